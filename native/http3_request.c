/* A strict reader of one kind of request.
 *
 * It is a sieve, not a parser: it says yes only to what every rule of RFC 9114 and contract
 * 4 lets through, and leaves all else to Python, malformed or merely unusual. So nothing here
 * decides about an error. Every read is bounds-checked against the bytes that came. */
#include "http3.h"

#include <stdbool.h>
#include <string.h>

#define SECTION_MAX 1024          /* encoded; a longer one is unusual */
#define TEXT_MAX    DP_H3_KEY_MAX /* of a name or value after decompression */
#define FIELDS_MAX  32

/* What lies ahead. Once something is not as it should be, `ok` stays false. */
struct reader {
    const uint8_t *at, *end;
    bool ok;
};

struct text {
    const uint8_t *bytes;
    uint32_t size;
};

static uint8_t take_byte(struct reader *in) {
    if (in->at < in->end)
        return *in->at++;
    in->ok = false;
    return 0;
}

/* RFC 9000 section 16; what takes eight bytes is unusual. */
static uint32_t take_varint(struct reader *in) {
    uint8_t first = take_byte(in);
    uint32_t more = first >> 6 == 0 ? 0 : first >> 6 == 1 ? 1 : 3, number = first & 0x3f;
    in->ok &= first >> 6 < 3;
    for (; more; more--)
        number = number << 8 | take_byte(in);
    return number;
}

/* An integer with a prefix of so many bits (RFC 7541 section 5.1), of two more bytes at most. */
static uint32_t take_integer(struct reader *in, uint8_t first, int bits) {
    uint32_t most = (1u << bits) - 1, number = first & most;
    if (number < most)
        return number;
    for (int shift = 0; shift <= 7; shift += 7) {
        uint8_t byte = take_byte(in);
        number += (uint32_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80))
            return number;
    }
    in->ok = false;
    return 0;
}

/* Huffman (RFC 7541 appendix B) ------------------------------------------------------------------
 */

/* The code is canonical: of each length above eight, the symbols in the order of their codes, the
 * first code and the first beyond, aligned to 15 bits. Symbols with longer codes are in no plain
 * request. */
static const char symbols[] = "!\"()?'+|#>\0$@[]~^}<`{";
static const struct {
    uint16_t beyond, first;
    uint8_t length, index;
} lengths[] = {
    {0x7fa0, 0x7f00, 10, 0},  {0x7fd0, 0x7fa0, 11, 5},  {0x7fe0, 0x7fd0, 12, 8},
    {0x7ff8, 0x7fe0, 13, 10}, {0x7ffc, 0x7ff8, 14, 16}, {0x7fff, 0x7ffc, 15, 18},
};

#define LENGTHS (sizeof lengths / sizeof *lengths)

/* The codes of at most eight bits, by the eight bits that begin with one: its symbol and length. */
#define TWICE(s, l)                                                                                \
    {s, l}, {                                                                                      \
        s, l                                                                                       \
    }
#define FOUR(s, l)  TWICE(s, l), TWICE(s, l)
#define EIGHT(s, l) FOUR(s, l), FOUR(s, l)
static const struct {
    uint8_t symbol, length;
} short_codes[256] = {
    EIGHT('0', 5), EIGHT('1', 5), EIGHT('2', 5), EIGHT('a', 5), EIGHT('c', 5), EIGHT('e', 5),
    EIGHT('i', 5), EIGHT('o', 5), EIGHT('s', 5), EIGHT('t', 5), FOUR(' ', 6),  FOUR('%', 6),
    FOUR('-', 6),  FOUR('.', 6),  FOUR('/', 6),  FOUR('3', 6),  FOUR('4', 6),  FOUR('5', 6),
    FOUR('6', 6),  FOUR('7', 6),  FOUR('8', 6),  FOUR('9', 6),  FOUR('=', 6),  FOUR('A', 6),
    FOUR('_', 6),  FOUR('b', 6),  FOUR('d', 6),  FOUR('f', 6),  FOUR('g', 6),  FOUR('h', 6),
    FOUR('l', 6),  FOUR('m', 6),  FOUR('n', 6),  FOUR('p', 6),  FOUR('r', 6),  FOUR('u', 6),
    TWICE(':', 7), TWICE('B', 7), TWICE('C', 7), TWICE('D', 7), TWICE('E', 7), TWICE('F', 7),
    TWICE('G', 7), TWICE('H', 7), TWICE('I', 7), TWICE('J', 7), TWICE('K', 7), TWICE('L', 7),
    TWICE('M', 7), TWICE('N', 7), TWICE('O', 7), TWICE('P', 7), TWICE('Q', 7), TWICE('R', 7),
    TWICE('S', 7), TWICE('T', 7), TWICE('U', 7), TWICE('V', 7), TWICE('W', 7), TWICE('Y', 7),
    TWICE('j', 7), TWICE('k', 7), TWICE('q', 7), TWICE('v', 7), TWICE('w', 7), TWICE('x', 7),
    TWICE('y', 7), TWICE('z', 7), {'&', 8},      {'*', 8},      {',', 8},      {';', 8},
    {'X', 8},      {'Z', 8},
};

