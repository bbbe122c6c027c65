/* See streams.h. */
#include "streams.h"

#include <string.h>

#include "pool.h"

static uint64_t lower(uint64_t a, uint64_t b) {
    return a < b ? a : b;
}

/* Bytes at `*buffer`, at least `need`: grown by doubling. */
static bool grow(struct dp_pool *pool, uint8_t **buffer, size_t *room, size_t held, size_t need) {
    if (need <= *room)
        return true;
    size_t wanted = *room ? *room * 2 : 256;
    while (wanted < need)
        wanted *= 2;
    size_t got;
    uint8_t *bigger = dp_pool_take(pool, wanted, &got);
    if (!bigger)
        return false;
    if (*room) {
        memcpy(bigger, *buffer, held);
        dp_pool_give(pool, *buffer, *room);
    }
    *buffer = bigger;
    *room = got;
    return true;
}

static void drop_in(struct dp_receiving *in, struct dp_pool *pool) {
    if (in->room)
        dp_pool_give(pool, in->buffer, in->room);
    in->buffer = NULL;
    in->room = 0;
}

static void drop_out(struct dp_sending *out, struct dp_pool *pool) {
    if (out->room)
        dp_pool_give(pool, out->buffer, out->room);
    out->buffer = NULL;
    out->room = 0;
    out->base = out->start;
}

void dp_stream_clear(struct dp_stream *stream, struct dp_pool *pool) {
    drop_in(&stream->in, pool);
    drop_out(&stream->out, pool);
    dp_ranges_free(&stream->in.beyond, pool);
    dp_ranges_free(&stream->out.acked, pool);
    dp_ranges_free(&stream->out.lost, pool);
}

/* What came ----------------------------------------------------------------------------------- */

static bool in_order(const struct dp_receiving *in, uint64_t offset) {
    return offset <= in->frontier;
}

bool dp_stream_accepts(const struct dp_stream *stream, uint64_t offset, size_t length,
                       uint32_t before) {
    const struct dp_receiving *in = &stream->in;
    if (before >= DP_STREAM_RANGES)
        return false;
    return in->discard || !length || in_order(in, offset) ||
           dp_ranges_fits(&in->beyond, DP_STREAM_RANGES - before, offset, offset + length);
}

uint8_t *dp_stream_target(const struct dp_stream *stream, uint64_t offset, size_t length) {
    const struct dp_receiving *in = &stream->in;
    if (!in->place || offset < in->place_from || offset < in->frontier ||
        offset + length > in->place_to || dp_ranges_touch(&in->beyond, offset, offset + length))
        return NULL;
    return in->place + (offset - in->place_from);
}

/* Store [offset, offset + length), none of which came before. */
static bool store(struct dp_receiving *in, struct dp_pool *pool, uint64_t offset,
                  const uint8_t *bytes, size_t length) {
    if (in->place) {
        if (offset >= in->place_to)
            return true;
        uint8_t *to = in->place + (offset - in->place_from);
        if (to != bytes)
            memcpy(to, bytes, (size_t)lower(length, in->place_to - offset));
        return true;
    }
    size_t at = (size_t)(offset - in->consumed);
    /* Bytes beyond the frontier lie in the buffer too: all of it moves when it grows. */
    if (!grow(pool, &in->buffer, &in->room, in->room, at + length))
        return false;
    memcpy(in->buffer + at, bytes, length);
    return true;
}

/* Store the parts of [offset, end) between the ranges that came already. */
static bool store_gaps(struct dp_receiving *in, struct dp_pool *pool, uint64_t offset,
                       const uint8_t *bytes, uint64_t end) {
    uint64_t at = offset;
    for (uint32_t i = 0; i < in->beyond.count && at < end; i++) {
        const struct dp_range *range = &in->beyond.range[i];
        if (range->to <= at)
            continue;
        if (range->from > at) {
            uint64_t until = lower(range->from, end);
            if (!store(in, pool, at, bytes + (at - offset), (size_t)(until - at)))
                return false;
        }
        at = range->to;
    }
    return at >= end || store(in, pool, at, bytes + (at - offset), (size_t)(end - at));
}

