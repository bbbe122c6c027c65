/* A turn of an engine whose loop runs on the host, on the `device` table: only kernels may swap the
 * slots' words there, so what the engine asks of its slots is written down, and one launch of
 * `dp_engine_turn` (engine.cu) carries it out, takes what is READY, and writes down what became of
 * it.
 *
 * The paper is one block of memory that both sides see at addresses which never change, with the
 * counts in it, so every launch has the same arguments. The two sides take turns: the engine writes
 * while no launch is in flight, the kernel between launch and end, and the launch and the wait for
 * its end order the one before the other. So no word here needs an ordering of its own.
 *
 * This header is also the cffi declaration; both compilers read it. */
#ifndef DP_TURN_H
#define DP_TURN_H

#include "../attach.h"

/* One slot's part. The engine's half stands for the request that it holds there; the device's half
 * says what this launch did. */
struct dp_turn_slot {
    uint64_t generation; /* of the request that is held */
    uint32_t held;       /* 0: none, and nothing below counts */
    uint32_t count;      /* ids to emit */
    uint32_t reason;     /* to finish with, after the ids; 0: do not */
    uint32_t lost;       /* an emit found the request over: the host's note */
    uint8_t engine_half[8];

    uint64_t taken; /* generation of the request that was taken */
    uint32_t is_taken;
    uint32_t cancelled; /* the held request's listener waits no more */
    int32_t emitted;    /* what the emit answered */
    int32_t finished;   /* what the finish answered; DP_ILLEGAL when none was asked for */
    uint8_t device_half[8];
};

/* Behind it lie struct dp_turn_slot[slots], and behind those i32[slots][room]: the ids to emit. */
struct dp_turn {
    uint32_t take; /* 0: leave what is READY */
    uint32_t room; /* ids that a slot may emit in one turn */
    uint8_t line[56];
};

/* Bytes of a paper. */
size_t dp_turn_bytes(const struct dp_region *region, uint32_t room);
struct dp_turn_slot *dp_turn_at(struct dp_turn *turn, uint32_t slot);
int32_t *dp_turn_ids(struct dp_region *region, struct dp_turn *turn, uint32_t slot);

/* Whether a slot waits for a turn: READY, or held and CANCELLING, as the host may know it. */
int dp_turn_is_due(struct dp_region *region, struct dp_turn *turn);

/* A launch has ended: strike out the verbs that it carried out, hold what it took, and write that
 * to `taken` (of as many as there are slots). How many were taken. */
uint32_t dp_turn_end(struct dp_region *region, struct dp_turn *turn, struct dp_taken *taken);

#endif