/* Decompress into `to`, which has room for TEXT_MAX: the size, 0 when it is empty or cannot be. */
static uint32_t decompress(const uint8_t *from, uint32_t size, uint8_t *to) {
    uint64_t held = 0; /* the next `bits` bits, at its low end */
    uint32_t bits = 0, made = 0;
    const uint8_t *end = from + size;
    for (;;) {
        while (bits <= 48 && from < end) {
            held = held << 8 | *from++;
            bits += 8;
        }
        /* What is beyond the end reads as ones, as padding does. */
        uint32_t ahead =
            (uint32_t)(bits >= 15 ? held >> (bits - 15) : held << (15 - bits) | (0x7fffu >> bits)) &
            0x7fff;
        uint32_t short_code = ahead >> 7, length = short_codes[short_code].length;
        if (length && length <= bits && made < TEXT_MAX) {
            to[made++] = short_codes[short_code].symbol;
            bits -= length;
            continue;
        }
        uint32_t i = 0;
        while (i < LENGTHS && ahead >= lengths[i].beyond)
            i++;
        if (i == LENGTHS || lengths[i].length > bits)
            /* Padding is ones, of less than a byte (section 5.2); else it is a rare symbol. */
            return ahead == 0x7fff && bits < 8 ? made : 0;
        if (made == TEXT_MAX || ahead < lengths[i].first)
            return 0;
        length = lengths[i].length;
        to[made++] =
            (uint8_t)symbols[lengths[i].index + ((ahead - lengths[i].first) >> (15 - length))];
        bits -= length;
    }
}

/* A string with a prefix of so many bits, the Huffman flag above them. Empty ones are unusual. */
static struct text take_string(struct reader *in, uint8_t first, int bits, uint8_t *scratch) {
    uint32_t size = take_integer(in, first, bits);
    if (!in->ok || !size || size > (size_t)(in->end - in->at) || size > TEXT_MAX) {
        in->ok = false;
        return (struct text){in->at, 0};
    }
    struct text text = {in->at, size};
    in->at += size;
    if (first & (1u << bits)) {
        text = (struct text){scratch, decompress(text.bytes, size, scratch)};
        in->ok = text.size != 0;
    }
    return text;
}

/* Fields ---------------------------------------------------------------------------------------
 */

enum field {
    UNKNOWN,
    METHOD,
    SCHEME,
    AUTHORITY,
    PATH,
    CONTENT_TYPE,
    CONTENT_LENGTH,
    ACCEPT,
    MAX_TOKENS,
    REQUEST_ID,
    AUTHORIZATION,
    API_KEY,
    WITHOUT_EFFECT, /* may stand in any request, and says nothing to this server */
};

#define PSEUDO   (1u << METHOD | 1u << SCHEME | 1u << AUTHORITY | 1u << PATH)
#define REQUIRED (PSEUDO | 1u << CONTENT_TYPE | 1u << CONTENT_LENGTH)

#define NAME(name, field) {name, sizeof(name) - 1, field}
static const struct {
    const char *name;
    uint8_t size, field;
} names[] = {
    NAME("content-type", CONTENT_TYPE),
    NAME("content-length", CONTENT_LENGTH),
    NAME("accept", ACCEPT),
    NAME("x-max-tokens", MAX_TOKENS),
    NAME("x-request-id", REQUEST_ID),
    NAME("user-agent", WITHOUT_EFFECT),
    NAME("accept-encoding", WITHOUT_EFFECT),
    NAME("accept-language", WITHOUT_EFFECT),
    NAME("authorization", AUTHORIZATION),
    NAME("x-api-key", API_KEY),
    NAME("traceparent", WITHOUT_EFFECT),
    NAME("tracestate", WITHOUT_EFFECT),
    NAME("x-forwarded-for", WITHOUT_EFFECT),
    NAME("x-forwarded-proto", WITHOUT_EFFECT),
    NAME("via", WITHOUT_EFFECT),
    NAME("origin", WITHOUT_EFFECT),
    NAME("referer", WITHOUT_EFFECT),
    NAME("cache-control", WITHOUT_EFFECT),
    NAME("pragma", WITHOUT_EFFECT),
    NAME("priority", WITHOUT_EFFECT),
    NAME("dnt", WITHOUT_EFFECT),
    NAME(":method", METHOD),
    NAME(":scheme", SCHEME),
    NAME(":authority", AUTHORITY),
    NAME(":path", PATH),
};

