/* What the runtime made, from the slot to the stream; dataplane/egress.py is the reference.
 *
 * Nothing that lies in the region is trusted: each word is loaded once, checked, and that value is
 * used. The tail of a finished answer is copied and the slot released at once, so a slow reader
 * costs its own connection only: while more waits for a connection than may, output stays in the
 * slot, a finished answer's for a short while. */
#include <stdarg.h>
#include <stdio.h>

#include "../atomics.h"
#include "../tokens.h"
#include "prompt1.h"
#include "raw_inside.h"

#define HOLD_WEIGHT 0.05 /* of the newest request in the smoothed time that a slot is held */

/* The watch ----------------------------------------------------------------------------------- */

void dp_raw_watch(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    exchange->watch = raw->watched++;
    raw->watches[exchange->watch] = (struct dp_watch){
        .generation = exchange->generation, .slot = exchange->slot, .state = DP_READY};
    if (!exchange->unanswered) {
        exchange->unanswered = true;
        raw->unanswered[raw->unanswered_count++] = exchange->slot;
    }
}

/* The last entry takes the place, so the watch stays dense. */
void dp_raw_unwatch(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    const struct dp_watch *last = &raw->watches[--raw->watched];
    raw->exchanges[last->slot].watch = exchange->watch;
    raw->watches[exchange->watch] = *last;
    exchange->watch = DP_RAW_NOBODY;
}

/* Those that wait for their reader ------------------------------------------------------------ */

static bool is_overfull(const struct dp_raw_exchange *exchange) {
    return dp_conn_unacked(exchange->entry->conn) > DP_RAW_BUFFER_LIMIT;
}

/* Leave the output in the slot until its connection has room. */
static void hold(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    struct dp_watch *watch = &raw->watches[exchange->watch];
    watch->paused = watch->state;
    exchange->held_until = watch->state == DP_DONE ? raw->pump->now + DP_RAW_HOLD_NS : DP_RAW_NEVER;
    if (exchange->held)
        return;
    exchange->held = true;
    exchange->next_held = DP_RAW_NOBODY;
    exchange->previous_held = raw->last_held;
    if (raw->last_held != DP_RAW_NOBODY)
        raw->exchanges[raw->last_held].next_held = exchange->slot;
    else
        raw->first_held = exchange->slot;
    raw->last_held = exchange->slot;
    raw->held_count++;
}

static void unhold(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    if (!exchange->held)
        return;
    uint32_t next = exchange->next_held, previous = exchange->previous_held;
    exchange->held = false;
    *(previous != DP_RAW_NOBODY ? &raw->exchanges[previous].next_held : &raw->first_held) = next;
    *(next != DP_RAW_NOBODY ? &raw->exchanges[next].previous_held : &raw->last_held) = previous;
    raw->held_count--;
}

void dp_raw_ended(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    struct dp_raw_stats *stats = &raw->stats;
    exchange->live = false;
    unhold(raw, exchange);
    double held = (double)(raw->pump->now - exchange->started) / 1e9;
    stats->hold_s += (held - stats->hold_s) * (stats->hold_s != 0 ? HOLD_WEIGHT : 1.0);
}

/* What is written ----------------------------------------------------------------------------- */

void dp_raw_answer(struct dp_raw *raw, struct dp_raw_exchange *exchange, uint32_t count,
                   uint32_t finish) {
    uint8_t *from = raw->scratch + DP_PROMPT1_VERDICT_BYTES;
    uint8_t *to = from + (size_t)count * 4;
    if (!exchange->answered) {
        exchange->answered = true;
        raw->stats.ok++;
        from = raw->scratch;
        dp_prompt1_verdict(from, DP_PROMPT1_OK, exchange->slot, exchange->request_id,
                           exchange->queue_us, exchange->ingress_us, 0, exchange->free_left);
    }
    if (finish) {
        dp_prompt1_end(to, finish, exchange->n_tokens, exchange->sent);
        to += DP_PROMPT1_END_BYTES;
        exchange->stream->app_state = DP_RAW_ANSWERED;
        exchange->stream->app = NULL;
    }
    dp_conn_send(exchange->entry->conn, exchange->stream, from, (size_t)(to - from), finish != 0);
}

