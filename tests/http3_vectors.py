"""HTTP/3 as it may come and as it may not: streams, and what a sink has to be told of each."""

from __future__ import annotations

from http3_frames import (
    GET,
    GREASE,
    OK,
    POST,
    SETTINGS,
    Event,
    Vector,
    data,
    frame,
    headers,
    section,
    wide,
)

from dataplane.http3 import Code
from dataplane.http3_fields import Pair, varint


def message_error(code: Code = Code.MESSAGE_ERROR, status: int = 400) -> Event:
    return ("message_error", 0, status, code)


def got(pairs: list[Pair], length: int | None = None) -> Event:
    return ("headers", 0, dict(pairs), length)


def sized(length: int) -> list[Pair]:
    return [*POST, (b"content-length", b"%d" % length)]


DONE = ("end", 0)
LONG = bytes(range(256)) * 3


def request(name: str, stream: bytes, *want: Event) -> Vector:
    return Vector(name, stream, list(want))


def uni(name: str, stream: bytes, *want: Event, fin: bool = False) -> Vector:
    """A client's unidirectional stream, seen by the server."""
    return Vector(name, stream, list(want), fin, 2)


def uni_to_client(name: str, stream: bytes, *want: Event) -> Vector:
    return Vector(name, stream, list(want), False, 3, True)


def reply(name: str, stream: bytes, *want: Event, head: bool = False) -> Vector:
    heads = [(b":method", b"HEAD")] if head else []
    return Vector(name, stream, list(want), is_client=True, heads=heads)


def body(content: bytes) -> Event:
    return ("data", 0, content)


SUM: list[Pair] = [(b"x-sum", b"9")]
TRAILERS: Event = ("trailers", 0, dict(SUM))
THREE = sized(3)
GOOD = [
    request("GET", headers(GET), got(GET), DONE),
    request("POST", headers(THREE) + data(b"abc"), got(THREE, 3), body(b"abc"), DONE),
    request(
        "POST of 768", headers(sized(768)) + data(LONG), got(sized(768), 768), body(LONG), DONE
    ),
    request(
        "body of no declared length in three frames",
        headers(POST) + data(b"a") + data(b"") + data(b"bc"),
        *(got(POST), body(b"abc"), DONE),
    ),
    request(
        "frames of later extensions everywhere",
        GREASE + headers(THREE) + GREASE + data(b"a") + GREASE + data(b"bc") + GREASE,
        *(got(THREE, 3), body(b"abc"), DONE),
    ),
    request(
        "trailers",
        headers(THREE) + data(b"abc") + headers(SUM) + GREASE,
        *(got(THREE, 3), body(b"abc"), TRAILERS, DONE),
    ),
    request(
        "trailers without fields",
        headers(GET) + frame(1, b"\0\0"),
        *(got(GET), ("trailers", 0, {}), DONE),
    ),
    *(
        request(
            f"numbers in {a} and {b} bytes",
            wide(1, a)
            + wide(len(section(THREE)), b)
            + section(THREE)
            + wide(0, a)
            + wide(3, b)
            + b"abc",
            *(got(THREE, 3), body(b"abc"), DONE),
        )
        for a in (1, 2, 4, 8)
        for b in (2, 4, 8)
    ),
    request(
        "99 frames without effect, and one more in the tail",
        headers(GET) + 49 * data(b"") + 50 * frame(0x21, b"") + data(b"a"),
        *(got(GET), body(b"a"), DONE),
    ),
    request("content-length 0", headers(sized(0)) + data(b""), got(sized(0), 0), DONE),
]


def with_field(name: bytes, value: bytes) -> list[Pair]:
    return [*GET, (name, value)]


def replaced(name: bytes, value: bytes) -> list[Pair]:
    return [(n, value if n == name else v) for n, v in GET]


def without(name: bytes) -> list[Pair]:
    return [pair for pair in GET if pair[0] != name]


