/* A packet's way in: header protection, packet number, AEAD, and its frames one by one, each of
 * which conn_frames.c acts on (RFC 9001 section 5, RFC 9000 sections 12 and 13).
 *
 * The rules that hold here:
 * - Nothing that a packet says has an effect before its tag has verified and all of its frames have
 *   been parsed: a packet that is not in order does nothing but end the connection.
 * - A packet number is looked up before anything is decrypted, so that a repeated packet writes
 *   nothing anywhere.
 * - What a packet decrypts straight into a stream's place lies where nothing had come before; until
 *   the tag has verified it counts for nothing. */
#include <string.h>

#include "conn_inside.h"

#define LOOK_AHEAD 64 /* bytes decrypted before it is known where a stream's data belongs */

struct packet {
    uint8_t *header;
    size_t header_bytes;
    uint8_t *payload;
    size_t bytes; /* of the payload, without the tag */
    uint64_t pn;
    uint8_t first;
    /* What was decrypted into a place: the frame's data, and where its beginning still lies. */
    uint8_t *target;
    const uint8_t *direct;
    size_t ahead;
    size_t datagram; /* bytes */
    bool elicits, probing, in_order;
};

/* RFC 9000 appendix A.3. */
static uint64_t full_number(const struct dp_conn *conn, uint64_t truncated, size_t bytes) {
    uint64_t expected = conn->any_received ? conn->largest + 1 : 0;
    uint64_t window = 1ULL << (bytes * 8), half = window / 2;
    uint64_t candidate = (expected & ~(window - 1)) | truncated;
    if (candidate + half <= expected && candidate < (1ULL << 62) - window)
        return candidate + window;
    if (candidate > expected + half && candidate >= window)
        return candidate - window;
    return candidate;
}

static bool unmask(struct dp_conn *conn, struct packet *packet, uint8_t *datagram, size_t size) {
    size_t at = 1 + (size_t)conn->host_cid_bytes;
    if (size < at + 4 + DP_SAMPLE_BYTES)
        return false;
    uint8_t mask[5];
    dp_opener_mask(conn->opener, datagram + at + 4, mask);
    datagram[0] ^= mask[0] & 0x1f;
    size_t bytes = (size_t)(datagram[0] & 3) + 1;
    for (size_t i = 0; i < bytes; i++)
        datagram[at + i] ^= mask[1 + i];
    packet->header = datagram;
    packet->header_bytes = at + bytes;
    packet->payload = datagram + packet->header_bytes;
    packet->bytes = size - packet->header_bytes - DP_TAG_BYTES;
    packet->first = datagram[0];
    packet->pn = full_number(conn, dp_get_be(datagram + at, bytes), bytes);
    return true;
}

/* Decrypt the beginning and see whether a STREAM frame begins there whose data has a place. */
static void look_ahead(struct dp_conn *conn, struct packet *packet) {
    uint8_t *at = packet->payload, *end = at + LOOK_AHEAD;
    size_t beyond = packet->bytes - LOOK_AHEAD;
    dp_opener_next(conn->opener, at, LOOK_AHEAD, at);
    packet->ahead = LOOK_AHEAD;
    struct dp_frame frame;
    while (at < end && (*at & 0xf8) != DP_FRAME_STREAM) {
        if (dp_frame_parse(at, end, &frame) != DP_NO_ERROR)
            return;
        at += frame.size;
    }
    if (at >= end || !dp_frame_peek_stream(at, end, beyond, &frame) ||
        frame.stream.length <= (size_t)LOOK_AHEAD)
        return;
    struct dp_stream *stream = dp_conn_stream(conn, frame.stream.id);
    if (!stream || !stream->in.place)
        return;
    packet->target = dp_stream_target(stream, frame.stream.offset, frame.stream.length);
    packet->direct = frame.stream.data;
    if (!packet->target)
        return;
    /* The frame's first bytes are here already, the others go where they belong. */
    size_t here = frame.stream.data < end ? (size_t)(end - frame.stream.data) : 0;
    uint8_t *from = end;
    if (frame.stream.data > end) {
        dp_opener_next(conn->opener, end, (size_t)(frame.stream.data - end), end);
        from = packet->payload + (frame.stream.data - packet->payload);
    }
    size_t rest = frame.stream.length - here;
    dp_opener_next(conn->opener, from, rest, packet->target + here);
    packet->ahead = (size_t)(from - packet->payload) + rest;
}