void dp_raw_fail(struct dp_raw_exchange *exchange, uint64_t code) {
    exchange->stream->app_state = DP_RAW_ANSWERED;
    exchange->stream->app = NULL;
    dp_conn_reset(exchange->entry->conn, exchange->stream, code);
}

/* What the runtime did ------------------------------------------------------------------------ */

void dp_raw_break(struct dp_raw *raw, uint32_t slot, const char *format, ...) {
    char text[160];
    if (raw->broken)
        return;
    raw->broken = true;
    int size = snprintf(text, sizeof text, "slot %u: ", slot);
    va_list arguments;
    va_start(arguments, format);
    size += vsnprintf(text + size, sizeof text - (size_t)size, format, arguments);
    va_end(arguments);
    dp_events_push(raw->pump, DP_EVENT_BROKEN, 0, 0, 0, raw->index, text, (size_t)size);
}

static bool breaks_rule(struct dp_raw *raw, const struct dp_raw_exchange *exchange,
                        const struct dp_watch *watch) {
    uint32_t slot = exchange->slot;
    if (watch->state != DP_READY && watch->state != DP_RUNNING && watch->state != DP_DONE)
        dp_raw_break(raw, slot, "the state word left this listener's hands");
    else if (watch->count > exchange->max_output)
        dp_raw_break(raw, slot, "%u output ids, %u allowed", watch->count, exchange->max_output);
    else if (watch->count < watch->seen)
        dp_raw_break(raw, slot, "the output count went back from %u to %u", watch->seen,
                     watch->count);
    else
        return false;
    return true;
}

/* The first sign of the runtime: its taken time, and the first token's if there is one. */
static void pick_up(struct dp_raw *raw, struct dp_raw_exchange *exchange, uint32_t count,
                    int64_t now_ns) {
    const struct dp_request *request = &raw->region->requests[exchange->slot];
    int64_t taken_ns = (int64_t)dp_load_relaxed((const uint64_t *)&request->taken_ns);
    exchange->picked_up = true;
    /* The runtime may have written anything there. */
    dp_raw_record(raw, DP_RAW_PICKUP,
                  (int64_t)((uint64_t)taken_ns - (uint64_t)exchange->published_ns));
    if (count)
        dp_raw_record(raw, DP_RAW_FIRST_TOKEN, now_ns - exchange->complete_ns);
}

/* Copy the new ids into the scratch, and note the first sign of the runtime. False: it broke a
 * rule.
 */
static bool take_output(struct dp_raw *raw, struct dp_raw_exchange *exchange,
                        const struct dp_watch *watch, int64_t now_ns) {
    if (watch->count > watch->seen &&
        dp_copy_output(raw->region, exchange->slot, watch->seen, watch->count,
                       raw->scratch + DP_PROMPT1_VERDICT_BYTES) != DP_OK) {
        dp_raw_break(raw, exchange->slot, "output id %u is outside the vocabulary",
                     raw->region->writers[exchange->slot].bad_id);
        return false;
    }
    if (!exchange->picked_up)
        pick_up(raw, exchange, watch->count, now_ns);
    return true;
}

/* The slot is back; the rest of the answer goes out. */
static void complete(struct dp_raw *raw, struct dp_raw_exchange *exchange, uint32_t count,
                     uint32_t finish, int64_t now_ns) {
    if (exchange->watch != DP_RAW_NOBODY)
        dp_raw_unwatch(raw, exchange);
    dp_raw_record(raw, DP_RAW_TOTAL, now_ns - exchange->complete_ns);
    dp_raw_ended(raw, exchange);
    if (finish == DP_FINISH_ERROR) {
        raw->stats.failed++;
        dp_raw_fail(exchange, DP_RAW_RUNTIME_ERROR);
    } else {
        raw->stats.completed++;
        dp_raw_answer(raw, exchange, count, finish);
    }
}

