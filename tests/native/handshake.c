/* The engine's side of an attachment against daemons that answer well, badly, or not at all: each
 * ends in an attachment or in words, and leaves no descriptor behind.
 *
 * usage: handshake [ROUNDS [SEED]] */
#include "harness.h"

#include <dirent.h>
#include <sys/socket.h>
#include <sys/un.h>

#include "attach.h"

#define FDS_SENT 24
#define REPLY    "{\"abi\": 1, \"attachment\": 1, \"region_bytes\": %llu, \"heartbeat_ms\": 5}\n"

static const char manifest[] = "{\"abi\": 1, \"model\": \"test\"}";

/* What the daemon of one handshake does. */
struct daemon {
    const char *reply; /* may hold the region's size; NULL: it closes */
    int n_fds;
    const char *error; /* what the engine is told, or part of it; NULL: it is attached */
    bool piecemeal;    /* the reply comes byte by byte */
    bool no_region;    /* the first descriptor is something else */
};

static const struct daemon daemons[] = {
    {REPLY, 4, NULL, false, false},
    {REPLY, 4, NULL, true, false},
    {"{\"heartbeat_ms\":5,\"region_bytes\" :  %llu,\"attachment\":1,\"abi\":1}\n", 4, NULL, true,
     false},
    {NULL, 0, "the daemon closed before it answered", false, false},
    {"", 0, "the daemon closed before it answered", false, false},
    {"{\"abi\": 1, \"attachment\": 1", 4, "the daemon closed before it answered", false, false},
    {"{\"error\": \"a runtime is attached\"}\n", 0, "the daemon refused: a runtime is attached",
     false, false},
    {"{\"error\": \"why\"}\n", 4, "the daemon refused: why", true, false},
    {"{\"error\": 5}\n", 0, "cannot be read: {\"error\": 5}", false, false},
    {"{\"error\n", 0, "cannot be read: {\"error", false, false},
    {"\n", 0, "the daemon's answer cannot be read: ", false, false},
    {"no JSON at all\n", 4, "cannot be read: no JSON at all", false, false},
    {"{\"abi\": 2, \"attachment\": 1, \"region_bytes\": %llu}\n", 4, "cannot be read: {\"abi\": 2",
     false, false},
    {"{\"abi\": 1, \"region_bytes\": %llu}\n", 4, "cannot be read", false, false},
    {"{\"abi\": 1, \"attachment\": -1, \"region_bytes\": %llu}\n", 4, "cannot be read", false,
     false},
    {"{\"abi\": 1, \"attachment\": 1}\n", 4, "cannot be read", false, false},
    {"{\"abi\": 1, \"attachment\": x, \"region_bytes\": %llu}\n", 4, "cannot be read", false,
     false},
    {"{\"abi\": 1, \"attachment\": 2, \"region_bytes\": %llu}\n", 4, "line and the region disagree",
     false, false},
    {"{\"abi\": 1, \"attachment\": 1, \"region_bytes\": 5%llu}\n", 4,
     "line and the region disagree", false, false},
    {REPLY, 0, "the daemon sent 0 descriptors, not at least 3", false, false},
    {REPLY, 2, "the daemon sent 2 descriptors, not at least 3", false, false},
    {REPLY, 3, "line and the region disagree", false, false},
    {REPLY, 5, "line and the region disagree", false, false},
    {REPLY, FDS_SENT, "line and the region disagree", false, false},
    {REPLY, 4, "the region's descriptor is no sealed memory file", false, true},
};

static struct sockaddr_un address = {.sun_family = AF_UNIX};

/* The daemon ------------------------------------------------------------ */

struct served {
    const struct daemon *daemon;
    int listening, region_fd, sent_tokenizer;
    struct dp_region *region;
    bool beats; /* the engine's heart was seen to beat */
};

static void send_part(int fd, const char *bytes, size_t size, const int *fds, int n_fds) {
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * FDS_SENT)] = {0};
    struct iovec iov = {(void *)(uintptr_t)bytes, size};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1};
    if (n_fds) {
        message.msg_control = control;
        message.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)n_fds);
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)n_fds);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)n_fds);
    }
    CHECK(sendmsg(fd, &message, MSG_NOSIGNAL) == (ssize_t)size);
}

/* Reads the manifest; whether a descriptor came with it. */
static bool read_manifest(int fd) {
    char line[256];
    size_t length = 0;
    bool with_fd = false;
    while (length == 0 || line[length - 1] != '\n') {
        _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))];
        struct iovec iov = {line + length, sizeof line - length};
        struct msghdr message = {.msg_iov = &iov,
                                 .msg_iovlen = 1,
                                 .msg_control = control,
                                 .msg_controllen = sizeof control};
        ssize_t n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        CHECK(n > 0);
        length += (size_t)n;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        if (!c)
            continue;
        int sent;
        memcpy(&sent, CMSG_DATA(c), sizeof sent);
        close(sent);
        with_fd = true;
    }
    CHECK(length == sizeof manifest && memcmp(line, manifest, length - 1) == 0);
    return with_fd;
}

