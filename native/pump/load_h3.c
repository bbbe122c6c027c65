/* What HTTP/3 answers (RFC 9114), read just far enough to judge it: the frames of the request's
 * stream, the status and the server's own figure out of the field section (QPACK, RFC 9204), and
 * the body as that of any answer.
 *
 * This side announces no dynamic table, so that every field section stands for itself. Nothing is
 * kept of a stream but a count: a field section and the head of a frame are read once they are
 * whole, and lie in the stream's own buffer until then. */
#include <string.h>

#include "../quic/varint.h"
#include "load_inside.h"

/* Frames (RFC 9114 section 7.2). */
#define DATA      0x00
#define HEADERS   0x01
#define GOAWAY    0x07
#define KNOWN_MAX 0x0d
/* Those that no request's stream may have, as bits: of the control stream, of HTTP/2 (section
 * 7.2.8), and PUSH_PROMISE, since no push is allowed here. */
#define UNWANTED                                                                                   \
    (1U << 0x02 | 1U << 0x03 | 1U << 0x04 | 1U << 0x05 | 1U << 0x06 | 1U << 0x07 | 1U << 0x08 |    \
     1U << 0x09 | 1U << 0x0d)

#define SECTION_MAX 16384 /* what this side announces */
#define STATIC_MAX  98    /* QPACK's static table (RFC 9204 appendix A) */

/* Of an exchange's `part`. */
enum part {
    IN_DATA = 1, /* what is left of a frame is the body's */
    TRAILED = 2, /* no more of the message may come */
};

/* What one of the server's own streams is (its app_state); app_number is what is left of a frame.
 */
enum other {
    OTHER_NEW = 0,
    OTHER_CONTROL = 1,
    OTHER_IGNORED = 2,
};

/* Field sections ----------------------------------------------------------------------------- */

/* What a field section says that is wanted. */
struct answer {
    uint16_t status;
    uint32_t ingress_us;
};

struct text {
    const uint8_t *bytes;
    size_t length;
    bool huffman;
};

/* The codes of up to 8 bits (RFC 7541 appendix B), which follow each other within a length. A
 * status is written in them, and so is what the server says of its times. */
static const char five[] = "012aceiost";
static const char six[] = " %-./3456789=A_bdfghlmnpru";
static const char seven[] = ":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz";
static const char eight[] = "&*,;XZ";

/* The symbol that the 8 bits begin with and how many bits it takes; 0 for a longer code. */
static unsigned symbol_of(unsigned bits, char *symbol) {
    if (bits < 10 << 3)
        return *symbol = five[bits >> 3], 5;
    if (bits < 46 << 2)
        return *symbol = six[(bits >> 2) - 20], 6;
    if (bits < 124 << 1)
        return *symbol = seven[(bits >> 1) - 92], 7;
    if (bits < 254)
        return *symbol = eight[bits - 248], 8;
    return 0;
}

/* Decode: how many characters, or -1 when there are more than `room`, when one has a longer code or
 * when the padding is none (section 5.2: fewer than 8 bits, all ones). */
static int decode_huffman(const struct text *text, char *to, int room) {
    size_t bit = 0, end = text->length * 8;
    int count = 0;
    while (bit < end) {
        size_t at = bit / 8;
        unsigned next = at + 1 < text->length ? text->bytes[at + 1] : 0xff;
        unsigned bits = (((unsigned)text->bytes[at] << 8 | next) >> (8 - bit % 8)) & 0xff;
        char symbol = 0;
        unsigned taken = symbol_of(bits, &symbol);
        if (!taken || bit + taken > end)
            return end - bit < 8 && bits == 0xff ? count : -1;
        if (count == room)
            return -1;
        to[count++] = symbol;
        bit += taken;
    }
    return count;
}

static int decode(const struct text *text, char *to, int room) {
    if (text->huffman)
        return decode_huffman(text, to, room);
    if (text->length > (size_t)room)
        return -1;
    if (text->length)
        memcpy(to, text->bytes, text->length);
    return (int)text->length;
}

/* An integer with a prefix of so many bits (RFC 7541 section 5.1); NULL: cut off, or out of all
 * proportion. */
static const uint8_t *get_int(const uint8_t *at, const uint8_t *end, unsigned prefix,
                              uint64_t *value) {
    if (at >= end)
        return NULL;
    unsigned most = (1U << prefix) - 1;
    *value = *at++ & most;
    if (*value < most)
        return at;
    for (unsigned shift = 0; shift <= 21 && at < end; shift += 7) {
        *value += (uint64_t)(*at & 0x7f) << shift;
        if (*at++ < 0x80)
            return at;
    }
    return NULL;
}

/* A string whose length has a prefix of so many bits, with the bit before it for Huffman. */
static const uint8_t *get_text(const uint8_t *at, const uint8_t *end, unsigned prefix,
                               struct text *text) {
    uint64_t length;
    text->huffman = at < end && *at >> prefix & 1;
    at = get_int(at, end, prefix, &length);
    if (!at || length > (uint64_t)(end - at))
        return NULL;
    text->bytes = at;
    text->length = (size_t)length;
    return at + length;
}