/* The runtime is done: `count` ids that were not sent lie in the scratch. */
static void finish(struct dp_raw *raw, struct dp_raw_exchange *exchange, uint32_t count,
                   int64_t now_ns) {
    struct dp_region *region = raw->region;
    uint32_t reason = dp_load_flag(&region->requests[exchange->slot].finish_reason);
    if (reason != DP_FINISH_STOP && reason != DP_FINISH_LENGTH && reason != DP_FINISH_ERROR) {
        dp_raw_break(raw, exchange->slot, "finish reason %u", reason);
        return;
    }
    exchange->sent += count;
    if (reason == DP_FINISH_ERROR && !exchange->answered) {
        /* A reset would take an unsent 200 with it: that goes out now, and the next pass finds the
         * slot DONE once more. */
        dp_raw_answer(raw, exchange, count, 0);
        return;
    }
    int status = raw->verbs->release(raw, exchange->slot, exchange->generation);
    if (status == DP_UNANSWERED)
        dp_raw_give_up(raw);
    else if (status < 0)
        dp_raw_break(raw, exchange->slot, "it left DONE under its listener (status %d)", status);
    else
        complete(raw, exchange, count, reason, now_ns);
}

/* Send on what a poll found. */
static void advance(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    struct dp_watch *watch = &raw->watches[exchange->watch];
    if (breaks_rule(raw, exchange, watch))
        return;
    if (is_overfull(exchange)) {
        hold(raw, exchange);
        return;
    }
    int64_t now_ns = dp_realtime_ns();
    if (!take_output(raw, exchange, watch, now_ns))
        return;
    uint32_t count = watch->count - watch->seen;
    watch->seen = watch->count;
    if (watch->state == DP_DONE) {
        finish(raw, exchange, count, now_ns);
        return;
    }
    exchange->sent += count;
    dp_raw_answer(raw, exchange, count, 0);
}

static void break_off(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    dp_raw_let_go(raw, exchange);
    raw->stats.failed++;
    dp_raw_fail(exchange, DP_RAW_SLOW_READER);
}

/* Whether a connection drained is asked once a look: those that another one's output takes the room
 * from are held for another while, since their reader reads. */
static bool has_drained(const struct dp_raw *raw, const struct dp_raw_exchange *exchange) {
    struct dp_entry *entry = exchange->entry;
    uint64_t look = raw->front->looks;
    if ((uintptr_t)entry->own >> 1 != look)
        entry->own = (void *)((uintptr_t)look << 1 | !is_overfull(exchange));
    return (uintptr_t)entry->own & 1;
}

/* Go on with what is held, the longest held first, and give up on what is overdue. Whatever is held
 * anew meanwhile stands behind those that this pass looks at. */
static void resume(struct dp_raw *raw) {
    uint32_t next, left = raw->held_count;
    for (uint32_t slot = raw->first_held; left-- && !raw->broken; slot = next) {
        struct dp_raw_exchange *exchange = &raw->exchanges[slot];
        struct dp_watch *watch = &raw->watches[exchange->watch];
        next = exchange->next_held;
        if (has_drained(raw, exchange)) {
            unhold(raw, exchange);
            watch->paused = 0;
            advance(raw, exchange);
        } else if (watch->state != watch->paused) {
            advance(raw, exchange);
        } else if (exchange->held_until <= raw->pump->now) {
            break_off(raw, exchange);
        }
    }
}

/* Polls, and leaves in `changed` the slots of those that moved and are not held. */
static uint32_t poll_watches(struct dp_raw *raw) {
    uint32_t found = dp_poll(raw->region, raw->watches, raw->watched, raw->changed), kept = 0;
    for (uint32_t i = 0; i < found; i++) {
        uint32_t slot = raw->watches[raw->changed[i]].slot;
        raw->changed[kept] = slot;
        kept += !raw->exchanges[slot].held;
    }
    return kept;
}

static void send_verdicts(struct dp_raw *raw) {
    for (uint32_t i = 0; i < raw->unanswered_count; i++) {
        struct dp_raw_exchange *exchange = &raw->exchanges[raw->unanswered[i]];
        exchange->unanswered = false;
        if (exchange->watch != DP_RAW_NOBODY && !exchange->answered)
            dp_raw_answer(raw, exchange, 0, 0);
    }
    raw->unanswered_count = 0;
}