static void send_reply(struct served *served, int fd) {
    char line[256];
    int fds[FDS_SENT];
    const struct daemon *daemon = served->daemon;
    size_t bytes = served->region->layout.bytes;
    int length = snprintf(line, sizeof line, daemon->reply, (unsigned long long)bytes);
    for (int i = 0; i < FDS_SENT; i++)
        fds[i] = served->region->doorbell;
    if (!daemon->no_region)
        fds[0] = served->region_fd;
    size_t first = daemon->piecemeal ? 1 : (size_t)length;
    if (length)
        send_part(fd, line, first, fds, daemon->n_fds);
    for (int i = 1; daemon->piecemeal && i < length; i++)
        send_part(fd, line + i, 1, NULL, 0);
}

static void *serve(void *argument) {
    struct served *served = argument;
    int fd = accept4(served->listening, NULL, NULL, SOCK_CLOEXEC);
    CHECK(fd >= 0);
    CHECK(read_manifest(fd) == (served->sent_tokenizer >= 0));
    if (served->daemon->reply)
        send_reply(served, fd);
    const uint64_t *beats = &served->region->header->heartbeat.value;
    int64_t deadline = monotonic_ns() + (int64_t)LOST_MS * 1000000;
    while (!served->daemon->error && dp_load_acquire(beats) < 3 && monotonic_ns() < deadline)
        sched_yield();
    served->beats = dp_load_acquire(beats) >= 3;
    close(fd);
    return NULL;
}

/* The engine ------------------------------------------------------------ */

static int open_descriptors(void) {
    int n = 0;
    DIR *all = opendir("/proc/self/fd");
    CHECK(all);
    while (readdir(all))
        n++;
    closedir(all);
    return n;
}

/* Attached: beats until the daemon closes, which take says. */
static void live(struct dp_attachment *attachment) {
    struct dp_taken taken;
    const uint64_t *beats = &dp_attached_region(attachment)->header->heartbeat.value;
    CHECK(dp_attached_region(attachment)->attachment == 1);
    CHECK(dp_load_acquire(beats) == 0);
    CHECK(dp_ready(attachment) == 0 && dp_ready(attachment) == 0);
    CHECK(dp_take_ready(attachment, &taken, 1, LOST_MS, 0) == -1);
    dp_leave(attachment);
    dp_leave(attachment);
    CHECK(dp_attached_socket(attachment) == -1);
    CHECK(dp_take_ready(attachment, &taken, 1, -1, 0) == -1);
    uint64_t at_the_end = dp_load_acquire(beats);
    dp_step(attachment);
    CHECK(dp_load_acquire(beats) == at_the_end);
    CHECK(dp_attached_region(attachment)->header->step.value == 2);
}

static void shake_hands(struct served *served, struct dp_region *region, int region_fd) {
    char error[200] = "";
    pthread_t thread;
    served->region = region;
    served->region_fd = region_fd;
    region->header->heartbeat.value = region->header->step.value = 0;
    int before = open_descriptors();
    CHECK(pthread_create(&thread, NULL, serve, served) == 0);
    struct dp_attachment *attachment =
        dp_attach(address.sun_path, manifest, served->sent_tokenizer, error, sizeof error);
    if (!attachment != (served->daemon->error != NULL))
        fail("to %s the engine said: %s", served->daemon->reply, error);
    if (attachment)
        live(attachment);
    else if (!strstr(error, served->daemon->error))
        fail("to %s the engine said: %s", served->daemon->reply, error);
    pthread_join(thread, NULL);
    CHECK(served->beats == (attachment != NULL));
    dp_detach(attachment);
    CHECK(open_descriptors() == before);
}

static void check_unreachable(void) {
    char error[200], path[sizeof address.sun_path + 1];
    memset(path, 'x', sizeof path);
    path[sizeof path - 1] = 0;
    int before = open_descriptors();
    CHECK(!dp_attach(path, manifest, -1, error, sizeof error));
    CHECK(strstr(error, "the socket's path is longer than 107 bytes: xxx"));
    CHECK(!dp_attach("/nowhere/at/all", manifest, -1, error, sizeof error));
    CHECK(strstr(error, "no daemon answers at /nowhere/at/all: No such file or directory"));
    CHECK(open_descriptors() == before);
}

int main(int argc, char **argv) {
    uint32_t rounds = argument(argc, argv, 1, 1);
    char folder[] = "/tmp/handshake-XXXXXX";
    struct dp_geometry geometry = {DP_TABLE_HOST, 2, 8, 8, 10, 2};
    int region_fd;
    struct dp_region *region = dp_region_create(&geometry, 1, 1, &region_fd);
    CHECK(region && mkdtemp(folder));
    region->doorbell = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    snprintf(address.sun_path, sizeof address.sun_path, "%s/s", folder);
    int listening = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK(bind(listening, (struct sockaddr *)&address, sizeof address) == 0);
    CHECK(listen(listening, 1) == 0);
    uint32_t n = 0;
    for (uint32_t round = 0; round < rounds; round++)
        for (size_t i = 0; i < sizeof daemons / sizeof *daemons; i++, n++) {
            struct served served = {.daemon = &daemons[i],
                                    .listening = listening,
                                    .sent_tokenizer = n % 2 ? region_fd : -1};
            shake_hands(&served, region, region_fd);
        }
    check_unreachable();
    close(listening);
    unlink(address.sun_path);
    rmdir(folder);
    close(region_fd);
    close(region->doorbell);
    dp_region_close(region);
    printf("handshake: %u daemons answered, each in words or with an attachment\n", n);
    return 0;
}
