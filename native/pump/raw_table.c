/* The slots of the attachment, as the raw front asks for them: on the host table each verb is a
 * compare-and-swap and answers at once; on the device table it is a command (gpu/commands.h).
 *
 * Nobody waits for a device here. A stream whose header is whole stands in a list while its claim
 * has no answer, and nothing of it is consumed; it is offered once more when the answer is there,
 * and then the claim is decided. The same goes for the revoke or cancel of a deadline, whose
 * exchange stands by meanwhile. */
#include "raw_inside.h"

#define NOT_POSTED UINT64_MAX /* of a claim for which the ring had no room yet */

/* Verbs --------------------------------------------------------------------------------------- */

static int host_claim(struct dp_raw *raw, struct dp_stream *stream, uint32_t start, uint32_t probes,
                      struct dp_claimed *out) {
    (void)stream;
    const struct dp_raw_config *config = &raw->config;
    return dp_claim(raw->region, config->owner, config->first, config->count, start, probes, out);
}

static int64_t host_submit(struct dp_raw *raw, uint32_t slot, uint64_t generation,
                           const uint8_t *bytes, size_t length) {
    return dp_submit(raw->region, slot, generation, bytes, 0, length);
}

static int host_revoke(struct dp_raw *raw, uint32_t slot, uint64_t generation) {
    return dp_apply(raw->region, slot, generation, DP_REVOKE);
}

static int host_cancel(struct dp_raw *raw, uint32_t slot, uint64_t generation) {
    return dp_cancel(raw->region, slot, generation);
}

static int host_release(struct dp_raw *raw, uint32_t slot, uint64_t generation) {
    return dp_apply(raw->region, slot, generation, DP_RELEASE);
}

static int host_let_go(struct dp_raw *raw, uint32_t slot, uint64_t generation) {
    return dp_let_go(raw->region, slot, generation);
}

const struct dp_raw_verbs dp_raw_host = {.claim = host_claim,
                                         .submit = host_submit,
                                         .revoke = host_revoke,
                                         .cancel = host_cancel,
                                         .release = host_release,
                                         .let_go = host_let_go};

/* Where the claim stands in the ring becomes the stream's number. */
static int device_claim(struct dp_raw *raw, struct dp_stream *stream, uint32_t start,
                        uint32_t probes, struct dp_claimed *out) {
    (void)out;
    const struct dp_raw_config *config = &raw->config;
    int64_t place = dp_commands_ask_claim(raw->commands, config->first, config->count, start,
                                          probes, stream, raw->pump->now);
    if (place == DP_UNANSWERED)
        return DP_UNANSWERED;
    stream->app_number = place >= 0 ? (uint64_t)place : NOT_POSTED;
    return DP_PENDING;
}

static int64_t device_submit(struct dp_raw *raw, uint32_t slot, uint64_t generation,
                             const uint8_t *bytes, size_t length) {
    return dp_commands_submit(raw->commands, slot, generation, bytes, 0, length);
}

static int device_revoke(struct dp_raw *raw, uint32_t slot, uint64_t generation) {
    return dp_commands_ask(raw->commands, DP_COMMAND_REVOKE, slot, generation, raw->pump->now);
}

static int device_cancel(struct dp_raw *raw, uint32_t slot, uint64_t generation) {
    return dp_commands_ask(raw->commands, DP_COMMAND_CANCEL, slot, generation, raw->pump->now);
}

static int device_release(struct dp_raw *raw, uint32_t slot, uint64_t generation) {
    return dp_commands_release(raw->commands, slot, generation);
}

static int device_let_go(struct dp_raw *raw, uint32_t slot, uint64_t generation) {
    return dp_commands_let_go(raw->commands, slot, generation);
}

const struct dp_raw_verbs dp_raw_device = {.claim = device_claim,
                                           .submit = device_submit,
                                           .revoke = device_revoke,
                                           .cancel = device_cancel,
                                           .release = device_release,
                                           .let_go = device_let_go};

/* Affinity 0 starts anywhere; a strict one tries its own slot alone. */
static int claim(struct dp_raw *raw, struct dp_stream *stream,
                 const struct dp_prompt1_request *request, struct dp_claimed *out) {
    uint32_t count = raw->config.count, probes = count, start = raw->next_probe;
    if (request->affinity) {
        start = request->affinity % count;
        if (request->strict)
            probes = 1;
    } else {
        raw->next_probe = start + 1 < count ? start + 1 : 0;
    }
    return raw->verbs->claim(raw, stream, start, probes, out);
}

/* Claims without an answer --------------------------------------------------------------------- */

static void take_out(struct dp_raw *raw, struct dp_stream *stream) {
    struct dp_stream *next = stream->app_next, *previous = stream->app_previous;
    *(previous ? &previous->app_next : &raw->first_claim) = next;
    *(next ? &next->app_previous : &raw->last_claim) = previous;
    if (raw->first_unposted == stream)
        raw->first_unposted = next;
    stream->app_next = stream->app_previous = NULL;
    dp_raw_mark(stream, DP_RAW_NEW, NULL);
}

