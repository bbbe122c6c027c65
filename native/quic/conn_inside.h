/* What the files of a connection share: conn.c (set-up, the control plane's calls), conn_streams.c
 * (its streams), conn_in.c (a packet's way in), conn_frames.c (what its frames do), conn_out.c (a
 * packet's way out), conn_fate.c (what becomes of sent packets). */
#ifndef DP_CONN_INSIDE_H
#define DP_CONN_INSIDE_H

#include "conn.h"
#include "pool.h"
#include "protect.h"
#include "recovery.h"
#include "varint.h"

#define DP_PACKET_RANGES                                                                           \
    64                   /* of received packet numbers; older ones are not told apart any more     \
                          */
#define DP_ACK_RANGES 32 /* that an ACK frame may have */
#define DP_CID_MAX    20

/* What a sent packet carried, to be repeated or noted when its fate is known. */
enum dp_record_kind {
    DP_RECORD_STREAM, /* id, offset, length, fin */
    DP_RECORD_RESET,  /* id */
    DP_RECORD_STOP,
    DP_RECORD_STREAM_LIMIT,
    DP_RECORD_MAX_DATA,
    DP_RECORD_MAX_STREAMS_BIDI,
    DP_RECORD_MAX_STREAMS_UNI,
    DP_RECORD_CONTROL, /* id: the token */
    DP_RECORD_ACK,     /* id: the largest packet number that it acknowledged */
    DP_RECORD_NONE,    /* its fate was told already */
};

struct dp_record {
    uint64_t id, offset;
    uint16_t length;
    uint8_t kind;
    bool fin;
};

/* A control packet that waits. */
struct dp_control {
    struct dp_control *next;
    uint64_t token;
    uint32_t size;
    bool elicits, has_path;
    struct dp_path path;
    uint8_t frames[];
};

/* A window of credit that one side grants. */
struct dp_credit {
    uint64_t limit, window, used, consumed;
};

enum dp_due {
    DP_DUE_MAX_DATA = 1,
    DP_DUE_STREAMS_BIDI = 2,
    DP_DUE_STREAMS_UNI = 4,
    DP_DUE_PING = 8,
};

struct dp_conn {
    struct dp_pool *pool;
    const struct dp_conn_owner *owner;
    void *self;
    bool is_client, touched, failed, over, close_due, sweep, credit_came;
    uint32_t depth; /* inside a call of the owner */

    struct dp_path path, other_path;
    bool has_other_path, validated;
    uint64_t path_in, path_out; /* bytes on a path that is not validated */
    uint64_t other_in;          /* bytes that came on `other_path` */
    uint8_t host_cid_bytes, peer_cid_bytes;
    uint8_t peer_cid[DP_CID_MAX];
    uint32_t datagram;

    struct dp_opener *opener;
    struct dp_sealer *sealer;
    int64_t forget_at;
    uint64_t phase_first; /* the first packet sealed with the current keys */
    uint64_t update_every;

    /* Received packets. */
    struct dp_ranges received;
    uint64_t floor;     /* below: dropped */
    uint64_t ack_floor; /* below: the peer knows */
    uint64_t largest;
    bool any_received;
    int64_t largest_at, last_received, at_ns;
    uint32_t unacked_eliciting, news; /* since the last ACK frame */
    bool ack_now;
    int64_t ack_at, max_ack_delay;
    uint64_t ack_exponent; /* the peer's */
    uint32_t pure_acks;

    /* Sent packets. */
    struct dp_recovery recovery;
    struct dp_record *records; /* ring of [record_low, record_next) */
    uint64_t record_low, record_next;
    uint32_t record_room;
    uint32_t probes;
    uint64_t repeat_from, repeat_end; /* the next packet to repeat, and where to go round */
    int64_t pacing_at;

    /* Streams. */
    struct dp_stream **table;
    uint32_t streams, table_room;
    uint32_t places;
    struct dp_stream *first_queued, *last_queued;
    uint64_t next_id[2];      /* by [uni]: of this side */
    uint64_t next_peer_id[2]; /* the first that the peer has not opened */
    uint64_t stream_limit[2]; /* how many the peer may open */
    uint64_t stream_window[2];
    uint64_t closed[2];              /* of the peer's streams: over */
    uint64_t remote_stream_limit[2]; /* how many this side may open */
    struct dp_credit in;
    uint64_t out_limit, out_used;
    uint64_t local_bidi_local, local_bidi_remote, local_uni;
    uint64_t remote_bidi_local, remote_bidi_remote, remote_uni;
    uint8_t due;

    /* Control plane. */
    struct dp_control *first_control, *last_control;
    uint8_t *close_frames;
    size_t close_size;
    size_t control_datagram; /* bytes of the one that `control` is being told of */
    uint64_t after_close, resend_close_at;

    struct dp_conn_stats stats;
};

/* conn.c */
void dp_conn_touch(struct dp_conn *conn);
void dp_conn_fail(struct dp_conn *conn, uint64_t code, uint64_t frame_type, const char *reason);

/* conn_streams.c */
struct dp_stream *dp_conn_add_stream(struct dp_conn *conn, uint64_t id);
void dp_conn_queue(struct dp_conn *conn, struct dp_stream *stream);
/* Close a stream whose halves are both over; only outside of the owner's calls, else later. */
void dp_conn_settle(struct dp_conn *conn, struct dp_stream *stream);
void dp_conn_sweep(struct dp_conn *conn);
/* Offer in-order bytes that are kept to the owner. */
void dp_conn_deliver(struct dp_conn *conn, struct dp_stream *stream);
/* Credit for bytes that were consumed. */
void dp_conn_credit(struct dp_conn *conn, struct dp_stream *stream, uint64_t bytes);
static inline bool dp_is_uni(uint64_t id) {
    return (id & DP_STREAM_IS_UNI) != 0;
}
static inline bool dp_is_ours(const struct dp_conn *conn, uint64_t id) {
    return ((id & DP_STREAM_IS_SERVER) == 0) == conn->is_client;
}

/* conn_frames.c */
/* Do what a frame says that is not the control plane's: 0, or the transport error that it is. */
uint64_t dp_conn_take_frame(struct dp_conn *conn, const struct dp_frame *frame, int64_t now);
/* Credit came: have the streams go on that waited for it. */
void dp_conn_wake_streams(struct dp_conn *conn);

/* conn_fate.c */
extern const struct dp_sent_owner dp_conn_fates;
bool dp_conn_record(struct dp_conn *conn, const struct dp_record *record);
void dp_conn_free_records(struct dp_conn *conn);
/* A probe time-out ran out: what is outstanding by now may be sent again. Of control frames the
 * owner hears that they are lost, and sends them anew by itself. */
void dp_conn_begin_repeats(struct dp_conn *conn);
/* Have the next outstanding data go out once more, the oldest first and each in its turn over all
 * time-outs until the peer is heard; so many packets are looked at. */
void dp_conn_repeat_next(struct dp_conn *conn, uint32_t most);

#endif