HOST = (b"host", b"localhost:4433")
GOOD_FIELDS: list[tuple[str, list[Pair], dict[bytes, bytes]]] = [
    ("host instead of authority", [*without(b":authority"), HOST], {b"host": HOST[1]}),
    ("host and authority agree", [*GET, HOST], {b"host": HOST[1]}),
    ("pseudo-fields in another order", GET[::-1], {}),
    ("te: trailers", with_field(b"te", b"trailers"), {b"te": b"trailers"}),
    ("te: Trailers", with_field(b"te", b"Trailers"), {b"te": b"Trailers"}),
    ("an empty value", with_field(b"x-empty", b""), {b"x-empty": b""}),
    ("spaces and tabs inside", with_field(b"user-agent", b"a b\tc"), {b"user-agent": b"a b\tc"}),
    ("bytes above 0x7f", with_field(b"x-name", b"\xff\x80"), {b"x-name": b"\xff\x80"}),
    ("every sign of a token", with_field(b"!#$%&'*+-.^_`|~09az", b"v"), {}),
    ("repeated fields", [*GET, (b"accept", b"a"), (b"accept", b"b")], {b"accept": b"a, b"}),
    ("cookies", [*GET, (b"cookie", b"a=1"), (b"cookie", b"b=2")], {b"cookie": b"a=1; b=2"}),
    ("path with a query", replaced(b":path", b"/health?latency99"), {}),
    ("plain http", replaced(b":scheme", b"http"), {}),
    ("scheme in capitals", replaced(b":scheme", b"HTTPS"), {}),
    (
        "another scheme needs neither path nor authority",
        [(b":method", b"GET"), (b":scheme", b"x"), (b":path", b"")],
        {},
    ),
    ("a method of one's own", replaced(b":method", b"M-SEARCH"), {}),
    (
        "OPTIONS *",
        [(b":method", b"OPTIONS"), (b":scheme", b"https"), (b":authority", b"a"), (b":path", b"*")],
        {},
    ),
    ("CONNECT", [(b":method", b"CONNECT"), (b":authority", b"a:1")], {b":authority": b"a:1"}),
]

