/* What clients send, from the header to a published slot. dataplane/ingress.py and
 * dataplane/fronts/prompt1.py are the reference.
 *
 * Whatever has to be refused in words goes to Python. A header is not consumed before its claim was
 * decided, so Python sees such a stream from its first byte. */
#include <string.h>

#include "../tokens.h"
#include "prompt1.h"
#include "raw_inside.h"

/* Headers that are not whole ------------------------------------------------------------------ */

void dp_raw_forget_header(struct dp_raw_front *front, struct dp_stream *stream) {
    struct dp_stream *next = stream->app_next, *previous = stream->app_previous;
    *(previous ? &previous->app_next : &front->first_header) = next;
    *(next ? &next->app_previous : &front->last_header) = previous;
    stream->app_next = stream->app_previous = NULL;
    dp_raw_mark(stream, DP_RAW_NEW, NULL);
}

static void wait_for_header(struct dp_pump *pump, struct dp_entry *entry,
                            struct dp_stream *stream) {
    struct dp_raw_front *front = pump->raw;
    if (stream->app_state == DP_RAW_HEADER)
        return;
    dp_raw_mark(stream, DP_RAW_HEADER, entry);
    stream->app_number = (uint64_t)(pump->now + front->body_timeout);
    stream->app_next = NULL;
    stream->app_previous = front->last_header;
    *(front->last_header ? &front->last_header->app_next : &front->first_header) = stream;
    front->last_header = stream;
    dp_raw_expect(pump);
}

/* Claim --------------------------------------------------------------------------------------- */

static uint64_t new_id(struct dp_raw_front *front) {
    uint64_t id = front->next_id;
    front->next_id = id + 1 ? id + 1 : 1;
    return id;
}

/* When a slot may be free: the time that a request holds one, over their number. Rounded to even,
 * as Python does it. */
static uint32_t retry_after_ms(const struct dp_raw *raw) {
    if (raw->stats.hold_s == 0)
        return DP_RAW_RETRY_MS;
    double expected = raw->stats.hold_s * 1000 / raw->config.count;
    if (!(expected < DP_RAW_RETRY_MS_MAX))
        return DP_RAW_RETRY_MS_MAX;
    if (expected < 1)
        return 1;
    uint32_t whole = (uint32_t)expected;
    double rest = expected - whole;
    return whole + (rest > 0.5 || (rest == 0.5 && whole % 2));
}

/* Every slot is taken. The body is not read. */
static void refuse_busy(struct dp_raw *raw, struct dp_entry *entry, struct dp_stream *stream,
                        uint64_t request_id, int64_t queue_ns, bool fin) {
    uint32_t queue_us = dp_raw_record(raw, DP_RAW_QUEUE, queue_ns);
    raw->stats.busy++;
    dp_prompt1_verdict(raw->busy, DP_PROMPT1_BUSY, DP_PROMPT1_NO_SLOT, request_id, queue_us, 0,
                       retry_after_ms(raw), 0);
    dp_raw_mark(stream, fin ? DP_RAW_ANSWERED : DP_RAW_UNWANTED, NULL);
    dp_conn_send(entry->conn, stream, raw->busy, raw->busy_bytes, true);
    if (!fin)
        dp_conn_stop(entry->conn, stream, DP_RAW_NO_ERROR);
}

static void begin(struct dp_raw *raw, struct dp_entry *entry, struct dp_stream *stream,
                  struct dp_raw_exchange *exchange, const struct dp_prompt1_request *request,
                  int64_t queue_ns) {
    exchange->entry = entry;
    exchange->stream = stream;
    exchange->stream_id = stream->id;
    exchange->n_tokens = request->n_tokens;
    exchange->header_bytes = request->header_bytes;
    exchange->deadline_ms = request->deadline_ms;
    exchange->deadline_at = DP_RAW_NEVER;
    exchange->queue_ns = queue_ns;
    exchange->queue_us = 0;
    if (queue_ns > 0)
        exchange->queue_us =
            queue_ns / 1000 < DP_RAW_MOST_US ? (uint32_t)(queue_ns / 1000) : DP_RAW_MOST_US;
    exchange->started = raw->pump->now;
    exchange->live = exchange->writing = true;
    exchange->placed = exchange->answered = exchange->picked_up = false;
    exchange->sent = 0;
    exchange->complete_ns = stream->app_at_ns[1];
    entry->writing++;
    raw->stats.claimed++;
    dp_raw_mark(stream, DP_RAW_EXCHANGE, exchange);
}

