/* How far CLOCK_REALTIME is ahead of the device's timer, kept true for as long as a runtime runs:
 * the timer is an oscillator of its own, and a few millionths are 36 ms an hour.
 *
 * An admission kernel stamps: it writes what its timer says, T, where the host reads it. The host
 * has read CLOCK_REALTIME before it launched that kernel, B, and reads it again once it sees the
 * stamp, A. The stamp was made in between, so of the offset o at that moment is known
 *
 *     B - T <= o <= A - T
 *
 * The upper bound is off by the way back alone, the lower one by the launch and the kernel's run.
 * What is kept is never below o: a time that is told too late makes a wait longer by so much, one
 * that is told too early may lie before what it followed, and then says nothing.
 *
 * Between two stamps o moves by at most DP_CLOCK_DRIFT_PPM of the time: 100 for the oscillators,
 * and the 500 by which the system may slew CLOCK_REALTIME. So an upper bound stays one when that is
 * added, and a look that came late spoils nothing while an earlier one was quick:
 *
 *     kept = min(A - T, kept before + drift x (T - T before))
 *
 * When that is below B - T, CLOCK_REALTIME was set forward, and A - T is kept; when it was set back
 * A - T is the lesser anyway. A - T is also kept at first, and after DP_CLOCK_MEMORY_NS without a
 * stamp, when the drift may have made more than any look is late.
 *
 * The error of a time x that is told by what was kept at the last stamp, of T:
 *
 *     early by at most  drift x (x - T), and a step of the timer
 *     late by at most   the least, over the looks of late, of
 *                       (from the stamp to the look) + 2 x drift x (from the stamp to x)
 *
 * with the drift that there is, of which the bound is only the worst. A stamp is seen after each
 * tick and several times a ms while a kernel is resident. The first tick after a pause carries out
 * no more than one command a ring, so no slot is claimed, published and taken before that stamp is
 * seen: at a take, the last one seen is at most such a pause older than the claim of the slot. A
 * clock that is set between that stamp and the take is not noticed in time, nor one that is set
 * forward by less than a launch takes. */
#ifndef DP_CLOCK_H
#define DP_CLOCK_H

#include <stdbool.h>
#include <stdint.h>

#define DP_CLOCK_DRIFT_PPM 600
#define DP_CLOCK_MEMORY_NS INT64_C(60000000000)

struct dp_clock {
    int64_t offset_ns; /* CLOCK_REALTIME less the device's timer */
    int64_t timer_ns;  /* the stamp that it was kept at */
    bool known;
};

/* A stamp was seen: CLOCK_REALTIME before its kernel's launch, the stamp, CLOCK_REALTIME now. */
static inline void dp_clock_see(struct dp_clock *clock, int64_t before_ns, int64_t timer_ns,
                                int64_t after_ns) {
    int64_t least = before_ns - timer_ns, most = after_ns - timer_ns, kept = most;
    int64_t since = timer_ns - clock->timer_ns;
    if (clock->known && since >= 0 && since < DP_CLOCK_MEMORY_NS) {
        /* Rounded up: it is a bound. */
        int64_t drifted = clock->offset_ns + since * DP_CLOCK_DRIFT_PPM / 1000000 + 1;
        if (drifted >= least && drifted < most)
            kept = drifted;
    }
    *clock = (struct dp_clock){.offset_ns = kept, .timer_ns = timer_ns, .known = true};
}

#endif