static enum field field_of(struct text name) {
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (names[i].size == name.size && memcmp(names[i].name, name.bytes, name.size) == 0)
            return names[i].field;
    return UNKNOWN;
}

/* The names of the static table (RFC 9204 appendix A) that such a request has use for. */
static enum field static_name(uint32_t index) {
    switch (index) {
    case 0:
        return AUTHORITY;
    case 1:
        return PATH;
    case 4:
        return CONTENT_LENGTH;
    case 15:
    case 16:
    case 17:
    case 18:
    case 19:
    case 20:
    case 21:
        return METHOD;
    case 22:
    case 23:
        return SCHEME;
    case 29:
    case 30:
        return ACCEPT;
    case 44:
    case 45:
    case 46:
    case 47:
    case 48:
    case 49:
    case 50:
    case 51:
    case 52:
    case 53:
    case 54:
        return CONTENT_TYPE;
    case 84:
        return AUTHORIZATION;
    case 13:
    case 31:
    case 36:
    case 37:
    case 38:
    case 39:
    case 40:
    case 41:
    case 72:
    case 90:
    case 95:
    case 96:
        return WITHOUT_EFFECT;
    default:
        return UNKNOWN;
    }
}

static bool is(struct text text, const char *word) {
    size_t size = strlen(word);
    return text.size == size && memcmp(text.bytes, word, size) == 0;
}

/* A whole number of at most ten digits that 32 bits hold (leading zeros are as good as any). */
static bool number_of(struct text text, uint32_t *out) {
    uint64_t number = 0;
    if (!text.size || text.size > 10)
        return false;
    for (uint32_t i = 0; i < text.size; i++) {
        if (text.bytes[i] < '0' || text.bytes[i] > '9')
            return false;
        number = number * 10 + (text.bytes[i] - '0');
    }
    *out = (uint32_t)number;
    return number <= UINT32_MAX;
}

/* Visible ASCII, and spaces within: allowed in any value (RFC 9110 section 5.5). */
static bool is_value(struct text text, bool spaces) {
    if (!text.size)
        return false;
    for (uint32_t i = 0; i < text.size; i++) {
        uint8_t c = text.bytes[i];
        bool inside = spaces && i && i + 1 < text.size;
        if (c < 0x20 || c > 0x7e || (c == 0x20 && !inside))
            return false;
    }
    return true;
}

struct section {
    uint32_t seen; /* bits by enum field */
    uint32_t length;
    bool has_token;
    struct dp_h3_plain *out;
};

/* The token of `Bearer TOKEN` (RFC 6750 section 2.1), whose scheme is in any case; empty for every
 * other scheme. */
static struct text bearer_token(struct text value) {
    static const char scheme[] = "bearer ";
    const uint32_t size = sizeof scheme - 1;
    if (value.size <= size)
        return (struct text){value.bytes, 0};
    for (uint32_t i = 0; i < size; i++)
        if ((value.bytes[i] | 0x20) != scheme[i])
            return (struct text){value.bytes, 0};
    struct text token = {value.bytes + size, value.size - size};
    for (; token.size && *token.bytes == ' '; token.size--)
        token.bytes++;
    return token;
}

/* A field that may hold the API key: as dataplane/fronts/parameters.py has it, a bearer token
 * counts before x-api-key. */
static bool on_key(struct section *section, enum field field, struct text value) {
    struct dp_h3_plain *out = section->out;
    if (!is_value(value, true))
        return false;
    out->key_twice |= section->seen >> field & 1;
    if (field == AUTHORIZATION) {
        value = bearer_token(value);
        section->has_token |= value.size != 0;
    } else if (section->has_token) {
        return true;
    }
    if (value.size) {
        memcpy(out->key, value.bytes, value.size);
        out->key_bytes = value.size;
    }
    return true;
}

