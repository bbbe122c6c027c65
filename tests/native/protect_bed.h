/* What the test programs of packet protection share: packets, and how one is opened.
 *
 * The source is included rather than linked, so that the limits (2^52 forgeries) can be reached by
 * setting the counters, and so that what is freed can be looked at. */
#ifndef PROTECT_BED_H
#define PROTECT_BED_H

#include "harness.h"

#include <malloc.h>
#include <openssl/crypto.h>
#include <openssl/err.h>

static void free_wiped(void *memory);
#define free(memory) free_wiped(memory)
#include "quic/protect.c"
#undef free

#define BODY_MAX   1500
#define HEADER_MAX 32
#define V2         0x6b3343cfu

static const uint16_t suite_ids[] = {DP_SUITE_AES_128_GCM, DP_SUITE_AES_256_GCM,
                                     DP_SUITE_CHACHA20_POLY1305};
static const uint32_t versions[] = {1, V2};

/* Memory -------------------------------------------------------------------------------------- */

static uint64_t freed, allocations;

/* What protect.c gives back holds nothing any more. */
static inline void free_wiped(void *memory) {
    const uint8_t *bytes = memory;
    for (size_t i = 0; bytes && i < sizeof(struct dp_sealer); i++)
        if (bytes[i])
            fail("byte %zu of what is freed is %#x, not wiped", i, bytes[i]);
    freed++;
    free(memory);
}

static inline void *counted_malloc(size_t bytes, const char *file, int line) {
    (void)file, (void)line;
    allocations++;
    return malloc(bytes);
}

static inline void *counted_realloc(void *memory, size_t bytes, const char *file, int line) {
    (void)file, (void)line;
    allocations++;
    return realloc(memory, bytes);
}

static inline void counted_free(void *memory, const char *file, int line) {
    (void)file, (void)line;
    free(memory);
}

/* Packets ------------------------------------------------------------------------------------- */

struct packet {
    uint64_t pn;
    uint32_t generation;
    uint8_t phase;
    size_t header_bytes, bytes;
    uint8_t header[HEADER_MAX];
    uint8_t plain[BODY_MAX];
    uint8_t sealed[BODY_MAX + DP_TAG_BYTES];
};

static inline void fill(uint8_t *to, size_t bytes, uint64_t *seed) {
    for (size_t i = 0; i < bytes; i++)
        to[i] = (uint8_t)random_next(seed);
}

static inline struct dp_secret secret_of(uint16_t suite, uint32_t version, uint64_t *seed) {
    struct dp_secret secret = {.version = version, .suite = suite};
    secret.bytes = suite == DP_SUITE_AES_256_GCM ? 48 : 32;
    secret.phase = random_below(seed, 2) & 1;
    fill(secret.secret, secret.bytes, seed);
    return secret;
}

static inline void make_packet(struct packet *packet, struct dp_sealer *sealer, uint64_t pn,
                               size_t bytes, uint64_t *seed) {
    packet->pn = pn;
    packet->phase = dp_sealer_phase(sealer);
    packet->bytes = bytes;
    packet->header_bytes = 1 + random_below(seed, HEADER_MAX);
    fill(packet->header, packet->header_bytes, seed);
    packet->header[0] = (uint8_t)(0x40 | packet->phase << 2);
    fill(packet->plain, bytes, seed);
    memcpy(packet->sealed, packet->plain, bytes);
    dp_sealer_seal(sealer, pn, packet->header, packet->header_bytes, packet->sealed, bytes);
}

enum outcome { REFUSED, FORGED, OPENED, UPDATED };

/* Open in parts of any length, in place or not; what opened is what was sealed. */
static inline int open_packet(struct dp_opener *opener, const struct packet *packet,
                              uint64_t *seed) {
    uint8_t from[BODY_MAX], out[BODY_MAX];
    uint8_t *to = random_below(seed, 2) ? from : out;
    uint8_t phase = packet->header[0] >> 2 & 1;
    bool updated = true;
    memcpy(from, packet->sealed, packet->bytes);
    if (!dp_opener_begin(opener, packet->pn, phase, packet->header, packet->header_bytes))
        return REFUSED;
    for (size_t at = 0; at < packet->bytes;) {
        size_t left = packet->bytes - at;
        size_t part = random_below(seed, 8) ? random_below(seed, (uint32_t)left + 1) : left;
        dp_opener_next(opener, from + at, part, to + at);
        at += part;
    }
    if (!dp_opener_end(opener, packet->pn, packet->sealed + packet->bytes, &updated)) {
        CHECK(!updated);
        return FORGED;
    }
    CHECK(memcmp(to, packet->plain, packet->bytes) == 0);
    return updated ? UPDATED : OPENED;
}

static inline void expect(struct dp_opener *opener, const struct packet *packet, int outcome,
                          const char *what) {
    static const char *const names[] = {"refused", "forged", "opened", "opened as an update"};
    uint64_t seed = packet->pn;
    int got = open_packet(opener, packet, &seed);
    if (got != outcome)
        fail("%s: packet %llu of phase %d was %s, not %s", what, (unsigned long long)packet->pn,
             packet->phase, names[got], names[outcome]);
}

/* Everything but the count of forgeries and the scratch of a packet. */
static inline struct dp_opener state_of(const struct dp_opener *opener) {
    struct dp_opener state;
    memcpy(&state, opener, sizeof state);
    state.using = NULL;
    state.forged = 0;
    state.failed = false;
    return state;
}

/* One of each suite and version --------------------------------------------------------------- */

struct both {
    struct dp_opener *opener;
    struct dp_sealer *sealer;
};

static inline struct both both_new(uint16_t suite, uint32_t version, uint64_t *seed) {
    struct dp_secret secret = secret_of(suite, version, seed);
    struct both both = {dp_opener_new(&secret), dp_sealer_new(&secret)};
    CHECK(both.opener && both.sealer);
    CHECK(dp_opener_phase(both.opener) == secret.phase);
    CHECK(dp_sealer_phase(both.sealer) == secret.phase);
    return both;
}

static inline void both_free(struct both both) {
    dp_opener_free(both.opener);
    dp_sealer_free(both.sealer);
}

static inline uint8_t update(struct dp_sealer *sealer) {
    uint8_t before = dp_sealer_phase(sealer);
    CHECK(dp_sealer_update(sealer) == !before);
    CHECK(dp_sealer_phase(sealer) == !before);
    CHECK(dp_sealer_used(sealer) == 0);
    return !before;
}

/* Before libcrypto is first used. */
static inline void count_memory(void) {
    CHECK(CRYPTO_set_mem_functions(counted_malloc, counted_realloc, counted_free));
}

/* Each suite and version by turns; what is freed is wiped. */
static inline void run_suites(void (*test)(uint16_t suite, uint32_t version, uint32_t rounds,
                                           uint64_t seed),
                              uint32_t rounds, uint64_t seed) {
    for (int suite = 0; suite < 3; suite++)
        for (int version = 0; version < 2; version++)
            test(suite_ids[suite], versions[version], rounds,
                 seed * 1000ULL + (uint64_t)(suite * 2 + version));
    CHECK(freed > 50);
    printf("AES-GCM by %s: 6 suites and versions, %u rounds each\n", dp_aead_backend(), rounds);
}

#endif