static void stand_in_line(struct dp_raw *raw, struct dp_entry *entry, struct dp_stream *stream) {
    dp_raw_mark(stream, DP_RAW_CLAIMING, entry);
    stream->app_index = raw->index;
    stream->app_next = NULL;
    stream->app_previous = raw->last_claim;
    *(raw->last_claim ? &raw->last_claim->app_next : &raw->first_claim) = stream;
    raw->last_claim = stream;
    if (stream->app_number == NOT_POSTED && !raw->first_unposted)
        raw->first_unposted = stream;
}

int dp_raw_claim(struct dp_raw *raw, struct dp_entry *entry, struct dp_stream *stream,
                 const struct dp_prompt1_request *request, struct dp_claimed *out) {
    int status = DP_PENDING;
    if (raw->decided.stream == stream) {
        raw->decided.stream = NULL;
        *out = raw->decided.claimed;
        return raw->decided.status;
    }
    if (raw->first_unposted)
        stream->app_number = NOT_POSTED;
    else
        status = claim(raw, stream, request, out);
    if (status == DP_PENDING)
        stand_in_line(raw, entry, stream);
    return status;
}

void dp_raw_forget_claim(struct dp_raw *raw, struct dp_stream *stream) {
    if (stream->app_number != NOT_POSTED)
        dp_commands_disown(raw->commands, (int64_t)stream->app_number);
    take_out(raw, stream);
}

static bool read_header(const struct dp_stream *stream, struct dp_prompt1_request *request) {
    size_t length;
    const uint8_t *bytes = dp_stream_readable(stream, &length);
    return dp_prompt1_parse(bytes, length, request) == DP_PROMPT1_WHOLE;
}

void dp_raw_refuse_claims(struct dp_raw *raw, enum dp_why why) {
    struct dp_stream *stream;
    while ((stream = raw->first_claim)) {
        struct dp_entry *entry = stream->app;
        struct dp_prompt1_request request = {0};
        read_header(stream, &request);
        dp_raw_refuse_claim(raw, entry, stream, &request, why, stream->app_at_ns[1] != 0);
    }
}

/* There is room in the ring again. */
static void post_claims(struct dp_raw *raw) {
    struct dp_stream *stream;
    while (!raw->broken && (stream = raw->first_unposted)) {
        struct dp_prompt1_request request;
        if (!read_header(stream, &request)) {
            dp_raw_leave_to_python(raw->pump, stream->app, stream);
            continue;
        }
        if (claim(raw, stream, &request, NULL) == DP_UNANSWERED)
            dp_raw_give_up(raw);
        else if (stream->app_number == NOT_POSTED)
            return;
        else
            raw->first_unposted = stream->app_next;
    }
}

/* Answers -------------------------------------------------------------------------------------- */

/* Offer the stream again, which decides on its request. If that was left to Python meanwhile, as
 * where the daemon drains, nobody wants the slot. */
static void decide(struct dp_raw *raw, const struct dp_answer *answer) {
    struct dp_stream *stream = answer->asker;
    struct dp_entry *entry = stream->app;
    take_out(raw, stream);
    raw->decided.stream = stream;
    raw->decided.status = answer->status;
    raw->decided.claimed =
        (struct dp_claimed){.generation = answer->generation, .slot = answer->slot};
    if (answer->status == DP_OK)
        raw->decided.claimed.free_left =
            dp_count_free(raw->region, raw->config.first, raw->config.count);
    dp_conn_offer(entry->conn, stream);
    if (raw->decided.stream && answer->status == DP_OK)
        raw->verbs->let_go(raw, answer->slot, answer->generation);
    raw->decided.stream = NULL;
}

void dp_raw_take_answers(struct dp_raw *raw) {
    struct dp_answer answer;
    if (!raw->commands)
        return;
    while (!raw->broken && dp_commands_answer(raw->commands, &answer)) {
        if (answer.status == DP_UNANSWERED)
            dp_raw_give_up(raw);
        else if (answer.kind == DP_COMMAND_CLAIM)
            decide(raw, &answer);
        else
            dp_raw_answered(raw, &answer);
    }
    post_claims(raw);
}

int64_t dp_raw_answer_due(const struct dp_raw *raw) {
    int64_t asked_at =
        raw->commands && !raw->broken ? dp_commands_asked_at(raw->commands) : DP_RAW_NEVER;
    return asked_at == DP_RAW_NEVER ? DP_RAW_NEVER : asked_at + raw->config.answer_timeout;
}

void dp_raw_give_up(struct dp_raw *raw) {
    if (raw->broken)
        return;
    raw->broken = raw->stuck = true;
    dp_commands_give_up(raw->commands);
    dp_events_push(raw->pump, DP_EVENT_STUCK, 0, 0, 0, raw->index, NULL, 0);
    dp_raw_refuse_claims(raw, DP_WHY_STUCK);
}
