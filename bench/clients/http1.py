"""HTTP/1.1 from the client's side, one request at a time on a connection; no sockets here.

A request is sent as it was built; of an answer the status, the length or the chunks, and the body
are looked at, and the body has to be the one expected, byte for byte.
"""

import re

from bench.clients import WrongAnswerError

_LENGTH = re.compile(rb"(?i)\r\ncontent-length: *(\d{1,9})\r\n")
_CHUNKED = re.compile(rb"(?i)\r\ntransfer-encoding: *chunked\r\n")
_LAST_CHUNK = b"0\r\n\r\n"


def request_bytes(path: str, content_type: str, body: bytes) -> bytes:
    """Return a whole request."""
    head = (
        f"POST {path} HTTP/1.1\r\n"
        "host: localhost\r\n"
        f"content-type: {content_type}\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode("ascii") + body


class Http1:
    """One connection.

    Args:
        request: Every request, whole.
        expected: Every answer's body.
    """

    opening = b""
    alpn = "http/1.1"

    def __init__(self, request: bytes, expected: bytes) -> None:
        self._request = request
        self._expected = expected
        self._held = b""
        self._began_ns = 0
        self.in_flight = 0

    def begin(self, began_ns: int) -> bytes:
        """Return what to send for a request that began then."""
        self._began_ns = began_ns
        self.in_flight = 1
        return self._request

    def receive(self, data: bytes) -> tuple[tuple[int, ...], bytes]:
        """Return when the requests that are now answered began, and what else to send.

        Raises:
            WrongAnswerError: The answer is another one.
        """
        if self._held:
            data = self._held + data
        body = answer_body(data)
        if body is None:
            self._held = data
            return (), b""
        if body != self._expected or not self.in_flight:
            raise WrongAnswerError(f"answered {data[:300]!r}")
        self._held = b""
        self.in_flight = 0
        return (self._began_ns,), b""


def answer_body(data: bytes) -> bytes | None:
    """Return the body of an answer; None while it is not whole.

    Raises:
        WrongAnswerError: It is no 200, or more than one answer.
    """
    end = data.find(b"\r\n\r\n")
    if end < 0:
        return None
    start = end + 4
    head = data[: end + 2]
    if not head.startswith(b"HTTP/1.1 200"):
        raise WrongAnswerError(f"answered {data[:300]!r}")
    length = _LENGTH.search(head)
    if length is not None:
        missing = start + int(length[1]) - len(data)
        if missing < 0:
            raise WrongAnswerError(f"more than one answer: {data[:300]!r}")
        return None if missing else data[start:]
    if _CHUNKED.search(head) is None:
        raise WrongAnswerError(f"an answer without a length: {data[:300]!r}")
    # Cheap to see, and seldom wrong: only an end that looks like one is looked at closely.
    return _joined_chunks(data, start) if data.endswith(_LAST_CHUNK) else None


def _joined_chunks(data: bytes, at: int) -> bytes | None:
    parts: list[bytes] = []
    while True:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            return None
        try:
            size = int(data[at:line_end].partition(b";")[0], 16)
        except ValueError as error:
            raise WrongAnswerError(f"no chunk: {data[at : at + 100]!r}") from error
        at = line_end + 2 + size + 2
        if at > len(data):
            return None
        if not size:
            return b"".join(parts)
        parts.append(data[line_end + 2 : at - 2])
