/* What the load generator makes of HTTP/3: answers however they are split, with each way to write a
 * status, and what breaks them; and the server's own streams.
 *
 * Usage: load_h3 STEPS SEED */
#include "load_h3_bed.h"

/* Statuses ----------------------------------------------------------------------------------- */

static void check_static_statuses(void) {
    static const uint16_t statuses[] = {200, 304, 404, 503, 204, 206, 302, 400, 403, 421, 425, 500};
    static const uint8_t indices[] = {25, 26, 27, 28, 64, 65, 66, 67, 68, 69, 70, 71};
    for (size_t i = 0; i < sizeof indices; i++) {
        struct message message = {.length = 0};
        uint8_t line[] = {(uint8_t)(0xc0 | indices[i]), 0};
        if (indices[i] >= 63) {
            line[0] = 0xff;
            line[1] = (uint8_t)(indices[i] - 63);
        }
        add_status(&message, line, indices[i] >= 63 ? 2 : 1);
        size_t verdict = message.length;
        add_body(&message, 2, 2);
        check_splits(&message, WHOLE(statuses[i], verdict, false));
    }
}

/* A literal, by either way to name it; the Huffman codes of digits are 0 to 2 in 5 bits and, from
 * 011001 on, 3 to 9 in 6 (RFC 7541 appendix B). */
static void add_literal_status(struct message *message, unsigned status, uint8_t index,
                               bool huffman) {
    uint8_t line[16] = {0x5f, (uint8_t)(index - 15)};
    unsigned digits[] = {status / 100, status / 10 % 10, status % 10};
    if (!huffman) {
        line[2] = 3;
        for (int i = 0; i < 3; i++)
            line[3 + i] = (uint8_t)('0' + digits[i]);
        add_status(message, line, 6);
        return;
    }
    uint32_t bits = 0;
    unsigned count = 0;
    for (int i = 0; i < 3; i++) {
        unsigned wide = digits[i] < 3 ? 5 : 6;
        bits = bits << wide | (digits[i] < 3 ? digits[i] : 0x19 + digits[i] - 3);
        count += wide;
    }
    unsigned bytes = (count + 7) / 8, padding = bytes * 8 - count;
    bits = bits << padding | ((1U << padding) - 1);
    line[2] = (uint8_t)(0x80 | bytes);
    for (unsigned i = 0; i < bytes; i++)
        line[3 + i] = (uint8_t)(bits >> 8 * (bytes - 1 - i));
    add_status(message, line, 3 + bytes);
}

static void check_literal_statuses(void) {
    for (unsigned status = 200; status < 1000; status++)
        for (int huffman = 0; huffman < 2; huffman++) {
            struct message message = {.length = 0};
            add_literal_status(&message, status, status % 2 ? 24 : 71, huffman);
            size_t verdict = message.length;
            add_body(&message, 1, 1);
            size_t ends[] = {verdict - 1, verdict, message.length};
            struct wanted wanted = WHOLE((uint16_t)status, verdict, false);
            check_message(&message, ends, 3, false, &wanted);
            if (status % 97 == 41)
                check_splits(&message, wanted);
        }
}

/* What the server states --------------------------------------------------------------------- */

#define TIMING "queue;dur=0.031, ingress;dur=0.077"

static const uint8_t huffman_name[] = {0x41, 0x6c, 0xee, 0x5b, 0x16, 0x49, 0xa9, 0x35, 0x53, 0x7f};
/* The same text as TIMING. */
static const uint8_t huffman_value[] = {0xed, 0x69, 0x6d, 0x2f, 0xdc, 0x96, 0xd9, 0x00, 0x17,
                                        0x03, 0x21, 0xfa, 0x50, 0xd5, 0x4d, 0x61, 0x50, 0x8f,
                                        0xb9, 0x2d, 0xb2, 0x00, 0x2e, 0x07, 0x5d};

static size_t put_timing(uint8_t *to, const char *value) {
    size_t length = strlen(value);
    memcpy(to, "\x27\x06server-timing", 15);
    to[15] = (uint8_t)length;
    memcpy(to + 16, value, length);
    return 16 + length;
}