bool dp_stream_keep(struct dp_stream *stream, struct dp_pool *pool, uint64_t offset,
                    const uint8_t *bytes, size_t length) {
    struct dp_receiving *in = &stream->in;
    uint64_t end = offset + length;
    if (in->discard || end <= in->frontier)
        return true;
    if (offset < in->frontier) {
        bytes += in->frontier - offset;
        offset = in->frontier;
    }
    if (!store_gaps(in, pool, offset, bytes, end))
        return false;
    if (offset > in->frontier)
        return dp_ranges_add(&in->beyond, pool, DP_STREAM_RANGES, offset, end);
    in->frontier = end;
    while (in->beyond.count && in->beyond.range[0].from <= in->frontier) {
        if (in->beyond.range[0].to > in->frontier)
            in->frontier = in->beyond.range[0].to;
        dp_ranges_drop_lowest(&in->beyond);
    }
    return true;
}

const uint8_t *dp_stream_readable(const struct dp_stream *stream, size_t *length) {
    static const uint8_t behind;
    const struct dp_receiving *in = &stream->in;
    *length = 0;
    if (in->discard || in->consumed >= in->frontier)
        return NULL;
    if (!in->place || in->consumed < in->place_from) {
        *length = (size_t)(in->frontier - in->consumed);
        return in->buffer;
    }
    if (in->consumed >= in->place_to) {
        *length = 1;
        return &behind;
    }
    *length = (size_t)(lower(in->frontier, in->place_to) - in->consumed);
    return in->place + (in->consumed - in->place_from);
}

void dp_stream_consume(struct dp_stream *stream, struct dp_pool *pool, size_t length) {
    struct dp_receiving *in = &stream->in;
    if (in->discard) {
        drop_in(in, pool);
        return;
    }
    in->consumed += length;
    if (!in->room)
        return;
    uint64_t last = in->beyond.count ? in->beyond.range[in->beyond.count - 1].to : in->frontier;
    if (in->place || last <= in->consumed)
        drop_in(in, pool);
    else if (length)
        memmove(in->buffer, in->buffer + length, (size_t)(last - in->consumed));
}

static void copy_to_place(struct dp_receiving *in, uint64_t from, uint64_t to) {
    if (from < in->place_from)
        from = in->place_from;
    to = lower(to, in->place_to);
    if (from < to)
        memcpy(in->place + (from - in->place_from), in->buffer + (from - in->consumed),
               (size_t)(to - from));
}

void dp_stream_set_place(struct dp_stream *stream, struct dp_pool *pool, uint8_t *place,
                         uint64_t from, uint64_t to) {
    (void)pool;
    struct dp_receiving *in = &stream->in;
    in->place = place;
    in->place_from = from;
    in->place_to = to;
    if (!in->room)
        return;
    copy_to_place(in, in->consumed, in->frontier);
    for (uint32_t i = 0; i < in->beyond.count; i++)
        copy_to_place(in, in->beyond.range[i].from, in->beyond.range[i].to);
}

/* The buffer itself goes with the next dp_stream_consume: it may be what is being offered. */
void dp_stream_discard(struct dp_stream *stream, struct dp_pool *pool) {
    struct dp_receiving *in = &stream->in;
    in->discard = true;
    in->place = NULL;
    dp_ranges_free(&in->beyond, pool);
    memset(&in->beyond, 0, sizeof in->beyond);
}

/* What is sent -------------------------------------------------------------------------------- */

bool dp_stream_write(struct dp_stream *stream, struct dp_pool *pool, const uint8_t *bytes,
                     size_t length, bool fin) {
    struct dp_sending *out = &stream->out;
    size_t held = (size_t)(out->stop - out->base);
    if (length && held + length > out->room && out->start > out->base) {
        held = (size_t)(out->stop - out->start);
        memmove(out->buffer, out->buffer + (out->start - out->base), held);
        out->base = out->start;
    }
    if (length) {
        if (!grow(pool, &out->buffer, &out->room, held, held + length))
            return false;
        memcpy(out->buffer + held, bytes, length);
    }
    out->stop += length;
    out->fin = out->fin || fin;
    return true;
}

void dp_stream_lend(struct dp_stream *stream, const uint8_t *bytes, size_t length) {
    stream->out.buffer = (uint8_t *)(uintptr_t)bytes; /* read alone, since room is 0 */
    stream->out.stop = length;
    stream->out.fin = true;
}

bool dp_stream_has_data(const struct dp_stream *stream) {
    const struct dp_sending *out = &stream->out;
    if (out->is_reset || out->done)
        return false;
    return out->lost.count || out->next < lower(out->stop, out->limit) ||
           (out->fin && !out->fin_sent && out->next == out->stop);
}

