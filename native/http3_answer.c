/* A writer of one kind of answer: the fields that it always has, in one pass and without a table.
 */
#include "http3.h"

#include <string.h>

/* A string constant; names stand in them with their prefix (RFC 9204 section 4.5.6). */
#define PUT(at, text) put_text(at, text, sizeof(text) - 1)

static uint8_t *put_text(uint8_t *at, const char *text, size_t size) {
    memcpy(at, text, size);
    return at + size;
}

static uint8_t *put_decimal(uint8_t *at, uint32_t number) {
    uint8_t digits[10];
    uint32_t count = 0;
    do
        digits[count++] = (uint8_t)('0' + number % 10);
    while (number /= 10);
    while (count)
        *at++ = digits[--count];
    return at;
}

/* Microseconds as milliseconds with three digits. */
static uint8_t *put_ms(uint8_t *at, uint32_t us) {
    at = put_decimal(at, us / 1000);
    *at++ = '.';
    *at++ = (uint8_t)('0' + us / 100 % 10);
    *at++ = (uint8_t)('0' + us / 10 % 10);
    *at++ = (uint8_t)('0' + us % 10);
    return at;
}

static uint8_t *put_bytes(uint8_t *at, const uint8_t *bytes, uint32_t size) {
    *at++ = (uint8_t)size;
    memcpy(at, bytes, size);
    return at + size;
}

/* State how long the value behind `size` is; every one is shorter than 127 bytes. */
static uint8_t *close_value(uint8_t *size, uint8_t *at) {
    *size = (uint8_t)(at - size - 1);
    return at;
}

static uint8_t *put_number(uint8_t *at, uint32_t number) {
    return close_value(at, put_decimal(at + 1, number));
}

uint32_t dp_h3_accepted(uint8_t *to, const uint8_t *media_type, uint32_t media_type_bytes,
                        const uint8_t *id, uint32_t id_bytes, uint64_t request_id,
                        uint32_t queue_us, uint32_t ingress_us, uint32_t slots, uint32_t free_left,
                        uint32_t slot) {
    uint8_t hex[16];
    if (!id_bytes) {
        for (int i = 15; i >= 0; i--, request_id >>= 4)
            hex[i] = (uint8_t)"0123456789abcdef"[request_id & 15];
        id = hex;
        id_bytes = sizeof hex;
    }
    uint8_t *at = to + 3; /* the frame's head */
    /* No dynamic table; :status 200; content-type by its name in the static table. */
    at = PUT(at, "\x00\x00\xd9\x5f\x1d");
    at = put_bytes(at, media_type, media_type_bytes);
    at = PUT(at, "\x27\x05x-request-id");
    at = put_bytes(at, id, id_bytes);
    at = PUT(at, "\x27\x03request-id");
    at = put_bytes(at, id, id_bytes);
    at = PUT(at, "\x27\x05x-queue-time");
    at = close_value(at, PUT(put_ms(at + 1, queue_us), "ms"));
    at = PUT(at, "\x27\x0ax-ratelimit-limit");
    at = put_number(at, slots);
    at = PUT(at, "\x27\x0ex-ratelimit-remaining");
    at = put_number(at, free_left);
    at = PUT(at, "\x26x-slot");
    at = put_number(at, slot);
    at = PUT(at, "\x27\x06server-timing");
    uint8_t *value = at;
    at = put_ms(PUT(at + 1, "queue;dur="), queue_us);
    at = close_value(value, put_ms(PUT(at, ", ingress;dur="), ingress_us));
    uint32_t size = (uint32_t)(at - to) - 3;
    to[0] = DP_H3_HEADERS;
    to[1] = (uint8_t)(0x40 | size >> 8);
    to[2] = (uint8_t)size;
    return size + 3;
}

static uint8_t *put_u32(uint8_t *at, uint32_t number) {
    for (int i = 0; i < 4; i++, number >>= 8)
        *at++ = (uint8_t)number;
    return at;
}

uint32_t dp_h3_binary(uint8_t *to, const uint8_t *id, uint32_t id_bytes, uint64_t request_id,
                      uint32_t queue_us, uint32_t ingress_us, uint32_t slots, uint32_t free_left,
                      uint32_t slot, const uint8_t *ids, uint32_t ids_bytes, uint32_t finish,
                      uint32_t n_tokens) {
    static const char media_type[] = "application/octet-stream";
    uint8_t *at =
        to + dp_h3_accepted(to, (const uint8_t *)media_type, sizeof media_type - 1, id, id_bytes,
                            request_id, queue_us, ingress_us, slots, free_left, slot);
    uint32_t body = ids_bytes + (finish ? 20 : 0);
    if (!body)
        return (uint32_t)(at - to);
    *at++ = DP_H3_DATA;
    if (body >= 0x40)
        *at++ = (uint8_t)(0x40 | body >> 8);
    *at++ = (uint8_t)body;
    if (ids_bytes)
        memcpy(at, ids, ids_bytes);
    at += ids_bytes;
    if (finish) {
        at = put_u32(at, UINT32_MAX); /* the end mark */
        at = put_u32(at, finish);
        at = put_u32(at, n_tokens);
        at = put_u32(at, ids_bytes / 4);
        at = put_u32(at, 0);
    }
    return (uint32_t)(at - to);
}