BAD_FIELDS: list[tuple[str, list[Pair]]] = [
    ("no fields", []),
    ("no :method", without(b":method")),
    ("no :scheme", without(b":scheme")),
    ("no :path", without(b":path")),
    ("neither :authority nor host", without(b":authority")),
    ("empty :authority", replaced(b":authority", b"")),
    ("empty host", [*without(b":authority"), (b"host", b"")]),
    ("empty host beside :authority", with_field(b"host", b"")),
    (":authority and host differ", with_field(b"host", b"localhost:4434")),
    (":authority with a password", replaced(b":authority", b"me:secret@localhost:4433")),
    ("empty :path", replaced(b":path", b"")),
    ("relative :path", replaced(b":path", b"health")),
    ("* without OPTIONS", replaced(b":path", b"*")),
    ("empty :method", replaced(b":method", b"")),
    (":method is no token", replaced(b":method", b"GE T")),
    ("CONNECT with a path", replaced(b":method", b"CONNECT")),
    ("CONNECT with a scheme", [(b":method", b"CONNECT"), *GET[1:3]]),
    ("CONNECT without authority", [(b":method", b"CONNECT")]),
    ("CONNECT with an empty authority", [(b":method", b"CONNECT"), (b":authority", b"")]),
    ("plain http without authority", [GET[0], (b":scheme", b"http"), GET[3]]),
    ("HTTPS without authority", [GET[0], (b":scheme", b"HTTPS"), GET[3]]),
    ("CONNECT with the authority last", [(b":method", b"CONNECT"), HOST, GET[2]]),
    *((f"{name.decode()} twice", [*GET, (name, value)]) for name, value in GET),
    ("host twice", [*without(b":authority"), HOST, HOST]),
    ("pseudo-field after a regular field", [GET[0], (b"accept", b"*"), *GET[1:]]),
    ("pseudo-field last", [*GET[:3], (b"x-own", b"1"), GET[3]]),
    ("unknown pseudo-field", [*GET, (b":protocol", b"websocket")]),
    ("pseudo-field of a response", [*GET, (b":status", b"200")]),
    ("pseudo-field without a name", [*GET, (b":", b"x")]),
    ("capitals in a name", with_field(b"Accept", b"x")),
    ("capital at the end of a name", with_field(b"x-owN", b"x")),
    ("line feed after a name", with_field(b"x-own\n", b"v")),
    *(
        (f"{c!r} in a name", with_field(b"x%bz" % c, b"v"))
        for c in (b" ", b"\0", b"\r", b"\n", b":", b"\x7f", b"\x80", b"(", b'"', b"/")
    ),
    *(
        (f"{c!r} in a value", with_field(b"accept", b"a%bb" % c))
        for c in (b"\0", b"\r", b"\n", b"\x01", b"\x1f", b"\x7f", b"\x0b", b"\x0c")
    ),
    *(
        (f"{c!r} around {name.decode()}: {value!r}", with_field(name, value))
        for c in (b" ", b"\t", b"\n", b"\0")
        for name, value in ((b"accept", c + b"a"), (b"accept", b"a" + c), (b"x-own", c))
    ),
    ("space before a repeated value", [*GET, (b"accept", b"a"), (b"accept", b" b")]),
    ("space after the method", replaced(b":method", b"GET ")),
    *(
        (f"{name} is of the connection", with_field(name.encode(), b"close"))
        for name in ("connection", "keep-alive", "proxy-connection", "transfer-encoding", "upgrade")
    ),
    ("te: gzip", with_field(b"te", b"gzip")),
    ("te: trailers and more", with_field(b"te", b"trailers, gzip")),
    ("te: gzip hidden behind another", [*GET, (b"te", b"gzip"), (b"te", b"trailers")]),
    ("te empty", with_field(b"te", b"")),
    *(
        (f"content-length {value[:20]!r}", with_field(b"content-length", value))
        for value in (
            *(b"", b"+5", b"-1", b"1_0", b"5 ", b" 5", b"0x5", b"5.0", b"1e3", b"five", b"5,5"),
            *(b"5, 5", "\u0665".encode(), b"9223372036854775808", b"9" * 5000),
        )
    ),
    ("content-length twice", [*GET, (b"content-length", b"5"), (b"content-length", b"5")]),
    ("two content-lengths", [*GET, (b"content-length", b"5"), (b"content-length", b"6")]),
]

TWO = sized(2)
EXTENSION = frame(0x21, b"")
BAD_MESSAGES = [
    *(
        request(name, headers(pairs) + data(b"hello"), message_error())
        for name, pairs in BAD_FIELDS
    ),
    request(
        "body too long in its first frame",
        headers(TWO) + data(b"abc"),
        *(got(TWO, 2), message_error()),
    ),
    request(
        "body too long in a later frame",
        headers(TWO) + data(b"ab") + data(b"c"),
        *(got(TWO, 2), body(b"ab"), message_error()),
    ),
    request(
        "body where none was declared",
        headers(sized(0)) + data(b"a"),
        *(got(sized(0), 0), message_error()),
    ),
    request(
        "body too short",
        headers(TWO) + data(b"a"),
        *(got(TWO, 2), body(b"a"), message_error()),
    ),
    request("no body where one was declared", headers(TWO), got(TWO, 2), message_error()),
    request(
        "trailers before the declared end",
        headers(TWO) + data(b"a") + headers(SUM),
        *(got(TWO, 2), body(b"a"), message_error()),
    ),
    *(
        request(f"{pair!r} in trailers", headers(GET) + headers([pair]), got(GET), message_error())
        for pair in (GET[3], OK[0], (b"upgrade", b"h2c"), (b"te", b"trailers"), (b"X", b"y"))
    ),
    request("nothing", b"", message_error(Code.REQUEST_INCOMPLETE, 0)),
    request("an extension's frame alone", GREASE, message_error(Code.REQUEST_INCOMPLETE, 0)),
    request(
        "101 frames without effect",
        headers(GET) + 101 * data(b"") + data(b"a"),
        *(got(GET), message_error(Code.EXCESSIVE_LOAD)),
    ),
    request(
        "101 frames of an extension",
        101 * EXTENSION + headers(GET),
        message_error(Code.EXCESSIVE_LOAD),
    ),
]


