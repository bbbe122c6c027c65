/* The listener's side of the `device` table: each verb is a command in this listener's ring.
 *
 * Claim, revoke and cancel wait for their verdict: a spin of some microseconds, then the listener's
 * eventfd. The others are told to the device and not waited for; what they lead to is known from
 * what this listener did itself and from the mirrors. A device that leaves a command unanswered for
 * `answer_ms` is given up for good: every later claim says DP_UNANSWERED at once, and what is held
 * can still be let go of.
 *
 * This header is also the cffi declaration. */
#ifndef DP_COMMANDS_H
#define DP_COMMANDS_H

#include "ring.h"

struct dp_commands;

/* NULL when there is no memory. The region stays until dp_commands_free. Takes up where the ring's
 * last poster stopped, so that whoever outlives a listener can let go of what it held. */
struct dp_commands *dp_commands_new(struct dp_region *region, uint32_t owner, uint32_t spin_us,
                                    uint32_t answer_ms);
void dp_commands_free(struct dp_commands *commands);
/* Whether the device was given up. */
int dp_commands_dead(const struct dp_commands *commands);

/* As dp_admit and dp_submit (tokens.h), or DP_UNANSWERED. */
int dp_commands_admit(struct dp_commands *commands, uint32_t first, uint32_t count, uint32_t start,
                      uint32_t probes, uint64_t request_id, uint32_t n_tokens, uint32_t width,
                      uint32_t max_output, float temperature, float top_p, uint32_t top_k,
                      uint32_t seed, struct dp_claimed *out);
int64_t dp_commands_submit(struct dp_commands *commands, uint32_t slot, uint64_t generation,
                           const uint8_t *body, size_t offset, size_t len);

/* The state that the slot is in then, or a negative status; DP_ILLEGAL and DP_STALE are known here
 * where this listener's own record says so, and are the device's verdict elsewhere. */
int dp_commands_revoke(struct dp_commands *commands, uint32_t slot, uint64_t generation);
int dp_commands_cancel(struct dp_commands *commands, uint32_t slot, uint64_t generation);
/* These do not wait. What dp_commands_let_go answers of a published slot is what the mirrors say it
 * will lead to; the runtime may be faster. */
int dp_commands_release(struct dp_commands *commands, uint32_t slot, uint64_t generation);
int dp_commands_let_go(struct dp_commands *commands, uint32_t slot, uint64_t generation);
/* For a listener that is gone: give up its claim that has no verdict, let go of all it holds. */
int dp_commands_let_go_all(struct dp_commands *commands);

/* Asking without waiting -------------------------------------------------------------------------
 *
 * For a listener that has other work until the device answers: claim, revoke and cancel are posted,
 * and their answers taken in the order of the asking. `now` is the listener's clock, in any unit.
 * All else is as above. The device rings the listener's eventfd for an answer, too; whoever sleeps
 * looks at dp_commands_is_answered between its flag and its sleep. */

struct dp_answer {
    void *asker; /* of a claim */
    int kind;    /* DP_COMMAND_CLAIM, DP_COMMAND_REVOKE or DP_COMMAND_CANCEL */
    int status;  /* DP_OK (a claim), the state that the slot is in then, or a negative status */
    uint32_t slot;
    uint64_t generation;
};

/* Where it was posted (0 or more), DP_OVERFLOW: the ring has no room until answers were taken, or
 * DP_UNANSWERED. */
int64_t dp_commands_ask_claim(struct dp_commands *commands, uint32_t first, uint32_t count,
                              uint32_t start, uint32_t probes, void *asker, int64_t now);
/* DP_PENDING, or what dp_commands_revoke and dp_commands_cancel say without asking. */
int dp_commands_ask(struct dp_commands *commands, int kind, uint32_t slot, uint64_t generation,
                    int64_t now);
/* Nobody waits for the claim at this place any more: what it is granted is let go of. */
void dp_commands_disown(struct dp_commands *commands, int64_t place);
/* The next answer: 1 and *out, or 0. */
int dp_commands_answer(struct dp_commands *commands, struct dp_answer *out);
int dp_commands_is_answered(struct dp_commands *commands);
/* When the longest waiting of those without an answer was asked; INT64_MAX: there is none. */
int64_t dp_commands_asked_at(const struct dp_commands *commands);
/* Give the device up now. What was asked of it is answered if it ever wakes up. */
void dp_commands_give_up(struct dp_commands *commands);

#endif
