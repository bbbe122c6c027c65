/* Recovery and congestion control under random traffic over a simulated link, with a model kept
 * beside them.
 *
 * Usage: recovery_link PACKETS SEED */
#include "recovery_bed.h"

/* A simulated link ------------------------------------------------------------------------------
 */

struct shape {
    int64_t one_way;
    double bytes_ns;      /* the bottleneck's rate; 0: none */
    uint32_t buffer;      /* bytes that wait before it at most */
    uint32_t loss;        /* per thousand, data and ACKs */
    uint32_t reordering;  /* per thousand: up to a round trip late */
    uint32_t duplication; /* per thousand */
    bool mixed;           /* sizes, ACKs alone, and changes of the path */
    bool model;           /* check everything at every step */
};

struct event {
    int64_t at;
    uint64_t order;
    uint64_t pn; /* of data */
    uint8_t elicits;
    size_t ack_bytes; /* 0: data */
    uint8_t ack[256];
};

struct link {
    const struct shape *shape;
    uint64_t seed;
    struct event **heap;
    size_t events, heap_room;
    uint64_t order;
    int64_t busy_until; /* when the bottleneck is through with what it has */
};

static bool earlier(const struct event *a, const struct event *b) {
    return a->at != b->at ? a->at < b->at : a->order < b->order;
}

static void push(struct link *link, struct event *event) {
    if (link->events == link->heap_room) {
        link->heap_room = link->heap_room ? 2 * link->heap_room : 64;
        link->heap = realloc(link->heap, link->heap_room * sizeof *link->heap);
        CHECK(link->heap);
    }
    event->order = link->order++;
    size_t i = link->events++;
    for (; i && earlier(event, link->heap[(i - 1) / 2]); i = (i - 1) / 2)
        link->heap[i] = link->heap[(i - 1) / 2];
    link->heap[i] = event;
}

static struct event *pop(struct link *link) {
    struct event *first = link->heap[0], *last = link->heap[--link->events];
    size_t i = 0;
    for (size_t child; (child = 2 * i + 1) < link->events; i = child) {
        child += child + 1 < link->events && earlier(link->heap[child + 1], link->heap[child]);
        if (!earlier(link->heap[child], last))
            break;
        link->heap[i] = link->heap[child];
    }
    link->heap[i] = last;
    return first;
}

static bool chance(struct link *link, uint32_t per_thousand) {
    return per_thousand && random_below(&link->seed, 1000) < per_thousand;
}

static void carry(struct link *link, int64_t at, const struct event *event) {
    const struct shape *shape = link->shape;
    for (int copies = 1 + chance(link, shape->duplication); copies > 0; copies--) {
        if (chance(link, shape->loss))
            continue;
        struct event *copy = malloc(sizeof *copy);
        CHECK(copy);
        *copy = *event;
        copy->at = at + shape->one_way;
        if (chance(link, shape->reordering))
            copy->at += random_below(&link->seed, (uint32_t)(2 * shape->one_way));
        push(link, copy);
    }
}

/* Data goes through the bottleneck, which drops what its buffer does not hold. */
static void carry_data(struct link *link, int64_t now, uint32_t bytes, const struct event *event) {
    double rate = link->shape->bytes_ns;
    if (rate == 0) {
        carry(link, now, event);
        return;
    }
    int64_t from = link->busy_until > now ? link->busy_until : now;
    if ((double)(from - now) * rate + bytes > link->shape->buffer)
        return;
    link->busy_until = from + (int64_t)(bytes / rate);
    carry(link, link->busy_until, event);
}

/* Sender and receiver over it -------------------------------------------------------------------
 */

enum fate { OUT = 1, ACKED, LOST };

struct run {
    struct link link;
    struct dp_pool *pool;
    struct dp_recovery recovery;
    int64_t now;
    uint64_t wanted; /* packets to send */
    /* The model: what became of every packet. */
    uint8_t *fate;
    uint8_t *flags;
    uint16_t *bytes;
    uint64_t path_from;
    uint64_t acked, lost, told_last;
    bool told;
    /* The receiver. */
    struct dp_ranges received;
    uint8_t *arrived;
    uint64_t arrived_bytes;
    uint32_t unacked;
    int64_t ack_due, largest_at;
};

