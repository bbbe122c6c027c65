/* An engine in C that gives each prompt back. Build it with
 * cc -pthread -I native tests/examples/echo.c native/attach.c native/region.c native/slots.c */
#include <stdio.h>

#include "attach.h"

#define SLOTS 4

static const char manifest[] = "{\"abi\": 1, \"model\": \"echo\", \"slots\": 4, \"context\": 1024,"
                               " \"max_output\": 512, \"vocab_size\": 49152}";

static void answer(struct dp_attachment *daemon, const struct dp_taken *request) {
    struct dp_region *region = dp_attached_region(daemon);
    uint32_t limit = request->max_output;
    uint32_t n = request->n_tokens < limit ? request->n_tokens : limit;
    for (uint32_t i = 0; i < n; i++) {
        if (dp_is_cancelled(region, request->slot, request->generation))
            break; /* nobody waits for the rest */
        dp_emit(region, request->slot, request->generation, &request->tokens[i], 1);
        dp_step(daemon);
    }
    dp_finish(region, request->slot, request->generation,
              n == limit ? DP_FINISH_LENGTH : DP_FINISH_STOP);
}

int main(int argc, char **argv) {
    char error[256];
    struct dp_taken taken[SLOTS];
    struct dp_attachment *daemon =
        dp_attach(argc > 1 ? argv[1] : "runtime.sock", manifest, -1, error, sizeof error);
    if (!daemon || dp_ready(daemon) != 0) /* ready: all is allocated, the daemon may serve */
        return fprintf(stderr, "%s\n", daemon ? "no thread for the heartbeat" : error), 1;
    for (int n; (n = dp_take_ready(daemon, taken, SLOTS, -1, 0)) >= 0;)
        for (int i = 0; i < n; i++)
            answer(daemon, &taken[i]);
    dp_detach(daemon); /* the daemon is gone */
    return 0;
}
