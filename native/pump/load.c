/* The load generator: who may begin a request, when, what came back for it, and whether that is an
 * answer of `prompt/1`.
 *
 * Everything is called under the pump's lock. A request in flight is one struct dp_load_exchange,
 * out of the pump's pool, that its stream carries; it ends once: by its end, a reset, its
 * connection's going, or because what came is no answer. Times count from the moment that a request
 * was due, however late it begins, so that what a slow server makes wait shows (coordinated
 * omission). */
#include <string.h>

#include "load_inside.h"

static const uint8_t magic[4] = {'D', 'P', 'V', '1'};
static const uint8_t end_mark[4] = {0xff, 0xff, 0xff, 0xff};

/* A connection. Those with room for a request stand in line, so that they take turns. */
struct link {
    struct dp_entry *entry;
    struct link *next, *previous; /* of all */
    struct link *behind, *before; /* in the line */
    uint32_t in_flight;
    bool in_line;
    bool usable; /* it takes new requests */
};

struct dp_load {
    const uint8_t *request;
    uint32_t size;
    uint32_t protocol;
    bool running;
    struct dp_load_run run;
    struct dp_load_progress at;
    int64_t moved_ns; /* when something was last heard of a request, or there were none before */
    struct link *links;
    struct link *first, *last; /* the line */
};

static struct dp_load *load_of(struct dp_pump *pump) {
    if (!pump->load) {
        pump->load = dp_pool_take(pump->pool, sizeof *pump->load, NULL);
        if (pump->load)
            *pump->load = (struct dp_load){0};
    }
    return pump->load;
}

/* The line ----------------------------------------------------------------------------------- */

static void leave_line(struct dp_load *load, struct link *link) {
    if (!link->in_line)
        return;
    link->in_line = false;
    *(link->before ? &link->before->behind : &load->first) = link->behind;
    *(link->behind ? &link->behind->before : &load->last) = link->before;
}

static void stand_in_line(struct dp_load *load, struct link *link) {
    if (link->in_line || !link->usable || link->in_flight >= load->run.streams)
        return;
    link->in_line = true;
    link->behind = NULL;
    link->before = load->last;
    *(load->last ? &load->last->behind : &load->first) = link;
    load->last = link;
}

/* The ends ----------------------------------------------------------------------------------- */

static void tell(struct dp_pump *pump) {
    dp_events_push(pump, DP_EVENT_LOAD, 0, 0, 0, 0, NULL, 0);
}

/* Count a request. */
static void count_end(struct dp_pump *pump, uint16_t status) {
    struct dp_load *load = pump->load;
    load->run.status[load->at.ended++] = status;
    if (load->at.ended < load->run.requests)
        return;
    load->running = false;
    load->at.finished = 1;
    load->at.end_ns = pump->now;
    tell(pump);
}

static void release(struct dp_pump *pump, struct link *link, struct dp_stream *stream) {
    dp_pool_give(pump->pool, stream->app, sizeof(struct dp_load_exchange));
    stream->app = NULL;
    link->in_flight--;
}

static void end(struct dp_pump *pump, struct link *link, struct dp_stream *stream,
                uint16_t status) {
    release(pump, link, stream);
    stand_in_line(pump->load, link);
    count_end(pump, status);
}

/* Without a connection that takes requests, those that have not begun are lost. */
static void abandon_unless_usable(struct dp_pump *pump) {
    struct dp_load *load = pump->load;
    if (load->at.live || !load->running)
        return;
    while (load->at.begun < load->run.requests) {
        load->at.begun++;
        count_end(pump, DP_LOAD_LOST);
    }
}

static void mark_unusable(struct dp_pump *pump, struct link *link) {
    if (!link->usable)
        return;
    link->usable = false;
    leave_line(pump->load, link);
    pump->load->at.live--;
}

static void forget_exchanges(struct dp_pump *pump, struct link *link, bool count) {
    struct dp_stream *stream;
    for (uint32_t at = 0; link->in_flight && (stream = dp_conn_each(link->entry->conn, &at));) {
        if (!stream->app)
            continue;
        release(pump, link, stream);
        if (count)
            count_end(pump, DP_LOAD_LOST);
    }
}