static void tell(struct run *run, uint64_t pn, const struct dp_sent *sent, enum fate fate) {
    if (run->fate[pn] != OUT)
        fail("packet %lu got fate %d after %d", pn, fate, run->fate[pn]);
    if (run->told && pn <= run->told_last)
        fail("packet %lu was told of after %lu", pn, run->told_last);
    EXPECT(sent->bytes, run->bytes[pn]);
    EXPECT(sent->first, pn);
    run->fate[pn] = (uint8_t)fate;
    run->told_last = pn;
    run->told = true;
    if (fate == ACKED)
        run->acked++;
    else
        run->lost++;
    if (fate == ACKED && !run->arrived[pn])
        fail("packet %lu was acknowledged and never arrived", pn);
}

static void run_acked(void *self, uint64_t pn, const struct dp_sent *sent) {
    tell(self, pn, sent, ACKED);
}
static void run_lost(void *self, uint64_t pn, const struct dp_sent *sent) {
    tell(self, pn, sent, LOST);
}

static const struct dp_sent_owner run_owner = {run_acked, run_lost};

static void check_model(struct run *run) {
    const struct dp_recovery *recovery = &run->recovery;
    uint64_t in_flight = 0, eliciting = 0, lowest = dp_recovery_lowest(recovery);
    CHECK(lowest == recovery->next || run->fate[lowest] == OUT);
    CHECK(lowest == 0 || run->fate[lowest - 1] != OUT);
    for (uint64_t pn = lowest; pn < recovery->next; pn++) {
        const struct dp_sent *sent = dp_recovery_packet(recovery, pn);
        EXPECT((sent->flags & DP_SENT_DONE) == 0, run->fate[pn] == OUT);
        if (run->fate[pn] != OUT)
            continue;
        eliciting += (run->flags[pn] & DP_SENT_ELICITS) != 0;
        if (run->flags[pn] & DP_SENT_IN_FLIGHT && pn >= run->path_from)
            in_flight += run->bytes[pn];
    }
    EXPECT(recovery->in_flight, in_flight);
    EXPECT(recovery->eliciting, eliciting);
    CHECK(recovery->window >= 2 * DATAGRAM);
    CHECK((dp_recovery_timer(recovery) == DP_NEVER) == (eliciting == 0));
}

static void transmit(struct run *run, uint8_t flags) {
    uint64_t pn = run->recovery.next;
    uint32_t bytes = DATAGRAM;
    if (run->link.shape->mixed && !random_below(&run->link.seed, 4))
        bytes = 40 + random_below(&run->link.seed, DATAGRAM - 40);
    CHECK(pn < 2 * run->wanted + 1000);
    CHECK(dp_recovery_sent(&run->recovery, run->now, bytes, flags, pn, 1));
    run->fate[pn] = OUT;
    run->flags[pn] = flags;
    run->bytes[pn] = (uint16_t)bytes;
    struct event data = {.pn = pn, .elicits = flags & DP_SENT_ELICITS};
    carry_data(&run->link, run->now, bytes, &data);
}

/* Send what the window and the pacer let through. When the next may leave, DP_NEVER: when an event
 * allows it. */
static int64_t send_all(struct run *run) {
    struct dp_recovery *recovery = &run->recovery;
    recovery->window_limited = false;
    while (recovery->next < run->wanted && dp_recovery_has_room(recovery)) {
        if (run->link.shape->mixed && !random_below(&run->link.seed, 16)) {
            transmit(run, 0);
            continue;
        }
        recovery->window_limited = true;
        if (dp_recovery_window(recovery) < DATAGRAM)
            return DP_NEVER;
        int64_t at = dp_recovery_paced_at(recovery, run->now);
        if (at > run->now)
            return at;
        recovery->window_limited = false;
        transmit(run, PLAIN);
    }
    return DP_NEVER;
}

