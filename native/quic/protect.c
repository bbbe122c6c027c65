#include "protect.h"

#include "aead.h"

#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <stdlib.h>
#include <string.h>

#define VERSION_1 1u
#define VERSION_2 0x6b3343cfu
#define IV_BYTES  DP_NONCE_BYTES
#define KEY_MAX   32
#define LABEL_MAX 16
#define NO_PACKET UINT64_MAX

struct suite {
    uint16_t id;
    uint8_t key_bytes;
    uint8_t secret_bytes; /* as many as the hash gives */
    const EVP_CIPHER *(*mask)(void);
    const EVP_MD *(*hash)(void);
    uint64_t forged_limit; /* both limits: RFC 9001 section 6.6 */
    uint64_t sealed_limit;
};

static const struct suite suites[] = {
    {DP_SUITE_AES_128_GCM, 16, 32, EVP_aes_128_ecb, EVP_sha256, 1ULL << 52, 1ULL << 23},
    {DP_SUITE_AES_256_GCM, 32, 48, EVP_aes_256_ecb, EVP_sha384, 1ULL << 52, 1ULL << 23},
    {DP_SUITE_CHACHA20_POLY1305, 32, 32, EVP_chacha20, EVP_sha256, 1ULL << 36, 1ULL << 62},
};

/* Where keys come from: the secret of the newest generation that was derived. */
struct chain {
    const struct suite *suite;
    const char *prefix; /* of the version's labels */
    uint8_t secret[DP_SECRET_MAX];
};

/* One generation of packet keys. The context holds the key schedule, so that a packet only sets its
 * nonce. */
struct keys {
    struct dp_aead aead;
    uint8_t iv[IV_BYTES];
    bool held;
};

/* Deriving ------------------------------------------------------------------------------------ */

static const struct suite *suite_of(const struct dp_secret *secret) {
    for (size_t i = 0; i < sizeof suites / sizeof *suites; i++)
        if (suites[i].id == secret->suite)
            return suites[i].secret_bytes == secret->bytes ? &suites[i] : NULL;
    return NULL;
}

static bool chain_start(struct chain *chain, const struct dp_secret *secret) {
    chain->suite = suite_of(secret);
    if (!chain->suite || (secret->version != VERSION_1 && secret->version != VERSION_2))
        return false;
    chain->prefix = secret->version == VERSION_1 ? "tls13 quic " : "tls13 quicv2 ";
    memcpy(chain->secret, secret->secret, secret->bytes);
    return true;
}

/* HKDF-Expand-Label (RFC 8446 section 7.1) without a context. Nothing that QUIC asks for is longer
 * than the hash, so the first block of HKDF-Expand is all there is. */
static bool expand(const struct chain *chain, const char *name, uint8_t *to, size_t bytes) {
    size_t prefix = strlen(chain->prefix), label = prefix + strlen(name);
    uint8_t info[2 + 1 + LABEL_MAX + 1 + 1] = {0, (uint8_t)bytes, (uint8_t)label};
    uint8_t block[EVP_MAX_MD_SIZE];
    memcpy(info + 3, chain->prefix, prefix);
    memcpy(info + 3 + prefix, name, label - prefix);
    info[3 + label + 1] = 1; /* behind the empty context: the number of the block */
    bool done = HMAC(chain->suite->hash(), chain->secret, chain->suite->secret_bytes, info,
                     3 + label + 2, block, NULL) != NULL;
    if (done)
        memcpy(to, block, bytes);
    OPENSSL_cleanse(block, sizeof block);
    return done;
}

/* The secret of the generation behind this one. */
static bool chain_advance(struct chain *chain) {
    uint8_t next[DP_SECRET_MAX];
    bool done = expand(chain, "ku", next, chain->suite->secret_bytes);
    if (done)
        memcpy(chain->secret, next, chain->suite->secret_bytes);
    OPENSSL_cleanse(next, sizeof next);
    return done;
}

/* Drop the keys; wipes what the AEAD keeps of them too. */
static void keys_drop(struct keys *keys) {
    dp_aead_drop(&keys->aead);
    OPENSSL_cleanse(keys->iv, sizeof keys->iv);
    keys->held = false;
}

/* The packet keys of the chain's secret. */
static bool keys_derive(struct keys *keys, const struct chain *chain, bool seals) {
    uint8_t key[KEY_MAX];
    keys->held = expand(chain, "key", key, chain->suite->key_bytes) &&
                 expand(chain, "iv", keys->iv, IV_BYTES) &&
                 dp_aead_set(&keys->aead, chain->suite->id, key, seals);
    OPENSSL_cleanse(key, sizeof key);
    if (!keys->held)
        keys_drop(keys);
    return keys->held;
}