bool dp_stream_next(struct dp_stream *stream, size_t room, uint64_t allowed, uint64_t *offset,
                    const uint8_t **bytes, size_t *length, bool *fin, bool *is_new) {
    struct dp_sending *out = &stream->out;
    if (out->is_reset || out->done)
        return false;
    uint64_t end;
    *is_new = !out->lost.count;
    if (out->lost.count) {
        *offset = out->lost.range[0].from;
        end = out->lost.range[0].to;
    } else {
        *offset = out->next;
        end = lower(lower(out->stop, out->limit), out->next + allowed);
    }
    end = lower(end, *offset + room);
    if (end <= *offset && !(out->fin && !out->fin_sent && *offset == out->stop))
        return false;
    *length = (size_t)(end - *offset);
    *bytes = *length ? out->buffer + (*offset - out->base) : NULL;
    *fin = out->fin && end == out->stop;
    return true;
}

void dp_stream_sent(struct dp_stream *stream, struct dp_pool *pool, uint64_t offset, size_t length,
                    bool fin) {
    struct dp_sending *out = &stream->out;
    uint64_t end = offset + length;
    if (out->lost.count && length)
        dp_ranges_remove(&out->lost, pool, DP_STREAM_RANGES * 2, offset, end);
    if (end > out->next)
        out->next = end;
    out->fin_sent = out->fin_sent || fin;
}

static void finish_sending(struct dp_sending *out, struct dp_pool *pool) {
    if (out->start == out->stop) {
        drop_out(out, pool);
        out->done = out->fin_acked;
    }
}

/* Have [from, to) go out again, but for what is acknowledged: nothing of it is kept below `start`.
 */
static void send_again(struct dp_sending *out, struct dp_pool *pool, uint64_t from, uint64_t to) {
    if (from < out->start)
        from = out->start;
    if (from >= to)
        return;
    if (!dp_ranges_add(&out->lost, pool, DP_STREAM_RANGES * 2, from, to)) {
        if (!out->lost.count)
            return; /* no memory: the probe time-out finds it */
        /* One range over all costs repeats, never bytes. */
        out->lost.range[0].to = lower(out->next, out->stop);
        out->lost.count = 1;
        if (from < out->lost.range[0].from)
            out->lost.range[0].from = from;
    }
    for (uint32_t i = 0; i < out->acked.count; i++)
        dp_ranges_remove(&out->lost, pool, DP_STREAM_RANGES * 2, out->acked.range[i].from,
                         out->acked.range[i].to);
}

/* All below `start` is through, and what was lost of it does not matter any more. */
static void advance(struct dp_sending *out, uint64_t to) {
    out->start = to;
    while (out->acked.count && out->acked.range[0].from <= out->start) {
        if (out->acked.range[0].to > out->start)
            out->start = out->acked.range[0].to;
        dp_ranges_drop_lowest(&out->acked);
    }
    dp_ranges_trim(&out->lost, out->start);
}

void dp_stream_acked(struct dp_stream *stream, struct dp_pool *pool, uint64_t offset, size_t length,
                     bool fin) {
    struct dp_sending *out = &stream->out;
    if (out->is_reset || out->done)
        return;
    uint64_t end = offset + length;
    out->fin_acked = out->fin_acked || fin;
    if (length && end > out->start) {
        if (out->lost.count)
            dp_ranges_remove(&out->lost, pool, DP_STREAM_RANGES * 2, offset, end);
        if (offset <= out->start)
            advance(out, end);
        else if (!dp_ranges_add(&out->acked, pool, DP_STREAM_RANGES * 2, offset, end))
            send_again(out, pool, offset, end); /* it cannot be remembered that they came */
    }
    finish_sending(out, pool);
}

void dp_stream_lost(struct dp_stream *stream, struct dp_pool *pool, uint64_t offset, size_t length,
                    bool fin) {
    struct dp_sending *out = &stream->out;
    if (out->is_reset || out->done)
        return;
    if (fin && !out->fin_acked)
        out->fin_sent = false;
    send_again(out, pool, offset, offset + length);
}

void dp_stream_reset(struct dp_stream *stream, struct dp_pool *pool, uint64_t code) {
    struct dp_sending *out = &stream->out;
    out->is_reset = true;
    out->reset_code = code;
    out->start = out->stop; /* nothing waits any more */
    drop_out(out, pool);
    dp_ranges_free(&out->acked, pool);
    dp_ranges_free(&out->lost, pool);
    memset(&out->acked, 0, sizeof out->acked);
    memset(&out->lost, 0, sizeof out->lost);
}

uint64_t dp_stream_unacked(const struct dp_stream *stream) {
    return stream->out.stop - stream->out.start;
}
