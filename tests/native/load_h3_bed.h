/* Answers over HTTP/3 for the load generator: how one is written, and what it has to come to in
 * whatever pieces it comes. */
#ifndef LOAD_H3_BED_H
#define LOAD_H3_BED_H

#include "load_bed.h"

/* What an answer should come to. */
struct wanted {
    uint16_t status;
    uint32_t why;
    size_t verdict_at; /* how many bytes tell the status; 0: none do */
    bool ingress;
};

/* Answers ------------------------------------------------------------------------------------ */

struct message {
    uint8_t bytes[512];
    size_t length;
};

static void add(struct message *message, const void *bytes, size_t length) {
    CHECK(message->length + length <= sizeof message->bytes);
    memcpy(message->bytes + message->length, bytes, length);
    message->length += length;
}

static void add_frame(struct message *message, uint8_t type, const void *bytes, size_t length) {
    CHECK(length < 16384);
    uint8_t head[3] = {type, (uint8_t)length};
    if (length >= 64) {
        head[1] = (uint8_t)(0x40 | length >> 8);
        head[2] = (uint8_t)length;
    }
    add(message, head, length < 64 ? 2 : 3);
    add(message, bytes, length);
}

#define ADD_FRAME(message, type, text) add_frame(message, type, text, sizeof(text) - 1)
#define HEADERS                        1
#define DATA                           0

/* A section of one line. */
static void add_status(struct message *message, const void *line, size_t length) {
    uint8_t section[64] = {0, 0};
    CHECK(length + 2 <= sizeof section);
    memcpy(section + 2, line, length);
    add_frame(message, HEADERS, section, length + 2);
}

static void add_body(struct message *message, uint32_t ids, uint32_t counted) {
    uint8_t body[256];
    add_frame(message, DATA, body, put_body(body, ids, counted));
}

/* One way of several pieces ------------------------------------------------------------------ */

/* Let the bytes come so many at a time, as a connection offers them: with what was left. */
static void check_message(const struct message *message, const size_t *ends, size_t pieces,
                          bool apart, const struct wanted *wanted) {
    struct bed *bed = make_bed(1, DP_LOAD_H3);
    clock_ns = 1000;
    begin(bed, 1, 1, 0);
    struct dp_stream *stream = bed->conns[0].streams[0];
    size_t consumed = 0;
    for (size_t i = 0; i < pieces; i++) {
        clock_ns += 100;
        bool fin = i + 1 == pieces && !apart;
        consumed += offer(bed, 0, stream, message->bytes + consumed, ends[i] - consumed, fin);
        CHECK(consumed <= ends[i]);
    }
    clock_ns += 100;
    if (apart)
        offer(bed, 0, stream, message->bytes + consumed, message->length - consumed, true);
    struct dp_load_progress progress = dp_load_progress(&bed->pump);
    expect("finished", 1, progress.finished);
    expect("status", wanted->status, bed->run.status[0]);
    expect("why", wanted->why, progress.why);
    expect("broken", wanted->why != 0, progress.broken);
    expect("totals", wanted->why == 0, progress.totals);
    expect("verdicts", wanted->verdict_at != 0, progress.verdicts);
    expect("ingresses", wanted->ingress, progress.ingresses);
    if (wanted->ingress)
        expect("ingress", INGRESS, bed->run.ingress_us[0]);
    if (wanted->verdict_at) {
        size_t piece = 0;
        while (ends[piece] < wanted->verdict_at)
            piece++;
        expect("verdict time", 100 * (piece + 1), (uint64_t)bed->run.verdict_ns[0]);
    }
    if (progress.totals)
        expect("total time", 100 * (pieces + apart), (uint64_t)bed->run.total_ns[0]);
    free_bed(bed);
}

/* Every split in two and many in three, and byte by byte. */
static void check_splits(const struct message *message, struct wanted wanted) {
    size_t length = message->length, ends[sizeof message->bytes];
    for (int apart = 0; apart < 2; apart++) {
        for (size_t first = 0; first <= length; first++)
            for (size_t second = first; second <= length; second += 1 + second / 8) {
                size_t three[] = {first, second, length};
                check_message(message, three, 3, apart, &wanted);
            }
        for (size_t i = 0; i < length; i++)
            ends[i] = i + 1;
        if (length)
            check_message(message, ends, length, apart, &wanted);
    }
}

#define WHOLE(of, at, stated) ((struct wanted){.status = of, .verdict_at = at, .ingress = stated})
#define BROKEN(of, at)        ((struct wanted){.status = DP_LOAD_NONE, .why = of, .verdict_at = at})

#endif
