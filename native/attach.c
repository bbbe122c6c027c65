/* See attach.h. The handshake is one line each way (contract 2); the daemon's line is read as the
 * flat object it is, key by key. */
#define _GNU_SOURCE
#include "attach.h"

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "atomics.h"

#define FDS_MAX (2 + DP_MAX_LISTENERS) /* region, doorbell, an output each listener */

struct dp_attachment {
    int socket;
    struct dp_region *region;
    int heartbeat_ms;
    int stop; /* eventfd: ends the heartbeat's sleep */
    bool beating;
    pthread_t heart;
};

struct reply {
    char line[DP_LINE_MAX + 1];
    size_t length;
    int fds[FDS_MAX];
    int n_fds;
};

static void close_all(const int *fds, int n) {
    for (int i = 0; i < n; i++)
        close(fds[i]);
}

/* Handshake ------------------------------------------------------------------------------------ */

static int connect_to(const char *path, char *error, size_t size) {
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path) {
        snprintf(error, size, "the socket's path is longer than %zu bytes: %s",
                 sizeof address.sun_path - 1, path);
        return -1;
    }
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
        snprintf(error, size, "no daemon answers at %s: %s", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    return fd;
}

static int send_manifest(int fd, const char *manifest, int tokenizer_fd) {
    size_t length = strlen(manifest);
    struct iovec iov[2] = {{(void *)(uintptr_t)manifest, length}, {"\n", 1}};
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = 2};
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {0};
    if (tokenizer_fd >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(c), &tokenizer_fd, sizeof(int));
    }
    size_t sent = 0;
    while (sent < length + 1) {
        ssize_t n = sendmsg(fd, &message, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return -1;
        sent += (size_t)n;
        /* The descriptor went with the first part. */
        message.msg_control = NULL;
        message.msg_controllen = 0;
        size_t of_line = sent < length ? sent : length;
        iov[0] = (struct iovec){(void *)(uintptr_t)(manifest + of_line), length - of_line};
    }
    return 0;
}

static void keep_fds(struct msghdr *message, struct reply *reply) {
    for (struct cmsghdr *c = CMSG_FIRSTHDR(message); c; c = CMSG_NXTHDR(message, c)) {
        if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
            continue;
        int n = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
        for (int i = 0; i < n; i++) {
            int fd;
            memcpy(&fd, CMSG_DATA(c) + (size_t)i * sizeof fd, sizeof fd);
            if (reply->n_fds < FDS_MAX)
                reply->fds[reply->n_fds++] = fd;
            else
                close(fd);
        }
    }
}

/* Reads up to the newline: 0, or -1 when the daemon closed or the line is too long. */
static int read_reply(int fd, struct reply *reply) {
    while (reply->length < DP_LINE_MAX) {
        _Alignas(struct cmsghdr) char control[CMSG_SPACE(sizeof(int) * FDS_MAX)];
        struct iovec iov = {reply->line + reply->length, DP_LINE_MAX - reply->length};
        struct msghdr message = {.msg_iov = &iov,
                                 .msg_iovlen = 1,
                                 .msg_control = control,
                                 .msg_controllen = sizeof control};
        ssize_t n = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return -1;
        keep_fds(&message, reply);
        reply->length += (size_t)n;
        char *end = memchr(reply->line, '\n', reply->length);
        if (end) {
            *end = 0;
            return 0;
        }
    }
    return -1;
}

/* The number behind "key": in a flat JSON object, or -1. */
static long long number_of(const char *line, const char *key) {
    char quoted[64];
    snprintf(quoted, sizeof quoted, "\"%s\"", key);
    const char *at = strstr(line, quoted);
    if (!at)
        return -1;
    at += strlen(quoted);
    at += strspn(at, " ");
    if (*at++ != ':')
        return -1;
    char *end;
    long long value = strtoll(at, &end, 10);
    return end == at ? -1 : value;
}

static void copy_error(const char *line, char *error, size_t size) {
    const char *at = strstr(line, "\"error\"");
    at = at ? strchr(at + 7, '"') : NULL;
    const char *end = at ? strrchr(at + 1, '"') : NULL;
    if (end)
        snprintf(error, size, "the daemon refused: %.*s", (int)(end - at - 1), at + 1);
    else
        snprintf(error, size, "the daemon's answer cannot be read: %.200s", line);
}

static struct dp_region *open_region(struct reply *reply, char *error, size_t size) {
    const char *why = NULL;
    long long attachment = number_of(reply->line, "attachment");
    long long bytes = number_of(reply->line, "region_bytes");
    if (number_of(reply->line, "abi") != DP_ABI || attachment < 0 || bytes < 0) {
        copy_error(reply->line, error, size);
        return NULL;
    }
    if (reply->n_fds < 3) {
        snprintf(error, size, "the daemon sent %d descriptors, not at least 3", reply->n_fds);
        return NULL;
    }
    struct dp_region *region = dp_region_open(reply->fds[0], &why);
    if (region &&
        ((uint64_t)attachment != region->attachment || (uint64_t)bytes != region->layout.bytes ||
         (int)region->geometry.listeners != reply->n_fds - 2)) {
        why = "the daemon's line and the region disagree";
        dp_region_close(region);
        region = NULL;
    }
    if (!region)
        snprintf(error, size, "%s", why);
    return region;
}

