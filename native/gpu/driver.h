/* The calls of CUDA's driver that the admission thread makes.
 *
 * The library is looked for when a runtime starts, and is never linked: the daemon and the tests
 * run where there is none. The types are CUDA's own (cuda.h), a CUresult is an int; written by hand
 * so that building needs no CUDA.
 *
 * This header is also the cffi declaration. */
#ifndef DP_DRIVER_H
#define DP_DRIVER_H

#include <stddef.h>

#define DP_CUDA_NOT_READY       600 /* CUDA_ERROR_NOT_READY */
#define DP_CUDA_CAPTURE_RELAXED 2   /* CU_STREAM_CAPTURE_MODE_RELAXED */

typedef struct CUctx_st *CUcontext;
typedef struct CUfunc_st *CUfunction;
typedef struct CUstream_st *CUstream;

struct dp_driver {
    void *library;
    int (*cuCtxGetCurrent)(CUcontext *context);
    int (*cuCtxSetCurrent)(CUcontext context);
    int (*cuLaunchKernel)(CUfunction function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z,
                          unsigned shared_bytes, CUstream stream, void **arguments, void **extra);
    /* `mode` is a CUstreamCaptureMode, and then the one that this thread had before. */
    int (*cuThreadExchangeStreamCaptureMode)(int *mode);
    int (*cuStreamQuery)(CUstream stream);
    int (*cuStreamSynchronize)(CUstream stream);
    int (*cuGetErrorName)(int result, const char **text);
    int (*cuGetErrorString)(int result, const char **text);
};

/* Open the library: by its name one that this process has loaded, wherever that lies, else the
 * system's; NULL for the program itself. NULL when it or a call of it is not there; `error` then
 * says what. */
struct dp_driver *dp_driver_open(const char *library, char *error, size_t bytes);
void dp_driver_close(struct dp_driver *driver);
/* The context that is current on this thread, NULL when none is. 0, or the CUresult. */
int dp_driver_context(const struct dp_driver *driver, CUcontext *context);
/* What the driver says of a result: its name and its words. */
void dp_driver_explain(const struct dp_driver *driver, int result, char *text, size_t bytes);

#endif