/* A section as servers write it: a status, fields of each kind, and the timing. */
static void add_full(struct message *message, const uint8_t *timing, size_t length) {
    uint8_t section[256] = "\0\0\xd9"          /* :status: 200 */
                           "\xee"              /* content-type by the table alone */
                           "\x5f\x1d\x03"      /* a literal value of the table's name 44 */
                           "a/b\x23yes\x02no"; /* both in words */
    size_t at = 2 + 1 + 1 + 6 + 4 + 3;
    memcpy(section + at, timing, length);
    at += length;
    section[at++] = 0xff; /* the last of the table */
    section[at++] = 0x23;
    add_frame(message, HEADERS, section, at);
}

static void check_timing(const char *value, bool stated) {
    struct message message = {.length = 0};
    uint8_t timing[128];
    add_full(&message, timing, put_timing(timing, value));
    size_t verdict = message.length, ends[] = {0, 0};
    add_body(&message, 2, 2);
    ends[0] = verdict;
    ends[1] = message.length;
    struct wanted wanted = WHOLE(200, verdict, stated);
    check_message(&message, ends, 2, false, &wanted);
    if (stated)
        check_splits(&message, wanted);
}

static void check_timings(void) {
    check_timing(TIMING, true);
    check_timing("ingress;dur=0.0774, queue;dur=1", true);
    check_timing("a,  ingress;dur=.077", false);
    check_timing("egress;dur=0.077", false);
    check_timing("x ingress;dur=0.077", false);
    check_timing("ingress;dur=", false);
    check_timing("ingress;dur=999999999.5", false);
    check_timing("ingress", false);
    check_timing("", false);
}

/* Broken ------------------------------------------------------------------------------------- */

#define SECTION(text) ADD_FRAME(&message, HEADERS, text)

static void check_section(const char *section, size_t length) {
    struct message message = {.length = 0};
    add_frame(&message, HEADERS, section, length);
    size_t end = message.length;
    add_body(&message, 1, 1);
    check_splits(&message, BROKEN(DP_LOAD_FIELDS, 0));
    /* It is broken once it is whole and not before. */
    struct bed *bed = make_bed(1, DP_LOAD_H3);
    begin(bed, 1, 1, 0);
    struct dp_stream *stream = bed->conns[0].streams[0];
    expect("taken of a part", 0, offer(bed, 0, stream, message.bytes, end - 1, false));
    expect("broken by a part", 0, dp_load_progress(&bed->pump).broken);
    expect("taken of the whole", end, offer(bed, 0, stream, message.bytes, end, false));
    struct dp_load_progress progress = dp_load_progress(&bed->pump);
    expect("broken", 1, progress.broken);
    expect("the section's bytes", length, progress.broken_a);
    expect("stopped", 1, bed->conns[0].stops);
    free_bed(bed);
}

static void check_sections(void) {
    static const struct {
        const char *bytes;
        size_t length;
    } broken[] = {
#define S(text) {text, sizeof(text) - 1}
        S(""),
        S("\0"),
        S("\0\0"),                       /* no status */
        S("\1\0\xd9"),                   /* it waits for a dynamic table */
        S("\0\x80\xd9"),                 /* a base below 0 */
        S("\0\x7f\xff\xff\xff\xff\xff"), /* a number without end */
        S("\0\0\x99"),                   /* of the dynamic table */
        S("\0\0\x10"),                   /* and behind its base */
        S("\0\0\x4f\x0a\x03"
          "200"),
        S("\0\0\x00\x03"
          "200"),
        S("\0\0\xee\xd9"), /* not first */
        S("\0\0\xd9\xd9"), /* twice */
        S("\0\0\xd9\x5f\x09\x03"
          "200"),
        S("\0\0\xff\x24"), /* beyond the static table */
        S("\0\0\xd9\xff\x24"),
        S("\0\0\x5f\x09\x03"
          "20"), /* cut off */
        S("\0\0\x5f\x09\x02"
          "20"),
        S("\0\0\x5f\x09\x04"
          "2000"),
        S("\0\0\x5f\x09\x03"
          "2x0"),
        S("\0\0\x5f\x09\x03"
          "020"),
        S("\0\0\x5f\x09\x03"
          "+20"),
        S("\0\0\x5f\x09\x82\x10\x00"),     /* 2 0 and padding of zeros, which is 0 */
        S("\0\0\x5f\x09\x83\x10\x01\xff"), /* 2 0 0 and more padding than a byte */
        S("\0\0\x5f\x09\x81\x17"),         /* 2, and padding or 5 bits of 1 */
        S("\0\0\x5f\x08\x03"
          "200"), /* the table's 23 is another field */
        S("\0\0\x5f\x0e\x03"
          "200"), /* so is 29 */
        S("\0\0\xde"),
        S("\0\0\xfe"),              /* 62 */
        S("\0\0\xff\x09"),          /* 72 */
        S("\0\0\xd9\x26yes\x02no"), /* its name is cut off */
        S("\0\0\xd9\x23yes\x03no"),
        S("\0\0\xd9\x23yes"),
        S("\0\0\x5f\x09\x82\x65\x90"),     /* 3 3 and 4 bits, which are no padding */
        S("\0\0\x5f\x09\x83\x10\x00\x0f"), /* 2 0 0 0 */
        S("\0\0\xd9\x5f\x54\x01"
          "a"), /* a name beyond the static table */
#undef S
    };
    for (size_t i = 0; i < sizeof broken / sizeof *broken; i++)
        check_section(broken[i].bytes, broken[i].length);
}

