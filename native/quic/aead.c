/* See aead.h. */
#include "aead.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include "aead_wide.h"
#include "protect.h"

static bool wide_is_allowed = true;

static bool takes_wide(uint16_t suite) {
    return suite != DP_SUITE_CHACHA20_POLY1305 && wide_is_allowed && dp_wide_usable();
}

static bool set_wide(struct dp_aead *aead, uint16_t suite, const uint8_t *key) {
    if (!aead->wide)
        aead->wide = dp_wide_new();
    if (!aead->wide)
        return false;
    dp_wide_set(aead->wide, key, suite == DP_SUITE_AES_256_GCM ? 32 : 16);
    return true;
}

static const EVP_CIPHER *cipher_of(uint16_t suite) {
    return suite == DP_SUITE_AES_128_GCM         ? EVP_aes_128_gcm()
           : suite == DP_SUITE_AES_256_GCM       ? EVP_aes_256_gcm()
           : suite == DP_SUITE_CHACHA20_POLY1305 ? EVP_chacha20_poly1305()
                                                 : NULL;
}

bool dp_aead_set(struct dp_aead *aead, uint16_t suite, const uint8_t *key, bool seals) {
    aead->seals = seals;
    if (takes_wide(suite) && !aead->context)
        return set_wide(aead, suite, key);
    if (!aead->context)
        aead->context = EVP_CIPHER_CTX_new();
    return aead->context && cipher_of(suite) &&
           EVP_CipherInit_ex(aead->context, cipher_of(suite), NULL, key, NULL, seals) > 0;
}

void dp_aead_drop(struct dp_aead *aead) {
    if (aead->context)
        EVP_CIPHER_CTX_reset(aead->context);
    if (aead->wide)
        dp_wide_wipe(aead->wide);
}

void dp_aead_free(struct dp_aead *aead) {
    EVP_CIPHER_CTX_free(aead->context);
    dp_wide_free(aead->wide);
    aead->context = NULL;
    aead->wide = NULL;
}

bool dp_aead_begin(struct dp_aead *aead, const uint8_t nonce[DP_NONCE_BYTES], const uint8_t *header,
                   size_t bytes) {
    int n;
    if (!aead->context) {
        dp_wide_begin(aead->wide, nonce, header, bytes);
        return true;
    }
    return EVP_CipherInit_ex(aead->context, NULL, NULL, NULL, nonce, -1) > 0 &&
           EVP_CipherUpdate(aead->context, NULL, &n, header, (int)bytes) > 0;
}

bool dp_aead_next(struct dp_aead *aead, const uint8_t *from, size_t bytes, uint8_t *to) {
    int n;
    if (!aead->context) {
        dp_wide_next(aead->wide, from, bytes, to, aead->seals);
        return true;
    }
    return EVP_CipherUpdate(aead->context, to, &n, from, (int)bytes) > 0;
}

bool dp_aead_tag(struct dp_aead *aead, uint8_t tag[DP_TAG_BYTES]) {
    int n;
    if (!aead->context) {
        dp_wide_tag(aead->wide, tag, true);
        return true;
    }
    return EVP_EncryptFinal_ex(aead->context, tag, &n) > 0 &&
           EVP_CIPHER_CTX_ctrl(aead->context, EVP_CTRL_AEAD_GET_TAG, DP_TAG_BYTES, tag) > 0;
}

bool dp_aead_holds(struct dp_aead *aead, const uint8_t tag[DP_TAG_BYTES]) {
    uint8_t made[DP_TAG_BYTES];
    int n;
    if (!aead->context) {
        dp_wide_tag(aead->wide, made, false);
        return CRYPTO_memcmp(made, tag, DP_TAG_BYTES) == 0;
    }
    return EVP_CIPHER_CTX_ctrl(aead->context, EVP_CTRL_AEAD_SET_TAG, DP_TAG_BYTES,
                               (void *)(uintptr_t)tag) > 0 &&
           EVP_DecryptFinal_ex(aead->context, made, &n) > 0;
}

const char *dp_aead_backend(void) {
    return takes_wide(DP_SUITE_AES_128_GCM) ? "ipsec-mb" : "libcrypto";
}

void dp_aead_allow_wide(bool allow) {
    wide_is_allowed = allow;
}