/* One field line (RFC 9204 section 4.5): its name by the static table (`index`) or else in words,
 * and its value, which is the table's where `value.bytes` is NULL. */
struct line {
    uint64_t index; /* 0, which is no status, if it is in words */
    struct text name, value;
    bool named; /* in words */
};

static const uint8_t *get_line(const uint8_t *at, const uint8_t *end, struct line *line) {
    *line = (struct line){0};
    uint8_t first = *at;
    if (first & 0x80) {
        at = get_int(at, end, 6, &line->index);
        return first & 0x40 && line->index <= STATIC_MAX ? at : NULL;
    }
    if (first & 0x40) {
        at = get_int(at, end, 4, &line->index);
        if (!at || !(first & 0x10) || line->index > STATIC_MAX)
            return NULL;
    } else if (first & 0x20) {
        line->named = true;
        at = get_text(at, end, 3, &line->name);
        if (!at)
            return NULL;
    } else {
        return NULL; /* both kinds that are left refer to a dynamic table */
    }
    return get_text(at, end, 7, &line->value);
}

/* The statuses of the static table; 0: another field. */
static uint16_t static_status(uint64_t index) {
    static const uint16_t low[] = {103, 200, 304, 404, 503};
    static const uint16_t high[] = {100, 204, 206, 302, 400, 403, 421, 425, 500};
    if (index >= 24 && index <= 28)
        return low[index - 24];
    return index >= 63 && index <= 71 ? high[index - 63] : 0;
}

/* What the line says if it is a :status; 0: it is none, or no number of three digits. */
static uint16_t status_of(const struct line *line) {
    char digits[3];
    uint16_t status = static_status(line->index);
    if (!status || !line->value.bytes)
        return status;
    if (decode(&line->value, digits, 3) != 3)
        return 0;
    for (int i = status = 0; i < 3; i++) {
        if (digits[i] < '0' || digits[i] > '9')
            return 0;
        status = (uint16_t)(status * 10 + digits[i] - '0');
    }
    return status >= 100 ? status : 0;
}

/* Milliseconds with a fraction, as microseconds. */
static uint32_t duration(const char *at, const char *end) {
    uint64_t us = 0;
    const char *digits = at;
    for (; at < end && at < digits + 9 && *at >= '0' && *at <= '9'; at++)
        us = us * 10 + (uint64_t)(*at - '0');
    if (at == digits)
        return DP_LOAD_UNSTATED;
    bool fraction = at < end && *at == '.';
    at += fraction;
    for (int i = 0; i < 3; i++) {
        fraction = fraction && at < end && *at >= '0' && *at <= '9';
        us = us * 10 + (fraction ? (uint64_t)(*at++ - '0') : 0);
    }
    return us < DP_LOAD_UNSTATED ? (uint32_t)us : DP_LOAD_UNSTATED;
}

/* What a server-timing says of `ingress`. A value that is longer than this server's are, or that
 * has other characters, is not read. */
static uint32_t ingress_of(const struct line *line) {
    static const char name[] = "server-timing", metric[] = "ingress;dur=";
    char text[128];
    if (!line->named || decode(&line->name, text, sizeof text) != sizeof name - 1 ||
        memcmp(text, name, sizeof name - 1) != 0)
        return DP_LOAD_UNSTATED;
    int length = decode(&line->value, text, sizeof text);
    const char *at = text, *end = text + (length > 0 ? length : 0);
    while (at < end) {
        while (at < end && *at == ' ')
            at++;
        if ((size_t)(end - at) > sizeof metric - 1 && memcmp(at, metric, sizeof metric - 1) == 0)
            return duration(at + sizeof metric - 1, end);
        while (at < end && *at++ != ',')
            ;
    }
    return DP_LOAD_UNSTATED;
}

/* Read a whole section; false: it cannot be read, or it is no answer's. */
static bool read_section(const uint8_t *at, const uint8_t *end, struct answer *answer) {
    uint64_t number;
    *answer = (struct answer){.ingress_us = DP_LOAD_UNSTATED};
    at = get_int(at, end, 8, &number); /* the required insert count */
    if (!at || number != 0 || at == end || *at & 0x80)
        return false;
    at = get_int(at, end, 7, &number); /* the base, which nothing refers to */
    while (at && at < end) {
        struct line line;
        at = get_line(at, end, &line);
        if (!at)
            return false;
        if (!answer->status) { /* pseudo-fields come first (RFC 9114 section 4.3) */
            answer->status = status_of(&line);
            if (!answer->status)
                return false;
        } else if (static_status(line.index)) {
            return false; /* twice */
        } else if (answer->status == DP_LOAD_OK && answer->ingress_us == DP_LOAD_UNSTATED) {
            answer->ingress_us = ingress_of(&line);
        }
    }
    return at && answer->status;
}