static struct dp_attachment *handshake(int fd, const char *manifest, int tokenizer_fd,
                                       struct reply *reply, char *error, size_t size) {
    if (send_manifest(fd, manifest, tokenizer_fd) < 0 && errno != EPIPE && errno != ECONNRESET) {
        snprintf(error, size, "the manifest cannot be sent: %s", strerror(errno));
        return NULL;
    }
    if (read_reply(fd, reply) < 0) {
        snprintf(error, size, "the daemon closed before it answered");
        return NULL;
    }
    struct dp_region *region = open_region(reply, error, size);
    if (!region)
        return NULL;
    struct dp_attachment *attachment = calloc(1, sizeof *attachment);
    int stop = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (!attachment || stop < 0) {
        snprintf(error, size, "no memory or no descriptor for the attachment");
        dp_region_close(region);
        free(attachment);
        return NULL;
    }
    region->doorbell = reply->fds[1];
    for (int i = 2; i < reply->n_fds; i++)
        region->outputs[i - 2] = reply->fds[i];
    long long beat = number_of(reply->line, "heartbeat_ms");
    *attachment =
        (struct dp_attachment){.socket = fd,
                               .region = region,
                               .stop = stop,
                               .heartbeat_ms = beat > 0 && beat < 10000 ? (int)beat : 500};
    close(reply->fds[0]);
    return attachment;
}

struct dp_attachment *dp_attach(const char *socket_path, const char *manifest, int tokenizer_fd,
                                char *error, size_t error_size) {
    int fd = connect_to(socket_path, error, error_size);
    if (fd < 0)
        return NULL;
    struct reply *reply = calloc(1, sizeof *reply);
    struct dp_attachment *attachment = NULL;
    if (reply)
        attachment = handshake(fd, manifest, tokenizer_fd, reply, error, error_size);
    else
        snprintf(error, error_size, "no memory for the handshake");
    if (!attachment) {
        if (reply)
            close_all(reply->fds, reply->n_fds);
        close(fd);
    }
    free(reply);
    return attachment;
}

/* Pulse ---------------------------------------------------------------------------------------- */

static void bump(struct dp_word *word) {
    dp_store_release(&word->value, dp_load_relaxed(&word->value) + 1);
}

static void *beat(void *argument) {
    struct dp_attachment *attachment = argument;
    struct pollfd stop = {.fd = attachment->stop, .events = POLLIN};
    do
        bump(&attachment->region->header->heartbeat);
    while (poll(&stop, 1, attachment->heartbeat_ms) <= 0);
    return NULL;
}

int dp_ready(struct dp_attachment *attachment) {
    if (attachment->beating)
        return 0;
    dp_step(attachment);
    int failed = pthread_create(&attachment->heart, NULL, beat, attachment);
    attachment->beating = !failed;
    return failed;
}

void dp_step(struct dp_attachment *attachment) {
    bump(&attachment->region->header->step);
}

void dp_leave(struct dp_attachment *attachment) {
    if (attachment->socket < 0)
        return;
    if (attachment->beating) {
        const uint64_t one = 1;
        ssize_t ignored = write(attachment->stop, &one, sizeof one);
        (void)ignored;
        pthread_join(attachment->heart, NULL);
    }
    close(attachment->socket);
    attachment->socket = -1;
}

void dp_detach(struct dp_attachment *attachment) {
    if (!attachment)
        return;
    dp_leave(attachment);
    close(attachment->stop);
    close(attachment->region->doorbell);
    close_all(attachment->region->outputs, (int)attachment->region->geometry.listeners);
    dp_region_close(attachment->region);
    free(attachment);
}

/* Work ----------------------------------------------------------------------------------------- */

struct dp_region *dp_attached_region(struct dp_attachment *attachment) {
    return attachment->region;
}

int dp_attached_socket(struct dp_attachment *attachment) {
    return attachment->socket;
}

void dp_describe_taken(struct dp_region *region, uint32_t slot, uint64_t generation,
                       struct dp_taken *out) {
    const struct dp_request *request = &region->requests[slot];
    *out = (struct dp_taken){
        .generation = generation,
        .slot = slot,
        .request_id = request->request_id,
        .tokens = dp_prompt(region, slot),
        .n_tokens = request->n_tokens,
        .max_output = request->max_output,
        .top_k = request->top_k,
        .seed = request->seed,
        .temperature = request->temperature,
        .top_p = request->top_p,
    };
}

int dp_take_ready(struct dp_attachment *attachment, struct dp_taken *out, uint32_t max,
                  int timeout_ms, uint32_t spin_us) {
    struct dp_region *region = attachment->region;
    if (attachment->socket < 0)
        return -1;
    int waited = dp_runtime_wait(region, attachment->socket, timeout_ms, spin_us);
    if (waited <= 0)
        return waited;
    uint32_t taken = 0;
    uint64_t generation;
    for (uint32_t slot = 0; slot < region->geometry.slots && taken < max; slot++)
        if (dp_take(region, slot, &generation) >= 0)
            dp_describe_taken(region, slot, generation, &out[taken++]);
    return (int)taken;
}
