/* The floor of what a request over UDP takes here: datagrams there and back, and nothing else.
 *
 *     null_udp serve REPLY_BYTES             prints its port, answers every datagram
 *     null_udp ask PORT COUNT REQUEST_BYTES  prints each round trip in ns, a line each
 *
 * Both spin on a socket that does not block, as the daemon and its client do with --busy-poll; with
 * a last argument `sleep` they wait in the kernel instead. */
#include <arpa/inet.h>
#include <errno.h>
#include <inttypes.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 2048 };

static void give_up(const char *what) {
    perror(what);
    exit(1);
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int open_socket(uint16_t port, bool connects) {
    int descriptor = socket(AF_INET, SOCK_DGRAM, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    const struct sockaddr *where = (const struct sockaddr *)&address;
    if (descriptor < 0)
        give_up("socket");
    if ((connects ? connect : bind)(descriptor, where, sizeof address))
        give_up(connects ? "connect" : "bind");
    return descriptor;
}

static ssize_t receive(int descriptor, void *bytes, int flags, struct sockaddr_in *from) {
    ssize_t length;
    do {
        socklen_t size = sizeof *from;
        length = recvfrom(descriptor, bytes, MOST, flags, (struct sockaddr *)from, &size);
    } while (length < 0 && (errno == EAGAIN || errno == EINTR));
    if (length < 0)
        give_up("recvfrom");
    return length;
}

static void serve(size_t reply, int flags) {
    static char bytes[MOST];
    struct sockaddr_in peer = {0};
    socklen_t size = sizeof peer;
    int descriptor = open_socket(0, false);
    if (getsockname(descriptor, (struct sockaddr *)&peer, &size))
        give_up("getsockname");
    printf("%u\n", ntohs(peer.sin_port));
    fflush(stdout);
    for (;;) {
        receive(descriptor, bytes, flags, &peer);
        if (sendto(descriptor, bytes, reply, 0, (struct sockaddr *)&peer, sizeof peer) < 0)
            give_up("sendto");
    }
}

static void ask(uint16_t port, size_t count, size_t request, int flags) {
    static char bytes[MOST];
    struct sockaddr_in peer;
    int descriptor = open_socket(port, true);
    int64_t *took = calloc(count, sizeof *took);
    if (!took)
        give_up("calloc");
    for (size_t i = 0; i < count; i++) {
        int64_t began = now_ns();
        if (send(descriptor, bytes, request, 0) < 0)
            give_up("send");
        receive(descriptor, bytes, flags, &peer);
        took[i] = now_ns() - began;
    }
    for (size_t i = 0; i < count; i++)
        printf("%" PRId64 "\n", took[i]);
    free(took);
    close(descriptor);
}

static size_t size_of(const char *text) {
    return (size_t)strtoul(text, NULL, 10);
}

int main(int count, char **words) {
    bool sleeps = count > 1 && !strcmp(words[count - 1], "sleep");
    int flags = sleeps ? 0 : MSG_DONTWAIT;
    count -= sleeps;
    if (count == 3 && !strcmp(words[1], "serve") && size_of(words[2]) <= MOST)
        serve(size_of(words[2]), flags);
    else if (count == 5 && !strcmp(words[1], "ask") && size_of(words[4]) <= MOST)
        ask((uint16_t)size_of(words[2]), size_of(words[3]), size_of(words[4]), flags);
    else
        return 2;
    return 0;
}
