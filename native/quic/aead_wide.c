/* See aead_wide.h. The library is looked for when the first key is set; its functions for one key
 * keep no state but what they are handed, so one manager serves all threads. */
#include "aead_wide.h"

#if defined __x86_64__ && __has_include(<intel-ipsec-mb.h>)

#include <dlfcn.h>
#include <intel-ipsec-mb.h>
#include <openssl/crypto.h>
#include <pthread.h>
#include <stdlib.h>

#define LIBRARY "libIPSec_MB.so.1"

struct dp_wide {
    struct gcm_key_data key;
    struct gcm_context_data state;
    bool long_key;
};

static IMB_MGR *manager;

static void find(void) {
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return;
    unsigned (*version)(void) = (unsigned (*)(void))dlsym(library, "imb_get_version");
    IMB_MGR *(*make)(uint64_t) = (IMB_MGR * (*)(uint64_t)) dlsym(library, "alloc_mb_mgr");
    void (*start)(IMB_MGR *, IMB_ARCH *) =
        (void (*)(IMB_MGR *, IMB_ARCH *))dlsym(library, "init_mb_mgr_auto");
    /* The manager's layout is that of the header's version. */
    if (!version || !make || !start || version() >> 8 != IMB_VERSION_NUM >> 8)
        return;
    IMB_ARCH arch = IMB_ARCH_NONE;
    IMB_MGR *made = make(0);
    if (!made)
        return;
    start(made, &arch);
    if (arch >= IMB_ARCH_AVX2)
        manager = made;
}

bool dp_wide_usable(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, find);
    return manager != NULL;
}

struct dp_wide *dp_wide_new(void) {
    return aligned_alloc(64, (sizeof(struct dp_wide) + 63) / 64 * 64);
}

void dp_wide_free(struct dp_wide *wide) {
    if (wide)
        dp_wide_wipe(wide);
    free(wide);
}

void dp_wide_wipe(struct dp_wide *wide) {
    OPENSSL_cleanse(wide, sizeof *wide);
}

void dp_wide_set(struct dp_wide *wide, const uint8_t *key, size_t bytes) {
    wide->long_key = bytes == 32;
    if (wide->long_key)
        IMB_AES256_GCM_PRE(manager, key, &wide->key);
    else
        IMB_AES128_GCM_PRE(manager, key, &wide->key);
}

void dp_wide_begin(struct dp_wide *wide, const uint8_t *nonce, const uint8_t *header,
                   size_t bytes) {
    if (wide->long_key)
        IMB_AES256_GCM_INIT(manager, &wide->key, &wide->state, nonce, header, bytes);
    else
        IMB_AES128_GCM_INIT(manager, &wide->key, &wide->state, nonce, header, bytes);
}

void dp_wide_next(struct dp_wide *wide, const uint8_t *from, size_t bytes, uint8_t *to,
                  bool seals) {
    if (!bytes)
        return;
    if (seals && wide->long_key)
        IMB_AES256_GCM_ENC_UPDATE(manager, &wide->key, &wide->state, to, from, bytes);
    else if (seals)
        IMB_AES128_GCM_ENC_UPDATE(manager, &wide->key, &wide->state, to, from, bytes);
    else if (wide->long_key)
        IMB_AES256_GCM_DEC_UPDATE(manager, &wide->key, &wide->state, to, from, bytes);
    else
        IMB_AES128_GCM_DEC_UPDATE(manager, &wide->key, &wide->state, to, from, bytes);
}

void dp_wide_tag(struct dp_wide *wide, uint8_t tag[16], bool seals) {
    if (seals && wide->long_key)
        IMB_AES256_GCM_ENC_FINALIZE(manager, &wide->key, &wide->state, tag, 16);
    else if (seals)
        IMB_AES128_GCM_ENC_FINALIZE(manager, &wide->key, &wide->state, tag, 16);
    else if (wide->long_key)
        IMB_AES256_GCM_DEC_FINALIZE(manager, &wide->key, &wide->state, tag, 16);
    else
        IMB_AES128_GCM_DEC_FINALIZE(manager, &wide->key, &wide->state, tag, 16);
}

#else

bool dp_wide_usable(void) {
    return false;
}

struct dp_wide *dp_wide_new(void) {
    return NULL;
}

void dp_wide_free(struct dp_wide *wide) {
    (void)wide;
}

void dp_wide_wipe(struct dp_wide *wide) {
    (void)wide;
}

void dp_wide_set(struct dp_wide *wide, const uint8_t *key, size_t bytes) {
    (void)wide, (void)key, (void)bytes;
}

void dp_wide_begin(struct dp_wide *wide, const uint8_t *nonce, const uint8_t *header,
                   size_t bytes) {
    (void)wide, (void)nonce, (void)header, (void)bytes;
}

void dp_wide_next(struct dp_wide *wide, const uint8_t *from, size_t bytes, uint8_t *to,
                  bool seals) {
    (void)wide, (void)from, (void)bytes, (void)to, (void)seals;
}

void dp_wide_tag(struct dp_wide *wide, uint8_t tag[16], bool seals) {
    (void)wide, (void)tag, (void)seals;
}

#endif