static void send_ack(struct run *run) {
    struct event ack = {0};
    ack.ack_bytes = put_ack(ack.ack, run->received.range, run->received.count);
    CHECK(ack.ack_bytes <= sizeof ack.ack);
    ack.pn = (uint64_t)(run->now - run->largest_at);
    carry(&run->link, run->now, &ack);
    run->unacked = 0;
    run->ack_due = DP_NEVER;
}

/* As RFC 9000 section 13.2 wants it: every second packet, and at once what is out of order. */
static void arrive(struct run *run, const struct event *data) {
    struct dp_ranges *received = &run->received;
    if (!run->arrived[data->pn])
        run->arrived_bytes += run->bytes[data->pn];
    run->arrived[data->pn] = 1;
    uint64_t top = received->count ? received->range[received->count - 1].to : 0;
    while (!dp_ranges_add(received, run->pool, 24, data->pn, data->pn + 1))
        dp_ranges_drop_lowest(received);
    if (data->pn >= top)
        run->largest_at = run->now;
    if (!data->elicits)
        return;
    if (data->pn != top || ++run->unacked >= 2)
        send_ack(run);
    else
        run->ack_due = run->now + MAX_DELAY;
}

static void handle(struct run *run, struct event *event) {
    if (event->ack_bytes) {
        struct dp_frame frame;
        CHECK(dp_frame_parse(event->ack, event->ack + event->ack_bytes, &frame) == 0);
        run->told = false;
        CHECK(
            dp_recovery_ack(&run->recovery, &frame, (int64_t)event->pn, run->now, &run_owner, run));
    } else {
        arrive(run, event);
    }
    free(event);
}

static void on_timer(struct run *run, bool path_changed) {
    for (int i = 0; dp_recovery_timer(&run->recovery) <= run->now; i++) {
        uint64_t lost = run->lost;
        run->told = false;
        uint32_t probes = dp_recovery_on_timer(&run->recovery, run->now, &run_owner, run);
        /* The round-trip time that a new path forgets may put a time that had come off again. */
        if (!probes && run->lost == lost && !path_changed)
            fail("the timer was due and nothing was");
        CHECK(i < 3);
        for (uint32_t probe = 0; probe < probes; probe++)
            transmit(run, PLAIN | DP_SENT_PROBE);
    }
}

static int64_t earliest(int64_t a, int64_t b) {
    return a < b ? a : b;
}

/* One step of the world: false when there is nothing that could happen. */
static bool advance(struct run *run, int64_t pace_at) {
    int64_t at = earliest(earliest(pace_at, run->ack_due), dp_recovery_timer(&run->recovery));
    if (run->link.events)
        at = earliest(at, run->link.heap[0]->at);
    if (at == DP_NEVER)
        return false;
    bool path_changed = false;
    if (at > run->now)
        run->now = at;
    while (run->link.events && run->link.heap[0]->at <= run->now)
        handle(run, pop(&run->link));
    if (run->ack_due <= run->now)
        send_ack(run);
    if (run->link.shape->mixed && !random_below(&run->link.seed, 4000)) {
        dp_recovery_new_path(&run->recovery);
        run->path_from = run->recovery.next;
    }
    path_changed = run->path_from > 0;
    on_timer(run, path_changed);
    return true;
}

static void run_begin(struct run *run, const struct shape *shape, uint64_t wanted, uint64_t seed) {
    *run = (struct run){.link = {.shape = shape, .seed = seed},
                        .wanted = wanted,
                        .ack_due = DP_NEVER,
                        .pool = dp_pool_new()};
    size_t most = 2 * wanted + 1000;
    run->fate = calloc(most, 1);
    run->flags = calloc(most, 1);
    run->arrived = calloc(most, 1);
    run->bytes = calloc(most, sizeof *run->bytes);
    CHECK(run->fate && run->flags && run->arrived && run->bytes);
    CHECK(dp_recovery_init(&run->recovery, run->pool, 0, DATAGRAM, MAX_DELAY));
}