static void check_frames(void) {
    static const uint8_t unwanted[] = {2, 3, 4, 5, 6, 7, 8, 9, 13};
    for (size_t i = 0; i < sizeof unwanted; i++) {
        struct message message = {.length = 0};
        add_frame(&message, unwanted[i], "x", 1);
        check_splits(&message, BROKEN(DP_LOAD_FRAME, 0));
        message.length = 0;
        SECTION("\0\0\xd9");
        size_t verdict = message.length;
        add_frame(&message, unwanted[i], "", 0);
        check_splits(&message, BROKEN(DP_LOAD_FRAME, verdict));
    }
    struct message message = {.length = 0};
    add_body(&message, 1, 1); /* before any header */
    check_splits(&message, BROKEN(DP_LOAD_FRAME, 0));
    message.length = 0;
    SECTION("\0\0\xd8"); /* 103, and a body of it */
    add_body(&message, 1, 1);
    check_splits(&message, BROKEN(DP_LOAD_FRAME, 0));
    for (uint8_t type = DATA; type <= HEADERS; type++) { /* behind trailers */
        message.length = 0;
        SECTION("\0\0\xd9");
        size_t verdict = message.length;
        add_body(&message, 1, 1);
        SECTION("\0\0\x23yes\x02no");
        add(&message, "\x21\x01?", 3);
        add_frame(&message, type, "", 0);
        check_splits(&message, BROKEN(DP_LOAD_FRAME, verdict));
    }
    message.length = 0;
    add(&message, "\x01\x80\x00\x40\x01", 5); /* a field section of 16,385 bytes */
    check_splits(&message, BROKEN(DP_LOAD_FIELDS, 0));
    message.bytes[message.length - 1] = 0; /* one less may be, and is cut off here */
    check_splits(&message, BROKEN(DP_LOAD_CUT, 0));
    message.length = 0;
    add_literal_status(&message, 101, 24, true);
    SECTION("\0\0\xd9");
    add_body(&message, 0, 0);
    check_splits(&message, BROKEN(DP_LOAD_STATUS, 0));
}

static void check_ends(void) {
    struct message message = {.length = 0};
    check_splits(&message, BROKEN(DP_LOAD_CUT, 0));
    SECTION("\0\0\xd8");
    check_splits(&message, BROKEN(DP_LOAD_CUT, 0)); /* 103 alone */
    message.length = 0;
    SECTION("\0\0\xd9");
    size_t verdict = message.length;
    check_splits(&message, BROKEN(DP_LOAD_TRAILER, verdict));
    add_body(&message, 3, 3);
    size_t whole = message.length;
    for (message.length = verdict - 1; message.length < whole; message.length++)
        if (message.length != verdict)
            check_splits(&message, BROKEN(DP_LOAD_CUT, message.length < verdict ? 0 : verdict));
    for (int more = -1; more < 2; more += 2) {
        message.length = verdict;
        add_body(&message, 3, (uint32_t)(3 + more));
        check_splits(&message, BROKEN(DP_LOAD_COUNT, verdict));
    }
    message.length = verdict;
    uint8_t body[64];
    add_frame(&message, DATA, body, put_body(body, 3, 3) - 4);
    check_splits(&message, BROKEN(DP_LOAD_TRAILER, verdict));
}

