/* The `prompt/1` codec, the server's half: a request's header in, verdict and end out,
 * little-endian (contract 3). Sans-IO. dataplane/prompt1.py is the reference, and has the words for
 * a header that is not in order; a test compares the two. This header is also a cdef. */
#ifndef DP_PROMPT1_H
#define DP_PROMPT1_H

#include <stddef.h>
#include <stdint.h>

#define DP_PROMPT1_REQUEST_MAGIC   0x31515044 /* "DPQ1" */
#define DP_PROMPT1_VERDICT_MAGIC   0x31565044 /* "DPV1" */
#define DP_PROMPT1_HEADER_MIN      48
#define DP_PROMPT1_HEADER_MAX      4096
#define DP_PROMPT1_EXTENSION_BYTES 4
#define DP_PROMPT1_EXTENSION_KEY   1 /* its type; all others are skipped */
#define DP_PROMPT1_STRICT          1 /* the only flag */
#define DP_PROMPT1_TEMPERATURE_MAX 100
#define DP_PROMPT1_VERDICT_BYTES   32
#define DP_PROMPT1_END_BYTES       20 /* the end mark and the trailer */
#define DP_PROMPT1_END_MARK        0xFFFFFFFF
#define DP_PROMPT1_NO_SLOT         0xFFFF
#define DP_PROMPT1_OK              200
#define DP_PROMPT1_BUSY            429

enum dp_prompt1_parsed {
    DP_PROMPT1_BAD = -1, /* not in order, and no more bytes can make it so */
    DP_PROMPT1_NOT_WHOLE = 0,
    DP_PROMPT1_WHOLE = 1,
};

/* A header that is in order. The ids begin at byte header_bytes of the stream. */
struct dp_prompt1_request {
    uint64_t request_id; /* 0: the daemon's choice */
    uint32_t header_bytes;
    uint32_t n_tokens;
    uint32_t width;
    uint32_t max_output; /* 0: the slot's maximum */
    uint32_t affinity;   /* 0: none */
    uint32_t strict;
    float temperature;
    float top_p;
    uint32_t top_k;
    uint32_t seed;
    uint32_t deadline_ms; /* after arrival; 0: none */
    uint32_t key_at;      /* where the API key begins in the header */
    uint32_t key_bytes;   /* 0: there is none */
};

/* Read the header at the start of a stream, of which `have` bytes are there: DP_PROMPT1_WHOLE and
 * *out, or one of the others and *out is of no use. */
int dp_prompt1_parse(const uint8_t *bytes, size_t have, struct dp_prompt1_request *out);
/* Write DP_PROMPT1_VERDICT_BYTES bytes. */
void dp_prompt1_verdict(uint8_t *to, uint32_t status, uint32_t slot, uint64_t request_id,
                        uint32_t queue_us, uint32_t ingress_us, uint32_t retry_after_ms,
                        uint32_t free_left);
/* Write DP_PROMPT1_END_BYTES bytes. */
void dp_prompt1_end(uint8_t *to, uint32_t finish_reason, uint32_t prompt_tokens,
                    uint32_t output_tokens);

#endif