/* Frames ------------------------------------------------------------------------------------- */

/* A whole HEADERS frame. */
static bool take_headers(struct dp_pump *pump, struct dp_load_exchange *exchange,
                         const uint8_t *bytes, size_t length) {
    struct answer answer;
    if (exchange->status) {
        exchange->part |= TRAILED; /* what trailers say is of no interest */
        return true;
    }
    if (!read_section(bytes, bytes + length, &answer))
        return dp_load_broke(pump, DP_LOAD_FIELDS, length, 0);
    if (answer.status == 101) /* HTTP/3 has none (RFC 9114 section 4.5) */
        return dp_load_broke(pump, DP_LOAD_STATUS, answer.status, 0);
    if (answer.status >= 200)
        dp_load_verdict(pump, exchange, answer.status, answer.ingress_us);
    return true;
}

/* Whether a frame may come now. */
static bool may_come(struct dp_pump *pump, const struct dp_load_exchange *exchange, uint64_t type,
                     uint64_t length) {
    if (type <= KNOWN_MAX && UNWANTED >> type & 1)
        return dp_load_broke(pump, DP_LOAD_FRAME, type, 0);
    if (type == DATA && (!exchange->status || exchange->part & TRAILED))
        return dp_load_broke(pump, DP_LOAD_FRAME, type, 0);
    if (type == HEADERS && exchange->part & TRAILED)
        return dp_load_broke(pump, DP_LOAD_FRAME, type, 0);
    if (type == HEADERS && length > SECTION_MAX)
        return dp_load_broke(pump, DP_LOAD_FIELDS, length, 0);
    return true;
}

/* What came of the payload that is under way. */
static const uint8_t *take_payload(struct dp_load_exchange *exchange, const uint8_t *at,
                                   const uint8_t *end) {
    size_t here = (size_t)(end - at);
    if (here > exchange->left)
        here = (size_t)exchange->left;
    if (exchange->part & IN_DATA)
        dp_load_body(exchange, at, here);
    exchange->left -= here;
    if (!exchange->left)
        exchange->part &= TRAILED;
    return at + here;
}

/* Take whole frames, and of all but HEADERS what is there. */
bool dp_load_h3_judge(struct dp_pump *pump, struct dp_load_exchange *exchange, const uint8_t *bytes,
                      size_t length, bool fin, size_t *taken) {
    const uint8_t *at = bytes, *end = bytes + length;
    while (at < end) {
        uint64_t type, size;
        if (exchange->left) {
            at = take_payload(exchange, at, end);
            continue;
        }
        const uint8_t *payload = dp_get_varint(at, end, &type);
        payload = payload ? dp_get_varint(payload, end, &size) : NULL;
        if (!payload)
            break;
        if (!may_come(pump, exchange, type, size))
            return false;
        if (type == HEADERS) {
            if (size > (uint64_t)(end - payload))
                break;
            if (!take_headers(pump, exchange, payload, (size_t)size))
                return false;
            at = payload + size;
            continue;
        }
        at = payload;
        exchange->left = size;
        if (size && type == DATA)
            exchange->part |= IN_DATA;
    }
    *taken = (size_t)(at - bytes);
    if (!fin)
        return true;
    if (at < end || exchange->left || !exchange->status)
        return dp_load_broke(pump, DP_LOAD_CUT, 0, 0);
    return dp_load_whole(pump, exchange);
}

/* The server's own streams ------------------------------------------------------------------- */

/* The control stream: its frames are skipped, and one is noted. */
static size_t take_control(struct dp_stream *stream, const uint8_t *bytes, size_t length,
                           bool *goes_away) {
    const uint8_t *at = bytes, *end = bytes + length;
    while (at < end) {
        uint64_t type, here = (uint64_t)(end - at);
        if (here > stream->app_number)
            here = stream->app_number;
        stream->app_number -= here;
        at += here;
        const uint8_t *payload = at < end ? dp_get_varint(at, end, &type) : NULL;
        payload = payload ? dp_get_varint(payload, end, &stream->app_number) : NULL;
        if (!payload) /* app_number is 0 still, or the pieces are used up */
            break;
        if (type == GOAWAY)
            *goes_away = true;
        at = payload;
    }
    return (size_t)(at - bytes);
}

size_t dp_load_h3_other(struct dp_stream *stream, const uint8_t *bytes, size_t length,
                        bool *goes_away) {
    size_t taken = 0;
    if (stream->app_state == OTHER_NEW) {
        uint64_t kind;
        const uint8_t *rest = dp_get_varint(bytes, bytes + length, &kind);
        if (!rest)
            return 0;
        taken = (size_t)(rest - bytes);
        stream->app_state = kind == 0 ? OTHER_CONTROL : OTHER_IGNORED;
        stream->app_number = 0;
    }
    if (stream->app_state == OTHER_CONTROL)
        return taken + take_control(stream, bytes + taken, length - taken, goes_away);
    return length;
}