def broken(code: Code) -> Event:
    return ("connection_error", code)


UNEXPECTED = broken(Code.FRAME_UNEXPECTED)
TRUNCATED = broken(Code.FRAME_ERROR)
BAD_ID = broken(Code.ID_ERROR)
CLOSED = broken(Code.CLOSED_CRITICAL_STREAM)
NO_SETTINGS = broken(Code.MISSING_SETTINGS)
BAD_SETTINGS = broken(Code.SETTINGS_ERROR)
BAD_STREAM = broken(Code.STREAM_CREATION_ERROR)
BAD_SECTION = broken(Code.QPACK_DECOMPRESSION_FAILED)
BAD_ENCODER = broken(Code.QPACK_ENCODER_STREAM_ERROR)
BAD_DECODER = broken(Code.QPACK_DECODER_STREAM_ERROR)

ALL_BUT_END = headers(GET) + headers(SUM)
BAD_REQUEST_STREAMS = [
    request("DATA first", data(b"abc"), UNEXPECTED),
    request("empty DATA first", data(b""), UNEXPECTED),
    request("DATA after trailers", ALL_BUT_END + data(b"a"), got(GET), TRAILERS, UNEXPECTED),
    request("HEADERS after trailers", ALL_BUT_END + headers(SUM), got(GET), TRAILERS, UNEXPECTED),
    *(
        request(f"frame of type {kind:#x}", frame(kind, b"\0" * 5), UNEXPECTED)
        for kind in (0x02, 0x03, 0x04, 0x05, 0x06, 0x07, 0x08, 0x09, 0x0D)
    ),
    *(
        request(
            f"type {kind} in two bytes", headers(GET) + wide(kind, 2) + b"\0", got(GET), UNEXPECTED
        )
        for kind in (0x02, 0x04, 0x08)
    ),
    request("end within the type", headers(GET) + b"\x40", got(GET), TRUNCATED),
    request("end before the length", headers(GET) + b"\x00", got(GET), TRUNCATED),
    request("end within the length", headers(GET) + b"\x00\x80\x00", got(GET), TRUNCATED),
    request("end within DATA", headers(GET) + b"\x00\x03ab", got(GET), body(b"ab"), TRUNCATED),
    request("end before the payload", headers(GET) + b"\x00\x05", got(GET), TRUNCATED),
    request("end within HEADERS", headers(GET)[:-1], TRUNCATED),
    request("end within an extension", headers(GET) + GREASE[:-1], got(GET), TRUNCATED),
    *(
        request(f"{name} in a field section", frame(1, block) + data(b"a"), BAD_SECTION)
        for name, block in (
            ("nothing", b""),
            ("half a prefix", b"\0"),
            ("a required insert", b"\x02\0\x80"),
            ("a negative base", b"\0\x80"),
            ("a dynamic index", b"\0\0\x80"),
            ("a post-base index", b"\0\0\x10"),
            ("a static index over 98", b"\0\0\xff\x24"),
            ("a literal cut off", section(GET)[:-1]),
            ("bad Huffman padding", b"\0\0\x51\x81\x00"),
            ("an endless number", b"\0\0" + b"\xff" * 12),
            # Well-formed, but ls-qpack does not tell an empty name from a broken section.
            ("an empty name", section([*GET, (b"", b"x")])),
        )
    ),
]

PUSHES_TO_3 = frame(0x0D, b"\x03")


def goaway(last_id: int) -> bytes:
    return frame(7, varint(last_id))


def setting(payload: bytes) -> bytes:
    return b"\0" + frame(4, payload)