/* Decide on a header that is whole and within bounds: DP_OK and the exchange, which holds a slot;
 * DP_FULL and it was answered; DP_PENDING; DP_UNANSWERED; DP_ILLEGAL: the runtime turned out to be
 * broken. */
static int claim(struct dp_raw *raw, struct dp_entry *entry, struct dp_stream *stream,
                 const struct dp_prompt1_request *request, bool fin,
                 struct dp_raw_exchange **held) {
    struct dp_claimed claimed;
    int status = dp_raw_claim(raw, entry, stream, request, &claimed);
    if (status == DP_PENDING || status == DP_UNANSWERED)
        return status;
    int64_t queue_ns = dp_realtime_ns() - stream->app_at_ns[0];
    if (status != DP_OK) {
        refuse_busy(raw, entry, stream, request->request_id, queue_ns, fin);
        return DP_FULL;
    }
    struct dp_raw_exchange *exchange = &raw->exchanges[claimed.slot];
    if (exchange->live) {
        dp_raw_break(raw, claimed.slot, "it was given out twice");
        return DP_ILLEGAL;
    }
    exchange->request_id = request->request_id ? request->request_id : new_id(raw->front);
    exchange->generation = claimed.generation;
    exchange->free_left = claimed.free_left;
    exchange->max_output =
        request->max_output ? request->max_output : raw->region->geometry.max_output;
    dp_describe(raw->region, claimed.slot, exchange->request_id, request->n_tokens,
                exchange->max_output, request->temperature, request->top_p, request->top_k,
                request->seed);
    dp_write_begin(raw->region, claimed.slot, request->n_tokens, request->width);
    begin(raw, entry, stream, exchange, request, queue_ns);
    *held = exchange;
    return DP_OK;
}

/* Write and publish -----------------------------------------------------------------------------
 */

static void refuse_body(struct dp_raw *raw, struct dp_raw_exchange *exchange, int status) {
    const struct dp_writer *writer = &raw->region->writers[exchange->slot];
    if (status == DP_BAD_TOKEN)
        dp_raw_refuse(raw, exchange, DP_WHY_BAD_TOKEN, writer->bad_index, writer->bad_id);
    else if (status == DP_OVERFLOW)
        dp_raw_refuse(raw, exchange, DP_WHY_OVERFLOW, 0, 0);
    else if (status == DP_SHORT)
        dp_raw_refuse(raw, exchange, DP_WHY_SHORT, writer->written, writer->partial_bytes);
    else if (status == DP_UNANSWERED)
        dp_raw_give_up(raw);
    else /* It is refused when the attachment ends. */
        dp_raw_break(raw, exchange->slot, "it left WRITING under its listener");
}

/* Nothing takes the slot: it goes back at publish, and the answer is empty. */
static void answer_null(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    raw->verbs->revoke(raw, exchange->slot, exchange->generation);
    exchange->live = false;
    raw->stats.completed++;
    dp_raw_answer(raw, exchange, 0, DP_FINISH_STOP);
}

