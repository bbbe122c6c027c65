"""What a load says on a connection and what it makes of the answers: `prompt/1` and HTTP/3.

Sans-IO, and cheap: a request is the same bytes every time, encoded once for all connections; of an
answer the verdict is read and the end is checked, and its ids are only counted. The rule that holds
here: an answer that is none (no verdict, no trailer, a trailer that counts other ids than came) is
a `ProtocolError` and ends the run, so that a server cannot look fast by answering rubbish.
"""

import re
from collections.abc import Callable
from typing import NoReturn, Protocol

from dataplane.client.keys import key_fields
from dataplane.errors import Status
from dataplane.http3 import Data, Fields, Http3, Sink, data_frame_header
from dataplane.http3_fields import Code
from dataplane.http_names import ALPN as H3_ALPN
from dataplane.http_names import BINARY, GENERATE
from dataplane.prompt1 import (
    ALPN,
    END_MARK_BYTES,
    TRAILER_BYTES,
    VERDICT_BYTES,
    ProtocolError,
    Request,
    decode_trailer,
    decode_verdict,
    encode_request,
)

_OK = int(Status.OK)
_END_BYTES = len(END_MARK_BYTES) + TRAILER_BYTES
_INGRESS = re.compile(rb"(?:^|,)\s*ingress;dur=([0-9]{1,9}(?:\.[0-9]{1,9})?)")


class Exchange:
    """One request in flight.

    Attributes:
        began_ns: The moment that its latency counts from.
        status: The answer's, 0 before its verdict is there.
        ingress_us: What the server states for it, -1 if it states none.
        body_bytes: How much came behind the verdict.
    """

    __slots__ = ("_tail", "began_ns", "body_bytes", "ingress_us", "status")

    def __init__(self, began_ns: int) -> None:
        self.began_ns = began_ns
        self.status = 0
        self.ingress_us = -1
        self._tail = b""
        self.body_bytes = 0

    def head(self, data: bytes) -> bytes | None:
        """Gather the verdict's bytes in front of a raw answer; None while they are not whole."""
        data = self._tail + data
        if len(data) < VERDICT_BYTES:
            self._tail = data
            return None
        self._tail = b""
        return data

    def body(self, data: bytes) -> None:
        """Count what came behind the verdict, and keep what may be the end."""
        self.body_bytes += len(data)
        self._tail = (self._tail + data)[-_END_BYTES:]

    def end(self) -> None:
        """The stream is over.

        Raises:
            ProtocolError: The answer is not whole.
        """
        if not self.status:
            raise ProtocolError("an answer ended inside its verdict")
        if self.status != _OK:
            return
        if len(self._tail) < _END_BYTES or not self._tail.startswith(END_MARK_BYTES):
            raise ProtocolError("an answer ended without its trailer")
        counted = decode_trailer(self._tail[len(END_MARK_BYTES) :]).output_tokens
        if 4 * counted + _END_BYTES != self.body_bytes:
            raise ProtocolError(
                f"a trailer counts {counted} ids; {self.body_bytes - _END_BYTES} bytes came"
            )