/* Whole -------------------------------------------------------------------------------------- */

static void check_shapes(void) {
    struct message message = {.length = 0};
    SECTION("\0\0\xd8"); /* 103, twice */
    SECTION("\0\0\xd8\x23yes\x02no");
    add_literal_status(&message, 199, 24, true);
    add(&message, "\x21\x02??", 4); /* of a later extension */
    SECTION("\0\x07\xd9");          /* a base that nothing refers to */
    size_t verdict = message.length;
    uint8_t body[128];
    size_t length = put_body(body, 5, 5);
    add_frame(&message, DATA, body, 3);
    add(&message, "\x00\x00", 2);
    add(&message, "\x40\x0a\x01?", 4); /* unknown, and written longer than it need be */
    add_frame(&message, DATA, body + 3, length - 4);
    add_frame(&message, DATA, body + length - 1, 1);
    check_splits(&message, WHOLE(200, verdict, false));
    SECTION("\0\0\x23yes\x02no");
    add(&message, "\x21\x01?", 3);
    check_splits(&message, WHOLE(200, verdict, false));

    message.length = 0;
    uint8_t timing[64] = {0x2f, sizeof huffman_name - 7};
    memcpy(timing + 2, huffman_name, sizeof huffman_name);
    timing[12] = 0x80 | sizeof huffman_value;
    size_t value = sizeof huffman_value;
    memcpy(timing + 13, huffman_value, value);
    add_full(&message, timing, 13 + value);
    verdict = message.length;
    add_body(&message, 0, 0);
    check_splits(&message, WHOLE(200, verdict, true));

    message.length = 0;
    SECTION("\0\0\xff\x04"); /* 400, with a body in words */
    verdict = message.length;
    check_splits(&message, WHOLE(400, verdict, false));
    ADD_FRAME(&message, DATA, "the prompt is too long");
    check_splits(&message, WHOLE(400, verdict, false));
}

/* The server's own streams ------------------------------------------------------------------- */

static void tell(struct bed *bed, uint32_t i, struct dp_stream *stream, const void *bytes,
                 size_t length, size_t piece) {
    size_t consumed = 0;
    for (size_t end = 0; end < length;) {
        end = end + piece < length ? end + piece : length;
        consumed += offer(bed, i, stream, (const uint8_t *)bytes + consumed, end - consumed, false);
        CHECK(consumed <= end);
    }
    expect("taken in the end", length, consumed);
}

/* Of two connections one goes away, in words of so many bytes each. */
static void check_goaway(size_t piece, bool goes) {
    struct bed *bed = make_bed(2, DP_LOAD_H3);
    struct dp_stream control = {.id = 3}, unknown = {.id = 7}, other = {.id = 1}, late = {.id = 11};
    static const char settings[] = "\0\4\6\1\x80\0\7\7\7\x21\x41\0";
    tell(bed, 0, &control, settings, sizeof settings - 1, piece);
    uint8_t skipped[256]; /* GOAWAY's type all through a payload and on another stream */
    memset(skipped, 7, sizeof skipped);
    tell(bed, 0, &control, skipped, sizeof skipped, piece);
    tell(bed, 0, &unknown, "\x42\0\7\1\0\7\1\0", 8, piece);
    tell(bed, 0, &other, "\0\7\1\0", 4, piece); /* no stream of the kind */
    begin(bed, 4, 1, 0);
    if (goes)
        tell(bed, 0, &control, "\x40\x07\1\4", 4, piece);
    expect("live", goes ? 1 : 2, dp_load_progress(&bed->pump).live);
    struct message answer = {.length = 0};
    add_frame(&answer, HEADERS, "\0\0\xd9", 3);
    add_body(&answer, 1, 1);
    for (uint32_t i = 0; i < 2; i++) /* what is in flight there is answered */
        offer(bed, i, bed->conns[i].streams[0], answer.bytes, answer.length, true);
    pass(bed);
    expect("begun where it goes away", goes ? 1 : 2, bed->conns[0].count);
    for (uint32_t i = 1; i < bed->conns[1].count; i++) {
        offer(bed, 1, bed->conns[1].streams[i], answer.bytes, answer.length, true);
        pass(bed);
    }
    if (!goes)
        offer(bed, 0, bed->conns[0].streams[1], answer.bytes, answer.length, true);
    expect("finished", 1, dp_load_progress(&bed->pump).finished);
    for (int i = 0; i < 4; i++)
        expect("status", 200, bed->run.status[i]);
    begin(bed, 2, 1, 0);
    if (goes)
        tell(bed, 1, &control, "\7\1\0", 3, piece);
    leave(bed, 0);
    tell(bed, 0, &late, "\0\7\1\0", 4, piece);
    leave(bed, 1);
    free_bed(bed);
}

