/* The engine's side of an attachment, in C: handshake, pulse, and the verbs in an engine's words.
 *
 * An engine in C needs this header and attach.c, slots.c, region.c and -pthread, nothing else.
 * This header is also the cffi declaration. */
#ifndef DP_ATTACH_H
#define DP_ATTACH_H

#include "region.h"

#define DP_LINE_MAX 65536 /* bytes of one JSON line of the handshake */

struct dp_attachment;

/* One taken request. `tokens` lies in the region and is the runtime's until finish. */
struct dp_taken {
    uint64_t generation;
    uint64_t request_id;
    const int32_t *tokens;
    uint32_t slot;
    uint32_t n_tokens;
    uint32_t max_output;
    uint32_t top_k;
    uint32_t seed;
    float temperature;
    float top_p;
};

/* Connect to the daemon's socket, send the manifest (one JSON object, no newline) and, when it is
 * not -1, the tokeniser's descriptor; map the region. NULL with a text in error[error_size]. */
struct dp_attachment *dp_attach(const char *socket_path, const char *manifest, int tokenizer_fd,
                                char *error, size_t error_size);
/* Everything is allocated and warm: start the heartbeat. 0, or an errno. */
int dp_ready(struct dp_attachment *attachment);
/* Stop the heartbeat and close the connection, at most once; the mapping stays valid. */
void dp_leave(struct dp_attachment *attachment);
/* Leave, unmap and free. No call may be inside, no pointer into the region be in use. */
void dp_detach(struct dp_attachment *attachment);

struct dp_region *dp_attached_region(struct dp_attachment *attachment);
/* The connection to the daemon: readable once the daemon is gone; -1 after dp_leave. */
int dp_attached_socket(struct dp_attachment *attachment);

/* Take READY requests, at most max: how many, or -1 when the daemon is gone. Blocks up to
 * timeout_ms (< 0: without end) after spinning for spin_us; returns early, with 0, when a running
 * request was cancelled. */
int dp_take_ready(struct dp_attachment *attachment, struct dp_taken *out, uint32_t max,
                  int timeout_ms, uint32_t spin_us);
/* What the request in a slot that was taken under `generation` states. */
void dp_describe_taken(struct dp_region *region, uint32_t slot, uint64_t generation,
                       struct dp_taken *out);
/* The engine made a step: a chunk, a token, or an idle pass. */
void dp_step(struct dp_attachment *attachment);

#endif
