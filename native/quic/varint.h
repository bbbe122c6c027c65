/* Variable-length integers (RFC 9000 section 16) and the big-endian numbers of packets. */
#ifndef DP_VARINT_H
#define DP_VARINT_H

#include <stddef.h>
#include <stdint.h>

#define DP_VARINT_MAX ((1ULL << 62) - 1)

static inline uint64_t dp_get_be(const uint8_t *from, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; i++)
        value = value << 8 | from[i];
    return value;
}

static inline void dp_put_be(uint8_t *to, uint64_t value, size_t bytes) {
    for (size_t i = bytes; i > 0; i--, value >>= 8)
        to[i - 1] = (uint8_t)value;
}

/* Bytes that a value takes: 1, 2, 4 or 8. */
static inline size_t dp_varint_size(uint64_t value) {
    return value < 64 ? 1 : value < 16384 ? 2 : value < 1073741824 ? 4 : 8;
}

/* Write a value at `to`, which has room for it; where it ends. */
static inline uint8_t *dp_put_varint(uint8_t *to, uint64_t value) {
    size_t bytes = dp_varint_size(value);
    dp_put_be(to, value, bytes);
    *to |= (uint8_t)((bytes == 1 ? 0 : bytes == 2 ? 1 : bytes == 4 ? 2 : 3) << 6);
    return to + bytes;
}

/* Read a value from [at, end): where it ends, or NULL when it is cut off. */
static inline const uint8_t *dp_get_varint(const uint8_t *at, const uint8_t *end, uint64_t *value) {
    if (at >= end)
        return NULL;
    size_t bytes = (size_t)1 << (*at >> 6);
    if ((size_t)(end - at) < bytes)
        return NULL;
    *value = dp_get_be(at, bytes) & (~0ULL >> (64 - (bytes * 8 - 2)));
    return at + bytes;
}

#endif
