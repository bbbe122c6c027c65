/* Runs a fuzz target without libFuzzer: over every file it is given, over each cut of each, and
 * over as many seeded mutations of them as it is told.
 *
 *     replay MUTATIONS SEED FILE...
 *
 * Every input is a heap block of exactly its size, so that a sanitizer sees the first byte read
 * behind it. A target that fails ends the process; the last line before says which input it was. */
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define INPUT_MAX 4096
#define EDITS_MAX 6

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct input {
    size_t size;
    uint8_t bytes[INPUT_MAX];
};

/* What is running, for the message of an input that fails. */
static const struct input *running;

static void die(const char *what, const char *name) {
    fprintf(stderr, "FAILED: %s: %s\n", what, name);
    exit(1);
}

/* splitmix64: the same numbers from the same seed everywhere. */
static uint64_t random_next(uint64_t *seed) {
    uint64_t z = *seed += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ z >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ z >> 27) * UINT64_C(0x94D049BB133111EB);
    return z ^ z >> 31;
}

static size_t below(uint64_t *seed, size_t bound) {
    return (size_t)(random_next(seed) % bound);
}

/* Only what a signal handler may call; the target does not return from here. */
static void say_input(int signal_number) {
    static const char digits[] = "0123456789abcdef";
    static const char begin[] = "the input was:";
    if (write(2, begin, sizeof begin - 1) < 0)
        _exit(1);
    for (size_t i = 0; running && i < running->size; i++) {
        char pair[3] = {' ', digits[running->bytes[i] >> 4], digits[running->bytes[i] & 15]};
        if (write(2, pair, sizeof pair) < 0)
            break;
    }
    if (write(2, "\n", 1) < 0)
        _exit(1);
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static void run_one(const struct input *input) {
    uint8_t *exact = malloc(input->size ? input->size : 1);
    if (!exact)
        die("no memory", "input");
    memcpy(exact, input->bytes, input->size);
    running = input;
    LLVMFuzzerTestOneInput(exact, input->size);
    free(exact);
}

static void run_cuts(const struct input *input) {
    struct input cut = *input;
    for (cut.size = 0; cut.size < input->size; cut.size++)
        run_one(&cut);
}

static void load(const char *name, struct input *to) {
    FILE *file = fopen(name, "rb");
    if (!file)
        die("cannot read", name);
    to->size = fread(to->bytes, 1, INPUT_MAX, file);
    if (fgetc(file) != EOF)
        die("larger than 4096 bytes", name);
    fclose(file);
}

/* Bytes that begin or end something: lengths of varints, their greatest values, and zeros. */
static uint8_t telling_byte(uint64_t *seed) {
    static const uint8_t telling[] = {0x00, 0x01, 0x3f, 0x40, 0x7f, 0x80, 0xbf, 0xc0, 0xff};
    size_t which = below(seed, sizeof telling + 4);
    return which < sizeof telling ? telling[which] : (uint8_t)random_next(seed);
}

/* Make room for `count` bytes at `at`, as many as there is room for, and say how many. */
static size_t open_gap(struct input *input, size_t at, size_t count) {
    if (count > INPUT_MAX - input->size)
        count = INPUT_MAX - input->size;
    memmove(input->bytes + at + count, input->bytes + at, input->size - at);
    input->size += count;
    return count;
}

static void insert(struct input *input, uint64_t *seed) {
    size_t at = below(seed, input->size + 1);
    size_t count = open_gap(input, at, 1 + below(seed, 8));
    for (size_t i = 0; i < count; i++)
        input->bytes[at + i] = telling_byte(seed);
}

static void delete(struct input *input, uint64_t *seed) {
    size_t at = below(seed, input->size), count = 1 + below(seed, 8);
    if (count > input->size - at)
        count = input->size - at;
    memmove(input->bytes + at, input->bytes + at + count, input->size - at - count);
    input->size -= count;
}

/* Put a piece of another input in. */
static void splice(struct input *input, const struct input *other, uint64_t *seed) {
    if (!other->size)
        return;
    size_t from = below(seed, other->size), at = below(seed, input->size + 1);
    size_t count = open_gap(input, at, 1 + below(seed, other->size - from));
    memcpy(input->bytes + at, other->bytes + from, count);
}

static void edit(struct input *input, const struct input *other, uint64_t *seed) {
    size_t how = below(seed, 6);
    if (how == 0 || input->size == 0)
        insert(input, seed);
    else if (how == 1)
        delete(input, seed);
    else if (how == 2)
        splice(input, other, seed);
    else if (how == 3)
        input->size = below(seed, input->size + 1);
    else if (how == 4)
        input->bytes[below(seed, input->size)] ^= (uint8_t)(1U << below(seed, 8));
    else
        input->bytes[below(seed, input->size)] = telling_byte(seed);
}

static void run_mutations(const struct input *inputs, size_t count, size_t mutations,
                          uint64_t seed) {
    static struct input mutant;
    for (size_t n = 0; n < mutations; n++) {
        const struct input *origin = &inputs[below(&seed, count)];
        mutant.size = origin->size;
        memcpy(mutant.bytes, origin->bytes, origin->size);
        for (size_t edits = 1 + below(&seed, EDITS_MAX); edits > 0; edits--)
            edit(&mutant, &inputs[below(&seed, count)], &seed);
        run_one(&mutant);
    }
}

int main(int argc, char **argv) {
    if (argc < 4)
        die("usage", "replay MUTATIONS SEED FILE...");
    signal(SIGABRT, say_input);
    size_t count = (size_t)argc - 3;
    size_t mutations = (size_t)strtoull(argv[1], NULL, 10);
    struct input *inputs = calloc(count, sizeof *inputs);
    if (!inputs)
        die("no memory", "inputs");
    for (size_t i = 0; i < count; i++) {
        load(argv[3 + i], &inputs[i]);
        run_one(&inputs[i]);
        run_cuts(&inputs[i]);
    }
    run_mutations(inputs, count, mutations, strtoull(argv[2], NULL, 10));
    printf("%zu files with all their cuts, %zu mutations\n", count, mutations);
    free(inputs);
    return 0;
}