UNIDIRECTIONAL = [
    uni("settings", SETTINGS),
    uni("settings and extensions", SETTINGS + GREASE + frame(0x800F0700, b"\0u=1") + GREASE),
    uni(
        "goaway going down",
        SETTINGS + goaway(8) + goaway(4) + goaway(4),
        *(("goaway", 8), ("goaway", 4), ("goaway", 4)),
    ),
    uni("goaway after extensions", SETTINGS + GREASE + goaway(8) + GREASE, ("goaway", 8)),
    uni("goaway going up", SETTINGS + goaway(4) + goaway(8), ("goaway", 4), BAD_ID),
    uni("goaway to a server may name any push", SETTINGS + goaway(7), ("goaway", 7)),
    uni("push ids going up", SETTINGS + PUSHES_TO_3 + frame(13, wide(3, 8)) + frame(13, b"\x04")),
    *(
        uni(name, SETTINGS + rest, want)
        for name, rest, want in (
            ("settings twice", frame(4, b""), UNEXPECTED),
            ("DATA", data(b"a"), UNEXPECTED),
            ("HEADERS", headers(GET), UNEXPECTED),
            ("PUSH_PROMISE", frame(5, b"\0"), UNEXPECTED),
            ("HTTP/2 PRIORITY", frame(2, b"\0\0\0\0\0"), UNEXPECTED),
            ("HTTP/2 PING", frame(6, b"\0" * 8), UNEXPECTED),
            ("HTTP/2 WINDOW_UPDATE", frame(8, b"\0\0\0\1"), UNEXPECTED),
            ("HTTP/2 CONTINUATION", frame(9, b""), UNEXPECTED),
            ("goaway with a tail", frame(7, b"\x04\x00"), TRUNCATED),
            ("goaway without a number", frame(7, b""), TRUNCATED),
            ("goaway cut off", frame(7, b"\x40"), TRUNCATED),
            ("goaway of nine bytes", b"\x07\x09", TRUNCATED),
            ("push ids going down", PUSHES_TO_3 + frame(13, b"\x02"), BAD_ID),
            ("cancelled push", PUSHES_TO_3 + frame(3, b"\x02"), BAD_ID),
        )
    ),
    uni("goaway first", b"\0" + goaway(0), NO_SETTINGS),
    uni("extension first", b"\0" + GREASE, NO_SETTINGS),
    uni("DATA first of all", b"\0" + data(b"a"), NO_SETTINGS),
    uni("a frame of HTTP/2 first", b"\0" + frame(6, b"\0" * 8), UNEXPECTED),
    *(
        uni(f"setting {key} of HTTP/2", setting(varint(key) + b"\1"), BAD_SETTINGS)
        for key in (0, 2, 3, 4, 5)
    ),
    uni("a setting twice", setting(b"\x06\x01\x06\x01"), BAD_SETTINGS),
    uni("an unknown setting twice", setting(b"\x21\x01\x40\x21\x02"), BAD_SETTINGS),
    uni("a setting without value", setting(b"\x06"), TRUNCATED),
    uni("a setting cut off", setting(b"\x06\x40"), TRUNCATED),
    uni("settings over 1 KiB", b"\0\x04" + varint(1025), broken(Code.EXCESSIVE_LOAD)),
    uni("settings of 1 KiB", b"\0\x04" + varint(1024)),
    uni("control stream ends", SETTINGS, CLOSED, fin=True),
    uni("type in eight bytes", wide(0, 8) + frame(4, b"") + data(b""), UNEXPECTED),
    uni_to_client("settings of a server", SETTINGS + goaway(8), ("goaway", 8)),
    uni_to_client("push ids to a client", SETTINGS + PUSHES_TO_3, UNEXPECTED),
    uni_to_client("cancelled push to a client", SETTINGS + frame(3, b"\x02"), BAD_ID),
    uni_to_client("goaway to a client names no request", SETTINGS + goaway(3), BAD_ID),
    uni("encoder", b"\x02\x20\x20"),
    uni("encoder inserts a name", b"\x02\x41a\x01b", BAD_ENCODER),
    uni("encoder refers to a name", b"\x02\xc0\x01b", BAD_ENCODER),
    uni("encoder sets a capacity", b"\x02\x3f\x01", BAD_ENCODER),
    uni("encoder duplicates", b"\x02\x00", BAD_ENCODER),
    uni("encoder ends", b"\x02", CLOSED, fin=True),
    uni("decoder cancels", b"\x03\x40\x7e\x7f\x00\x7f" + b"\xff" * 7 + b"\x7f\x44"),
    uni("decoder acknowledges", b"\x03\x40\x84", BAD_DECODER),
    uni("decoder counts", b"\x03\x01", BAD_DECODER),
    uni("decoder counts 0", b"\x03\x40\x00", BAD_DECODER),
    uni("decoder cancels without end", b"\x03\x7f" + b"\xff" * 9, BAD_DECODER),
    uni("decoder ends", b"\x03", CLOSED, fin=True),
    uni("a stream of a later extension", b"\x21" + bytes(range(256))),
    uni("it ends", b"\x21" + bytes(range(256)), fin=True),
    uni("a stream ends before its type", b"\x40", fin=True),
    uni("a stream ends at once", b"", fin=True),
    uni("a client pushes", b"\x01\x00", BAD_STREAM),
    uni_to_client("a server pushes", b"\x01\x00", BAD_ID),
    Vector("a server opens a bidirectional stream", b"\0", [BAD_STREAM], False, 1, True),
]


