/* The host thread that runs the admission kernel for what listeners post, from its first launch to
 * its end: without the interpreter, whose launches cost more than the kernel, and whose lock the
 * engine's thread holds when it likes.
 *
 * A tick is a launch of its own, not of a captured graph: a graph saves the driver work between
 * nodes, of which a single kernel has none, and its arguments would be as fixed as these are.
 * Nothing is allocated once the loop is made.
 *
 * This header is also the cffi declaration. */
#ifndef DP_ADMISSION_LOOP_H
#define DP_ADMISSION_LOOP_H

#include "device.h"
#include "driver.h"

/* How long it looks for commands before it sleeps on the doorbell. */
#define DP_ADMISSION_SPIN_US 30

struct dp_admission_plan {
    struct dp_region *region;
    const struct dp_driver *driver;
    CUcontext context; /* of the two kernels and the stream */
    CUstream stream;   /* no other thread uses it meanwhile */
    CUfunction tick, resident;
    uint64_t device; /* where struct dp_device lies, as the device addresses it */
    int daemon;      /* a socket: the loop ends when it is readable or hung up; -1: none */
    int work;        /* an eventfd, written when a slot is READY or CANCELLING; -1: none */
    uint32_t stays;  /* 0: a tick for each batch of commands; 1: a resident kernel */
};

/* The call that failed last. */
enum dp_admission_call {
    DP_ADMISSION_NONE = 0,
    DP_ADMISSION_CONTEXT = 1,  /* making it current, or staying out of captures in it */
    DP_ADMISSION_TICK = 2,     /* launching it */
    DP_ADMISSION_RESIDENT = 3, /* likewise */
    DP_ADMISSION_KERNEL = 4,   /* a kernel, while it ran */
};

struct dp_admission;

/* The plan is copied; all that it names outlives the loop. NULL with errno set: no memory, or no
 * descriptors. Not to be freed while dp_admission_run is in it. */
struct dp_admission *dp_admission_new(const struct dp_admission_plan *plan);
void dp_admission_free(struct dp_admission *admission);

/* Run both kernels once, on the calling thread, before dp_admission_run. 0 or a CUresult. */
int dp_admission_try(struct dp_admission *admission);
/* Carry out what is posted until dp_admission_end, or until the daemon is gone. 0, or the CUresult
 * that ended it. A kernel that hangs keeps a tick's loop in the driver. */
int dp_admission_run(struct dp_admission *admission);
/* Have it end, from any thread, resident kernel included. */
void dp_admission_end(struct dp_admission *admission);
/* The call that the CUresult came from. */
enum dp_admission_call dp_admission_failed(const struct dp_admission *admission);

#endif
