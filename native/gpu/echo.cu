/* `cuda-echo`: a whole request in kernels. A block has a slot for each of its turns: it takes it,
 * copies the prompt where it lies to the output, a piece a turn, sees a cancellation, and finishes;
 * the host only launches the kernel again. It is the shape of a persistent megakernel, with the
 * copy in the model's place. */
#include "slots_device.cuh"

/* A slot's request, in device memory: it outlives a launch. */
struct dp_echo_job {
    uint64_t generation;
    uint32_t running;
    uint32_t length; /* ids to give back */
    uint32_t sent;
    uint32_t upto; /* of this turn */
};

/* One thread decides what the block does in this turn. */
DP_DEVICE void begin_turn(const dp_device *device, dp_echo_job *job, uint32_t slot,
                          uint32_t piece) {
    if (!job->running && dp_slot_take(device, slot, &job->generation) == DP_RUNNING) {
        uint32_t tokens = dp_slot_tokens(device, slot), room = dp_slot_room(device, slot);
        job->length = tokens < room ? tokens : room;
        job->sent = 0;
        job->running = 1;
    }
    uint32_t left = job->running ? job->length - job->sent : 0;
    job->upto = job->sent + (left < piece ? left : piece);
}

DP_DEVICE void end_turn(const dp_device *device, dp_echo_job *job, uint32_t slot) {
    if (!job->running)
        return;
    if (job->upto > job->sent)
        dp_slot_show(device, slot, job->generation, job->upto);
    job->sent = job->upto;
    bool whole = job->sent == job->length;
    if (!whole && !dp_slot_is_cancelled(device, slot, job->generation))
        return;
    uint32_t reason =
        whole && job->length == dp_slot_room(device, slot) ? DP_FINISH_LENGTH : DP_FINISH_STOP;
    dp_slot_finish(device, slot, job->generation, reason);
    job->running = 0;
}

/* One look at a slot, by all threads of the block. */
DP_DEVICE void take_turn(const dp_device *device, dp_echo_job *job, uint32_t slot, uint32_t piece) {
    if (threadIdx.x == 0)
        begin_turn(device, job, slot, piece);
    __syncthreads();
    if (job->running) {
        const int32_t *prompt = dp_slot_prompt(device, slot);
        uint32_t *output = dp_slot_output(device, slot);
        for (uint32_t i = job->sent + threadIdx.x; i < job->upto; i += blockDim.x)
            output[i] = (uint32_t)prompt[i];
    }
    __syncthreads();
    if (threadIdx.x == 0)
        end_turn(device, job, slot);
    __syncthreads();
}

/* `turns` looks at each slot, `piece` ids a look. */
extern "C" __global__ void __launch_bounds__(128)
    dp_echo(const dp_device *device, dp_echo_job *jobs, unsigned piece, unsigned turns) {
    for (unsigned turn = 0; turn < turns; turn++)
        for (uint32_t slot = blockIdx.x; slot < device->slots; slot += gridDim.x)
            take_turn(device, &jobs[slot], slot, piece);
}