/* What comes --------------------------------------------------------------------------------- */

static uint32_t u32(const uint8_t *bytes) {
    return (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 |
           (uint32_t)bytes[3] << 24;
}

bool dp_load_broke(struct dp_pump *pump, uint32_t why, uint64_t a, uint64_t b) {
    struct dp_load_progress *at = &pump->load->at;
    if (at->broken++)
        return false;
    at->why = why;
    at->broken_a = a;
    at->broken_b = b;
    tell(pump);
    return false;
}

void dp_load_verdict(struct dp_pump *pump, struct dp_load_exchange *exchange, uint16_t status,
                     uint32_t ingress_us) {
    struct dp_load *load = pump->load;
    exchange->status = status;
    exchange->have = 0;
    load->run.verdict_ns[load->at.verdicts++] = pump->now - exchange->began_ns;
    if (status == DP_LOAD_OK && ingress_us != DP_LOAD_UNSTATED)
        load->run.ingress_us[load->at.ingresses++] = ingress_us;
}

/* The verdict is whole: contract 3 has its layout. */
static bool take_verdict(struct dp_pump *pump, struct dp_load_exchange *exchange) {
    const uint8_t *head = exchange->head;
    uint16_t status = (uint16_t)(head[4] | head[5] << 8);
    /* A status that stands for none of the answers would pass for one of the load's own. */
    if (memcmp(head, magic, sizeof magic) != 0 || status <= DP_LOAD_NONE)
        return dp_load_broke(pump, DP_LOAD_MAGIC, u32(head), status);
    dp_load_verdict(pump, exchange, status, u32(head + 20));
    return true;
}

void dp_load_body(struct dp_load_exchange *exchange, const uint8_t *bytes, size_t length) {
    exchange->body_bytes += length;
    if (length >= DP_LOAD_END_BYTES) {
        memcpy(exchange->tail, bytes + length - DP_LOAD_END_BYTES, DP_LOAD_END_BYTES);
        exchange->have = DP_LOAD_END_BYTES;
        return;
    }
    size_t kept = exchange->have;
    if (kept + length > DP_LOAD_END_BYTES) {
        size_t gone = kept + length - DP_LOAD_END_BYTES;
        memmove(exchange->tail, exchange->tail + gone, kept - gone);
        kept -= gone;
    }
    if (length)
        memcpy(exchange->tail + kept, bytes, length);
    exchange->have = (uint8_t)(kept + length);
}

bool dp_load_whole(struct dp_pump *pump, const struct dp_load_exchange *exchange) {
    if (!exchange->status)
        return dp_load_broke(pump, DP_LOAD_SHORT, 0, 0);
    if (exchange->status != DP_LOAD_OK)
        return true;
    if (exchange->have < DP_LOAD_END_BYTES ||
        memcmp(exchange->tail, end_mark, sizeof end_mark) != 0)
        return dp_load_broke(pump, DP_LOAD_TRAILER, 0, 0);
    /* Behind the mark: finish reason, prompt tokens, output tokens, 0. */
    uint64_t counted = u32(exchange->tail + 12), came = exchange->body_bytes - DP_LOAD_END_BYTES;
    if (counted * 4 == came)
        return true;
    return dp_load_broke(pump, DP_LOAD_COUNT, counted, came);
}

/* Whether the bytes can be an answer's. */
static bool judge(struct dp_pump *pump, struct dp_load_exchange *exchange, const uint8_t *bytes,
                  size_t length, bool fin) {
    if (!exchange->status) {
        size_t wanted = (size_t)DP_LOAD_VERDICT_BYTES - exchange->have;
        size_t taken = length < wanted ? length : wanted;
        if (taken)
            memcpy(exchange->head + exchange->have, bytes, taken);
        exchange->have = (uint8_t)(exchange->have + taken);
        bytes += taken;
        length -= taken;
        if (exchange->have == DP_LOAD_VERDICT_BYTES && !take_verdict(pump, exchange))
            return false;
    }
    if (exchange->status)
        dp_load_body(exchange, bytes, length);
    return !fin || dp_load_whole(pump, exchange);
}

/* Bytes that answer nothing: on a stream of the server's own, or for a run that was stopped. */
static size_t take_other(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                         const uint8_t *bytes, size_t length, bool fin) {
    bool goes_away = false;
    if (pump->load->protocol != DP_LOAD_H3 || !(stream->id & DP_STREAM_IS_UNI) || !length)
        return length;
    size_t taken = dp_load_h3_other(stream, bytes, length, &goes_away);
    if (goes_away && entry->own) {
        mark_unusable(pump, entry->own);
        abandon_unless_usable(pump);
    }
    return fin ? length : taken;
}

static size_t on_data(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                      const uint8_t *bytes, size_t length, bool fin) {
    struct dp_load_exchange *exchange = stream->app;
    if (!exchange)
        return take_other(pump, entry, stream, bytes, length, fin);
    struct dp_load *load = pump->load;
    size_t taken = length;
    load->moved_ns = pump->now;
    bool sound = load->protocol == DP_LOAD_H3
                     ? dp_load_h3_judge(pump, exchange, bytes, length, fin, &taken)
                     : judge(pump, exchange, bytes, length, fin);
    if (!sound) {
        end(pump, entry->own, stream, DP_LOAD_NONE);
        if (!fin)
            dp_conn_stop(entry->conn, stream, 0);
        return length;
    }
    if (fin) {
        uint16_t status = exchange->status;
        load->run.total_ns[load->at.totals++] = pump->now - exchange->began_ns;
        end(pump, entry->own, stream, status);
    }
    return taken;
}

static void on_reset(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                     uint64_t code) {
    (void)code;
    if (!stream->app)
        return;
    pump->load->moved_ns = pump->now;
    end(pump, entry->own, stream, DP_LOAD_RESET);
}

/* The rest of the request is not wanted; its answer comes all the same. */
static void on_stopped(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream,
                       uint64_t code) {
    (void)pump, (void)entry, (void)stream, (void)code;
}

static void on_closed(struct dp_pump *pump, struct dp_entry *entry, struct dp_stream *stream) {
    if (stream->app) /* both halves are over, and no end was heard of */
        end(pump, entry->own, stream, DP_LOAD_RESET);
}

static void on_left(struct dp_pump *pump, struct dp_entry *entry) {
    struct dp_load *load = pump->load;
    struct link *link = entry->own;
    if (!link)
        return;
    entry->own = NULL;
    mark_unusable(pump, link);
    forget_exchanges(pump, link, true);
    *(link->previous ? &link->previous->next : &load->links) = link->next;
    if (link->next)
        link->next->previous = link->previous;
    dp_pool_give(pump->pool, link, sizeof *link);
    abandon_unless_usable(pump);
}

const struct dp_front_calls dp_front_load = {
    .data = on_data,
    .reset = on_reset,
    .stopped = on_stopped,
    .closed = on_closed,
    .left = on_left,
};

/* What goes out ------------------------------------------------------------------------------- */

bool dp_load_join(struct dp_pump *pump, struct dp_entry *entry) {
    struct dp_load *load = load_of(pump);
    struct link *link = load ? dp_pool_take(pump->pool, sizeof *link, NULL) : NULL;
    if (!link)
        return false;
    *link = (struct link){.entry = entry, .next = load->links, .usable = true};
    if (load->links)
        load->links->previous = link;
    load->links = link;
    load->at.live++;
    entry->own = link;
    if (load->running)
        stand_in_line(load, link);
    return true;
}

/* From the number and not from the request before, so that no rounding adds up. */
static int64_t due_ns(const struct dp_load *load) {
    return load->at.start_ns + (int64_t)((double)load->at.begun * load->run.interval_ns);
}

/* False: the connection is over, or there is no memory. */
static bool begin(struct dp_pump *pump, struct link *link, int64_t began_ns) {
    struct dp_load *load = pump->load;
    struct dp_conn *conn = link->entry->conn;
    struct dp_load_exchange *exchange = dp_pool_take(pump->pool, sizeof *exchange, NULL);
    if (!exchange)
        return false;
    struct dp_stream *stream = dp_conn_open(conn, false);
    if (!stream || !dp_conn_send_lent(conn, stream, load->request, load->size)) {
        dp_pool_give(pump->pool, exchange, sizeof *exchange);
        return false;
    }
    exchange->began_ns = began_ns;
    exchange->body_bytes = exchange->left = 0;
    exchange->status = 0;
    exchange->have = exchange->part = 0;
    stream->app = exchange;
    link->in_flight++;
    load->at.begun++;
    return true;
}

/* Begin what is due where there is room, a connection after the other. */
static void begin_due(struct dp_pump *pump, int64_t now) {
    struct dp_load *load = pump->load;
    struct link *link;
    while ((link = load->first) && load->at.begun < load->run.requests) {
        int64_t began = load->run.interval_ns > 0 ? due_ns(load) : now;
        if (began > now)
            break;
        if (load->at.begun == load->at.ended)
            load->moved_ns = now; /* before it, there was nothing to wait for */
        leave_line(load, link);
        if (begin(pump, link, began))
            stand_in_line(load, link);
        else
            mark_unusable(pump, link);
    }
    abandon_unless_usable(pump);
}

void dp_load_pass(struct dp_pump *pump) {
    struct dp_load *load = pump->load;
    if (!load || !load->running || load->at.stalled)
        return;
    int64_t now = dp_monotonic_ns();
    begin_due(pump, now);
    if (load->running && load->at.begun > load->at.ended &&
        now - load->moved_ns > load->run.stall_ns) {
        load->at.stalled = 1;
        tell(pump);
    }
}

int64_t dp_load_timer(const struct dp_pump *pump) {
    const struct dp_load *load = pump->load;
    if (!load || !load->running || load->at.stalled)
        return INT64_MAX;
    int64_t at = INT64_MAX;
    if (load->first && load->at.begun < load->run.requests)
        at = load->run.interval_ns > 0 ? due_ns(load) : load->moved_ns;
    if (load->at.begun > load->at.ended && load->moved_ns + load->run.stall_ns < at)
        at = load->moved_ns + load->run.stall_ns + 1;
    return at;
}

void dp_load_free(struct dp_pump *pump) {
    if (pump->load)
        dp_pool_give(pump->pool, pump->load, sizeof *pump->load);
    pump->load = NULL;
}

/* What Python calls --------------------------------------------------------------------------- */

int dp_load_request(struct dp_pump *pump, const uint8_t *request, uint32_t size,
                    uint32_t protocol) {
    dp_pump_lock(pump);
    struct dp_load *load = load_of(pump);
    if (load) {
        load->request = request;
        load->size = size;
        load->protocol = protocol;
    }
    dp_pump_unlock(pump);
    return load ? 0 : -1;
}

static bool start(struct dp_pump *pump, const struct dp_load_run *run) {
    struct dp_load *load = load_of(pump);
    if (!load || !load->request || load->running || !run->requests || !run->streams)
        return false;
    load->run = *run;
    pump->now = dp_monotonic_ns();
    load->at = (struct dp_load_progress){.live = load->at.live, .start_ns = pump->now};
    load->moved_ns = pump->now;
    load->running = true;
    /* The list has the newest first; the line begins with the oldest. */
    struct link *link = load->links;
    while (link && link->next)
        link = link->next;
    for (; link; link = link->previous)
        stand_in_line(load, link);
    dp_load_pass(pump);
    return true;
}

int dp_load_begin(struct dp_pump *pump, const struct dp_load_run *run) {
    dp_pump_lock(pump);
    bool done = start(pump, run);
    dp_pump_unlock(pump);
    /* Sends it, and has a thread that sleeps look at its timers again. */
    if (done && pump->loop)
        dp_pump_flush(pump);
    return done ? 0 : -1;
}

struct dp_load_progress dp_load_progress(struct dp_pump *pump) {
    dp_pump_lock(pump);
    struct dp_load_progress at = pump->load ? pump->load->at : (struct dp_load_progress){0};
    dp_pump_unlock(pump);
    return at;
}

void dp_load_stop(struct dp_pump *pump) {
    dp_pump_lock(pump);
    struct dp_load *load = pump->load;
    if (load && load->running) {
        for (struct link *link = load->links; link; link = link->next)
            forget_exchanges(pump, link, true);
        load->running = false;
        load->at.end_ns = dp_monotonic_ns();
    }
    dp_pump_unlock(pump);
}
