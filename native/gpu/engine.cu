/* The turn of an engine whose loop runs on the host (turn.h): its verbs, then what is READY.
 *
 * One block. A slot's part is one thread's alone, which does it in order: ids, finish, take. No
 * shared memory, no barrier, no warp intrinsics. */
#include "slots_device.cuh"

extern "C" {
#include "turn.h"
}

DP_DEVICE const int32_t *turn_ids(const dp_device *device, const dp_turn *turn, uint32_t slot) {
    const dp_turn_slot *slots = (const dp_turn_slot *)(turn + 1);
    return (const int32_t *)(slots + device->slots) + (uint64_t)slot * turn->room;
}

/* What the engine asked of the request that it holds. */
DP_DEVICE void carry_out_verbs(const dp_device *device, const dp_turn *turn, uint32_t slot,
                               dp_turn_slot *part) {
    uint32_t count = part->count < turn->room ? part->count : turn->room;
    const int32_t *ids = turn_ids(device, turn, slot);
    part->emitted = count ? dp_slot_emit(device, slot, part->generation, ids, count) : DP_OK;
    part->finished =
        part->reason ? dp_slot_finish(device, slot, part->generation, part->reason) : DP_ILLEGAL;
}

extern "C" __global__ void __launch_bounds__(128)
    dp_engine_turn(const dp_device *device, dp_turn *turn) {
    for (uint32_t slot = threadIdx.x; slot < device->slots; slot += blockDim.x) {
        dp_turn_slot *part = (dp_turn_slot *)(turn + 1) + slot;
        if (part->held)
            carry_out_verbs(device, turn, slot, part);
        bool held = part->held && !part->reason;
        part->cancelled = held && dp_slot_is_cancelled(device, slot, part->generation);
        part->is_taken =
            turn->take && !held && dp_slot_take(device, slot, &part->taken) == DP_RUNNING;
    }
}
