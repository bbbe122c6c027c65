"""Both ends of an HTTP/3 front in memory: what it is told to send, and what a client reads."""

from typing import Any

from dataplane.http3 import Data, Fields, Http3, Sink
from dataplane.pages import Page

Pairs = list[tuple[bytes, bytes]]


class Quiet:
    """No pages."""

    def has(self, target: str, probes: bool) -> bool:
        return False

    def is_about_a_partition(self, target: str) -> bool:
        return False

    def get(self, target: str, probes: bool, request_id: str, partition: str | None) -> Page:
        return Page(404, "text/plain", target.encode())


class Recorder:
    """A connection that keeps what it is told to send."""

    def __init__(self) -> None:
        self.streams: dict[int, Any] = {}
        self.writing = 0
        self.gone = False
        self.extra: Any = None
        self.told: list[tuple[Any, ...]] = []

    def send(self, stream_id: int, data: bytes, fin: bool) -> None:
        self.told.append(("send", bytes(data), fin))

    def reset(self, stream_id: int, code: int) -> None:
        self.told.append(("reset", code))

    def stop(self, stream_id: int, code: int) -> None:
        self.told.append(("stop", code))

    def close(self, code: int, reason: str) -> None:
        self.told.append(("close", code, reason))

    def overfull(self) -> bool:
        return False


class Heard(Sink):
    """What came of a message that may have no fault."""

    def __init__(self) -> None:
        self.fields: Fields = {}
        self.body = b""
        self.ended = False

    def on_headers(self, stream_id: int, fields: Fields, length: int | None) -> bool:
        self.fields = fields
        return True

    def on_data(self, stream_id: int, data: Data, start: int, end: int) -> bool:
        self.body += data[start:end]
        return True

    def on_end(self, stream_id: int) -> None:
        self.ended = True

    def on_trailers(self, stream_id: int, fields: Fields) -> None:
        raise AssertionError(fields)

    def on_interim(self, stream_id: int, fields: Fields) -> None:
        raise AssertionError(fields)

    def on_goaway(self, last_id: int) -> None:
        raise AssertionError(last_id)

    def on_message_error(self, stream_id: int, status: int, code: int, reason: str) -> None:
        raise AssertionError(reason)

    def on_connection_error(self, code: int, reason: str) -> None:
        raise AssertionError(reason)


class Answer:
    """What a client makes of an answer."""

    def __init__(self, data: bytes) -> None:
        heard = Heard()
        Http3(is_client=True).receive(0, data, True, heard)
        self.fields: Pairs = list(heard.fields.items())
        self.body = heard.body
        self.ended = heard.ended
