/* The raw front as a whole: attaching and detaching, deadlines, sleep and wake, counters. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "../tokens.h"
#include "prompt1.h"
#include "raw_inside.h"

/* The front's memory -------------------------------------------------------------------------- */

struct dp_raw_front *dp_raw_of(struct dp_pump *pump) {
    if (pump->raw)
        return pump->raw;
    struct dp_raw_front *front = calloc(1, sizeof *front);
    struct dp_latency *latency = front ? dp_latency_new(DP_RAW_SERIES) : NULL;
    if (!latency) {
        free(front);
        return NULL;
    }
    front->latency = latency;
    front->sweep_at = DP_RAW_NEVER;
    if (getrandom(&front->next_id, sizeof front->next_id, GRND_NONBLOCK) != sizeof front->next_id)
        front->next_id = (uint64_t)dp_realtime_ns();
    front->next_id = front->next_id >> 1 ? front->next_id >> 1 : 1;
    pump->raw = front;
    return front;
}

/* What a partition has for good, made when it is first attached to. */
static struct dp_raw *partition_of(struct dp_pump *pump, uint32_t index) {
    struct dp_raw_front *front = dp_raw_of(pump);
    if (!front || index >= DP_RAW_PARTITIONS)
        return NULL;
    if (front->partitions[index])
        return front->partitions[index];
    struct dp_raw *raw = calloc(1, sizeof *raw);
    if (!raw)
        return NULL;
    raw->pump = pump;
    raw->front = front;
    raw->index = index;
    raw->overdue_at = DP_RAW_NEVER;
    raw->first_held = raw->last_held = DP_RAW_NOBODY;
    front->partitions[index] = raw;
    if (front->count <= index)
        front->count = index + 1;
    return raw;
}

/* One that was attached to before, or NULL. */
static struct dp_raw *known(const struct dp_pump *pump, uint32_t index) {
    return pump->raw && index < DP_RAW_PARTITIONS ? pump->raw->partitions[index] : NULL;
}

static void free_arrays(struct dp_raw *raw) {
    free(raw->exchanges);
    free(raw->watches);
    free(raw->changed);
    free(raw->unanswered);
    free(raw->scratch);
    raw->exchanges = NULL;
    raw->watches = NULL;
    raw->changed = raw->unanswered = NULL;
    raw->scratch = NULL;
    dp_commands_free(raw->commands);
    raw->commands = NULL;
    raw->region = NULL;
}

void dp_raw_free(struct dp_pump *pump) {
    struct dp_raw_front *front = pump->raw;
    struct dp_raw *raw;
    if (!front)
        return;
    pump->raw = NULL;
    for (uint32_t at = 0; (raw = dp_raw_next(front, &at));) {
        free_arrays(raw);
        free(raw);
    }
    dp_keys_free(front->keys);
    dp_latency_free(front->latency);
    free(front);
}

/* Whose is whose ------------------------------------------------------------------------------ */

static int set_keys(struct dp_pump *pump, const uint8_t *digests, const uint32_t *partitions,
                    uint32_t count) {
    struct dp_raw_front *front = dp_raw_of(pump);
    if (!front || front->keys || front->count)
        return -1;
    for (uint32_t i = 0; i < count; i++)
        if (partitions[i] >= DP_RAW_PARTITIONS)
            return -1;
    front->keys = dp_keys_new(digests, partitions, count);
    return front->keys ? 0 : -1;
}

int dp_raw_set_keys(struct dp_pump *pump, const uint8_t *digests, const uint32_t *partitions,
                    uint32_t count) {
    dp_pump_lock(pump);
    int status = set_keys(pump, digests, partitions, count);
    dp_pump_unlock(pump);
    return status;
}

/* Attaching and detaching --------------------------------------------------------------------- */

static bool is_sound(const struct dp_region *region, const struct dp_raw_config *config,
                     const char *busy_reason) {
    const struct dp_geometry *geometry = &region->geometry;
    return (geometry->table == DP_TABLE_HOST || !config->null) && config->owner >= 1 &&
           config->owner <= geometry->listeners && config->count >= 1 &&
           config->first < geometry->slots && config->count <= geometry->slots - config->first &&
           config->body_timeout >= 0 && config->answer_timeout >= 0 &&
           strlen(busy_reason) <= DP_RAW_REASON_MAX;
}

