/* native/slots.c with one mistake sown in, chosen by -DMUTANT_...; without one it is the original.
 *
 * The mistakes are in how words are touched: an ordering that is too weak, an operation that is not
 * atomic, a fence or a flag that is missing. tests/native_programs.py builds the test programs with
 * each and fails when one goes unnoticed. (A fence missing after a compare-and-swap is not among
 * them: on x86 that instruction is a fence already, so nothing could notice.) */
#define _GNU_SOURCE
#include <string.h>

#include "atomics.h"
#include "slots.h"

#define IN(function)          (strcmp(__func__, function) == 0)
#define LEADS_TO(next, state) (((next) & DP_STATE_MASK) == (state))

static inline bool torn_cas(uint64_t *word, uint64_t *expected, uint64_t next) {
    uint64_t seen = dp_load_acquire(word);
    bool same = seen == *expected;
    *expected = seen;
    if (same)
        dp_store_release(word, next);
    return same;
}

static inline bool blind_cas(uint64_t *word, uint64_t *expected, uint64_t next) {
    *expected = __atomic_exchange_n(word, next, __ATOMIC_ACQ_REL);
    return true;
}

static inline bool relaxed_cas(uint64_t *word, uint64_t *expected, uint64_t next) {
    return __atomic_compare_exchange_n(word, expected, next, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
}

static inline bool release_cas(uint64_t *word, uint64_t *expected, uint64_t next) {
    return __atomic_compare_exchange_n(word, expected, next, false, __ATOMIC_RELEASE,
                                       __ATOMIC_RELAXED);
}

/* A macro may name the function that it hides: it is not expanded again. */

#if defined MUTANT_TORN_CLAIM
#define dp_cas(w, seen, next) (IN("claim_one") ? torn_cas(w, seen, next) : dp_cas(w, seen, next))

#elif defined MUTANT_TORN_VERB
#define dp_cas(w, seen, next) (IN("apply") ? torn_cas(w, seen, next) : dp_cas(w, seen, next))

#elif defined MUTANT_BLIND_VERB
#define dp_cas(w, seen, next) (IN("apply") ? blind_cas(w, seen, next) : dp_cas(w, seen, next))

#elif defined MUTANT_RELAXED_CLAIM
#define dp_cas(w, seen, next) (IN("claim_one") ? relaxed_cas(w, seen, next) : dp_cas(w, seen, next))

#elif defined MUTANT_RELAXED_PUBLISH
#define dp_cas(w, seen, next)                                                                      \
    (LEADS_TO(next, DP_READY) ? relaxed_cas(w, seen, next) : dp_cas(w, seen, next))

#elif defined MUTANT_RELAXED_TAKE
#define dp_load_acquire(w) (IN("apply") ? dp_load_relaxed(w) : dp_load_acquire(w))
#define dp_cas(w, seen, next)                                                                      \
    (LEADS_TO(next, DP_RUNNING) ? release_cas(w, seen, next) : dp_cas(w, seen, next))

#elif defined MUTANT_RELAXED_FINISH
#define dp_cas(w, seen, next)                                                                      \
    (LEADS_TO(next, DP_DONE) ? relaxed_cas(w, seen, next) : dp_cas(w, seen, next))

#elif defined MUTANT_RELAXED_RELEASE
#define dp_cas(w, seen, next)                                                                      \
    (LEADS_TO(next, DP_FREE) ? relaxed_cas(w, seen, next) : dp_cas(w, seen, next))

#elif defined MUTANT_RELAXED_EMIT
#define dp_store_release(w, value) dp_store_relaxed(w, value)

#elif defined MUTANT_RELAXED_POLL_STATE
#define dp_load_acquire(w)                                                                         \
    (IN("refresh") && strstr(#w, "states") ? dp_load_relaxed(w) : dp_load_acquire(w))

#elif defined MUTANT_RELAXED_POLL_COUNT
#define dp_load_acquire(w)                                                                         \
    (IN("refresh") && strstr(#w, "progress") ? dp_load_relaxed(w) : dp_load_acquire(w))

#elif defined MUTANT_NO_FENCE_IN_WAIT
#define dp_fence_full() (IN("dp_runtime_wait") ? (void)0 : dp_fence_full())

#elif defined MUTANT_NO_FENCE_IN_SLEEP
#define dp_fence_full() (IN("dp_listener_sleep") ? (void)0 : dp_fence_full())

#elif defined MUTANT_NO_FENCE_BEFORE_RING
#define dp_fence_full() (IN("wake_listener") ? (void)0 : dp_fence_full())

#elif defined MUTANT_SLEEPS_UNSAID
#define dp_store_flag(flag, value) (IN("dp_runtime_wait") ? (void)0 : dp_store_flag(flag, value))

#elif defined MUTANT
#error "no such mutant"
#endif

#include "slots.c"