def answer(length: int) -> list[Pair]:
    return [*OK, (b"content-length", b"%d" % length)]


INTERIM: list[Pair] = [(b":status", b"103"), (b"link", b"</x>")]
SOON: Event = ("interim", 0, dict(INTERIM))
HUNDRED: Event = ("interim", 0, {b":status": b"100"})
NOT_MODIFIED: list[Pair] = [(b":status", b"304"), (b"content-length", b"9")]
HI = answer(2)
RESPONSES = [
    reply("200", headers(HI) + data(b"hi"), got(HI, 2), body(b"hi"), DONE),
    reply(
        "interim twice",
        headers(INTERIM) + GREASE + headers(INTERIM) + headers(OK) + data(b"a"),
        *(SOON, SOON, got(OK), body(b"a"), DONE),
    ),
    reply("interim 100", headers([(b":status", b"100")]) + headers(OK), HUNDRED, got(OK), DONE),
    reply("response with trailers", headers(OK) + headers(SUM), got(OK), TRAILERS, DONE),
    reply("304 with a length", headers(NOT_MODIFIED), got(NOT_MODIFIED, 9), DONE),
    reply(
        "304 with a body",
        headers(NOT_MODIFIED) + data(b"123456789"),
        *(got(NOT_MODIFIED, 9), message_error()),
    ),
    reply("answer to HEAD", headers(answer(9)), got(answer(9), 9), DONE, head=True),
    reply("too short", headers(HI) + data(b"h"), got(HI, 2), body(b"h"), message_error()),
    reply("too long", headers(HI) + data(b"hi!"), got(HI, 2), message_error()),
    reply("no response", b"", message_error(status=0)),
    reply("interim alone", headers(INTERIM), SOON, message_error(status=0)),
    reply("DATA after interim", headers(INTERIM) + data(b"a"), SOON, UNEXPECTED),
    reply("push", frame(5, b"\0" + section(GET)), BAD_ID),
    *(
        reply(name, headers(pairs), message_error())
        for name, pairs in (
            ("no status", OK[1:]),
            ("status twice", [OK[0], *OK]),
            ("status last", OK[::-1]),
            ("status of two digits", [(b":status", b"20")]),
            ("status 099", [(b":status", b"099")]),
            ("status of four digits", [(b":status", b"2000")]),
            ("status +20", [(b":status", b"+20")]),
            ("status 101", [(b":status", b"101")]),
            ("a request's field", [*OK, (b":path", b"/")]),
            ("te in a response", [*OK, (b"te", b"trailers")]),
            ("connection", [*OK, (b"connection", b"close")]),
            ("content-length +2", [*OK, (b"content-length", b"+2")]),
        )
    ),
]

VECTORS = [*GOOD, *BAD_MESSAGES, *BAD_REQUEST_STREAMS, *UNIDIRECTIONAL, *RESPONSES]
