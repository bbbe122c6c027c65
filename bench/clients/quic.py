"""The QUIC generators: the project's own load generator, and what its peers need different.

`prompt/1` runs natively on the packet pump, HTTP/3 in Python above it, which costs about what an
HTTP/3 server does; a row in which the generator was the busier says so (`client_bound`). The rule
that holds here: an answer of a peer has to be the expected body, as over TCP; an answer of
`prompt/1` or of the daemon's HTTP/3 is checked by `dataplane.load`, ids counted against the
trailer.
"""

from collections.abc import Callable

from bench.clients import Outcome, WrongAnswerError
from dataplane.errors import UnavailableError
from dataplane.http3 import Data, Fields, Http3, data_frame_header
from dataplane.load import Load, Server
from dataplane.load.wire import Dialogue, H3Dialogue
from dataplane.prompt1 import ProtocolError


def peer_h3_request(path: str, body: bytes) -> bytes:
    """Return a whole request: HEADERS frame and DATA frame."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", b"localhost"),
        (b":path", path.encode("ascii")),
        (b"content-type", b"application/octet-stream"),
        (b"content-length", b"%d" % len(body)),
    ]
    head = Http3(is_client=True).encode_headers(0, fields)
    return head + data_frame_header(len(body)) + body


class PeerH3Dialogue(H3Dialogue):
    """`POST` with a binary body to an HTTP/3 server that is not the daemon."""

    def __init__(self, request: bytes, expected: bytes) -> None:
        super().__init__(request)
        self._expected = expected
        self._bodies: dict[int, bytes] = {}

    def on_headers(self, stream_id: int, fields: Fields, length: int | None) -> bool:
        if fields[b":status"] != b"200":
            raise ProtocolError(f"answered {fields[b':status']!r}")
        self._bodies[stream_id] = b""
        return super().on_headers(stream_id, fields, length)

    def on_data(self, stream_id: int, data: Data, start: int, end: int) -> bool:
        self._bodies[stream_id] += bytes(data[start:end])
        return True

    def on_end(self, stream_id: int) -> None:
        body = self._bodies.pop(stream_id)
        if body != self._expected:
            raise ProtocolError(f"answered {body[:300]!r}")


class QuicLoad:
    """Connections to one QUIC server on 127.0.0.1.

    Args:
        port: The server's.
        ca_pem: What to verify it with.
        alpn: The protocol to ask for.
        dialogue: Makes each connection's half of it.
        connections: How many.
        streams: How many requests may be in flight on each.
        gso: Whether batches are sent that the kernel cuts into datagrams.
    """

    def __init__(
        self,
        port: int,
        ca_pem: bytes,
        alpn: str,
        dialogue: Callable[[], Dialogue],
        connections: int,
        streams: int,
        gso: bool = True,
    ) -> None:
        server = Server(("127.0.0.1", port), ca_pem)
        self._load = Load(server, alpn, dialogue, connections, gso=gso)
        self._streams = streams

    def connect(self) -> None:
        """Complete every handshake.

        Raises:
            UnavailableError: One failed.
        """
        self._load.connect()

    def close(self) -> None:
        """Close them."""
        self._load.close()

    def run(self, requests: int, rate: float | None = None) -> Outcome:
        """Send so many requests, as fast as they are answered or `rate` a second.

        Raises:
            WrongAnswerError: One was not answered with 200, or none was for too long.
        """
        try:
            outcome = self._load.run(requests, self._streams, rate)
        except (ProtocolError, UnavailableError) as error:
            raise WrongAnswerError(str(error)) from error
        if outcome.by_status != {"200": requests}:
            raise WrongAnswerError(f"not every request was answered with 200: {outcome.by_status}")
        return Outcome(outcome.totals_us, outcome.seconds, outcome.cpu_s, outcome.verdicts_us)
