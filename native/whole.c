#include "whole.h"

#include <string.h>

#include "region.h"

static uint32_t microseconds(int64_t ns) {
    int64_t us = ns / 1000;
    return ns < 0 ? 0 : us > UINT32_MAX ? UINT32_MAX : (uint32_t)us;
}

static int claim(struct dp_whole *whole, uint64_t request_id, int64_t complete_ns,
                 struct dp_served *out) {
    uint32_t start = whole->next;
    whole->next = start + 1 < whole->count ? start + 1 : 0;
    struct dp_claimed claimed = {0};
    int status =
        dp_admit(whole->region, whole->owner, whole->first, whole->count, start, whole->count,
                 request_id, out->n_tokens, 4, out->max_output, 0, 0, 0, 0, &claimed);
    out->queue_ns = dp_realtime_ns() - complete_ns;
    out->queue_us = microseconds(out->queue_ns);
    out->slot = claimed.slot;
    out->generation = claimed.generation;
    out->free_left = claimed.free_left;
    return status;
}

static int64_t publish(struct dp_whole *whole, const struct dp_h3_plain *plain,
                       const uint8_t *bytes, int64_t complete_ns, uint64_t now_s,
                       struct dp_served *out) {
    int64_t at_ns = dp_submit(whole->region, out->slot, out->generation, bytes, plain->body_at,
                              (size_t)plain->n_tokens * 4);
    if (at_ns < 0) {
        dp_let_go(whole->region, out->slot, out->generation);
        return at_ns;
    }
    int64_t ingress_ns = at_ns - complete_ns;
    out->published_ns = at_ns;
    out->ingress_us = microseconds(ingress_ns);
    if (out->queue_ns >= 0 && ingress_ns >= 0)
        dp_latency_record_pair(whole->latency, whole->series, out->queue_ns / 1000, out->ingress_us,
                               now_s);
    if (whole->null)
        dp_apply(whole->region, out->slot, out->generation, DP_REVOKE);
    return DP_OK;
}

int64_t dp_read_whole(struct dp_keys *keys, const uint8_t *bytes, uint32_t at, uint32_t size,
                      struct dp_h3_plain *out) {
    if (!dp_h3_plain(bytes, at, size, out) || out->key_twice)
        return -1;
    return dp_keys_find(keys, out->key, out->key_bytes);
}

void dp_serve_whole(struct dp_whole *whole, uint64_t now_s, uint64_t request_id,
                    const uint8_t *bytes, uint32_t at, uint32_t size,
                    const struct dp_h3_plain *plain, int64_t complete_ns, struct dp_served *out) {
    const struct dp_geometry *geometry = &whole->region->geometry;
    struct dp_h3_plain own;
    out->status = DP_NOT_PLAIN;
    if (!plain && dp_h3_plain(bytes, at, size, &own))
        plain = &own;
    /* The bounds that the runtime set are Python's to refuse. */
    if (!plain || plain->n_tokens > geometry->context || plain->max_output > geometry->max_output)
        return;
    out->n_tokens = plain->n_tokens;
    out->max_output = plain->max_output ? plain->max_output : geometry->max_output;
    out->id_bytes = plain->id_bytes;
    if (plain->id_bytes)
        memcpy(out->id, plain->id, plain->id_bytes);
    out->status = claim(whole, request_id, complete_ns, out);
    if (out->status == DP_OK)
        out->status = publish(whole, plain, bytes, complete_ns, now_s, out);
}
