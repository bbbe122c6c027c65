/* Packet protection against the RFCs' vectors, and against a model of what may open: round trips in
 * parts, forgeries of every byte, key updates with packets out of order, and the AEADs' limits.
 *
 * The source is included rather than linked, so that the limits (2^52 forgeries) can be reached by
 * setting the counters, and so that what is freed can be looked at.
 *
 * usage: protect [ROUNDS [SEED]] */
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
static void free_wiped(void *memory) {
    const uint8_t *bytes = memory;
    for (size_t i = 0; bytes && i < sizeof(struct dp_sealer); i++)
        if (bytes[i])
            fail("byte %zu of what is freed is %#x, not wiped", i, bytes[i]);
    freed++;
    free(memory);
}

static void *counted_malloc(size_t bytes, const char *file, int line) {
    (void)file, (void)line;
    allocations++;
    return malloc(bytes);
}

static void *counted_realloc(void *memory, size_t bytes, const char *file, int line) {
    (void)file, (void)line;
    allocations++;
    return realloc(memory, bytes);
}

static void counted_free(void *memory, const char *file, int line) {
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

static void fill(uint8_t *to, size_t bytes, uint64_t *seed) {
    for (size_t i = 0; i < bytes; i++)
        to[i] = (uint8_t)random_next(seed);
}

static struct dp_secret secret_of(uint16_t suite, uint32_t version, uint64_t *seed) {
    struct dp_secret secret = {.version = version, .suite = suite};
    secret.bytes = suite == DP_SUITE_AES_256_GCM ? 48 : 32;
    secret.phase = random_below(seed, 2) & 1;
    fill(secret.secret, secret.bytes, seed);
    return secret;
}

static void make_packet(struct packet *packet, struct dp_sealer *sealer, uint64_t pn, size_t bytes,
                        uint64_t *seed) {
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
static int open_packet(struct dp_opener *opener, const struct packet *packet, uint64_t *seed) {
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

static void expect(struct dp_opener *opener, const struct packet *packet, int outcome,
                   const char *what) {
    static const char *const names[] = {"refused", "forged", "opened", "opened as an update"};
    uint64_t seed = packet->pn;
    int got = open_packet(opener, packet, &seed);
    if (got != outcome)
        fail("%s: packet %llu of phase %d was %s, not %s", what, (unsigned long long)packet->pn,
             packet->phase, names[got], names[outcome]);
}

/* Everything but the count of forgeries and the scratch of a packet. */
static struct dp_opener state_of(const struct dp_opener *opener) {
    struct dp_opener state;
    memcpy(&state, opener, sizeof state);
    state.using = NULL;
    state.forged = 0;
    state.failed = false;
    return state;
}

/* Vectors ------------------------------------------------------------------------------------- */

static size_t from_hex(const char *hex, uint8_t *to) {
    size_t bytes = strlen(hex) / 2;
    for (size_t i = 0; i < bytes; i++) {
        unsigned byte;
        CHECK(sscanf(hex + 2 * i, "%2x", &byte) == 1);
        to[i] = (uint8_t)byte;
    }
    return bytes;
}

static void is_hex(const uint8_t *got, const char *hex, const char *what) {
    char text[2 * 256 + 1];
    size_t bytes = strlen(hex) / 2;
    CHECK(bytes <= 256);
    for (size_t i = 0; i < bytes; i++)
        snprintf(text + 2 * i, 3, "%02x", got[i]);
    if (strcmp(text, hex) != 0)
        fail("%s: %s instead of %s", what, text, hex);
}

struct vector {
    const char *name;
    uint32_t version;
    uint16_t suite;
    const char *secret, *key, *iv, *hp, *ku; /* NULL: not given */
    uint64_t pn;
    const char *header, *plain, *masked, *sealed, *mask;
    size_t pn_at; /* in the header */
};

#define SECRET_A5 "9ac312a7f877468ebe69422748ad00a15443f18203a07d6060f688f30f21632b"

static const struct vector vectors[] = {
    {"RFC 9001 A.5", 1, DP_SUITE_CHACHA20_POLY1305, SECRET_A5,
     "c6d98ff3441c3fe1b2182094f69caa2ed4b716b65488960a7a984979fb23e1c8", "e0459b3474bdd0e44a41c144",
     "25a282b9e82f06f21f488917a4fc8f1b73573685608597d0efcb076b0ab7a7a4",
     "1223504755036d556342ee9361d253421a826c9ecdf3c7148684b36b714881f9", 654360564, "4200bff4",
     "01", "4cfe4189", "655e5cd55c41f69080575d7999c25a5bfb", "aefefe7d03", 1},
    {"RFC 9369 A.5", V2, DP_SUITE_CHACHA20_POLY1305, SECRET_A5,
     "3bfcddd72bcf02541d7fa0dd1f5f9eeea817e09a6963a0e6c7df0f9a1bab90f2", "a6b5bc6ab7dafce30ffff5dd",
     "d659760d2ba434a226fd37b35c69e2da8211d10c4f12538787d65645d5d1b8e2",
     "c69374c49e3d2a9466fa689e49d476db5d0dfbc87d32ceeaa6343fd0ae4c7d88", 654360564, "4200bff4",
     "01", "5558b1c6", "0ae7b6b932bc27d786f4bc2bb20f2162ba", "97580e32bf", 1},
    {"RFC 9001 A.3", 1, DP_SUITE_AES_128_GCM,
     "3c199828fd139efd216c155ad844cc81fb82fa8d7446fa7d78be803acdda951b",
     "cf3a5331653c364c88f0f379b6067e37", "0ac1493ca1905853b0bba03e",
     "c206b8d9b9f0f37644430b490eeaa314", NULL, 1, "c1000000010008f067a5502a4262b50040750001",
     "02000000000600405a020000560303eefce7f7b37ba1d1632e96677825ddf73988cfc79825df566dc5430b9a045a1"
     "2"
     "00130100002e00330024001d00209d3c940d89690b84d08a60993c144eca684d1081287c834d5311bcf32bb9da1a0"
     "0"
     "2b00020304",
     "cf000000010008f067a5502a4262b5004075c0d9",
     "5a482cd0991cd25b0aac406a5816b6394100f37a1c69797554780bb38cc5a99f5ede4cf73c3ec2493a1839b3dbcba"
     "3"
     "f6ea46c5b7684df3548e7ddeb9c3bf9c73cc3f3bded74b562bfb19fb84022f8ef4cdd93795d77d06edbb7aaf2f588"
     "9"
     "1850abbdca3d20398c276456cbc42158407dd074ee",
     "2ec0d8356a", 18},
};

static void derives(const struct vector *vector, const struct dp_secret *secret) {
    struct chain chain;
    uint8_t out[DP_SECRET_MAX];
    CHECK(chain_start(&chain, secret));
    CHECK(expand(&chain, "key", out, chain.suite->key_bytes));
    is_hex(out, vector->key, vector->name);
    CHECK(expand(&chain, "iv", out, IV_BYTES));
    is_hex(out, vector->iv, vector->name);
    CHECK(expand(&chain, "hp", out, chain.suite->key_bytes));
    is_hex(out, vector->hp, vector->name);
    if (!vector->ku)
        return;
    CHECK(chain_advance(&chain));
    is_hex(chain.secret, vector->ku, vector->name);
}

static void protects(const struct vector *vector, const struct dp_secret *secret) {
    uint8_t header[64], body[256], mask[5], other[5];
    size_t header_bytes = from_hex(vector->header, header), bytes = from_hex(vector->plain, body);
    size_t pn_bytes = header_bytes - vector->pn_at;
    struct dp_sealer *sealer = dp_sealer_new(secret);
    struct dp_opener *opener = dp_opener_new(secret);
    bool updated;
    CHECK(sealer && opener);
    dp_sealer_seal(sealer, vector->pn, header, header_bytes, body, bytes);
    is_hex(body, vector->sealed, vector->name);
    dp_sealer_mask(sealer, body + 4 - pn_bytes, mask);
    dp_opener_mask(opener, body + 4 - pn_bytes, other);
    is_hex(mask, vector->mask, vector->name);
    CHECK(memcmp(mask, other, sizeof mask) == 0);
    CHECK(dp_opener_begin(opener, vector->pn, 0, header, header_bytes));
    dp_opener_next(opener, body, bytes, body);
    CHECK(dp_opener_end(opener, vector->pn, body + bytes, &updated) && !updated);
    is_hex(body, vector->plain, vector->name);
    header[0] ^= mask[0] & (header[0] & 0x80 ? 0x0f : 0x1f);
    for (size_t i = 0; i < pn_bytes; i++)
        header[vector->pn_at + i] ^= mask[1 + i];
    is_hex(header, vector->masked, vector->name);
    dp_sealer_free(sealer);
    dp_opener_free(opener);
}

static void test_vectors(void) {
    for (size_t i = 0; i < sizeof vectors / sizeof *vectors; i++) {
        struct dp_secret secret = {.version = vectors[i].version, .suite = vectors[i].suite};
        secret.bytes = (uint16_t)from_hex(vectors[i].secret, secret.secret);
        derives(&vectors[i], &secret);
        protects(&vectors[i], &secret);
    }
}

/* One of each suite and version --------------------------------------------------------------- */

struct both {
    struct dp_opener *opener;
    struct dp_sealer *sealer;
};

static struct both both_new(uint16_t suite, uint32_t version, uint64_t *seed) {
    struct dp_secret secret = secret_of(suite, version, seed);
    struct both both = {dp_opener_new(&secret), dp_sealer_new(&secret)};
    CHECK(both.opener && both.sealer);
    CHECK(dp_opener_phase(both.opener) == secret.phase);
    CHECK(dp_sealer_phase(both.sealer) == secret.phase);
    return both;
}

static void both_free(struct both both) {
    dp_opener_free(both.opener);
    dp_sealer_free(both.sealer);
}

static void test_bad_secrets(uint64_t seed) {
    struct dp_secret good = secret_of(DP_SUITE_AES_128_GCM, 1, &seed), bad[5];
    for (int i = 0; i < 5; i++)
        bad[i] = good;
    bad[0].version = 2;
    bad[1].suite = 0x1304; /* AES-128-CCM has no place in QUIC's TLS stacks */
    bad[2].bytes = 48;
    bad[3].suite = DP_SUITE_AES_256_GCM;
    bad[4].bytes = 0;
    for (int i = 0; i < 5; i++)
        if (dp_opener_new(&bad[i]) || dp_sealer_new(&bad[i]))
            fail("secret %d was taken", i);
    dp_opener_free(NULL);
    dp_sealer_free(NULL);
}

/* Sizes from nothing to a whole datagram, packet numbers up to the last, in any parts. Nothing is
 * allocated on the way. */
static void test_round_trips(struct both both, uint32_t rounds, uint64_t seed) {
    struct packet packet;
    uint8_t mask[5], other[5];
    uint64_t before = allocations;
    for (uint32_t i = 0; i < rounds; i++) {
        size_t bytes = i < 40 ? i : random_below(&seed, BODY_MAX + 1);
        uint64_t pn = random_next(&seed) >> (2 + random_below(&seed, 60));
        make_packet(&packet, both.sealer, pn, bytes, &seed);
        CHECK(dp_sealer_used(both.sealer) == i + 1);
        CHECK(bytes < 16 || memcmp(packet.sealed, packet.plain, bytes) != 0);
        expect(both.opener, &packet, OPENED, "a round trip");
        expect(both.opener, &packet, OPENED, "the same again");
        packet.pn ^= 1ULL << random_below(&seed, 62);
        expect(both.opener, &packet, FORGED, "another packet number");
        dp_sealer_mask(both.sealer, packet.sealed, mask);
        dp_opener_mask(both.opener, packet.sealed, other);
        CHECK(memcmp(mask, other, sizeof mask) == 0);
    }
    CHECK(both.opener->forged == rounds);
    CHECK(allocations == before);
    CHECK(ERR_peek_error() == 0);
}

/* Every bit of tag, body and header counts; a forgery is counted and changes nothing else. */
static void test_forgeries(struct both both, uint64_t seed) {
    struct packet packet, forged;
    make_packet(&packet, both.sealer, 7, 37, &seed);
    expect(both.opener, &packet, OPENED, "before the forgeries");
    struct dp_opener before = state_of(both.opener);
    uint64_t count = both.opener->forged;
    for (size_t i = 0; i < packet.bytes + DP_TAG_BYTES + packet.header_bytes; i++)
        for (int bit = 0; bit < 8; bit++) {
            forged = packet;
            size_t sealed = packet.bytes + DP_TAG_BYTES;
            *(i < sealed ? &forged.sealed[i] : &forged.header[i - sealed]) ^= (uint8_t)(1 << bit);
            expect(both.opener, &forged, FORGED, "a flipped bit");
            CHECK(both.opener->forged == ++count);
            struct dp_opener after = state_of(both.opener);
            CHECK(memcmp(&before, &after, sizeof before) == 0);
        }
    CHECK(ERR_peek_error() == 0);
    expect(both.opener, &packet, OPENED, "after the forgeries");
}

/* Before a packet is begun and after it ended nothing is written, opened or counted. */
static void test_nothing_begun(struct both both, uint64_t seed) {
    struct packet packet;
    uint8_t out[64] = {0};
    bool updated = true;
    make_packet(&packet, both.sealer, 7, sizeof out, &seed);
    dp_opener_next(both.opener, packet.sealed, packet.bytes, out);
    for (size_t i = 0; i < sizeof out; i++)
        CHECK(out[i] == 0);
    CHECK(!dp_opener_end(both.opener, 7, packet.sealed + packet.bytes, &updated) && !updated);
    CHECK(both.opener->forged == 0);
    expect(both.opener, &packet, OPENED, "afterwards");
    CHECK(!dp_opener_end(both.opener, 7, packet.sealed + packet.bytes, &updated) && !updated);
    CHECK(both.opener->forged == 0);
}

/* Key updates --------------------------------------------------------------------------------- */

static uint8_t update(struct dp_sealer *sealer) {
    uint8_t before = dp_sealer_phase(sealer);
    CHECK(dp_sealer_update(sealer) == !before);
    CHECK(dp_sealer_phase(sealer) == !before);
    CHECK(dp_sealer_used(sealer) == 0);
    return !before;
}

/* One update step by step: late packets, the rule of section 6.5, and forgetting. */
static void test_one_update(struct both both, uint64_t seed) {
    struct dp_opener *opener = both.opener;
    struct packet old[4], new[4];
    uint8_t mask[5], other[5], sample[DP_SAMPLE_BYTES] = {5};
    dp_opener_mask(opener, sample, mask);
    static const uint64_t old_pn[] = {100, 50, 40, 45}, new_pn[] = {120, 110, 60, 49};
    for (int i = 0; i < 4; i++)
        make_packet(&old[i], both.sealer, old_pn[i], 30, &seed);
    uint8_t phase = update(both.sealer);
    for (int i = 0; i < 4; i++)
        make_packet(&new[i], both.sealer, new_pn[i], 30, &seed);
    expect(opener, &old[0], OPENED, "current keys");
    expect(opener, &old[1], OPENED, "current keys, a lower number");
    expect(opener, &new[3], REFUSED, "below the first of the first keys");
    CHECK(opener->forged == 0 && dp_opener_phase(opener) == !phase);
    expect(opener, &new[0], UPDATED, "an update");
    CHECK(dp_opener_phase(opener) == phase);
    expect(opener, &old[2], OPENED, "previous keys");
    expect(opener, &new[1], OPENED, "new keys, a lower number");
    expect(opener, &new[0], OPENED, "new keys");
    CHECK(opener->first == 110);
    dp_opener_forget(opener);
    expect(opener, &old[3], REFUSED, "previous keys that were forgotten");
    CHECK(opener->forged == 0);
    for (size_t i = 0; i < IV_BYTES; i++)
        CHECK(previous_keys(opener)->iv[i] == 0);
    const struct dp_aead *forgotten = &previous_keys(opener)->aead;
    if (forgotten->context)
        CHECK(!EVP_CIPHER_CTX_get0_cipher(forgotten->context));
    expect(opener, &new[2], OPENED, "new keys after forgetting");
    dp_opener_mask(opener, sample, other);
    CHECK(memcmp(mask, other, sizeof mask) == 0);
    dp_sealer_mask(both.sealer, sample, other);
    CHECK(memcmp(mask, other, sizeof mask) == 0);
}

/* The very first packet may come with the next keys; and a number between those that the current
 * keys opened is taken for the next ones. */
static void test_update_at_once(struct both both, uint64_t seed) {
    struct packet packet;
    update(both.sealer);
    make_packet(&packet, both.sealer, 0, 10, &seed);
    expect(both.opener, &packet, UPDATED, "the first packet, in the next phase");
    make_packet(&packet, both.sealer, 9, 10, &seed);
    expect(both.opener, &packet, OPENED, "the next packet");
    update(both.sealer);
    make_packet(&packet, both.sealer, 5, 10, &seed);
    expect(both.opener, &packet, UPDATED, "an update between");
    update(both.sealer);
    update(both.sealer);
    make_packet(&packet, both.sealer, 20, 10, &seed);
    expect(both.opener, &packet, FORGED, "two updates ahead");
    update(both.sealer);
    make_packet(&packet, both.sealer, 21, 10, &seed);
    expect(both.opener, &packet, FORGED, "three updates ahead");
}

/* What the opener has to do with a packet, from generations alone. */
struct model {
    uint32_t generation;
    bool previous; /* keys are held */
    uint64_t forged;
};

static int judge(struct model *model, const struct packet *packet, bool forged) {
    uint32_t of = packet->generation, now = model->generation;
    if (of < now && (now - of) % 2 == 1 && !model->previous)
        return REFUSED;
    if (forged || of + 1 < now || of > now + 1) {
        model->forged++;
        return FORGED;
    }
    if (of != now + 1)
        return OPENED;
    model->generation++;
    model->previous = true;
    return UPDATED;
}

#define STREAM 600
#define WINDOW 24

/* Packets of many generations, numbered in order, then moved: ahead by less than WINDOW, which no
 * generation falls short of, or back by any number of places. */
static void make_stream(struct packet *packets, struct dp_sealer *sealer, uint64_t *seed) {
    uint32_t generation = 0, until = WINDOW;
    for (uint32_t i = 0; i < STREAM; i++) {
        if (i >= until) {
            update(sealer);
            generation++;
            until = i + WINDOW + random_below(seed, WINDOW);
        }
        make_packet(&packets[i], sealer, 1000 + i, 1 + random_below(seed, 60), seed);
        packets[i].generation = generation;
    }
    CHECK(generation > 10);
    for (uint32_t i = 0; i + WINDOW < STREAM; i++) {
        uint32_t j = i + random_below(seed, WINDOW);
        struct packet moved = packets[i];
        packets[i] = packets[j];
        packets[j] = moved;
    }
}

/* A forgery of a packet that is known: another phase bit, another byte, another tag. A flipped
 * phase bit asks for other keys, which may not be held. */
static void forge(struct dp_opener *opener, struct model *model, const struct packet *packet,
                  uint64_t *seed) {
    struct packet forged = *packet;
    struct dp_opener before = state_of(opener);
    if (random_below(seed, 2)) {
        forged.header[0] ^= 4;
        int got = open_packet(opener, &forged, seed);
        CHECK(got == REFUSED || got == FORGED);
        model->forged += got == FORGED;
    } else {
        forged.sealed[random_below(seed, (uint32_t)packet->bytes + DP_TAG_BYTES)] ^= 0x10;
        expect(opener, &forged, judge(model, packet, true), "a forgery");
    }
    struct dp_opener after = state_of(opener);
    CHECK(memcmp(&before, &after, sizeof before) == 0);
}

static void test_many_updates(struct both both, uint64_t seed, uint32_t seen[4]) {
    struct packet *packets = calloc(STREAM, sizeof *packets);
    struct model model = {0};
    uint8_t phase = dp_opener_phase(both.opener);
    CHECK(packets);
    make_stream(packets, both.sealer, &seed);
    for (uint32_t i = 0; i < STREAM; i++) {
        if (random_below(&seed, 3) == 0)
            forge(both.opener, &model, &packets[i], &seed);
        int outcome = judge(&model, &packets[i], false);
        expect(both.opener, &packets[i], outcome, "a stream with updates");
        seen[outcome]++;
        CHECK(both.opener->forged == model.forged);
        CHECK(dp_opener_phase(both.opener) == ((phase + model.generation) & 1));
        if (random_below(&seed, 15) == 0) {
            dp_opener_forget(both.opener);
            model.previous = false;
        }
    }
    CHECK(model.generation > 10);
    free(packets);
}

static bool in_step(const struct both *way) {
    return dp_opener_phase(way->opener) == dp_sealer_phase(way->sealer);
}

/* Both directions of a connection follow each other: whoever updates, the other end comes along. As
 * section 6.1 wants it, no end updates before it heard the other one use its last update. */
static void test_both_ways(uint16_t suite, uint32_t version, uint64_t seed) {
    struct dp_secret there = secret_of(suite, version, &seed),
                     here = secret_of(suite, version, &seed);
    here.phase = there.phase;
    struct both way[2] = {{dp_opener_new(&there), dp_sealer_new(&there)},
                          {dp_opener_new(&here), dp_sealer_new(&here)}};
    struct packet packet;
    uint32_t updates = 0;
    for (uint64_t pn = 0; pn < 400; pn++) {
        uint32_t side = random_below(&seed, 2);
        if (random_below(&seed, 10) == 0 && in_step(&way[0]) && in_step(&way[1])) {
            update(way[side].sealer);
            updates++;
        }
        make_packet(&packet, way[side].sealer, pn, 20, &seed);
        bool ahead_of_opener = !in_step(&way[side]);
        int got = open_packet(way[side].opener, &packet, &seed);
        CHECK(got == (ahead_of_opener ? UPDATED : OPENED) && in_step(&way[side]));
        uint8_t phase = dp_opener_phase(way[side].opener);
        if (got == UPDATED && dp_sealer_phase(way[!side].sealer) != phase)
            update(way[!side].sealer);
    }
    CHECK(updates > 5);
    both_free(way[0]);
    both_free(way[1]);
}

/* Limits -------------------------------------------------------------------------------------- */

static void test_forged_limit(struct both both, uint16_t suite, uint64_t seed) {
    uint64_t limit = suite == DP_SUITE_CHACHA20_POLY1305 ? 1ULL << 36 : 1ULL << 52;
    struct packet packet, forged;
    make_packet(&packet, both.sealer, 3, 20, &seed);
    forged = packet;
    forged.sealed[0] ^= 1;
    both.opener->forged = limit - 2;
    expect(both.opener, &forged, FORGED, "the last forgery but one");
    expect(both.opener, &packet, OPENED, "before the limit");
    CHECK(!dp_opener_exhausted(both.opener));
    expect(both.opener, &forged, FORGED, "the last forgery");
    CHECK(dp_opener_exhausted(both.opener));
    expect(both.opener, &packet, REFUSED, "at the limit");
    /* It is the connection's limit, across all keys. */
    update(both.sealer);
    make_packet(&packet, both.sealer, 4, 20, &seed);
    expect(both.opener, &packet, REFUSED, "at the limit, with other keys");
}

static void test_sealed_limit(struct both both, uint16_t suite, uint64_t seed) {
    uint64_t limit = suite == DP_SUITE_CHACHA20_POLY1305 ? 1ULL << 62 : 1ULL << 23;
    struct packet packet;
    CHECK(dp_sealer_limit(both.sealer) == limit / 2);
    both.sealer->used = limit - 1;
    make_packet(&packet, both.sealer, 0, 40, &seed);
    expect(both.opener, &packet, OPENED, "the last packet of these keys");
    make_packet(&packet, both.sealer, 1, 40, &seed);
    expect(both.opener, &packet, FORGED, "one packet too many");
    for (size_t i = 0; i < packet.bytes + DP_TAG_BYTES; i++)
        CHECK(packet.sealed[i] == 0);
    update(both.sealer);
    make_packet(&packet, both.sealer, 2, 40, &seed);
    expect(both.opener, &packet, UPDATED, "after the update");
}

static void test_suite(uint16_t suite, uint32_t version, uint32_t rounds, uint64_t seed) {
    struct both both[7];
    for (int i = 0; i < 7; i++)
        both[i] = both_new(suite, version, &seed);
    test_round_trips(both[0], rounds, seed + 1);
    test_forgeries(both[1], seed + 2);
    test_nothing_begun(both[2], seed + 3);
    test_one_update(both[3], seed + 4);
    test_update_at_once(both[4], seed + 5);
    test_forged_limit(both[5], suite, seed + 6);
    test_sealed_limit(both[6], suite, seed + 7);
    for (int i = 0; i < 7; i++)
        both_free(both[i]);
    uint32_t seen[4] = {0};
    for (uint32_t i = 0; i < 2 + rounds / 100; i++) {
        struct both many = both_new(suite, version, &seed);
        test_many_updates(many, seed + 8, seen);
        both_free(many);
    }
    CHECK(seen[OPENED] > STREAM && seen[UPDATED] > 20 && seen[REFUSED] && seen[FORGED]);
    test_both_ways(suite, version, seed + 9);
}

static void test_all(uint32_t rounds, uint64_t seed) {
    test_vectors();
    test_bad_secrets(seed);
    for (int suite = 0; suite < 3; suite++)
        for (int version = 0; version < 2; version++)
            test_suite(suite_ids[suite], versions[version], rounds,
                       seed * 1000ULL + (uint64_t)(suite * 2 + version));
}

int main(int argc, char **argv) {
    uint32_t rounds = argument(argc, argv, 1, 500), seed = argument(argc, argv, 2, 1);
    CHECK(CRYPTO_set_mem_functions(counted_malloc, counted_realloc, counted_free));
    for (int wide = 0; wide < 2; wide++) {
        dp_aead_allow_wide(wide);
        test_all(rounds, seed);
        printf("protect, AES-GCM by %s: %zu vectors, 6 suites and versions, %u round trips each\n",
               dp_aead_backend(), sizeof vectors / sizeof *vectors, rounds);
    }
    CHECK(freed > 100);
    return 0;
}
