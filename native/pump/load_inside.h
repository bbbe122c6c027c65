/* What the files of the load generator share. Not a cdef.
 *
 * load.c: the run, and what `prompt/1` answers. load_h3.c: what HTTP/3 answers. */
#ifndef DP_LOAD_INSIDE_H
#define DP_LOAD_INSIDE_H

#include "inside.h"
#include "load.h"

#define DP_LOAD_VERDICT_BYTES 32
#define DP_LOAD_END_BYTES     20 /* the end mark and the trailer */
#define DP_LOAD_OK            200

/* A request in flight, and what came for it. */
struct dp_load_exchange {
    int64_t began_ns;
    uint64_t body_bytes; /* behind the verdict */
    uint64_t left;       /* HTTP/3: bytes of the frame's payload that are still to come */
    uint16_t status;     /* 0: the verdict is not whole */
    uint8_t have;        /* of `head`, or of `tail` */
    uint8_t part;        /* HTTP/3: load_h3.c's */
    uint8_t head[DP_LOAD_VERDICT_BYTES];
    uint8_t tail[DP_LOAD_END_BYTES]; /* the last bytes, which may be the end */
};

#define DP_LOAD_UNSTATED UINT32_MAX /* an ingress time that the server does not tell */

/* load.c ------------------------------------------------------------------------------------- */

/* What came is no answer. The first such is kept, for words to be made of it. Always false. */
bool dp_load_broke(struct dp_pump *pump, uint32_t why, uint64_t a, uint64_t b);
/* The verdict is whole. */
void dp_load_verdict(struct dp_pump *pump, struct dp_load_exchange *exchange, uint16_t status,
                     uint32_t ingress_us);
/* Count what came behind it, and keep what may be the end. */
void dp_load_body(struct dp_load_exchange *exchange, const uint8_t *bytes, size_t length);
/* The stream is over: whether the answer is whole. */
bool dp_load_whole(struct dp_pump *pump, const struct dp_load_exchange *exchange);

/* load_h3.c ---------------------------------------------------------------------------------- */

/* Take the next bytes of an answer, *taken of them: whether they can be an answer's. */
bool dp_load_h3_judge(struct dp_pump *pump, struct dp_load_exchange *exchange, const uint8_t *bytes,
                      size_t length, bool fin, size_t *taken);
/* Take the next bytes of one of the server's own streams: how many. *goes_away: it takes no new
 * requests on this connection. */
size_t dp_load_h3_other(struct dp_stream *stream, const uint8_t *bytes, size_t length,
                        bool *goes_away);

#endif