static bool make_arrays(struct dp_raw *raw, const struct dp_geometry *geometry) {
    size_t slots = geometry->slots;
    raw->exchanges = calloc(slots, sizeof *raw->exchanges);
    raw->watches = calloc(slots, sizeof *raw->watches);
    raw->changed = calloc(slots, sizeof *raw->changed);
    raw->unanswered = calloc(slots, sizeof *raw->unanswered);
    raw->scratch =
        malloc(DP_PROMPT1_VERDICT_BYTES + (size_t)geometry->max_output * 4 + DP_PROMPT1_END_BYTES);
    if (!raw->exchanges || !raw->watches || !raw->changed || !raw->unanswered || !raw->scratch)
        return false;
    for (uint32_t slot = 0; slot < slots; slot++) {
        raw->exchanges[slot].raw = raw;
        raw->exchanges[slot].slot = slot;
        raw->exchanges[slot].watch = DP_RAW_NOBODY;
    }
    return true;
}

static bool choose_table(struct dp_raw *raw, struct dp_region *region, uint32_t owner) {
    raw->verbs = &dp_raw_host;
    if (region->geometry.table == DP_TABLE_HOST)
        return true;
    raw->verbs = &dp_raw_device;
    raw->commands = dp_commands_new(region, owner, 0, 0); /* no verb here waits */
    return raw->commands;
}

static int attach(struct dp_pump *pump, struct dp_region *region,
                  const struct dp_raw_config *config, const char *busy_reason) {
    if (!is_sound(region, config, busy_reason))
        return -1;
    struct dp_raw *raw = partition_of(pump, config->partition);
    if (!raw || raw->region)
        return -1;
    if (!make_arrays(raw, &region->geometry) || !choose_table(raw, region, config->owner)) {
        free_arrays(raw);
        return -1;
    }
    raw->region = region;
    raw->config = *config;
    raw->front->body_timeout = config->body_timeout;
    if (!config->max_writing)
        raw->config.max_writing = (config->count + 1) / 2;
    raw->broken = raw->stuck = false;
    raw->next_probe = 0;
    raw->overdue_at = DP_RAW_NEVER;
    raw->watched = raw->unanswered_count = 0;
    size_t reason = strlen(busy_reason);
    memcpy(raw->busy + DP_PROMPT1_VERDICT_BYTES, busy_reason, reason);
    raw->busy_bytes = (uint32_t)(DP_PROMPT1_VERDICT_BYTES + reason);
    return 0;
}

int dp_raw_attach(struct dp_pump *pump, struct dp_region *region,
                  const struct dp_raw_config *config, const char *busy_reason) {
    dp_pump_lock(pump);
    int status = attach(pump, region, config, busy_reason);
    dp_pump_unlock(pump);
    return status;
}

static void end_all(struct dp_raw *raw, uint32_t code) {
    dp_raw_refuse_claims(raw, DP_WHY_LOST);
    for (uint32_t slot = 0; slot < raw->region->geometry.slots; slot++) {
        struct dp_raw_exchange *exchange = &raw->exchanges[slot];
        if (!exchange->live)
            continue;
        if (!exchange->answered) {
            dp_raw_refuse(raw, exchange, DP_WHY_LOST, 0, 0);
            continue;
        }
        dp_raw_let_go(raw, exchange);
        raw->stats.failed++;
        dp_raw_fail(exchange, code);
    }
}

void dp_raw_detach(struct dp_pump *pump, uint32_t partition, uint32_t code) {
    dp_pump_lock(pump);
    struct dp_raw *raw = known(pump, partition);
    if (raw && raw->region) {
        /* What the runtime finished before its end is whole, and goes out. */
        dp_raw_look(raw);
        end_all(raw, code);
        /* Claims that nobody waits for any more are answered later, if at all. */
        if (raw->commands)
            dp_commands_let_go_all(raw->commands);
        free_arrays(raw);
        raw->watched = raw->unanswered_count = 0;
        raw->overdue_at = DP_RAW_NEVER;
    }
    dp_pump_ring(pump);
    dp_pump_unlock(pump);
}

void dp_raw_end_all(struct dp_pump *pump, uint32_t code) {
    struct dp_raw *raw;
    dp_pump_lock(pump);
    for (uint32_t at = 0; (raw = dp_raw_next(pump->raw, &at));)
        if (raw->region)
            end_all(raw, code);
    dp_pump_ring(pump);
    dp_pump_unlock(pump);
}

void dp_raw_drain(struct dp_pump *pump) {
    dp_pump_lock(pump);
    struct dp_raw_front *front = dp_raw_of(pump);
    if (front)
        front->draining = true;
    dp_pump_unlock(pump);
}

/* Counters ------------------------------------------------------------------------------------ */

static uint64_t ended(const struct dp_raw_stats *stats) {
    return stats->completed + stats->cancelled + stats->failed;
}

