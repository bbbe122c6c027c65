/* See driver.h. */
#define _GNU_SOURCE
#include "driver.h"

#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/* Each member of `driver` is named as the call that it is. */
#define FIND(driver, call) find(driver, #call, (void **)&(driver)->call, error, bytes)

static bool find(struct dp_driver *driver, const char *name, void **call, char *error,
                 size_t bytes) {
    *call = dlsym(driver->library, name);
    if (!*call)
        snprintf(error, bytes, "it has no %s", name);
    return *call != NULL;
}

struct dp_driver *dp_driver_open(const char *library, char *error, size_t bytes) {
    struct dp_driver *driver = calloc(1, sizeof *driver);
    if (!driver) {
        snprintf(error, bytes, "there is no memory");
        return NULL;
    }
    driver->library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (!driver->library)
        snprintf(error, bytes, "%s", dlerror());
    if (driver->library && FIND(driver, cuCtxGetCurrent) && FIND(driver, cuCtxSetCurrent) &&
        FIND(driver, cuThreadExchangeStreamCaptureMode) && FIND(driver, cuLaunchKernel) &&
        FIND(driver, cuStreamQuery) && FIND(driver, cuStreamSynchronize) &&
        FIND(driver, cuGetErrorName) && FIND(driver, cuGetErrorString))
        return driver;
    dp_driver_close(driver);
    return NULL;
}

void dp_driver_close(struct dp_driver *driver) {
    if (!driver)
        return;
    if (driver->library)
        dlclose(driver->library);
    free(driver);
}

int dp_driver_context(const struct dp_driver *driver, CUcontext *context) {
    *context = NULL;
    return driver->cuCtxGetCurrent(context);
}

void dp_driver_explain(const struct dp_driver *driver, int result, char *text, size_t bytes) {
    const char *name = NULL, *words = NULL;
    if (driver->cuGetErrorName(result, &name) || !name)
        name = "an unknown CUDA error";
    if (driver->cuGetErrorString(result, &words) || !words)
        words = "the driver has no words for it";
    snprintf(text, bytes, "%s, %d: %s", name, result, words);
}
