/* See turn.h. */
#include "turn.h"

static struct dp_turn_slot *slots_of(struct dp_turn *turn) {
    return (struct dp_turn_slot *)(turn + 1);
}

size_t dp_turn_bytes(const struct dp_region *region, uint32_t room) {
    size_t a_slot = sizeof(struct dp_turn_slot) + (size_t)room * sizeof(int32_t);
    return sizeof(struct dp_turn) + region->geometry.slots * a_slot;
}

struct dp_turn_slot *dp_turn_at(struct dp_turn *turn, uint32_t slot) {
    return &slots_of(turn)[slot];
}

int32_t *dp_turn_ids(struct dp_region *region, struct dp_turn *turn, uint32_t slot) {
    int32_t *ids = (int32_t *)(slots_of(turn) + region->geometry.slots);
    return ids + (size_t)slot * turn->room;
}

int dp_turn_is_due(struct dp_region *region, struct dp_turn *turn) {
    for (uint32_t i = 0; i < region->geometry.slots; i++) {
        const struct dp_turn_slot *slot = &slots_of(turn)[i];
        uint64_t word = dp_word_now(region, i);
        int state = (int)(word & DP_STATE_MASK);
        if (state == DP_READY)
            return 1;
        if (state == DP_CANCELLING && slot->held && word >> DP_GENERATION_SHIFT == slot->generation)
            return 1;
    }
    return 0;
}

uint32_t dp_turn_end(struct dp_region *region, struct dp_turn *turn, struct dp_taken *taken) {
    uint32_t n = 0;
    for (uint32_t i = 0; i < region->geometry.slots; i++) {
        struct dp_turn_slot *slot = &slots_of(turn)[i];
        if (slot->held && slot->emitted < 0)
            slot->lost = 1;
        if (slot->reason)
            slot->held = 0;
        slot->count = slot->reason = 0;
        if (!slot->is_taken)
            continue;
        slot->generation = slot->taken;
        slot->held = 1;
        slot->lost = slot->is_taken = 0;
        dp_describe_taken(region, i, slot->generation, &taken[n++]);
    }
    return n;
}