/* Who holds its slot still says nothing of how long. */
static void add(struct dp_raw_stats *sum, const struct dp_raw_stats *one) {
    uint64_t all = ended(sum) + ended(one);
    if (all)
        sum->hold_s += (one->hold_s - sum->hold_s) * (double)ended(one) / (double)all;
    sum->claimed += one->claimed;
    sum->completed += one->completed;
    sum->cancelled += one->cancelled;
    sum->failed += one->failed;
    sum->ok += one->ok;
    sum->busy += one->busy;
    sum->negative += one->negative;
}

struct dp_raw_stats dp_raw_stats(struct dp_pump *pump) {
    struct dp_raw_stats stats = {0};
    const struct dp_raw *raw;
    dp_pump_lock(pump);
    for (uint32_t at = 0; (raw = dp_raw_next(pump->raw, &at));)
        add(&stats, &raw->stats);
    dp_pump_unlock(pump);
    return stats;
}

struct dp_raw_stats dp_raw_partition_stats(struct dp_pump *pump, uint32_t partition) {
    struct dp_raw_stats stats = {0};
    dp_pump_lock(pump);
    const struct dp_raw *raw = known(pump, partition);
    if (raw)
        stats = raw->stats;
    dp_pump_unlock(pump);
    return stats;
}

/* Each one claimed ends in one of the other three. */
uint32_t dp_raw_in_flight(struct dp_pump *pump) {
    struct dp_raw_stats stats = dp_raw_stats(pump);
    return (uint32_t)(stats.claimed - ended(&stats));
}

uint32_t dp_raw_writing(struct dp_pump *pump, uint64_t connection) {
    dp_pump_lock(pump);
    const struct dp_entry *entry = dp_pump_entry(pump, connection);
    uint32_t writing = entry ? entry->writing : 0;
    dp_pump_unlock(pump);
    return writing;
}

uint32_t dp_raw_writing_of(const struct dp_raw *raw, const struct dp_entry *entry) {
    uint32_t writing = 0;
    for (uint32_t slot = 0; raw->region && slot < raw->region->geometry.slots; slot++)
        writing += raw->exchanges[slot].writing && raw->exchanges[slot].entry == entry;
    return writing;
}

uint32_t dp_raw_writing_in(struct dp_pump *pump, uint64_t connection, uint32_t partition) {
    dp_pump_lock(pump);
    const struct dp_entry *entry = dp_pump_entry(pump, connection);
    const struct dp_raw *raw = known(pump, partition);
    uint32_t writing = entry && raw ? dp_raw_writing_of(raw, entry) : 0;
    dp_pump_unlock(pump);
    return writing;
}

struct dp_latency *dp_raw_latency(struct dp_pump *pump) {
    dp_pump_lock(pump);
    struct dp_raw_front *front = dp_raw_of(pump);
    dp_pump_unlock(pump);
    return front ? front->latency : NULL;
}

uint32_t dp_raw_record(struct dp_raw *raw, enum dp_raw_series series, int64_t difference_ns) {
    if (difference_ns < 0) {
        raw->stats.negative++;
        return 0;
    }
    int64_t us = difference_ns / 1000;
    if (us > DP_RAW_MOST_US)
        us = DP_RAW_MOST_US;
    dp_latency_record(raw->front->latency, series, us, (uint64_t)raw->pump->now / 1000000000);
    return (uint32_t)us;
}

/* Time ---------------------------------------------------------------------------------------- */

/* Nearly every header and body comes in time, so none costs an entry in a queue of deadlines; while
 * there are any, all are looked at so often that none waits much longer than it may. */
static int64_t next_sweep(const struct dp_pump *pump) {
    return pump->now + pump->raw->body_timeout / DP_RAW_SWEEPS;
}

void dp_raw_expect(struct dp_pump *pump) {
    if (pump->raw->sweep_at == DP_RAW_NEVER)
        pump->raw->sweep_at = next_sweep(pump);
}

/* The header was in the kernel for queue_ns. */
void dp_raw_set_deadline(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    int64_t arrived = exchange->started - (exchange->queue_ns > 0 ? exchange->queue_ns : 0);
    exchange->deadline_at = arrived + (int64_t)exchange->deadline_ms * 1000000;
    if (exchange->deadline_at < raw->overdue_at)
        raw->overdue_at = exchange->deadline_at;
}

static void expire(struct dp_raw *raw, struct dp_raw_exchange *exchange) {
    if (exchange->writing)
        dp_raw_refuse(raw, exchange, DP_WHY_LATE, raw->region->writers[exchange->slot].written, 0);
    else
        dp_raw_expire(raw, exchange);
}