/* The last connection goes away: what has not begun is lost. */
static void check_gone(void) {
    struct bed *bed = make_bed(1, DP_LOAD_H3);
    struct dp_stream control = {.id = 3};
    begin(bed, 3, 1, 0);
    tell(bed, 0, &control, "\0\7\1\0", 4, 4);
    struct message answer = {.length = 0};
    add_frame(&answer, HEADERS, "\0\0\xd9", 3);
    add_body(&answer, 1, 1);
    offer(bed, 0, bed->conns[0].streams[0], answer.bytes, answer.length, true);
    struct dp_stream cut = {.id = 7}; /* its end leaves nothing to wait for */
    expect("taken of the end", 2, offer(bed, 0, &cut, (const uint8_t *)"\0\4", 2, true));
    expect("finished", 1, dp_load_progress(&bed->pump).finished);
    expect("lost", DP_LOAD_LOST, bed->run.status[0]);
    expect("lost", DP_LOAD_LOST, bed->run.status[1]);
    expect("answered", 200, bed->run.status[2]);
    free_bed(bed);
}

/* Rubbish must neither be read beyond its end nor pass. */
static void check_rubbish(uint64_t *seed) {
    struct message message = {.length = 0};
    uint8_t timing[64];
    add_full(&message, timing, put_timing(timing, TIMING));
    add_body(&message, 3, 3);
    for (uint32_t i = 1 + random_below(seed, 3); i > 0; i--)
        message.bytes[random_below(seed, (uint32_t)message.length)] = (uint8_t)random_next(seed);
    struct bed *bed = make_bed(1, DP_LOAD_H3);
    begin(bed, 1, 1, 0);
    struct dp_stream *stream = bed->conns[0].streams[0], own = {.id = 3};
    size_t consumed[2] = {0}, end = 0;
    while (end < message.length) {
        end += 1 + random_below(seed, (uint32_t)(message.length - end));
        const uint8_t *bytes = message.bytes;
        consumed[0] +=
            offer(bed, 0, stream, bytes + consumed[0], end - consumed[0], end == message.length);
        consumed[1] +=
            offer(bed, 0, &own, bytes + consumed[1], end - consumed[1], end == message.length);
    }
    struct dp_load_progress progress = dp_load_progress(&bed->pump);
    expect("ended", 1, progress.ended);
    expect("one or the other", 1, progress.broken + progress.totals);
    expect("taken", message.length, consumed[0]);
    expect("taken of its own", message.length, consumed[1]);
    free_bed(bed);
}

int main(int count, char **arguments) {
    CHECK(count == 3);
    uint64_t seed = strtoull(arguments[2], NULL, 10);
    check_static_statuses();
    check_literal_statuses();
    check_timings();
    check_sections();
    check_frames();
    check_ends();
    check_shapes();
    for (size_t piece = 1; piece < 9; piece++) {
        check_goaway(piece, false);
        check_goaway(piece, true);
    }
    check_gone();
    for (long i = strtol(arguments[1], NULL, 10); i > 0; i--)
        check_rubbish(&seed);
    printf("load_h3: answers of every shape and %s of rubbish\n", arguments[1]);
    return 0;
}
