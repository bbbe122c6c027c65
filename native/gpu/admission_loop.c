/* See admission_loop.h. */
#define _GNU_SOURCE
#include "admission_loop.h"

#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

#include "../atomics.h"
#include "clock.h"

enum {
    LOOK_MS = 250, /* longest sleep */
    COMMANDS_A_TICK = 4096,
    PAUSE_MS = 100, /* without a launch for so long, the clocks may be apart (clock.h) */
    QUERY_US = 50,  /* how long a kernel's end is asked for before the driver waits for it */
    RELAX = 16,     /* pauses between two questions, each of which takes the driver's lock */
    POLLS = 200000, /* of a resident kernel: some hundred ms */
    NAP_NS = 200,
    ATTEND_US = 200,
    RESIDENT_IDLE_MS = 1000, /* nothing new for so long: the resident kernel is left to end */
};

struct dp_admission {
    struct dp_admission_plan plan;
    struct dp_bell *bell;
    int wake;  /* an eventfd: written to end the loop */
    int watch; /* an epoll of `wake` and the daemon: readable when the loop is to end */
    uint32_t ending;
    enum dp_admission_call failed;
    struct dp_clock clock;
    int64_t launched_ns; /* CLOCK_REALTIME before the last launch */
    /* What the kernels' arguments point at; the driver copies them at each launch. */
    uint32_t most, polls, nap_ns;
    void *of_tick[2], *of_resident[3];
};

/* Making --------------------------------------------------------------------------------------- */

/* Epoll keeps the file and not its number, which may be another's once the attachment has closed
 * it. */
static int watch(struct dp_admission *admission, int fd, uint32_t events) {
    struct epoll_event event = {.events = events};
    return epoll_ctl(admission->watch, EPOLL_CTL_ADD, fd, &event);
}

struct dp_admission *dp_admission_new(const struct dp_admission_plan *plan) {
    struct dp_admission *admission = calloc(1, sizeof *admission);
    if (!admission)
        return NULL;
    *admission = (struct dp_admission){
        .plan = *plan,
        .bell = dp_bell_new(plan->region),
        .wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK),
        .watch = epoll_create1(EPOLL_CLOEXEC),
        .most = COMMANDS_A_TICK,
        .polls = POLLS,
        .nap_ns = NAP_NS,
        /* A stamp that is there already is of no launch of this loop. */
        .clock.timer_ns = (int64_t)dp_device_beat(plan->region),
    };
    uint64_t *device = &admission->plan.device;
    admission->of_tick[0] = admission->of_resident[0] = device;
    admission->of_tick[1] = &admission->most;
    admission->of_resident[1] = &admission->polls;
    admission->of_resident[2] = &admission->nap_ns;
    if (admission->bell && admission->wake >= 0 && admission->watch >= 0 &&
        !watch(admission, admission->wake, EPOLLIN) &&
        (plan->daemon < 0 || !watch(admission, plan->daemon, EPOLLIN | EPOLLRDHUP)))
        return admission;
    int why = errno;
    dp_admission_free(admission);
    errno = why;
    return NULL;
}

void dp_admission_free(struct dp_admission *admission) {
    if (!admission)
        return;
    dp_bell_free(admission->bell);
    if (admission->wake >= 0)
        close(admission->wake);
    if (admission->watch >= 0)
        close(admission->watch);
    free(admission);
}

/* Ending --------------------------------------------------------------------------------------- */

void dp_admission_end(struct dp_admission *admission) {
    const uint64_t one = 1;
    dp_store_flag(&admission->ending, 1);
    dp_device_stop(admission->plan.region, 1);
    ssize_t ignored = write(admission->wake, &one, sizeof one);
    (void)ignored;
}

static bool is_ending(struct dp_admission *admission) {
    return dp_load_flag(&admission->ending);
}

/* The same where nothing slept on `watch` meanwhile. */
static bool is_over(struct dp_admission *admission) {
    struct pollfd over = {.fd = admission->watch, .events = POLLIN};
    if (!is_ending(admission) && poll(&over, 1, 0) > 0)
        dp_store_flag(&admission->ending, 1);
    return is_ending(admission);
}

/* Kernels -------------------------------------------------------------------------------------- */

static int noted(struct dp_admission *admission, enum dp_admission_call call, int result) {
    if (result)
        admission->failed = call;
    return result;
}

