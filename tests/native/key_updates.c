/* Key updates against a model of what may open: packets out of order, forgeries among them, and
 * both sides at once.
 *
 * usage: key_updates [ROUNDS [SEED]] */
#include "protect_bed.h"

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

static void test_suite(uint16_t suite, uint32_t version, uint32_t rounds, uint64_t seed) {
    struct both one = both_new(suite, version, &seed), other = both_new(suite, version, &seed);
    test_one_update(one, seed + 4);
    test_update_at_once(other, seed + 5);
    both_free(one);
    both_free(other);
    uint32_t seen[4] = {0};
    for (uint32_t i = 0; i < 2 + rounds / 100; i++) {
        struct both many = both_new(suite, version, &seed);
        test_many_updates(many, seed + 8, seen);
        both_free(many);
    }
    CHECK(seen[OPENED] > STREAM && seen[UPDATED] > 20 && seen[REFUSED] && seen[FORGED]);
    test_both_ways(suite, version, seed + 9);
}

int main(int argc, char **argv) {
    uint32_t rounds = argument(argc, argv, 1, 500), seed = argument(argc, argv, 2, 1);
    count_memory();
    for (int wide = 0; wide < 2; wide++) {
        dp_aead_allow_wide(wide);
        run_suites(test_suite, rounds, seed);
    }
    return 0;
}