/* Set a nonce (RFC 9001 section 5.3) and take the associated data in. */
static bool keys_begin(struct keys *keys, uint64_t pn, const uint8_t *header, size_t bytes) {
    uint8_t nonce[IV_BYTES];
    memcpy(nonce, keys->iv, IV_BYTES);
    for (size_t i = 0; i < 8; i++)
        nonce[IV_BYTES - 1 - i] ^= (uint8_t)(pn >> 8 * i);
    return dp_aead_begin(&keys->aead, nonce, header, bytes);
}

/* Header protection (section 5.4). Its key outlives every key update (section 6). */

static EVP_CIPHER_CTX *mask_new(const struct chain *chain) {
    uint8_t key[KEY_MAX];
    EVP_CIPHER_CTX *mask = EVP_CIPHER_CTX_new();
    bool done = mask && expand(chain, "hp", key, chain->suite->key_bytes) &&
                EVP_EncryptInit_ex(mask, chain->suite->mask(), NULL, key, NULL) > 0;
    OPENSSL_cleanse(key, sizeof key);
    if (done)
        return mask;
    EVP_CIPHER_CTX_free(mask);
    return NULL;
}

static void mask_make(EVP_CIPHER_CTX *context, const struct suite *suite, const uint8_t *sample,
                      uint8_t mask[5]) {
    static const uint8_t zeros[5];
    uint8_t block[DP_SAMPLE_BYTES] = {0};
    int n;
    if (suite->id != DP_SUITE_CHACHA20_POLY1305)
        EVP_EncryptUpdate(context, block, &n, sample, DP_SAMPLE_BYTES);
    /* libcrypto's ChaCha20 takes the counter and the nonce in the order of the sample. */
    else if (EVP_EncryptInit_ex(context, NULL, NULL, NULL, sample) > 0)
        EVP_EncryptUpdate(context, block, &n, zeros, sizeof zeros);
    memcpy(mask, block, 5);
}

/* Receiving ----------------------------------------------------------------------------------- */

/* The generations lie in a ring: behind the current one the next, behind that the previous. An
 * update is a step along it, and the keys it leaves behind make room for new next ones. */
#define RING 3

struct dp_opener {
    struct keys ring[RING];
    struct keys *using; /* by the packet that is being opened */
    EVP_CIPHER_CTX *mask;
    uint64_t first; /* lowest packet number opened with the current keys */
    uint64_t forged;
    struct chain chain; /* of the next keys */
    uint8_t current;
    uint8_t phase;
    bool failed; /* the AEAD refused a step of this packet */
};

static struct keys *ahead(struct dp_opener *opener, unsigned steps) {
    return &opener->ring[(opener->current + steps) % RING];
}

static struct keys *next_keys(struct dp_opener *opener) {
    return ahead(opener, 1);
}

static struct keys *previous_keys(struct dp_opener *opener) {
    return ahead(opener, 2);
}

/* Without memory the next keys are missing, and packets that need them are not opened. */
static bool derive_next(struct dp_opener *opener) {
    return chain_advance(&opener->chain) && keys_derive(next_keys(opener), &opener->chain, false);
}

struct dp_opener *dp_opener_new(const struct dp_secret *secret) {
    struct dp_opener *opener = calloc(1, sizeof *opener);
    bool done = opener && chain_start(&opener->chain, secret);
    done = done && (opener->mask = mask_new(&opener->chain)) != NULL &&
           keys_derive(&opener->ring[0], &opener->chain, false) && derive_next(opener);
    if (!done) {
        dp_opener_free(opener);
        return NULL;
    }
    opener->phase = secret->phase & 1;
    opener->first = NO_PACKET;
    return opener;
}

void dp_opener_free(struct dp_opener *opener) {
    if (!opener)
        return;
    for (int i = 0; i < RING; i++)
        dp_aead_free(&opener->ring[i].aead);
    EVP_CIPHER_CTX_free(opener->mask);
    OPENSSL_cleanse(opener, sizeof *opener);
    free(opener);
}

void dp_opener_mask(struct dp_opener *opener, const uint8_t *sample, uint8_t mask[5]) {
    mask_make(opener->mask, opener->chain.suite, sample, mask);
}

/* The keys of a packet, held or not. A peer never uses newer keys for a lower packet number, so one
 * below the first of the current keys can only be of the previous ones (section 6.5). Where that
 * rule is broken (section 6.4), the wrong keys are tried and the packet is dropped. */
static struct keys *choose(struct dp_opener *opener, uint64_t pn, uint8_t phase) {
    if (phase == opener->phase)
        return &opener->ring[opener->current];
    bool late = opener->first != NO_PACKET && pn < opener->first;
    return late ? previous_keys(opener) : next_keys(opener);
}