enum dp_admission_call dp_admission_failed(const struct dp_admission *admission) {
    return admission->failed;
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static int make_current(struct dp_admission *admission) {
    const struct dp_admission_plan *plan = &admission->plan;
    return noted(admission, DP_ADMISSION_CONTEXT, plan->driver->cuCtxSetCurrent(plan->context));
}

/* While a thread of the engine captures a graph, what this one asks of the driver would fail and
 * spoil the capture: as every thread is made, it has a part in those of all others. */
static int stay_out_of_captures(struct dp_admission *admission) {
    int mode = DP_CUDA_CAPTURE_RELAXED;
    return noted(admission, DP_ADMISSION_CONTEXT,
                 admission->plan.driver->cuThreadExchangeStreamCaptureMode(&mode));
}

/* Keeps the offset of the clocks, where there is a new stamp. Each kernel's last one is looked at
 * before the next launch, so a stamp is always of the last kernel launched. */
static void look_at_clock(struct dp_admission *admission) {
    struct dp_region *region = admission->plan.region;
    struct dp_clock *clock = &admission->clock;
    int64_t stamp = (int64_t)dp_device_beat(region);
    if (stamp == clock->timer_ns)
        return;
    /* After the stamp: the reading bounds what the stamp was made at. */
    dp_clock_see(clock, admission->launched_ns, stamp, dp_realtime_ns());
    dp_device_set_offset(region, clock->offset_ns);
}

/* One block, a thread for each listener's ring. */
static int launch(struct dp_admission *admission, enum dp_admission_call which) {
    const struct dp_admission_plan *plan = &admission->plan;
    bool is_tick = which == DP_ADMISSION_TICK;
    int64_t last_ns = admission->launched_ns;
    admission->launched_ns = dp_realtime_ns();
    bool was_paused = admission->launched_ns - last_ns > PAUSE_MS * INT64_C(1000000);
    admission->most = was_paused ? 1 : COMMANDS_A_TICK;
    int result = plan->driver->cuLaunchKernel(
        is_tick ? plan->tick : plan->resident, 1, 1, 1, plan->region->geometry.listeners, 1, 1, 0,
        plan->stream, is_tick ? admission->of_tick : admission->of_resident, NULL);
    return noted(admission, which, result);
}

/* Waits for the stream. A short kernel's end is seen soonest by asking; one that waits for room
 * beside the model's kernels is left to the driver. */
static int finish(struct dp_admission *admission) {
    const struct dp_admission_plan *plan = &admission->plan;
    int64_t until = now_ns() + QUERY_US * 1000;
    int result;
    while ((result = plan->driver->cuStreamQuery(plan->stream)) == DP_CUDA_NOT_READY &&
           now_ns() < until)
        for (int i = 0; i < RELAX; i++) {
            look_at_clock(admission);
            dp_cpu_relax();
        }
    if (result == DP_CUDA_NOT_READY)
        result = plan->driver->cuStreamSynchronize(plan->stream);
    look_at_clock(admission);
    return noted(admission, DP_ADMISSION_KERNEL, result);
}

/* The bell comes after the kernel's end: what it still carries out after that would wake nobody. */
static int tick(struct dp_admission *admission) {
    int result = launch(admission, DP_ADMISSION_TICK);
    if (!result)
        result = finish(admission);
    dp_bell_ring(admission->bell, admission->plan.work);
    return result;
}

/* Attends to a resident kernel to its end, which it is told to come to when the loop is over. */
static int attend(struct dp_admission *admission, int64_t *news_ns) {
    const struct dp_admission_plan *plan = &admission->plan;
    int result;
    while ((result = plan->driver->cuStreamQuery(plan->stream)) == DP_CUDA_NOT_READY) {
        if (dp_bell_attend(admission->bell, plan->work, ATTEND_US))
            *news_ns = now_ns();
        look_at_clock(admission);
        if (is_over(admission))
            dp_device_stop(plan->region, 1);
    }
    look_at_clock(admission);
    dp_bell_ring(admission->bell, plan->work);
    return noted(admission, DP_ADMISSION_KERNEL, result);
}

/* Keeps a kernel resident until there was nothing new for a while. A tick comes first: a slot may
 * be claimed and taken before a resident kernel's first stamp is seen. */
static int stay(struct dp_admission *admission) {
    int result = tick(admission);
    int64_t news_ns = now_ns();
    while (!result && !is_over(admission) &&
           now_ns() - news_ns < RESIDENT_IDLE_MS * INT64_C(1000000)) {
        result = launch(admission, DP_ADMISSION_RESIDENT);
        if (!result)
            result = attend(admission, &news_ns);
    }
    return result;
}

/* The loop ------------------------------------------------------------------------------------- */

int dp_admission_try(struct dp_admission *admission) {
    int result = make_current(admission);
    admission->polls = 1;
    if (!result)
        result = launch(admission, DP_ADMISSION_RESIDENT);
    admission->polls = POLLS;
    if (!result)
        result = finish(admission);
    return result ? result : tick(admission);
}

int dp_admission_run(struct dp_admission *admission) {
    struct dp_region *region = admission->plan.region;
    dp_device_stop(region, 0);
    int result = make_current(admission);
    if (!result)
        result = stay_out_of_captures(admission);
    while (!result && !is_ending(admission)) {
        int found = dp_device_wait(region, admission->watch, LOOK_MS, DP_ADMISSION_SPIN_US);
        if (found < 0)
            break;
        if (found)
            result = admission->plan.stays ? stay(admission) : tick(admission);
    }
    return result;
}