static void run_end(struct run *run) {
    while (run->link.events)
        free(pop(&run->link));
    free(run->link.heap);
    free(run->fate);
    free(run->flags);
    free(run->arrived);
    free(run->bytes);
    dp_ranges_free(&run->received, run->pool);
    dp_recovery_free(&run->recovery);
    EXPECT(dp_pool_out(run->pool), 0);
    dp_pool_free(run->pool);
}

/* Until all is sent and every packet has its fate. The last may be ACKs alone, which nobody
 * acknowledges for their own sake: a PING then brings that about. */
static void run_whole(struct run *run) {
    int64_t pace_at = 0;
    while (run->recovery.next < run->wanted ||
           dp_recovery_lowest(&run->recovery) < run->recovery.next) {
        pace_at = send_all(run);
        if (run->link.shape->model)
            check_model(run);
        if (!advance(run, pace_at))
            transmit(run, PLAIN);
        if (run->link.shape->model)
            check_model(run);
    }
    EXPECT(run->acked + run->lost, run->recovery.next);
    EXPECT(run->recovery.in_flight, 0);
}

static void random_traffic(uint64_t packets, uint64_t seed) {
    static const struct shape shapes[] = {
        {10 * MS, 0.00125, 50000, 0, 0, 0, false, true},
        {10 * MS, 0.0125, 100000, 20, 10, 10, true, true},
        {MS / 5, 0.125, 50000, 50, 50, 30, true, true},
        {50 * MS, 0, 0, 10, 0, 0, true, true},
        {5 * MS, 0.0125, 30000, 300, 100, 100, true, true},
    };
    enum { COUNT = sizeof shapes / sizeof *shapes };
    for (uint32_t i = 0; i < COUNT; i++) {
        struct run run;
        run_begin(&run, &shapes[i], packets / COUNT, seed + i);
        run_whole(&run);
        CHECK(run.acked > run.lost);
        printf("%lu packets in %.1f s: %lu lost\n", run.recovery.next, (double)run.now / 1e9,
               run.lost);
        run_end(&run);
    }
}

/* The share of the bottleneck that is filled in `duration`. */
static double utilisation(const struct shape *shape, int64_t duration, uint64_t seed) {
    struct run run;
    run_begin(&run, shape, 1000000, seed);
    while (run.now < duration)
        CHECK(advance(&run, send_all(&run)));
    double share = (double)run.arrived_bytes / ((double)run.now * shape->bytes_ns);
    run_end(&run);
    return share;
}

/* 10 Mbit/s and a round trip of 20 ms: 25,000 bytes are on their way, and as many may wait. */
static void throughput(uint64_t seed) {
    static const struct shape clean = {10 * MS, 0.00125, 25000, 0, 0, 0, false, false};
    static const struct shape lossy = {10 * MS, 0.00125, 25000, 10, 0, 0, false, false};
    double share = utilisation(&clean, 20000 * MS, seed);
    printf("10 Mbit/s, 20 ms: %.0f%% filled without loss\n", share * 100);
    if (share < 0.7)
        fail("expected at least 70%% of the link, got %.1f%%", share * 100);
    /* At this loss NewReno's own bound is about 1.22 * 1200 bytes / (20 ms * sqrt(0.01)): 59%. */
    share = utilisation(&lossy, 20000 * MS, seed);
    printf("10 Mbit/s, 20 ms: %.0f%% filled at 1%% loss\n", share * 100);
    if (share < 0.35)
        fail("expected at least 35%% of the link at 1%% loss, got %.1f%%", share * 100);
}

int main(int argc, char **argv) {
    uint64_t packets = argument(argc, argv, 1, 100000);
    uint64_t seed = argument(argc, argv, 2, 1);
    random_traffic(packets, seed);
    throughput(seed);
    return 0;
}