/* Write the last bytes of a request whose end came, and publish it. */
static void submit(struct dp_raw *raw, struct dp_raw_exchange *exchange, const uint8_t *bytes,
                   size_t length) {
    static const uint8_t none;
    int64_t published_ns = raw->verbs->submit(raw, exchange->slot, exchange->generation,
                                              length ? bytes : &none, length);
    if (published_ns < 0) {
        refuse_body(raw, exchange, (int)published_ns);
        return;
    }
    exchange->entry->writing--;
    exchange->writing = false;
    exchange->published_ns = published_ns;
    dp_raw_record(raw, DP_RAW_QUEUE, exchange->queue_ns);
    exchange->ingress_us = dp_raw_record(raw, DP_RAW_INGRESS, published_ns - exchange->complete_ns);
    if (raw->config.null) {
        answer_null(raw, exchange);
        return;
    }
    dp_raw_watch(raw, exchange);
    if (exchange->deadline_ms)
        dp_raw_set_deadline(raw, exchange);
}

/* The ids that came with the header are written here; the connection decrypts the others to where
 * they belong. An id that is not whole is left to it too. How many bytes were consumed. */
static size_t place_rest(struct dp_raw *raw, struct dp_raw_exchange *exchange, const uint8_t *bytes,
                         size_t length) {
    uint64_t declared = (uint64_t)exchange->n_tokens * 4;
    size_t whole = length - length % 4;
    int status =
        length > declared ? DP_OVERFLOW : dp_write(raw->region, exchange->slot, bytes, 0, whole);
    if (status != DP_OK) {
        refuse_body(raw, exchange, status);
        return length;
    }
    if (whole < declared) {
        exchange->placed = true;
        dp_conn_set_place(exchange->entry->conn, exchange->stream,
                          (uint8_t *)dp_prompt(raw->region, exchange->slot) + whole,
                          exchange->header_bytes + whole, exchange->header_bytes + declared);
    }
    return whole;
}

/* Bytes [0, length) that were not consumed lie in the slot already. */
static size_t take_placed(struct dp_raw *raw, struct dp_raw_exchange *exchange, size_t length,
                          bool fin) {
    struct dp_region *region = raw->region;
    const struct dp_receiving *in = &exchange->stream->in;
    const struct dp_writer *writer = &region->writers[exchange->slot];
    uint64_t left = (uint64_t)(exchange->n_tokens - writer->written) * 4;
    int status = length > left || in->frontier > in->place_to
                     ? DP_OVERFLOW
                     : dp_check_placed(region, exchange->slot, length);
    if (status != DP_OK) {
        refuse_body(raw, exchange, status);
        return length;
    }
    if (!fin)
        return length - length % 4;
    /* From publish on the slot is the runtime's. */
    exchange->placed = false;
    dp_conn_leave_place(exchange->entry->conn, exchange->stream);
    submit(raw, exchange, NULL, 0);
    return length;
}

size_t dp_raw_take_body(struct dp_raw_exchange *exchange, const uint8_t *bytes, size_t length,
                        bool fin) {
    struct dp_raw *raw = exchange->raw;
    const struct dp_receiving *in = &exchange->stream->in;
    /* Of a body that is too long the end may be there behind what is offered. */
    if (!exchange->complete_ns && (fin || in->frontier == in->final_size))
        exchange->complete_ns = dp_conn_at_ns(exchange->entry->conn);
    if (raw->broken)
        return length; /* The attachment is about to end, and this request with it. */
    if (exchange->placed)
        return take_placed(raw, exchange, length, fin);
    if (fin) {
        submit(raw, exchange, bytes, length);
    } else if (length) {
        int status = dp_write(raw->region, exchange->slot, bytes, 0, length);
        if (status != DP_OK)
            refuse_body(raw, exchange, status);
    }
    return length;
}

/* The body did not come with the header: it has until the time-out, or the deadline. */
static void expect_body(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    exchange->body_due = exchange->started + raw->config.body_timeout;
    if (exchange->deadline_ms)
        dp_raw_set_deadline(raw, exchange);
    dp_raw_expect(raw->pump);
}

static size_t take_first(struct dp_raw *raw, struct dp_raw_exchange *exchange,
                         const struct dp_prompt1_request *request, const uint8_t *bytes,
                         size_t length, bool fin) {
    if (!fin)
        expect_body(raw, exchange);
    if (!fin && request->width == 4)
        return place_rest(raw, exchange, bytes, length);
    return dp_raw_take_body(exchange, bytes, length, fin);
}