class Dialogue(Protocol):
    """One connection's half of a protocol.

    Attributes:
        request: Every request, whole.
        close_code: What the connection is closed with.
        taking: Whether the server takes new requests here.
    """

    request: bytes
    close_code: int
    taking: bool

    def opening(self, first_uni_id: int) -> list[tuple[int, bytes]]:
        """What to send once the connection is up, on unidirectional streams from this one on."""
        ...

    def take(self, exchange: Exchange, stream_id: int, data: bytes, fin: bool) -> None:
        """Take an answer's next bytes; with `fin` it is whole afterwards.

        Raises:
            ProtocolError: The bytes are no answer.
        """
        ...

    def take_other(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Take bytes of a stream that answers nothing."""
        ...


class RawDialogue:
    """`prompt/1`."""

    close_code = 0
    taking = True

    def __init__(self, request: bytes) -> None:
        self.request = request

    def opening(self, first_uni_id: int) -> list[tuple[int, bytes]]:
        return []

    def take(self, exchange: Exchange, stream_id: int, data: bytes, fin: bool) -> None:
        if exchange.status:
            exchange.body(data)
        else:
            whole = exchange.head(data)
            if whole is not None:
                verdict = decode_verdict(whole)
                exchange.status = verdict.status
                if verdict.status == _OK:
                    exchange.ingress_us = verdict.ingress_us
                exchange.body(whole[VERDICT_BYTES:])
        if fin:
            exchange.end()

    def take_other(self, stream_id: int, data: bytes, fin: bool) -> None:
        pass


class H3Dialogue(Sink):
    """`POST /v1/generate` with a binary body and a binary answer."""

    close_code = int(Code.NO_ERROR)

    def __init__(self, request: bytes) -> None:
        self.request = request
        self.taking = True
        self._http3 = Http3(is_client=True)
        self._exchange = Exchange(0)

    def opening(self, first_uni_id: int) -> list[tuple[int, bytes]]:
        return self._http3.start((first_uni_id, first_uni_id + 4, first_uni_id + 8))

    def take(self, exchange: Exchange, stream_id: int, data: bytes, fin: bool) -> None:
        self._exchange = exchange
        self._http3.receive(stream_id, data, fin, self)

    def take_other(self, stream_id: int, data: bytes, fin: bool) -> None:
        self._http3.receive(stream_id, data, fin, self)

    # What the framing says.

    def on_headers(self, stream_id: int, fields: Fields, length: int | None) -> bool:
        exchange = self._exchange
        exchange.status = int(fields[b":status"])
        if exchange.status == _OK:
            found = _INGRESS.search(fields.get(b"server-timing", b""))
            if found:
                exchange.ingress_us = round(float(found[1]) * 1000)
        return True

    def on_data(self, stream_id: int, data: Data, start: int, end: int) -> bool:
        self._exchange.body(bytes(data[start:end]))
        return True

    def on_end(self, stream_id: int) -> None:
        self._exchange.end()

    def on_trailers(self, stream_id: int, fields: Fields) -> None:
        pass

    def on_interim(self, stream_id: int, fields: Fields) -> None:
        pass

    def on_message_error(self, stream_id: int, status: int, code: int, reason: str) -> NoReturn:
        raise ProtocolError(f"an answer is no HTTP/3 message: {reason}")

    def on_connection_error(self, code: int, reason: str) -> NoReturn:
        raise ProtocolError(f"the server does not keep to HTTP/3: {reason}")

    def on_goaway(self, last_id: int) -> None:
        self.taking = False


def raw_request(ids: bytes, max_output: int, api_key: bytes | None = None) -> bytes:
    """Return a whole `prompt/1` request; `ids` are u32, little-endian."""
    return encode_request(Request(len(ids) // 4, max_output=max_output, api_key=api_key)) + ids


def h3_request(authority: str, ids: bytes, max_output: int, api_key: bytes | None = None) -> bytes:
    """Return a whole HTTP/3 request: HEADERS frame and DATA frame."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", authority.encode()),
        (b":path", GENERATE),
        (b"content-type", BINARY),
        (b"content-length", b"%d" % len(ids)),
        (b"x-max-tokens", b"%d" % max_output),
        *key_fields(api_key),
    ]
    head = Http3(is_client=True).encode_headers(0, fields)
    return head + data_frame_header(len(ids)) + ids


def dialogues(
    protocol: str, authority: str, ids: bytes, max_output: int, api_key: bytes | None = None
) -> tuple[str, Callable[[], Dialogue]]:
    """Return the ALPN of `raw` or `h3`, and what makes each connection's dialogue."""
    if protocol == "h3":
        request = h3_request(authority, ids, max_output, api_key)
        return H3_ALPN, lambda: H3Dialogue(request)
    request = raw_request(ids, max_output, api_key)
    return ALPN, lambda: RawDialogue(request)
