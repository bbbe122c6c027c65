/* The kernels with one mistake sown in, chosen by -DMUTANT_...: an ordering that is too weak, a
 * swap that is none, a mirror that comes too late, an abandoned claim that is forgotten.
 * tests/gpu_programs.py builds gpu_traffic with each and fails when one goes unnoticed. */
#ifndef GPU_MUTANTS_H
#define GPU_MUTANTS_H

#include <string.h>
#include <unistd.h>

#include "words.cuh"

#define IN(function)          (strcmp(__func__, function) == 0)
#define LEADS_TO(next, state) (((next) & DP_STATE_MASK) == (state))
#define NAMES(word, part)     (strstr(#word, part) != nullptr)

static inline bool weak_cas(uint64_t *word, uint64_t *expected, uint64_t next, int order) {
    if (order == __ATOMIC_RELEASE)
        return __atomic_compare_exchange_n(word, expected, next, false, __ATOMIC_RELEASE,
                                           __ATOMIC_RELAXED);
    return __atomic_compare_exchange_n(word, expected, next, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
}

static inline bool torn_cas(uint64_t *word, uint64_t *expected, uint64_t next) {
    uint64_t seen = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    bool same = seen == *expected;
    *expected = seen;
    usleep(1);
    if (same)
        __atomic_store_n(word, next, __ATOMIC_RELEASE);
    return same;
}

static thread_local uint64_t *late_word, late_value;

static inline void put_off(uint64_t *word, uint64_t value) {
    late_word = word;
    late_value = value;
}

static inline void store_and_catch_up(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
    if (late_word) {
        usleep(2000);
        __atomic_store_n(late_word, late_value, __ATOMIC_RELEASE);
    }
    late_word = nullptr;
}

#if defined MUTANT_RELAXED_COMMAND
#define dp_sys_load_acquire(w) dp_sys_load_relaxed(w)

#elif defined MUTANT_RELAXED_VERDICT
#define dp_sys_store_release(w, v)                                                                 \
    (NAMES(w, "verdict") ? dp_sys_store_relaxed(w, v) : dp_sys_store_release(w, v))

#elif defined MUTANT_RELAXED_CLAIM
#define dp_gpu_load_acquire(w) (IN("on_slot") ? dp_gpu_load_relaxed(w) : dp_gpu_load_acquire(w))
#define dp_gpu_cas(w, seen, next)                                                                  \
    (IN("claim_one") ? weak_cas(w, seen, next, __ATOMIC_RELAXED) : dp_gpu_cas(w, seen, next))

#elif defined MUTANT_RELAXED_PUBLISH
#define dp_gpu_cas(w, seen, next)                                                                  \
    (LEADS_TO(next, DP_READY) ? weak_cas(w, seen, next, __ATOMIC_RELAXED)                          \
                              : dp_gpu_cas(w, seen, next))

#elif defined MUTANT_RELAXED_TAKE
#define dp_gpu_cas(w, seen, next)                                                                  \
    (LEADS_TO(next, DP_RUNNING) ? weak_cas(w, seen, next, __ATOMIC_RELEASE)                        \
                                : dp_gpu_cas(w, seen, next))

#elif defined MUTANT_RELAXED_SHOW
#define dp_sys_store_release(w, v)                                                                 \
    (NAMES(w, "progress") ? dp_sys_store_relaxed(w, v) : dp_sys_store_release(w, v))

#elif defined MUTANT_RELAXED_MIRROR
#define dp_sys_store_release(w, v)                                                                 \
    (NAMES(w, "mirrors") ? dp_sys_store_relaxed(w, v) : dp_sys_store_release(w, v))

#elif defined MUTANT_RELAXED_GIVE_BACK
#define dp_gpu_store_release(w, v) __atomic_store_n(w, v, __ATOMIC_RELAXED)

#elif defined MUTANT_TORN_CLAIM
#define dp_gpu_cas(w, seen, next)                                                                  \
    (IN("claim_one") ? torn_cas(w, seen, next) : dp_gpu_cas(w, seen, next))

#elif defined MUTANT_TORN_CANCEL
#define dp_gpu_cas(w, seen, next)                                                                  \
    (IN("cancel") ? torn_cas(w, seen, next) : dp_gpu_cas(w, seen, next))

#elif defined MUTANT_TORN_REVOKE
#define dp_gpu_cas(w, seen, next)                                                                  \
    (IN("revoke") ? torn_cas(w, seen, next) : dp_gpu_cas(w, seen, next))

#elif defined MUTANT_LATE_MIRROR
#define dp_sys_store_release(w, v)                                                                 \
    (IN("dp_slot_give_back") ? put_off(w, v) : dp_sys_store_release(w, v))
#define dp_gpu_store_release(w, v) store_and_catch_up(w, v)

#elif defined MUTANT_FORGOTTEN_CLAIM
#define DP_COMMAND_ABANDON 15

#elif defined MUTANT
#error "no such mutant"
#endif

#endif
