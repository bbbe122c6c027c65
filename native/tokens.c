/* The writers: each id is checked against the vocabulary in the pass that stores it, so a prompt
 * byte is written once between the packet's plaintext and the slot, and read once. */
#include "tokens.h"

#include <string.h>

#include "atomics.h"

void dp_write_begin(struct dp_region *region, uint32_t slot, uint32_t n_tokens, uint32_t width) {
    struct dp_writer *writer = &region->writers[slot];
    memset(writer, 0, sizeof *writer);
    writer->n_tokens = n_tokens;
    writer->width = (uint8_t)width;
}

/* Find the first id outside the vocabulary; only called when there is one. */
static int say_bad(struct dp_writer *writer, const int32_t *ids, uint32_t count, uint32_t vocab) {
    for (uint32_t i = 0; i < count; i++)
        if ((uint32_t)ids[i] >= vocab) {
            writer->bad_index = writer->written + i;
            writer->bad_id = (uint32_t)ids[i];
            break;
        }
    return DP_BAD_TOKEN;
}

/* Branch-free over the block so that the compiler can use vectors: `bad` gathers what failed. */
static uint32_t store_u32(int32_t *to, const uint8_t *from, uint32_t count, uint32_t vocab) {
    uint32_t bad = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t id;
        memcpy(&id, from + (size_t)i * 4, 4);
        bad |= id >= vocab;
        to[i] = (int32_t)id;
    }
    return bad;
}

static uint32_t store_u16(int32_t *to, const uint8_t *from, uint32_t count, uint32_t vocab) {
    uint32_t bad = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint16_t id;
        memcpy(&id, from + (size_t)i * 2, 2);
        bad |= id >= vocab;
        to[i] = id;
    }
    return bad;
}

static int store(struct dp_region *region, uint32_t slot, const uint8_t *from, uint32_t count) {
    struct dp_writer *writer = &region->writers[slot];
    int32_t *to = dp_prompt(region, slot) + writer->written;
    uint32_t vocab = region->geometry.vocab_size;
    uint32_t bad =
        writer->width == 4 ? store_u32(to, from, count, vocab) : store_u16(to, from, count, vocab);
    if (bad)
        return say_bad(writer, to, count, vocab);
    writer->written += count;
    return DP_OK;
}

/* An id that the stream split: its bytes are gathered until it is whole. */
static int finish_partial(struct dp_region *region, uint32_t slot, const uint8_t **from,
                          size_t *len) {
    struct dp_writer *writer = &region->writers[slot];
    while (writer->partial_bytes && *len) {
        writer->partial[writer->partial_bytes++] = *(*from)++;
        --*len;
        if (writer->partial_bytes == writer->width) {
            writer->partial_bytes = 0;
            return store(region, slot, writer->partial, 1);
        }
    }
    return DP_OK;
}

int dp_write(struct dp_region *region, uint32_t slot, const uint8_t *body, size_t offset,
             size_t len) {
    struct dp_writer *writer = &region->writers[slot];
    const uint8_t *from = body + offset;
    size_t have = (size_t)writer->written * writer->width + writer->partial_bytes;
    if (len > (size_t)writer->n_tokens * writer->width - have)
        return DP_OVERFLOW;
    int status = finish_partial(region, slot, &from, &len);
    if (status != DP_OK || !len)
        return status;
    uint32_t whole = (uint32_t)(len / writer->width);
    status = store(region, slot, from, whole);
    if (status != DP_OK)
        return status;
    writer->partial_bytes = (uint8_t)(len % writer->width);
    memcpy(writer->partial, from + (size_t)whole * writer->width, writer->partial_bytes);
    return DP_OK;
}

int dp_check_placed(struct dp_region *region, uint32_t slot, size_t len) {
    struct dp_writer *writer = &region->writers[slot];
    const int32_t *ids = dp_prompt(region, slot) + writer->written;
    uint32_t vocab = region->geometry.vocab_size, bad = 0;
    if (len > (size_t)(writer->n_tokens - writer->written) * 4)
        return DP_OVERFLOW;
    uint32_t count = (uint32_t)(len / 4);
    for (uint32_t i = 0; i < count; i++)
        bad |= (uint32_t)ids[i] >= vocab;
    if (bad)
        return say_bad(writer, ids, count, vocab);
    writer->written += count;
    writer->partial_bytes = (uint8_t)(len % 4);
    return DP_OK;
}

int dp_write_complete(struct dp_region *region, uint32_t slot) {
    const struct dp_writer *writer = &region->writers[slot];
    return writer->written == writer->n_tokens && !writer->partial_bytes;
}

int dp_admit(struct dp_region *region, uint32_t owner, uint32_t first, uint32_t count,
             uint32_t start, uint32_t probes, uint64_t request_id, uint32_t n_tokens,
             uint32_t width, uint32_t max_output, float temperature, float top_p, uint32_t top_k,
             uint32_t seed, struct dp_claimed *out) {
    int status = dp_claim(region, owner, first, count, start, probes, out);
    if (status != DP_OK)
        return status;
    dp_describe(region, out->slot, request_id, n_tokens, max_output, temperature, top_p, top_k,
                seed);
    dp_write_begin(region, out->slot, n_tokens, width);
    return DP_OK;
}

int64_t dp_submit(struct dp_region *region, uint32_t slot, uint64_t generation, const uint8_t *body,
                  size_t offset, size_t len) {
    /* Nothing is written on the strength of a handle that is over. */
    uint64_t word = dp_load_acquire(&region->states[slot]);
    if (word >> DP_GENERATION_SHIFT != generation)
        return DP_STALE;
    int status = dp_next_state(DP_PUBLISH, (int)(word & DP_STATE_MASK));
    if (status < 0)
        return status;
    status = dp_write(region, slot, body, offset, len);
    if (status != DP_OK)
        return status;
    if (!dp_write_complete(region, slot))
        return DP_SHORT;
    int64_t at_ns = 0;
    status = dp_publish(region, slot, generation, &at_ns);
    return status < 0 ? status : at_ns;
}

int dp_copy_output(struct dp_region *region, uint32_t slot, uint32_t start, uint32_t stop,
                   uint8_t *to) {
    if (start > stop || stop > region->geometry.max_output)
        return DP_OVERFLOW;
    uint32_t count = stop - start, vocab = region->geometry.vocab_size, bad = 0;
    memcpy(to, dp_output(region, slot) + start, (size_t)count * 4);
    /* What is checked is the copy: the compiler may not look at the region again instead. */
    __asm__ volatile("" ::: "memory");
    for (uint32_t i = 0; i < count; i++) {
        uint32_t id;
        memcpy(&id, to + (size_t)i * 4, 4);
        bad |= id >= vocab;
    }
    if (!bad)
        return DP_OK;
    struct dp_writer *writer = &region->writers[slot];
    for (uint32_t i = 0; i < count; i++) {
        memcpy(&writer->bad_id, to + (size_t)i * 4, 4);
        writer->bad_index = start + i;
        if (writer->bad_id >= vocab)
            break;
    }
    return DP_BAD_TOKEN;
}