bool dp_opener_begin(struct dp_opener *opener, uint64_t pn, uint8_t phase, const uint8_t *header,
                     size_t header_bytes) {
    struct keys *keys = choose(opener, pn, phase);
    opener->using = NULL;
    if (!keys->held || dp_opener_exhausted(opener))
        return false;
    opener->using = keys;
    opener->failed = !keys_begin(keys, pn, header, header_bytes);
    return true;
}

void dp_opener_next(struct dp_opener *opener, const uint8_t *from, size_t bytes, uint8_t *to) {
    if (opener->using && !dp_aead_next(&opener->using->aead, from, bytes, to))
        opener->failed = true;
}

/* The next keys opened a packet: they are the current ones from here on. */
static void follow_update(struct dp_opener *opener, uint64_t pn) {
    keys_drop(previous_keys(opener));
    opener->current = (uint8_t)((opener->current + 1) % RING);
    opener->phase ^= 1;
    opener->first = pn;
    derive_next(opener);
}

bool dp_opener_end(struct dp_opener *opener, uint64_t pn, const uint8_t *tag, bool *updated) {
    struct keys *used = opener->using;
    *updated = false;
    opener->using = NULL;
    if (!used)
        return false;
    if (opener->failed || !dp_aead_holds(&used->aead, tag)) {
        opener->forged++;
        return false;
    }
    *updated = used == next_keys(opener);
    if (*updated)
        follow_update(opener, pn);
    else if (used == &opener->ring[opener->current] && pn < opener->first)
        opener->first = pn;
    return true;
}

void dp_opener_forget(struct dp_opener *opener) {
    keys_drop(previous_keys(opener));
}

bool dp_opener_exhausted(const struct dp_opener *opener) {
    return opener->forged >= opener->chain.suite->forged_limit;
}

uint8_t dp_opener_phase(const struct dp_opener *opener) {
    return opener->phase;
}

/* Sending ------------------------------------------------------------------------------------- */

struct dp_sealer {
    struct keys keys;
    EVP_CIPHER_CTX *mask;
    uint64_t used;
    struct chain chain; /* of the keys in use */
    uint8_t phase;
};

struct dp_sealer *dp_sealer_new(const struct dp_secret *secret) {
    struct dp_sealer *sealer = calloc(1, sizeof *sealer);
    bool done = sealer && chain_start(&sealer->chain, secret) &&
                (sealer->mask = mask_new(&sealer->chain)) != NULL &&
                keys_derive(&sealer->keys, &sealer->chain, true);
    if (!done) {
        dp_sealer_free(sealer);
        return NULL;
    }
    sealer->phase = secret->phase & 1;
    return sealer;
}

void dp_sealer_free(struct dp_sealer *sealer) {
    if (!sealer)
        return;
    dp_aead_free(&sealer->keys.aead);
    EVP_CIPHER_CTX_free(sealer->mask);
    OPENSSL_cleanse(sealer, sizeof *sealer);
    free(sealer);
}

void dp_sealer_mask(struct dp_sealer *sealer, const uint8_t *sample, uint8_t mask[5]) {
    mask_make(sealer->mask, sealer->chain.suite, sample, mask);
}

void dp_sealer_seal(struct dp_sealer *sealer, uint64_t pn, const uint8_t *header,
                    size_t header_bytes, uint8_t *payload, size_t bytes) {
    struct dp_aead *aead = &sealer->keys.aead;
    sealer->used++;
    if (sealer->keys.held && sealer->used <= sealer->chain.suite->sealed_limit &&
        keys_begin(&sealer->keys, pn, header, header_bytes) &&
        dp_aead_next(aead, payload, bytes, payload) && dp_aead_tag(aead, payload + bytes))
        return;
    /* Keys that are worn out, or missing because an update found no memory. Whatever the caller
     * does now, no plaintext goes out: the peer drops such a packet. */
    memset(payload, 0, bytes + DP_TAG_BYTES);
}

uint8_t dp_sealer_update(struct dp_sealer *sealer) {
    sealer->keys.held =
        chain_advance(&sealer->chain) && keys_derive(&sealer->keys, &sealer->chain, true);
    sealer->used = 0;
    return sealer->phase ^= 1;
}

uint8_t dp_sealer_phase(const struct dp_sealer *sealer) {
    return sealer->phase;
}

uint64_t dp_sealer_used(const struct dp_sealer *sealer) {
    return sealer->used;
}

/* Half of what is allowed: an update may have to wait for the peer (section 6.1). */
uint64_t dp_sealer_limit(const struct dp_sealer *sealer) {
    return sealer->chain.suite->sealed_limit / 2;
}