void dp_raw_look(struct dp_raw *raw) {
    if (!raw->watched || raw->broken)
        return;
    raw->front->looks++;
    uint32_t changed = poll_watches(raw);
    if (raw->held_count)
        resume(raw);
    for (uint32_t i = 0; i < changed && !raw->broken; i++) {
        struct dp_raw_exchange *exchange = &raw->exchanges[raw->changed[i]];
        if (exchange->watch != DP_RAW_NOBODY)
            advance(raw, exchange);
    }
}

static void pass(struct dp_raw *raw) {
    dp_raw_take_answers(raw);
    if (!raw->watched || raw->broken)
        return;
    dp_raw_look(raw);
    if (!raw->broken)
        send_verdicts(raw);
}

void dp_raw_pass(struct dp_pump *pump) {
    struct dp_raw *raw;
    for (uint32_t at = 0; (raw = dp_raw_next(pump->raw, &at));)
        pass(raw);
}

/* Deadlines ------------------------------------------------------------------------------------ */

/* The device was asked: until it answers, the slot may be the runtime's alone, so it is not
 * watched. */
static void stand_by(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    dp_raw_unwatch(raw, exchange);
    unhold(raw, exchange);
}

/* It is this listener's still. */
static void go_on(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    dp_raw_watch(raw, exchange);
    struct dp_watch *watch = &raw->watches[exchange->watch];
    watch->seen = watch->count = exchange->sent;
}

static void on_cancel(struct dp_raw *raw, struct dp_raw_exchange *exchange, uint32_t count,
                      int64_t now_ns, int status) {
    if (status == DP_UNANSWERED)
        dp_raw_give_up(raw);
    else if (status >= 0)
        complete(raw, exchange, count, DP_FINISH_DEADLINE, now_ns);
}

/* The runtime took it: what is out is copied before the cancel, since after that the slot is the
 * runtime's alone. */
static void cancel(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    struct dp_watch *watch = &raw->watches[exchange->watch];
    uint32_t changed;
    dp_poll(raw->region, watch, 1, &changed);
    if (breaks_rule(raw, exchange, watch) || watch->state == DP_DONE)
        return; /* What is done the next pass finds. */
    if (is_overfull(exchange)) {
        break_off(raw, exchange);
        return;
    }
    int64_t now_ns = dp_realtime_ns();
    uint32_t count = watch->count - watch->seen, sent = watch->count;
    if (watch->count && !take_output(raw, exchange, watch, now_ns))
        return;
    int status = raw->verbs->cancel(raw, exchange->slot, exchange->generation);
    if (status >= 0 || status == DP_PENDING)
        exchange->sent = sent;
    if (status != DP_PENDING) {
        on_cancel(raw, exchange, count, now_ns, status);
        return;
    }
    if (count)
        dp_raw_answer(raw, exchange, count, 0);
    stand_by(raw, exchange);
}

/* In READY the slot is revoked, in RUNNING cancelled. If either finds that the runtime moved on,
 * its result counts. */
void dp_raw_expire(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    if (raw->broken)
        return;
    int status = raw->verbs->revoke(raw, exchange->slot, exchange->generation);
    if (status == DP_PENDING)
        stand_by(raw, exchange);
    else if (status == DP_UNANSWERED)
        dp_raw_give_up(raw);
    else if (status == DP_FREE)
        complete(raw, exchange, 0, DP_FINISH_DEADLINE, dp_realtime_ns());
    else
        cancel(raw, exchange);
}

void dp_raw_answered(struct dp_raw *raw, const struct dp_answer *answer) {
    struct dp_raw_exchange *exchange = &raw->exchanges[answer->slot];
    /* Whoever left meanwhile let go of it; the next one's claim is answered later than this. */
    if (!exchange->live)
        return;
    if (answer->status >= 0) {
        complete(raw, exchange, 0, DP_FINISH_DEADLINE, dp_realtime_ns());
        return;
    }
    go_on(raw, exchange);
    if (answer->kind == DP_COMMAND_REVOKE)
        cancel(raw, exchange);
}
