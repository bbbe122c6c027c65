/* AES-GCM by Intel's ipsec-mb. Not a cdef; aead.c is its only caller. */
#ifndef DP_AEAD_WIDE_H
#define DP_AEAD_WIDE_H

#include "aead.h"

/* Whether the library is there, is the one this was compiled for, and the processor has the wide
 * instructions. */
bool dp_wide_usable(void);
/* 64-byte aligned; NULL: no memory. */
struct dp_wide *dp_wide_new(void);
void dp_wide_free(struct dp_wide *wide);
void dp_wide_wipe(struct dp_wide *wide);
/* `key` has 16 or 32 bytes. */
void dp_wide_set(struct dp_wide *wide, const uint8_t *key, size_t bytes);
void dp_wide_begin(struct dp_wide *wide, const uint8_t *nonce, const uint8_t *header, size_t bytes);
void dp_wide_next(struct dp_wide *wide, const uint8_t *from, size_t bytes, uint8_t *to, bool seals);
void dp_wide_tag(struct dp_wide *wide, uint8_t tag[16], bool seals);

#endif
