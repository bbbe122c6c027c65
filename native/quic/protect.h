/* 1-RTT packet protection (RFC 9001 section 5 and 6): header masks, AEAD in parts, key updates.
 *
 * Built on libcrypto. A context is made once; a packet allocates nothing. Not a cdef. */
#ifndef DP_PROTECT_H
#define DP_PROTECT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DP_TAG_BYTES    16
#define DP_SAMPLE_BYTES 16
#define DP_SECRET_MAX   48

/* TLS 1.3 cipher suites (RFC 8446 appendix B.4). */
enum dp_suite {
    DP_SUITE_AES_128_GCM = 0x1301,
    DP_SUITE_AES_256_GCM = 0x1302,
    DP_SUITE_CHACHA20_POLY1305 = 0x1303,
};

struct dp_secret {
    uint32_t version; /* of QUIC: 1, or 0x6b3343cf (RFC 9369), whose labels differ */
    uint16_t suite;
    uint16_t bytes;
    uint8_t phase; /* the key phase that it belongs to, 0 or 1 */
    uint8_t secret[DP_SECRET_MAX];
};

/* Receiving -------------------------------------------------------------------------------------
 * Keeps three generations: the current keys, the next ones (derived ahead, so that an update costs
 * the same as any packet, RFC 9001 section 9.5), and the previous ones until dp_opener_forget. */
struct dp_opener;

/* NULL: unknown suite or version, a secret of another length, or no memory. */
struct dp_opener *dp_opener_new(const struct dp_secret *secret);
void dp_opener_free(struct dp_opener *opener);

/* The five bytes that a header is masked with. */
void dp_opener_mask(struct dp_opener *opener, const uint8_t *sample, uint8_t mask[5]);

/* Begin to open a packet whose unmasked header (the associated data) carries `phase`. Chooses the
 * generation: a phase other than the current one means the previous keys when `pn` lies below the
 * first packet of the current ones, the next keys otherwise (section 6.5). False: no such keys are
 * held, or the AEAD's limit of forged packets is reached (section 6.6): then nothing is opened any
 * more and dp_opener_exhausted says so. */
bool dp_opener_begin(struct dp_opener *opener, uint64_t pn, uint8_t phase, const uint8_t *header,
                     size_t header_bytes);
/* Decrypt the next bytes; may be called any number of times, `to` may be `from`. What it wrote
 * counts for nothing before dp_opener_end said true. */
void dp_opener_next(struct dp_opener *opener, const uint8_t *from, size_t bytes, uint8_t *to);
/* Check the tag. True makes the generation that was used current when it was the next one; *updated
 * then says so: the peer updated its keys and the sealer has to follow. A failed check is counted
 * against the limit and changes nothing else. */
bool dp_opener_end(struct dp_opener *opener, uint64_t pn, const uint8_t *tag, bool *updated);
/* Drop the previous keys (three PTOs after an update). */
void dp_opener_forget(struct dp_opener *opener);
bool dp_opener_exhausted(const struct dp_opener *opener);
uint8_t dp_opener_phase(const struct dp_opener *opener);

/* Sending ------------------------------------------------------------------------------------- */
struct dp_sealer;

struct dp_sealer *dp_sealer_new(const struct dp_secret *secret);
void dp_sealer_free(struct dp_sealer *sealer);
void dp_sealer_mask(struct dp_sealer *sealer, const uint8_t *sample, uint8_t mask[5]);
/* Seal in place: `payload` has room for `bytes` and the tag behind them. */
void dp_sealer_seal(struct dp_sealer *sealer, uint64_t pn, const uint8_t *header,
                    size_t header_bytes, uint8_t *payload, size_t bytes);
/* Go on to the next generation (section 6.1): the new phase. */
uint8_t dp_sealer_update(struct dp_sealer *sealer);
uint8_t dp_sealer_phase(const struct dp_sealer *sealer);
/* Packets sealed with the current keys, and how many may be before an update is due (well below the
 * confidentiality limit of section 6.6: 2^23 for AES-GCM, 2^62 for ChaCha20-Poly1305). */
uint64_t dp_sealer_used(const struct dp_sealer *sealer);
uint64_t dp_sealer_limit(const struct dp_sealer *sealer);

#endif
