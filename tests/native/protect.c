/* Packet protection against the RFCs' vectors and with keys that stay: round trips in parts,
 * forgeries of every byte, and the AEADs' limits.
 *
 * usage: protect [ROUNDS [SEED]] */
#include "protect_bed.h"

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
    struct both both[5];
    for (int i = 0; i < 5; i++)
        both[i] = both_new(suite, version, &seed);
    test_round_trips(both[0], rounds, seed + 1);
    test_forgeries(both[1], seed + 2);
    test_nothing_begun(both[2], seed + 3);
    test_forged_limit(both[3], suite, seed + 6);
    test_sealed_limit(both[4], suite, seed + 7);
    for (int i = 0; i < 5; i++)
        both_free(both[i]);
}

int main(int argc, char **argv) {
    uint32_t rounds = argument(argc, argv, 1, 500), seed = argument(argc, argv, 2, 1);
    count_memory();
    for (int wide = 0; wide < 2; wide++) {
        dp_aead_allow_wide(wide);
        test_vectors();
        test_bad_secrets(seed);
        run_suites(test_suite, rounds, seed);
    }
    return 0;
}
