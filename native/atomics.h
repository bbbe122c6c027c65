/* Every atomic operation of the project, by the ordering it needs.
 *
 * Words that two processes share are plain integers in the region; they are touched through these
 * functions alone. A release here is paired with the acquire that its comment at the call site
 * names. Read-modify-write operations are acquire-release: a verb both takes what the last holder
 * wrote and gives what this holder wrote. */
#ifndef DP_ATOMICS_H
#define DP_ATOMICS_H

#include <stdbool.h>
#include <stdint.h>

static inline uint64_t dp_load_acquire(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

static inline uint64_t dp_load_relaxed(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

static inline void dp_store_release(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline void dp_store_relaxed(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

/* Strong: a failure means that the word really held something else, now stored in *expected. */
static inline bool dp_cas(uint64_t *word, uint64_t *expected, uint64_t desired) {
    return __atomic_compare_exchange_n(word, expected, desired, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

static inline uint32_t dp_load_flag(const uint32_t *flag) {
    return __atomic_load_n(flag, __ATOMIC_RELAXED);
}

static inline void dp_store_flag(uint32_t *flag, uint32_t value) {
    __atomic_store_n(flag, value, __ATOMIC_RELAXED);
}

/* Orders the store before it against the load after it: the two halves of the sleep/wake pair
 * (contract 1, "Wake-ups"). Only a lost wake-up hangs on it, never data: that goes by release and
 * acquire on the words, which is also what ThreadSanitizer sees (it does not model fences). */
static inline void dp_fence_full(void) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

static inline void dp_cpu_relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#endif
