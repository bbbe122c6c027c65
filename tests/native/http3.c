/* The reader of plain HTTP/3 requests: of mutated ones it reads nothing that did not come, and what
 * it takes for a request lies within its bytes.
 *
 * Usage: http3 ROUNDS SEED */
#include "harness.h"

#include "http3.h"

#define BODY 64

/* POST /v1/generate of 16 ids: literals and names of the static table, bare and compressed. */
static const uint8_t head[] = {
    0x01, 0x40, 0x4b, 0x00, 0x00, 0xd4, 0xd7,       /* POST, https */
    0x50, 0x86, 0xa0, 0xe4, 0x1d, 0x13, 0x9d, 0x09, /* localhost */
    0x51, 0x0c, '/',  'v',  '1',  '/',  'g',  'e',  'n',  'e',  'r', 'a', 't', 'e', /* :path */
    0x5f, 0x1d, 24,   'a',  'p',  'p',  'l',  'i',  'c',  'a',  't', 'i', 'o', 'n',
    '/',  'o',  'c',  't',  'e',  't',  '-',  's',  't',  'r',  'e', 'a', 'm', 0x54,
    0x02, '6',  '4',  0x27, 0x05, 'x',  '-',  'r',  'e',  'q',  'u', 'e', 's', 't',
    '-',  'i',  'd',  0x03, 'a',  'b',  'c',  0x00, 0x40, BODY,
};
#define SIZE (sizeof head + BODY)

static int read_copy(const uint8_t *message, size_t size, struct dp_h3_plain *plain) {
    /* Of exactly that size, for a sanitizer to see a byte too much. */
    uint8_t *copy = malloc(size ? size : 1);
    memcpy(copy, message, size);
    int is_plain = dp_h3_plain(copy, 0, (uint32_t)size, plain);
    free(copy);
    return is_plain;
}

static void reads_a_plain_one(const uint8_t *message) {
    struct dp_h3_plain plain;
    CHECK(read_copy(message, SIZE, &plain) == 1);
    CHECK(plain.body_at == sizeof head && plain.n_tokens == BODY / 4 && plain.max_output == 0);
    CHECK(plain.id_bytes == 3 && memcmp(plain.id, "abc", 3) == 0);
    for (size_t size = 0; size < SIZE; size++)
        CHECK(read_copy(message, size, &plain) == 0);
}

static void mutated(const uint8_t *message, uint32_t rounds, uint64_t seed) {
    uint32_t taken = 0;
    for (uint32_t round = 0; round < rounds; round++) {
        uint8_t copy[SIZE];
        memcpy(copy, message, SIZE);
        for (uint64_t n = random_next(&seed) % 4 + 1; n; n--)
            copy[random_next(&seed) % sizeof head] = (uint8_t)random_next(&seed);
        size_t size = random_next(&seed) % 4 ? SIZE : random_next(&seed) % (SIZE + 1);
        struct dp_h3_plain plain = {0};
        if (!read_copy(copy, size, &plain))
            continue;
        taken++;
        if (plain.body_at + (size_t)plain.n_tokens * 4 != size || !plain.n_tokens ||
            plain.id_bytes > DP_H3_ID_MAX)
            fail("round %u: a body of %u ids at %u in %zu bytes", round, plain.n_tokens,
                 plain.body_at, size);
    }
    if (rounds >= 1000 && !taken)
        fail("not one of %u mutated requests was still plain", rounds);
    printf("%u of %u mutated requests were still plain\n", taken, rounds);
}

int main(int argc, char **argv) {
    uint32_t rounds = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 100000;
    uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    uint8_t message[SIZE] = {0};
    memcpy(message, head, sizeof head);
    reads_a_plain_one(message);
    mutated(message, rounds, seed);
    return 0;
}
