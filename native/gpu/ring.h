/* The command rings of the `device` table: how a listener asks the admission kernel for what it may
 * not do itself, since only the device swaps the words that lie in it.
 *
 * Every word here has one writer, and is aligned and loaded and stored whole; the two sides meet by
 * acquire and release at system scope, never by a read-modify-write across the bus. Both compilers
 * read this header, and it is also the cffi declaration.
 *
 * A ring belongs to one listener, which alone posts in it and so can block no other. An entry holds
 * its command and its verdict, one word each, both marked with the lap of the ring in which they
 * were written: a word of the lap before is not there yet. Position p lies in entry p % entries and
 * in lap p / entries. Commands are carried out in the order in which they were posted.
 *
 * A slot's state is mirrored to the host in two words, one for each side that changes it: `states`
 * by the admission kernel, `mirrors` by the kernels that take and finish. Each is written before
 * the compare-and-swap that gives the slot away, so it never goes back; the later of the two is the
 * slot's state. */
#ifndef DP_RING_H
#define DP_RING_H

#include "../region.h"

/* A command or a verdict, u64: bits 0-3 kind or result, 4-13 slot, 14-53 generation, 54-63 lap
 * (from 1). A claim has instead of slot and generation four numbers of ten bits: first, count - 1,
 * start, probes - 1. A result is a state, or a negative status in four bits. */
#define DP_COMMAND_KIND_MASK  0xF
#define DP_COMMAND_SLOT_SHIFT 4
#define DP_COMMAND_TEN_BITS   0x3FF
#define DP_COMMAND_GENERATION 14
#define DP_COMMAND_LAP_SHIFT  54
#define DP_LAPS               1023

#define DP_RING_SMALLEST 16

enum dp_command_kind {
    DP_COMMAND_CLAIM = 1,
    DP_COMMAND_PUBLISH = 2,
    DP_COMMAND_ABORT = 3,
    DP_COMMAND_REVOKE = 4,
    DP_COMMAND_CANCEL = 5,
    DP_COMMAND_RELEASE = 6,
    DP_COMMAND_LET_GO = 7,     /* abort, revoke, cancel or release, as the state asks for */
    DP_COMMAND_ABANDON = 8,    /* abort this ring's last claim: its listener gave up on it */
    DP_COMMAND_LET_GO_ALL = 9, /* let go of every slot of a listener that is gone */
};

struct dp_command {
    uint64_t command; /* the listener's */
    uint8_t listener_half[24];
    uint64_t verdict; /* the device's */
    uint8_t device_half[24];
};

/* The head of a ring; its entries follow. */
struct dp_ring {
    struct dp_word posted;   /* the listener's: positions that have a command */
    struct dp_word consumed; /* the device's: positions that have a verdict */
};

/* What the admission kernels and the thread that launches them tell each other; the daemon has no
 * part in it. */
struct dp_resident {
    struct dp_word beat;   /* the device's: a stamp of its timer, in ns (clock.h); it moves while a
                              kernel stays on the device */
    struct dp_word stop;   /* the host's: not 0 asks that one to end */
    struct dp_word offset; /* the host's, i64: CLOCK_REALTIME less the device's timer, in ns */
};

/* Entries of a ring, a power of two: when a listener has posted all that it may without an answer
 * (three commands a slot), one claim and as much again still fit. */
uint32_t dp_ring_entries(uint32_t slots);

#endif
