/* The timers of connections: a heap whose entries may be earlier than what they stand for, so that
 * one which only moves later costs nothing until it fires. */
#include <stdlib.h>

#include "inside.h"

static void put_timer(struct dp_pump *pump, uint32_t at, struct dp_entry *entry) {
    pump->timers[at] = entry;
    entry->timer_slot = at + 1;
}

static void sift_up(struct dp_pump *pump, uint32_t at, struct dp_entry *entry) {
    while (at && pump->timers[(at - 1) / 2]->timer_at > entry->timer_at) {
        put_timer(pump, at, pump->timers[(at - 1) / 2]);
        at = (at - 1) / 2;
    }
    put_timer(pump, at, entry);
}

static void sift_down(struct dp_pump *pump, uint32_t at, struct dp_entry *entry) {
    for (uint32_t child; (child = at * 2 + 1) < pump->timer_count; at = child) {
        if (child + 1 < pump->timer_count &&
            pump->timers[child + 1]->timer_at < pump->timers[child]->timer_at)
            child++;
        if (pump->timers[child]->timer_at >= entry->timer_at)
            break;
        put_timer(pump, at, pump->timers[child]);
    }
    put_timer(pump, at, entry);
}

void dp_pump_unset_timer(struct dp_pump *pump, struct dp_entry *entry) {
    if (!entry->timer_slot)
        return;
    uint32_t at = entry->timer_slot - 1;
    entry->timer_slot = 0;
    struct dp_entry *last = pump->timers[--pump->timer_count];
    if (last == entry)
        return;
    if (at && pump->timers[(at - 1) / 2]->timer_at > last->timer_at)
        sift_up(pump, at, last);
    else
        sift_down(pump, at, last);
}

/* A timer that only moved later is looked at again when it fires. */
void dp_pump_set_timer(struct dp_pump *pump, struct dp_entry *entry) {
    int64_t due = dp_conn_timer(entry->conn);
    if (due == DP_NEVER || (entry->timer_slot && entry->timer_at <= due))
        return;
    entry->timer_at = due;
    sift_up(pump, entry->timer_slot ? entry->timer_slot - 1 : pump->timer_count++, entry);
}

/* Room for the timer of one connection more: setting it cannot fail. */
bool dp_pump_timer_room(struct dp_pump *pump) {
    if (pump->handles < pump->timer_room)
        return true;
    uint32_t room = pump->timer_room * 2;
    struct dp_entry **bigger = realloc(pump->timers, room * sizeof *bigger);
    if (!bigger)
        return false;
    pump->timers = bigger;
    pump->timer_room = room;
    return true;
}

void dp_pump_run_timers(struct dp_pump *pump) {
    while (pump->timer_count && pump->timers[0]->timer_at <= pump->now) {
        struct dp_entry *entry = pump->timers[0];
        dp_pump_unset_timer(pump, entry);
        if (dp_conn_timer(entry->conn) > pump->now) {
            dp_pump_set_timer(pump, entry);
            continue;
        }
        dp_conn_on_timer(entry->conn, pump->now);
        dp_pump_touch(entry); /* building sets the timer anew */
    }
    if (dp_raw_timer(pump) <= pump->now)
        dp_raw_on_timer(pump);
}

int64_t dp_pump_next_timer(struct dp_pump *pump) {
    int64_t due = dp_sooner(dp_raw_timer(pump), dp_load_timer(pump));
    return pump->timer_count ? dp_sooner(due, pump->timers[0]->timer_at) : due;
}
