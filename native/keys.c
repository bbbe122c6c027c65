#include "keys.h"

#include <openssl/evp.h>
#include <stdlib.h>
#include <string.h>

struct entry {
    uint8_t digest[DP_KEY_DIGEST];
    uint32_t number;
};

struct dp_keys {
    /* Set up for SHA-256 once: finding an algorithm costs more than the hash. */
    EVP_MD_CTX *context;
    uint32_t count;
    struct entry entries[]; /* sorted */
};

static int compare(const void *a, const void *b) {
    return memcmp(a, b, DP_KEY_DIGEST); /* an entry begins with its digest */
}

struct dp_keys *dp_keys_new(const uint8_t *digests, const uint32_t *numbers, uint32_t count) {
    struct dp_keys *keys = malloc(sizeof *keys + count * sizeof *keys->entries);
    if (!keys)
        return NULL;
    keys->context = EVP_MD_CTX_new();
    if (!keys->context || !EVP_DigestInit_ex(keys->context, EVP_sha256(), NULL)) {
        dp_keys_free(keys);
        return NULL;
    }
    keys->count = count;
    for (uint32_t i = 0; i < count; i++) {
        memcpy(keys->entries[i].digest, digests + (size_t)i * DP_KEY_DIGEST, DP_KEY_DIGEST);
        keys->entries[i].number = numbers[i];
    }
    qsort(keys->entries, count, sizeof *keys->entries, compare);
    return keys;
}

void dp_keys_free(struct dp_keys *keys) {
    if (!keys)
        return;
    EVP_MD_CTX_free(keys->context);
    free(keys);
}

int64_t dp_keys_find(struct dp_keys *keys, const uint8_t *key, size_t bytes) {
    uint8_t digest[DP_KEY_DIGEST];
    if (!bytes || !EVP_DigestInit_ex(keys->context, NULL, NULL) ||
        !EVP_DigestUpdate(keys->context, key, bytes) ||
        !EVP_DigestFinal_ex(keys->context, digest, NULL))
        return -1;
    const struct entry *found =
        bsearch(digest, keys->entries, keys->count, sizeof *keys->entries, compare);
    return found ? (int64_t)found->number : -1;
}
