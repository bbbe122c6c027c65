/* See prompt1.h. Every field is read and written byte by byte, so neither the machine's order nor
 * the alignment of what a packet brought matters; compilers make one move of each. */
#include "prompt1.h"

#include <stdbool.h>
#include <string.h>

static uint32_t get16(const uint8_t *from) {
    return (uint32_t)from[0] | (uint32_t)from[1] << 8;
}

static uint32_t get32(const uint8_t *from) {
    return get16(from) | get16(from + 2) << 16;
}

static uint64_t get64(const uint8_t *from) {
    return get32(from) | (uint64_t)get32(from + 4) << 32;
}

static float get_float(const uint8_t *from) {
    uint32_t bits = get32(from);
    float value;
    _Static_assert(sizeof value == sizeof bits, "an f32 of the wire");
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void put16(uint8_t *to, uint32_t value) {
    to[0] = (uint8_t)value;
    to[1] = (uint8_t)(value >> 8);
}

static void put32(uint8_t *to, uint32_t value) {
    put16(to, value);
    put16(to + 2, value >> 16);
}

static void put64(uint8_t *to, uint64_t value) {
    put32(to, (uint32_t)value);
    put32(to + 4, (uint32_t)(value >> 32));
}

static bool is_length(uint32_t length) {
    return length >= DP_PROMPT1_HEADER_MIN && length <= DP_PROMPT1_HEADER_MAX;
}

/* Fewer bytes than the shortest header: what can be told already is told. */
static int parse_short(const uint8_t *bytes, size_t have) {
    for (size_t i = 0; i < have && i < 4; i++)
        if (bytes[i] != (uint8_t)(DP_PROMPT1_REQUEST_MAGIC >> 8 * i))
            return DP_PROMPT1_BAD;
    if (have >= 6 && !is_length(get16(bytes + 4)))
        return DP_PROMPT1_BAD;
    return DP_PROMPT1_NOT_WHOLE;
}

/* Whether the extensions fill the header to its end. Of several API keys the last one counts. */
static bool walk_extensions(const uint8_t *bytes, uint32_t end, struct dp_prompt1_request *out) {
    uint32_t at = DP_PROMPT1_HEADER_MIN;
    while (at < end) {
        if (end - at < DP_PROMPT1_EXTENSION_BYTES)
            return false;
        uint32_t type = get16(bytes + at), length = get16(bytes + at + 2);
        at += DP_PROMPT1_EXTENSION_BYTES;
        if (length > end - at)
            return false;
        if (type == DP_PROMPT1_EXTENSION_KEY) {
            out->key_at = at;
            out->key_bytes = length;
        }
        at += length;
    }
    return true;
}

/* A NaN fails every comparison, so it is out of range too. */
static bool is_in_range(const struct dp_prompt1_request *request) {
    return request->temperature >= 0 && request->temperature <= DP_PROMPT1_TEMPERATURE_MAX &&
           request->top_p >= 0 && request->top_p <= 1 && request->n_tokens > 0 &&
           (request->width == 2 || request->width == 4);
}

int dp_prompt1_parse(const uint8_t *bytes, size_t have, struct dp_prompt1_request *out) {
    if (have < DP_PROMPT1_HEADER_MIN)
        return parse_short(bytes, have);
    uint32_t flags = bytes[7];
    out->header_bytes = get16(bytes + 4);
    out->width = bytes[6];
    out->strict = flags & DP_PROMPT1_STRICT;
    out->n_tokens = get32(bytes + 8);
    out->max_output = get32(bytes + 12);
    out->request_id = get64(bytes + 16);
    out->affinity = get32(bytes + 24);
    out->temperature = get_float(bytes + 28);
    out->top_p = get_float(bytes + 32);
    out->top_k = get32(bytes + 36);
    out->seed = get32(bytes + 40);
    out->deadline_ms = get32(bytes + 44);
    out->key_at = out->key_bytes = 0;
    if (get32(bytes) != DP_PROMPT1_REQUEST_MAGIC || !is_length(out->header_bytes) ||
        flags & ~(uint32_t)DP_PROMPT1_STRICT || !is_in_range(out))
        return DP_PROMPT1_BAD;
    if (out->header_bytes == DP_PROMPT1_HEADER_MIN)
        return DP_PROMPT1_WHOLE;
    if (have < out->header_bytes)
        return DP_PROMPT1_NOT_WHOLE;
    return walk_extensions(bytes, out->header_bytes, out) ? DP_PROMPT1_WHOLE : DP_PROMPT1_BAD;
}

void dp_prompt1_verdict(uint8_t *to, uint32_t status, uint32_t slot, uint64_t request_id,
                        uint32_t queue_us, uint32_t ingress_us, uint32_t retry_after_ms,
                        uint32_t free_left) {
    put32(to, DP_PROMPT1_VERDICT_MAGIC);
    put16(to + 4, status);
    put16(to + 6, slot);
    put64(to + 8, request_id);
    put32(to + 16, queue_us);
    put32(to + 20, ingress_us);
    put32(to + 24, retry_after_ms);
    put32(to + 28, free_left);
}

void dp_prompt1_end(uint8_t *to, uint32_t finish_reason, uint32_t prompt_tokens,
                    uint32_t output_tokens) {
    put32(to, DP_PROMPT1_END_MARK);
    put32(to + 4, finish_reason);
    put32(to + 8, prompt_tokens);
    put32(to + 12, output_tokens);
    put32(to + 16, 0);
}