/* Looks at every slot rather than at a queue of deadlines, which would keep those of requests that
 * ended long before. */
static void end_overdue(struct dp_raw *raw) {
    int64_t next = DP_RAW_NEVER;
    for (uint32_t slot = 0; raw->region && slot < raw->region->geometry.slots; slot++) {
        struct dp_raw_exchange *exchange = &raw->exchanges[slot];
        if (!exchange->live)
            continue;
        if (exchange->deadline_at <= raw->pump->now) {
            exchange->deadline_at = DP_RAW_NEVER;
            expire(raw, exchange);
        } else if (exchange->deadline_at < next) {
            next = exchange->deadline_at;
        }
    }
    raw->overdue_at = next;
}

/* Whether anything is still to come of what is being written. */
static bool sweep_bodies(struct dp_raw *raw) {
    bool left = false;
    for (uint32_t slot = 0; raw->region && slot < raw->region->geometry.slots; slot++) {
        struct dp_raw_exchange *exchange = &raw->exchanges[slot];
        if (!exchange->writing)
            continue;
        if (exchange->body_due <= raw->pump->now)
            expire(raw, exchange);
        else
            left = true;
    }
    return left;
}

static void sweep(struct dp_pump *pump) {
    struct dp_raw_front *front = pump->raw;
    struct dp_raw *raw;
    while (front->first_header && (int64_t)front->first_header->app_number <= pump->now)
        dp_raw_header_late(pump, front->first_header);
    bool left = front->first_header;
    for (uint32_t at = 0; (raw = dp_raw_next(front, &at));)
        left |= sweep_bodies(raw);
    front->sweep_at = left ? next_sweep(pump) : DP_RAW_NEVER;
}

static int64_t next_due(const struct dp_raw *raw) {
    int64_t due = dp_sooner(raw->overdue_at, dp_raw_answer_due(raw));
    for (uint32_t slot = raw->first_held; slot != DP_RAW_NOBODY && !raw->broken;
         slot = raw->exchanges[slot].next_held)
        if (raw->exchanges[slot].held_until < due)
            due = raw->exchanges[slot].held_until;
    return due;
}

int64_t dp_raw_timer(const struct dp_pump *pump) {
    const struct dp_raw *raw;
    int64_t due = pump->raw ? pump->raw->sweep_at : DP_RAW_NEVER;
    for (uint32_t at = 0; (raw = dp_raw_next(pump->raw, &at));)
        due = dp_sooner(due, next_due(raw));
    return due;
}

/* What is held for too long is the next pass's. */
static void on_timer(struct dp_raw *raw) {
    if (dp_raw_answer_due(raw) <= raw->pump->now) {
        /* It may be this thread that was late. */
        dp_raw_take_answers(raw);
        if (dp_raw_answer_due(raw) <= raw->pump->now)
            dp_raw_give_up(raw);
    }
    if (raw->overdue_at <= raw->pump->now)
        end_overdue(raw);
}

void dp_raw_on_timer(struct dp_pump *pump) {
    struct dp_raw *raw;
    for (uint32_t at = 0; (raw = dp_raw_next(pump->raw, &at));)
        on_timer(raw);
    if (pump->raw && pump->raw->sweep_at <= pump->now)
        sweep(pump);
}

/* Sleep and wake ------------------------------------------------------------------------------ */

uint32_t dp_raw_count(const struct dp_pump *pump) {
    return pump->raw ? pump->raw->count : 0;
}

int dp_raw_fd(const struct dp_pump *pump, uint32_t partition) {
    const struct dp_raw *raw = known(pump, partition);
    return raw && raw->region ? raw->region->outputs[raw->config.owner - 1] : -1;
}

static bool is_quiet(struct dp_raw *raw) {
    uint32_t watched = raw->broken ? 0 : raw->watched;
    if (dp_listener_sleep(raw->region, raw->config.owner, raw->watches, watched))
        return false;
    return raw->broken || !raw->commands || !dp_commands_is_answered(raw->commands);
}

bool dp_raw_sleep(struct dp_pump *pump) {
    struct dp_raw *raw;
    for (uint32_t at = 0; (raw = dp_raw_next(pump->raw, &at));)
        if (raw->region && !is_quiet(raw))
            return false;
    return true;
}

void dp_raw_wake(struct dp_pump *pump) {
    struct dp_raw *raw;
    for (uint32_t at = 0; (raw = dp_raw_next(pump->raw, &at));)
        if (raw->region)
            dp_listener_wake(raw->region, raw->config.owner);
}