static bool open_packet(struct dp_conn *conn, struct packet *packet, int64_t now) {
    if (now >= conn->forget_at) {
        dp_opener_forget(conn->opener);
        conn->forget_at = DP_NEVER;
    }
    uint8_t phase = packet->first >> 2 & 1;
    if (!dp_opener_begin(conn->opener, packet->pn, phase, packet->header, packet->header_bytes))
        return false;
    if (conn->places && packet->bytes > LOOK_AHEAD * 2)
        look_ahead(conn, packet);
    uint8_t *rest = packet->payload + packet->ahead;
    dp_opener_next(conn->opener, rest, packet->bytes - packet->ahead, rest);
    bool updated = false;
    if (!dp_opener_end(conn->opener, packet->pn, packet->payload + packet->bytes, &updated))
        return false;
    if (packet->target) {
        size_t before = (size_t)(packet->direct - packet->payload);
        if (before < LOOK_AHEAD)
            memcpy(packet->target, packet->direct, LOOK_AHEAD - before);
    }
    if (updated) {
        conn->forget_at = now + 3 * dp_recovery_pto(&conn->recovery);
        if (dp_sealer_phase(conn->sealer) != dp_opener_phase(conn->opener)) {
            dp_sealer_update(conn->sealer);
            conn->phase_first = conn->recovery.next;
            conn->stats.key_updates++;
        }
    }
    return true;
}

/* The packet ---------------------------------------------------------------------------------- */

/* Parse everything before anything is done. DP_TAKEN, DP_NOT_KEPT or DP_BROKEN. */
static int judge(struct dp_conn *conn, struct packet *packet) {
    if (packet->first & 0x18) {
        dp_conn_fail(conn, DP_PROTOCOL_VIOLATION, 0, "reserved bits of a packet are set");
        return DP_BROKEN;
    }
    if (!packet->bytes) {
        dp_conn_fail(conn, DP_PROTOCOL_VIOLATION, 0, "a packet without frames");
        return DP_BROKEN;
    }
    const uint8_t *at = packet->payload, *end = at + packet->bytes;
    packet->probing = true;
    uint32_t streams = 0; /* frames before, each of which may take a range */
    while (at < end) {
        struct dp_frame frame;
        int error = dp_frame_parse(at, end, &frame);
        if (error) {
            dp_conn_fail(conn, (uint64_t)error, *at, "a frame that cannot be read");
            return DP_BROKEN;
        }
        if (frame.type == DP_FRAME_STREAM) {
            const struct dp_stream *stream = dp_conn_stream(conn, frame.stream.id);
            if (stream &&
                !dp_stream_accepts(stream, frame.stream.offset, frame.stream.length, streams++))
                return DP_NOT_KEPT;
        }
        packet->elicits = packet->elicits || dp_frame_elicits(frame.type);
        packet->probing = packet->probing && dp_frame_probes(frame.type);
        at += frame.size;
    }
    return DP_TAKEN;
}

/* RFC 9000 section 13.2.1 and 13.2.2: every second packet that asks for it, and at once what is out
 * of order. */
static bool note_received(struct dp_conn *conn, const struct packet *packet, int64_t now) {
    while (
        !dp_ranges_add(&conn->received, conn->pool, DP_PACKET_RANGES, packet->pn, packet->pn + 1)) {
        if (!conn->received.count)
            return false;
        conn->floor = conn->received.range[0].to;
        dp_ranges_drop_lowest(&conn->received);
        if (packet->pn < conn->floor)
            return false;
    }
    if (packet->pn < conn->ack_floor)
        conn->ack_floor = packet->pn; /* it came late, and is to be acknowledged too */
    bool next = !conn->any_received || packet->pn == conn->largest + 1;
    if (!conn->any_received || packet->pn > conn->largest) {
        conn->largest = packet->pn;
        conn->largest_at = now;
        conn->any_received = true;
    }
    conn->news++;
    if (!packet->elicits)
        return true;
    if (++conn->unacked_eliciting >= 2 || !next)
        conn->ack_now = true;
    else if (conn->ack_at == DP_NEVER)
        conn->ack_at = now + conn->max_ack_delay;
    dp_conn_touch(conn);
    return true;
}

