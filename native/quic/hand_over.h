/* What passes from the control plane when a connection's handshake is complete, and what can be
 * asked of one that was taken over.
 *
 * This header is also a cdef. */
#ifndef DP_HAND_OVER_H
#define DP_HAND_OVER_H

#include "../udp.h"

/* Limits in bytes or streams; times in ns. */
struct dp_hand_over {
    uint32_t version; /* of QUIC */
    uint16_t suite;   /* the TLS cipher suite */
    uint8_t is_client;
    uint8_t secret_bytes;
    uint8_t receive_secret[48];
    uint8_t send_secret[48];
    uint8_t receive_phase, send_phase;

    uint8_t host_cid_bytes; /* of this side's connection IDs, all alike */
    uint8_t peer_cid_bytes;
    uint8_t peer_cid[20];
    struct dp_path path;
    uint32_t max_datagram; /* bytes of a UDP payload that this side may send */
    uint64_t next_packet_number;

    /* What this side granted. */
    uint64_t local_max_data;
    uint64_t local_max_stream_data_bidi_local;
    uint64_t local_max_stream_data_bidi_remote;
    uint64_t local_max_stream_data_uni;
    uint64_t local_max_streams_bidi;
    uint64_t local_max_streams_uni;
    /* What the peer granted. */
    uint64_t remote_max_data;
    uint64_t remote_max_stream_data_bidi_local;
    uint64_t remote_max_stream_data_bidi_remote;
    uint64_t remote_max_stream_data_uni;
    uint64_t remote_max_streams_bidi;
    uint64_t remote_max_streams_uni;
    /* The ids of the next streams that this side opens. */
    uint64_t next_bidi;
    uint64_t next_uni;

    uint64_t peer_ack_delay_exponent;
    int64_t peer_max_ack_delay;
    int64_t local_max_ack_delay;
    /* Measured during the handshake; 0: not at all. */
    int64_t smoothed_rtt, rtt_variance, minimum_rtt;
};

struct dp_conn_stats {
    uint64_t packets_in, packets_out, forged, duplicates, lost;
    uint64_t key_updates; /* of the sending keys */
    uint64_t bytes_in, bytes_out;
    uint64_t unacked;
    uint64_t window; /* of congestion control */
    int64_t smoothed_rtt;
    uint32_t streams;
    uint32_t memory; /* bytes that it holds */
};

#endif
