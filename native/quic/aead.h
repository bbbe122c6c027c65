/* One key of an AEAD, used in parts: nonce and associated data, text, tag. Not a cdef.
 *
 * libcrypto has every suite. For AES-GCM, where the processor has wide AES instructions, Intel's
 * ipsec-mb takes less than half of the time a packet, so it is used if it is installed (Debian:
 * libipsec-mb1; loaded at run time, compiled in where its header is there). */
#ifndef DP_AEAD_H
#define DP_AEAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DP_NONCE_BYTES 12

struct dp_wide; /* ipsec-mb's schedule and state */

/* All zero is one without a key. The schedule stays from packet to packet, which only sets its
 * nonce: nothing is allocated for it. */
struct dp_aead {
    void *context; /* EVP_CIPHER_CTX, or NULL while `wide` has the key */
    struct dp_wide *wide;
    bool seals;
};

/* Set the key of a TLS cipher suite (protect.h). False: unknown, or no memory. */
bool dp_aead_set(struct dp_aead *aead, uint16_t suite, const uint8_t *key, bool seals);
/* Wipe the key; the memory stays for the next one. */
void dp_aead_drop(struct dp_aead *aead);
void dp_aead_free(struct dp_aead *aead);

bool dp_aead_begin(struct dp_aead *aead, const uint8_t nonce[DP_NONCE_BYTES], const uint8_t *header,
                   size_t bytes);
/* `to` may be `from`. */
bool dp_aead_next(struct dp_aead *aead, const uint8_t *from, size_t bytes, uint8_t *to);
/* The tag of what was sealed. */
bool dp_aead_tag(struct dp_aead *aead, uint8_t tag[16]);
/* Whether this is the tag of what was opened. */
bool dp_aead_holds(struct dp_aead *aead, const uint8_t tag[16]);

/* What AES-GCM runs on: "ipsec-mb" or "libcrypto". */
const char *dp_aead_backend(void);
/* Whether ipsec-mb may be used for keys that are set from now on; for tests and comparisons. */
void dp_aead_allow_wide(bool allow);

#endif