/* A field with its value. False: not of a plain request. */
static bool on_field(struct section *section, enum field field, struct text value) {
    if (field == WITHOUT_EFFECT)
        return is_value(value, true);
    if (field == AUTHORIZATION || field == API_KEY)
        return on_key(section, field, value);
    uint32_t bit = 1u << field;
    if (section->seen & bit) /* what comes twice may contradict itself */
        return false;
    /* Pseudo-fields come first (RFC 9114 section 4.3). */
    if ((bit & PSEUDO) && (section->seen & ~PSEUDO))
        return false;
    section->seen |= bit;
    switch (field) {
    case METHOD:
        return is(value, "POST");
    case SCHEME:
        return is(value, "https");
    case AUTHORITY: /* without user information */
        return is_value(value, false) && !memchr(value.bytes, '@', value.size);
    case PATH:
        return is(value, "/v1/generate");
    case CONTENT_TYPE:
        return is(value, "application/octet-stream");
    case CONTENT_LENGTH:
        return number_of(value, &section->length);
    case ACCEPT:
        return is(value, "*/*") || is(value, "application/octet-stream");
    case MAX_TOKENS:
        return number_of(value, &section->out->max_output);
    case REQUEST_ID:
        if (value.size > DP_H3_ID_MAX || !is_value(value, false))
            return false;
        memcpy(section->out->id, value.bytes, value.size);
        section->out->id_bytes = value.size;
        return true;
    default:
        return false;
    }
}

/* A field that the static table holds whole. */
static bool on_indexed(struct section *section, uint32_t index) {
    switch (index) {
    case 20:
        return on_field(section, METHOD, (struct text){(const uint8_t *)"POST", 4});
    case 23:
        return on_field(section, SCHEME, (struct text){(const uint8_t *)"https", 5});
    case 29:
        return on_field(section, ACCEPT, (struct text){(const uint8_t *)"*/*", 3});
    case 31: /* accept-encoding: gzip, deflate, br */
    case 39: /* cache-control: no-cache */
        /* A name of no effect still ends the pseudo-fields. */
        section->seen |= 1u << WITHOUT_EFFECT;
        return true;
    default:
        return false;
    }
}

/* One field line (RFC 9204 section 4.5), of those that need no dynamic table. */
static bool take_line(struct reader *in, struct section *section) {
    uint8_t name_room[TEXT_MAX], value_room[TEXT_MAX];
    uint8_t first = take_byte(in);
    enum field field;
    if ((first & 0xc0) == 0xc0) {
        uint32_t index = take_integer(in, first, 6);
        return in->ok && on_indexed(section, index);
    }
    if ((first & 0xd0) == 0x50) {
        field = static_name(take_integer(in, first, 4));
    } else if ((first & 0xe0) == 0x20) {
        struct text name = take_string(in, first, 3, name_room);
        field = in->ok ? field_of(name) : UNKNOWN;
    } else {
        return false;
    }
    if (!in->ok || field == UNKNOWN)
        return false;
    uint8_t head = take_byte(in);
    struct text value = take_string(in, head, 7, value_room);
    if (!in->ok || !on_field(section, field, value))
        return false;
    section->seen |= 1u << field;
    return true;
}

static bool take_section(struct reader *in, struct section *section) {
    /* No insert is required of the dynamic table (RFC 9204 section 4.5.1). */
    if (take_byte(in) || take_byte(in) || !in->ok)
        return false;
    for (int fields = 0; in->at < in->end; fields++)
        if (fields == FIELDS_MAX || !take_line(in, section))
            return false;
    return (section->seen & REQUIRED) == REQUIRED;
}

int dp_h3_plain(const uint8_t *bytes, uint32_t at, uint32_t size, struct dp_h3_plain *out) {
    struct reader in = {bytes + at, bytes + at + size, true};
    out->max_output = out->id_bytes = out->key_bytes = out->key_twice = 0;
    if (take_byte(&in) != DP_H3_HEADERS)
        return 0;
    uint32_t length = take_varint(&in);
    if (!in.ok || length > SECTION_MAX || length > (size_t)(in.end - in.at))
        return 0;
    struct reader fields = {in.at, in.at + length, true};
    struct section section = {.out = out};
    if (!take_section(&fields, &section))
        return 0;
    in.at += length;
    uint8_t kind = take_byte(&in);
    uint32_t body = take_varint(&in);
    if (!in.ok || kind != DP_H3_DATA || !body || body % 4 || body != section.length ||
        body != (size_t)(in.end - in.at))
        return 0;
    out->body_at = (uint32_t)(in.at - bytes);
    out->n_tokens = body / 4;
    return 1;
}
