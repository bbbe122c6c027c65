"""One HTTP/3 connection of a client: requests out, and what the framing says of their answers.

It knows nothing of what the answers mean. The rules that hold here:

- One bad answer ends its stream; what breaks HTTP/3 itself ends the connection.
- After GOAWAY nothing more is asked on the connection, and what the daemon will not answer any more
  ends at once.
- Whoever asked hears of the end exactly once.
"""

from typing import Protocol

from dataplane.client.answer import ResetError
from dataplane.client.link import Link
from dataplane.client.transport import Transport
from dataplane.errors import DataplaneError, UnavailableError
from dataplane.http3 import Http3, data_frame_header
from dataplane.http3_fields import Code, Data, Fields, Pair
from dataplane.prompt1 import ProtocolError


class Consumer(Protocol):
    """Whoever asked, as the link sees them. What it raises of `DataplaneError` ends its stream."""

    def on_head(self, fields: Fields) -> None:
        """The answer's header."""

    def on_body(self, data: bytes) -> None:
        """The next bytes of its body."""

    def on_end(self) -> None:
        """The answer is whole, as far as HTTP goes."""

    def on_error(self, error: DataplaneError) -> None:
        """There will be no more of it."""

    def on_lost(self, why: str) -> None:
        """The connection is over."""


class Http3Link(Link):
    """A connection that speaks HTTP/3: it is the framing's sink."""

    cancel_code = int(Code.REQUEST_CANCELLED)
    close_code = int(Code.NO_ERROR)

    def __init__(self, quic: Transport) -> None:
        super().__init__(quic)
        self.http3 = Http3(is_client=True)
        self._consumers: dict[int, Consumer] = {}
        self._goaway = False
        self._receiving = -1

    def request(self, pairs: list[Pair], body: bytes, consumer: Consumer) -> int:
        """Send a whole request.

        Returns:
            Its stream.

        Raises:
            UnavailableError: The connection is over, or takes no more requests.
        """
        if self._goaway:
            raise UnavailableError(
                "the daemon is shutting down and takes no more requests on this connection"
            )
        stream = _Stream(self)
        stream_id = stream.stream_id = self.open(stream, b"", False)
        self._consumers[stream_id] = consumer
        data = self.http3.encode_headers(stream_id, pairs)
        if body:
            data += data_frame_header(len(body)) + body
        self.send(stream_id, data, True)
        return stream_id

    def abandon(self, stream_id: int) -> None:
        self._consumers.pop(stream_id, None)
        super().abandon(stream_id)
        if stream_id != self._receiving:  # else once the framing is through with it
            self.http3.forget(stream_id)

    def receive(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Hand a request's stream to the framing; what nobody waits for leaves nothing there."""
        self._receiving = stream_id
        self.http3.receive(stream_id, data, fin, self)
        self._receiving = -1
        if stream_id not in self._consumers:
            self.http3.forget(stream_id)

    # -------------------------------------------------------- what the link tells

    def on_up(self) -> None:
        # The ids play no part in what is said.
        for _, data in self.http3.start((2, 6, 10)):
            self.open_uni(data)

    def on_peer_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        self.http3.receive(stream_id, data, fin, self)

    def on_peer_reset(self, stream_id: int) -> None:
        self.http3.reset(stream_id, self)

    def take_consumer(self, stream_id: int) -> Consumer | None:
        """Return whoever asked on a stream that is over."""
        return self._consumers.pop(stream_id, None)

    # -------------------------------------------------------- what the framing tells

    def on_headers(self, stream_id: int, fields: Fields, length: int | None) -> bool:
        consumer = self._consumers.get(stream_id)
        if consumer is None:
            return False
        try:
            consumer.on_head(fields)
        except DataplaneError as error:
            return self._give_up(stream_id, error)
        return stream_id in self._consumers

    def on_data(self, stream_id: int, data: Data, start: int, end: int) -> bool:
        consumer = self._consumers.get(stream_id)
        if consumer is None:
            return False
        try:
            consumer.on_body(bytes(data[start:end]))
        except DataplaneError as error:
            return self._give_up(stream_id, error)
        return stream_id in self._consumers

    def on_end(self, stream_id: int) -> None:
        consumer = self._consumers.get(stream_id)
        if consumer is not None:
            try:
                consumer.on_end()
            except DataplaneError as error:
                consumer.on_error(error)
            self._consumers.pop(stream_id, None)

    def on_trailers(self, stream_id: int, fields: Fields) -> None:
        """Nothing in trailers matters here."""

    def on_interim(self, stream_id: int, fields: Fields) -> None:
        """What comes before the answer says nothing of it."""

    def on_message_error(self, stream_id: int, status: int, code: int, reason: str) -> None:
        self._give_up(stream_id, ProtocolError(f"the answer is no good HTTP/3: {reason}"))

    def on_connection_error(self, code: int, reason: str) -> None:
        self.shut(f"the server broke HTTP/3: {reason}", code)

    def on_goaway(self, last_id: int) -> None:
        self._goaway = True
        for stream_id in [number for number in self._consumers if number >= last_id]:
            error = UnavailableError("the daemon is shutting down and did not take the request")
            self._give_up(stream_id, error)

    def _give_up(self, stream_id: int, error: DataplaneError) -> bool:
        """End a stream that whoever asked hears of; False, for the framing to discard the rest."""
        consumer = self._consumers.get(stream_id)
        self.abandon(stream_id)
        if consumer is not None:
            consumer.on_error(error)
        return False


class _Stream:
    """A request's stream: its bytes go to the framing."""

    def __init__(self, link: Http3Link) -> None:
        self._link = link
        self.stream_id = -1

    def on_data(self, data: bytes, fin: bool) -> None:
        self._link.receive(self.stream_id, data, fin)

    def on_reset(self, code: int) -> None:
        self._link.http3.reset(self.stream_id, self._link)
        consumer = self._link.take_consumer(self.stream_id)
        if consumer is not None:
            consumer.on_error(ResetError(code, _reset_words(code)))

    def on_lost(self, why: str) -> None:
        consumer = self._link.take_consumer(self.stream_id)
        if consumer is not None:
            consumer.on_lost(why)


def _reset_words(code: int) -> str:
    if code == Code.INTERNAL_ERROR:
        return "the daemon could not finish it (H3_INTERNAL_ERROR)"
    name = f"H3_{Code(code).name}" if code in Code.__members__.values() else f"code {code:#x}"
    return f"the daemon gave it up ({name})"
