/* How the kernels touch words that others touch too: by scope and ordering, never volatile and a
 * fence (which costs more, and which ThreadSanitizer does not model).
 *
 * Words in device memory: device scope ("gpu"); one compare-and-swap there moves a slot. Words in
 * the region, which the host maps: system scope ("sys"), plain loads and stores, never a
 * read-modify-write. On the host (host_cuda.h) the same names are the compiler's atomics, so that
 * the kernels run there as they are. */
#ifndef DP_WORDS_CUH
#define DP_WORDS_CUH

extern "C" {
#include "device.h"
}

#define DP_DEVICE static __device__ __forceinline__

#ifdef __CUDA_ARCH__

DP_DEVICE uint64_t dp_gpu_load_relaxed(const uint64_t *word) {
    uint64_t value;
    asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

DP_DEVICE uint64_t dp_gpu_load_acquire(const uint64_t *word) {
    uint64_t value;
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

DP_DEVICE void dp_gpu_store_release(uint64_t *word, uint64_t value) {
    asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

/* Strong; *expected is then what the word held. */
DP_DEVICE bool dp_gpu_cas(uint64_t *word, uint64_t *expected, uint64_t desired) {
    uint64_t found;
    asm volatile("atom.acq_rel.gpu.global.cas.b64 %0, [%1], %2, %3;"
                 : "=l"(found)
                 : "l"(word), "l"(*expected), "l"(desired)
                 : "memory");
    bool swapped = found == *expected;
    *expected = found;
    return swapped;
}

DP_DEVICE uint64_t dp_sys_load_relaxed(const uint64_t *word) {
    uint64_t value;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

DP_DEVICE uint64_t dp_sys_load_acquire(const uint64_t *word) {
    uint64_t value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
    return value;
}

DP_DEVICE void dp_sys_store_relaxed(uint64_t *word, uint64_t value) {
    asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

DP_DEVICE void dp_sys_store_release(uint64_t *word, uint64_t value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(word), "l"(value) : "memory");
}

DP_DEVICE int64_t dp_timer_ns(void) {
    int64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

#else

DP_DEVICE uint64_t dp_gpu_load_relaxed(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

DP_DEVICE uint64_t dp_gpu_load_acquire(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

DP_DEVICE void dp_gpu_store_release(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

DP_DEVICE bool dp_gpu_cas(uint64_t *word, uint64_t *expected, uint64_t desired) {
    return __atomic_compare_exchange_n(word, expected, desired, false, __ATOMIC_ACQ_REL,
                                       __ATOMIC_ACQUIRE);
}

DP_DEVICE uint64_t dp_sys_load_relaxed(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_RELAXED);
}

DP_DEVICE uint64_t dp_sys_load_acquire(const uint64_t *word) {
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

DP_DEVICE void dp_sys_store_relaxed(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELAXED);
}

DP_DEVICE void dp_sys_store_release(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

DP_DEVICE int64_t dp_timer_ns(void) {
    return dp_host_timer_ns();
}

#endif

#endif
