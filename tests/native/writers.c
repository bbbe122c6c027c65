/* The token writers against a reference, with canaries around the slot: bodies split anywhere, from
 * unaligned memory that ends where the body ends (so AddressSanitizer sees a byte too many), ids
 * outside the vocabulary at every position, and bodies that are too long.
 *
 * usage: writers [BODIES [SEED]] */
#include "harness.h"
#include "tokens.h"

#define TOKENS 67 /* no multiple of a vector, nor of a line */
#define VOCAB  50000
#define CANARY 0xC5

struct body {
    uint32_t ids[TOKENS + 2];
    uint32_t n;
    uint32_t width;
};

/* The slot in the middle of three is written to; everything else in the prompts is canary. */
static struct dp_region *region;
#define SLOT 1

static void plant_canaries(void) {
    memset(dp_prompt(region, 0), CANARY, 3 * region->layout.prompt_stride);
}

/* Nothing but the slot's first n ids was touched. */
static void check_canaries(uint32_t n) {
    const uint8_t *prompts = (const uint8_t *)dp_prompt(region, 0);
    const size_t stride = region->layout.prompt_stride;
    for (size_t i = 0; i < 3 * stride; i++)
        if (i < stride || i >= stride + n * 4)
            CHECK(prompts[i] == CANARY);
}

static void random_body(struct body *body, uint64_t *seed) {
    body->width = random_below(seed, 2) ? 2 : 4;
    body->n = 1 + random_below(seed, TOKENS);
    for (uint32_t i = 0; i < TOKENS + 2; i++)
        body->ids[i] = random_below(seed, VOCAB);
}

/* A part of the body in memory of just that size, which begins at any address. */
static int write_part(const struct body *body, size_t from, size_t count, uint64_t *seed) {
    size_t shift = random_below(seed, 4);
    uint8_t *memory = malloc(shift + count + !count);
    CHECK(memory);
    for (size_t i = 0; i < count; i++) {
        uint32_t id = body->ids[(from + i) / body->width];
        memory[shift + i] = (uint8_t)(id >> (from + i) % body->width * 8);
    }
    int status = dp_write(region, SLOT, memory, shift, count);
    free(memory);
    return status;
}

/* Writes bytes [0, end) in random parts, often of a byte or two: the status of the first part that
 * failed, or DP_OK. */
static int write_split(const struct body *body, size_t end, uint64_t *seed) {
    dp_write_begin(region, SLOT, body->n, body->width);
    for (size_t at = 0, count; at < end; at += count) {
        uint32_t most = random_below(seed, 2) ? 3 : (uint32_t)(end - at);
        count = random_below(seed, most + 1);
        if (count > end - at)
            count = end - at;
        CHECK(!dp_write_complete(region, SLOT) || at == (size_t)body->n * body->width);
        int status = write_part(body, at, count, seed);
        if (status != DP_OK)
            return status;
    }
    return DP_OK;
}

static void check_good(struct body *body, uint64_t *seed) {
    plant_canaries();
    CHECK(write_split(body, (size_t)body->n * body->width, seed) == DP_OK);
    CHECK(dp_write_complete(region, SLOT));
    for (uint32_t i = 0; i < body->n; i++)
        CHECK((uint32_t)dp_prompt(region, SLOT)[i] == body->ids[i]);
    check_canaries(body->n);
}

static void check_short(struct body *body, uint64_t *seed) {
    size_t end = random_below(seed, body->n * body->width);
    plant_canaries();
    CHECK(write_split(body, end, seed) == DP_OK);
    CHECK(!dp_write_complete(region, SLOT));
    CHECK(region->writers[SLOT].written == end / body->width);
    CHECK(region->writers[SLOT].partial_bytes == end % body->width);
    check_canaries((uint32_t)(end / body->width));
}

static void check_long(struct body *body, uint64_t *seed) {
    size_t whole = (size_t)body->n * body->width;
    plant_canaries();
    CHECK(write_split(body, random_below(seed, (uint32_t)whole + 1), seed) == DP_OK);
    const struct dp_writer *writer = &region->writers[SLOT];
    size_t have = (size_t)writer->written * body->width + writer->partial_bytes;
    size_t excess = 1 + random_below(seed, 2 * body->width);
    CHECK(write_part(body, have, whole - have + excess, seed) == DP_OVERFLOW);
    check_canaries(body->n);
}

static void check_bad(struct body *body, uint32_t position, uint64_t *seed) {
    uint32_t most = body->width == 2 ? 0xFFFF : 0xFFFFFFFF;
    uint32_t bad = random_below(seed, 2) ? VOCAB : VOCAB + random_below(seed, most - VOCAB + 1);
    uint32_t good = body->ids[position];
    body->ids[position] = bad;
    plant_canaries();
    CHECK(write_split(body, (size_t)body->n * body->width, seed) == DP_BAD_TOKEN);
    CHECK(region->writers[SLOT].bad_index == position);
    CHECK(region->writers[SLOT].bad_id == bad);
    check_canaries(body->n);
    /* The first of two is named, also within one part. */
    if (position + 1 < body->n) {
        uint32_t after = body->ids[body->n - 1];
        body->ids[body->n - 1] = most;
        CHECK(write_split(body, (size_t)body->n * body->width, seed) == DP_BAD_TOKEN);
        CHECK(region->writers[SLOT].bad_index == position && region->writers[SLOT].bad_id == bad);
        body->ids[body->n - 1] = after;
    }
    body->ids[position] = good;
}

/* Every way to cut a short body in two, both widths. */
static void check_cuts(uint64_t *seed) {
    struct body body;
    for (uint32_t width = 2; width <= 4; width += 2) {
        random_body(&body, seed);
        body.width = width;
        body.n = 5;
        for (size_t cut = 0; cut <= (size_t)body.n * width; cut++) {
            plant_canaries();
            dp_write_begin(region, SLOT, body.n, width);
            CHECK(write_part(&body, 0, cut, seed) == DP_OK);
            CHECK(write_part(&body, cut, (size_t)body.n * width - cut, seed) == DP_OK);
            CHECK(dp_write_complete(region, SLOT));
            for (uint32_t i = 0; i < body.n; i++)
                CHECK((uint32_t)dp_prompt(region, SLOT)[i] == body.ids[i]);
            check_canaries(body.n);
        }
    }
}

int main(int argc, char **argv) {
    uint32_t bodies = argument(argc, argv, 1, 500);
    uint64_t seed = argument(argc, argv, 2, 1);
    uint32_t bad = 0;
    region = region_new(3, TOKENS, 1);
    CHECK(region->geometry.vocab_size == VOCAB);
    check_cuts(&seed);
    for (uint32_t i = 0; i < bodies; i++) {
        struct body body;
        random_body(&body, &seed);
        check_good(&body, &seed);
        check_short(&body, &seed);
        check_long(&body, &seed);
        for (uint32_t position = 0; position < body.n; position++, bad++)
            check_bad(&body, position, &seed);
    }
    printf("writers: %u bodies whole, short and too long, %u with an id outside the vocabulary\n",
           bodies, bad);
    region_delete(region);
    return 0;
}
