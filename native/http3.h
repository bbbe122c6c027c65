/* The common case of HTTP/3's `POST /v1/generate`, read (http3_request.c) and answered
 * (http3_answer.c) without the interpreter.
 *
 * Both functions are shortcuts: what dp_h3_plain does not know, Python reads (dataplane/http3.py),
 * by the same rules and with the same outcome. The QPACK dynamic table is used in neither
 * direction. This header is also the cffi declaration. */
#ifndef DP_HTTP3_H
#define DP_HTTP3_H

#include <stdint.h>

/* Frame types (RFC 9114 section 7.2). */
#define DP_H3_DATA    0
#define DP_H3_HEADERS 1

#define DP_H3_ID_MAX       64
#define DP_H3_KEY_MAX      512
#define DP_H3_ACCEPTED_MAX 512  /* bytes of dp_h3_accepted, for a media type of at most 64 */
#define DP_H3_IDS_MAX      2048 /* bytes of ids that dp_h3_binary takes */

/* A request with a binary body and nothing out of the ordinary. */
struct dp_h3_plain {
    uint32_t body_at;    /* where its body begins */
    uint32_t n_tokens;   /* it is that long, in ids of four bytes */
    uint32_t max_output; /* 0: not stated */
    uint32_t id_bytes;   /* the client's own identifier, 0: none */
    uint32_t key_bytes;  /* the API key: a bearer token, or else x-api-key; 0: none */
    uint32_t key_twice;  /* a field that may hold one came twice: which key that is, Python says */
    uint8_t id[DP_H3_ID_MAX];
    uint8_t key[DP_H3_KEY_MAX];
};

/* Whether bytes [at, at + size), a whole stream, are one: HEADERS, one DATA frame as long as the
 * content-length says, nothing else. 0: not known, whatever is wrong with it. */
int dp_h3_plain(const uint8_t *bytes, uint32_t at, uint32_t size, struct dp_h3_plain *out);

/* Write the HEADERS frame of a 200 (contract 4): how many bytes. Without an `id` the client gets
 * `request_id` in hexadecimal. */
uint32_t dp_h3_accepted(uint8_t *to, const uint8_t *media_type, uint32_t media_type_bytes,
                        const uint8_t *id, uint32_t id_bytes, uint64_t request_id,
                        uint32_t queue_us, uint32_t ingress_us, uint32_t slots, uint32_t free_left,
                        uint32_t slot);

/* The same for a binary answer, and behind it, if there is any of it, the body in a DATA frame: at
 * most DP_H3_IDS_MAX bytes of ids, and with a finish reason the end mark and the trailer (contract
 * 3). `to` has room for DP_H3_ACCEPTED_MAX bytes more than that. */
uint32_t dp_h3_binary(uint8_t *to, const uint8_t *id, uint32_t id_bytes, uint64_t request_id,
                      uint32_t queue_us, uint32_t ingress_us, uint32_t slots, uint32_t free_left,
                      uint32_t slot, const uint8_t *ids, uint32_t ids_bytes, uint32_t finish,
                      uint32_t n_tokens);

#endif