/* Whether a connection holds as many slots in WRITING as it may, other partitions' apart. */
static bool is_capped(const struct dp_raw *raw, const struct dp_entry *entry) {
    return entry->writing >= raw->config.max_writing &&
           (raw->front->count == 1 || dp_raw_writing_of(raw, entry) >= raw->config.max_writing);
}

/* Whether this front has something to say to a request with this header. */
static bool serves(const struct dp_raw *raw, const struct dp_entry *entry,
                   const struct dp_prompt1_request *request) {
    const struct dp_geometry *geometry = &raw->region->geometry;
    return request->n_tokens <= geometry->context && request->max_output <= geometry->max_output &&
           !is_capped(raw, entry);
}

/* Claim, and go on with what there is of the body. How many bytes were consumed. */
static size_t admit(struct dp_raw *raw, struct dp_entry *entry, struct dp_stream *stream,
                    const struct dp_prompt1_request *request, const uint8_t *bytes, size_t length,
                    bool fin) {
    struct dp_raw_exchange *exchange;
    switch (claim(raw, entry, stream, request, fin, &exchange)) {
    case DP_OK:
        return request->header_bytes + take_first(raw, exchange, request,
                                                  bytes + request->header_bytes,
                                                  length - request->header_bytes, fin);
    case DP_PENDING:
        return 0;
    case DP_UNANSWERED:
        dp_raw_give_up(raw);
        dp_raw_refuse_claim(raw, entry, stream, request, DP_WHY_STUCK, fin);
        return length;
    case DP_ILLEGAL:
        dp_raw_leave_to_python(raw->pump, entry, stream);
        return 0;
    default:
        return length;
    }
}

static bool is_any_serving(const struct dp_raw_front *front) {
    const struct dp_raw *raw;
    for (uint32_t at = 0; (raw = dp_raw_next(front, &at));)
        if (dp_raw_is_serving(raw))
            return true;
    return false;
}

/* Who serves a request with this header; NULL: it is Python's, which has the words for a key that
 * is missing or unknown and for a partition without slots. */
static struct dp_raw *partition_of(const struct dp_raw_front *front, const struct dp_entry *entry,
                                   const struct dp_prompt1_request *request, const uint8_t *bytes) {
    int64_t index = 0;
    if (front->keys)
        index = dp_keys_find(front->keys, bytes + request->key_at, request->key_bytes);
    struct dp_raw *raw = index >= 0 && index < front->count ? front->partitions[index] : NULL;
    return raw && dp_raw_is_serving(raw) && serves(raw, entry, request) ? raw : NULL;
}

size_t dp_raw_take_header(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                          const uint8_t *bytes, size_t length, bool fin) {
    struct dp_raw_front *front = pump->raw;
    struct dp_prompt1_request request;
    int parsed = DP_PROMPT1_BAD;
    if (is_any_serving(front) && !front->draining && !(stream->id & DP_STREAM_IS_UNI))
        parsed = dp_prompt1_parse(bytes, length, &request);
    if (parsed == DP_PROMPT1_NOT_WHOLE && !fin) {
        wait_for_header(pump, entry, stream);
        return 0;
    }
    struct dp_raw *raw = NULL;
    if (parsed == DP_PROMPT1_WHOLE)
        raw = partition_of(front, entry, &request, bytes);
    if (!raw) {
        dp_raw_leave_to_python(pump, entry, stream);
        return 0;
    }
    if (stream->app_state == DP_RAW_HEADER)
        dp_raw_forget_header(front, stream);
    /* What is offered again for its claim's sake came before. */
    if (raw->decided.stream != stream) {
        stream->app_at_ns[0] = dp_conn_at_ns(entry->conn);
        stream->app_at_ns[1] = fin ? stream->app_at_ns[0] : 0;
    }
    return admit(raw, entry, stream, &request, bytes, length, fin);
}