static int act(struct dp_conn *conn, struct packet *packet, const struct dp_path *path,
               int64_t now) {
    uint8_t *at = packet->payload, *end = at + packet->bytes, *foreign = at;
    while (at < end && !conn->failed && !conn->over) {
        struct dp_frame frame;
        dp_frame_parse(at, end, &frame);
        at += frame.size;
        if (dp_frame_is_foreign(frame.type)) {
            /* Gathered in front, over frames that are dealt with. */
            memmove(foreign, frame.start, frame.size);
            foreign += frame.size;
            continue;
        }
        /* What was decrypted into its place is read there. */
        if (packet->target && frame.type == DP_FRAME_STREAM && frame.stream.data == packet->direct)
            frame.stream.data = packet->target;
        uint64_t error = dp_conn_take_frame(conn, &frame, now);
        if (error) {
            dp_conn_fail(conn, error, frame.type, "a frame that breaks the protocol");
            return DP_BROKEN;
        }
    }
    if (conn->credit_came) {
        conn->credit_came = false;
        dp_conn_wake_streams(conn);
    }
    dp_conn_sweep(conn);
    size_t size = (size_t)(foreign - packet->payload);
    bool moved = memcmp(path, &conn->path, sizeof *path) != 0;
    bool told = moved && conn->has_other_path && memcmp(path, &conn->other_path, sizeof *path) == 0;
    if (told)
        conn->other_in += packet->datagram;
    if (!size && (!moved || told))
        return DP_TAKEN;
    /* Only the newest packet moves a connection (section 9.3), so only that one need not be told of
     * again. */
    if (moved && !packet->probing && packet->pn == conn->largest) {
        if (!told)
            conn->other_in = packet->datagram;
        conn->other_path = *path;
        conn->has_other_path = true;
    }
    conn->depth++;
    conn->control_datagram = packet->datagram;
    conn->owner->control(conn->self, conn, path, packet->header + 1, packet->pn,
                         packet->probing || packet->pn != conn->largest, packet->payload, size);
    conn->depth--;
    dp_conn_sweep(conn);
    return DP_TAKEN;
}

static int after_close(struct dp_conn *conn) {
    /* Answers to what still comes get rarer (section 10.2.1). */
    if (conn->close_size && ++conn->after_close >= conn->resend_close_at) {
        conn->resend_close_at *= 2;
        conn->close_due = true;
        dp_conn_touch(conn);
    }
    return DP_CLOSED;
}

int dp_conn_receive(struct dp_conn *conn, uint8_t *datagram, size_t size,
                    const struct dp_path *path, int64_t now, int64_t at_ns) {
    struct packet packet = {.datagram = size};
    if (conn->over)
        return after_close(conn);
    if (conn->failed)
        return DP_CLOSED;
    if (!unmask(conn, &packet, datagram, size))
        return DP_TOO_SHORT;
    if (packet.pn < conn->floor || dp_ranges_have(&conn->received, packet.pn)) {
        conn->stats.duplicates++;
        return DP_DUPLICATE;
    }
    if (!open_packet(conn, &packet, now)) {
        conn->stats.forged++;
        if (dp_opener_exhausted(conn->opener))
            dp_conn_fail(conn, DP_AEAD_LIMIT_REACHED, 0, "too many packets that were forged");
        return DP_FORGED;
    }
    conn->at_ns = at_ns;
    int taken = judge(conn, &packet);
    if (taken != DP_TAKEN)
        return taken;
    if (!note_received(conn, &packet, now))
        return DP_NOT_KEPT;
    conn->last_received = now;
    conn->stats.packets_in++;
    conn->stats.bytes_in += size;
    if (!conn->validated && memcmp(path, &conn->path, sizeof *path) == 0)
        conn->path_in += size;
    return act(conn, &packet, path, now);
}
