"""`prompt/1` over a QUIC connection: one bidirectional stream a request (contract 3).

A stream is in one of five states, kept in `connection.streams`: absent (nothing came), `_Header` (a
header that is not whole), `Asked` (its claim has no answer yet), `Exchange` (it holds a slot, or is
being answered), `CLOSED` (answered; the client's own end has not come).
"""

from typing import Any

from dataplane import refusals
from dataplane.errors import Refusal, ResetCode, Status
from dataplane.exchange import Asked, Exchange
from dataplane.ingress import Ingress, Routes
from dataplane.prompt1 import (
    NO_SLOT,
    encode_end,
    encode_verdict,
    parse_request,
)

CLOSED = object()
_UNIDIRECTIONAL = 2
_OK = int(Status.OK)


class _Header:
    """The first bytes of a stream whose header is not whole."""

    __slots__ = ("connection", "data", "front", "stream_id")

    def __init__(self, front: "Prompt1", connection: Any, stream_id: int, data: bytes) -> None:
        self.front = front
        self.connection = connection
        self.stream_id = stream_id
        self.data = data

    def expire(self) -> None:
        self.front.drop_header(self)
        self.front.refuse_stream(
            self.connection, self.stream_id, 0, refusals.header_late(len(self.data)), False
        )


class Prompt1:
    """The raw front of one listener."""

    NO_ERROR = 0

    def __init__(self, routes: Routes) -> None:
        self._routes = routes
        self._home = routes.home
        self._sole = routes.sole
        self._answers = routes.stats.answers

    # What the peer did.

    def opened(self, connection: Any) -> None:
        """The handshake is complete; the raw protocol has nothing to say first."""

    def stream_data(
        self, connection: Any, stream_id: int, data: bytes, fin: bool, at_ns: int
    ) -> None:
        """Take in-order bytes of a stream, received by the kernel at `at_ns`."""
        state = connection.streams.get(stream_id)
        if state is None:
            if stream_id & _UNIDIRECTIONAL:
                if not fin:  # else nothing more comes of it
                    connection.streams[stream_id] = CLOSED
                    connection.stop(stream_id, 0)
                return
            self._header(None, connection, stream_id, data, fin, at_ns)
        elif state.__class__ is Exchange:
            self._body(state, data, 0, fin, at_ns)
        elif state.__class__ is _Header:
            state.data += data
            self._header(state, connection, stream_id, state.data, fin, at_ns)
        elif state.__class__ is Asked:
            self._keep(state, data, 0, fin, at_ns)
        elif fin:
            del connection.streams[stream_id]

    def _header(
        self,
        waiting: _Header | None,
        connection: Any,
        stream_id: int,
        data: bytes,
        fin: bool,
        at_ns: int,
    ) -> None:
        request = parse_request(data, fin)
        if request is None:
            if waiting is None:
                waiting = _Header(self, connection, stream_id, data)
                connection.streams[stream_id] = waiting
                self._home.deadlines.expect_header(waiting)
            return
        if waiting is not None:
            self._home.deadlines.expect_no_header(waiting)
        if isinstance(request, Refusal):
            self.refuse_stream(connection, stream_id, 0, request, fin)
            return
        ingress = self._sole or self._routes.of(request.api_key)
        if isinstance(ingress, Refusal):
            self.refuse_stream(connection, stream_id, request.request_id, ingress, fin)
            return
        exchange = ingress.claim(self, connection, stream_id, request, at_ns)
        if isinstance(exchange, Asked):
            connection.streams[stream_id] = exchange
            self._keep(exchange, data, request.header_bytes, fin, at_ns)
            return
        if isinstance(exchange, Refusal):
            self.refuse_stream(
                connection, stream_id, request.request_id, exchange, fin, ingress.queue_us, ingress
            )
            return
        connection.streams[stream_id] = exchange
        if not fin:
            ingress.deadlines.expect_body(exchange)
        self._body(exchange, data, request.header_bytes, fin, at_ns)

    @staticmethod
    def _keep(asked: Asked, data: bytes, offset: int, fin: bool, at_ns: int) -> None:
        """Keep what comes of the body before its claim is answered; one byte too many will tell."""
        request = asked.request
        room = request.n_tokens * request.width + 1 - len(asked.body)
        asked.body += data[offset : offset + room]
        if fin:
            asked.ends(at_ns)

    def decided(self, asked: Asked, outcome: Exchange | Refusal) -> None:
        """See `dataplane.exchange.Front`."""
        connection, stream_id, ingress = asked.connection, asked.stream_id, asked.ingress
        if isinstance(outcome, Refusal):
            self.refuse_stream(
                connection, stream_id, asked.request.request_id, outcome, asked.is_whole,
                ingress.queue_us, ingress,
            )  # fmt: skip
            return
        connection.streams[stream_id] = outcome
        if not asked.is_whole:
            ingress.deadlines.expect_body(outcome)
        self._body(outcome, bytes(asked.body), 0, asked.is_whole, asked.whole_ns)

    def drop_header(self, state: _Header) -> None:
        """Forget a header that is not waited for any more."""
        state.connection.streams.pop(state.stream_id, None)
        self._home.deadlines.expect_no_header(state)

    def _body(self, exchange: Exchange, data: bytes, offset: int, fin: bool, at_ns: int) -> None:
        length = len(data) - offset
        if fin:
            refusal = exchange.ingress.submit(exchange, data, offset, length, at_ns)
        elif length:
            refusal = exchange.ingress.write(exchange, data, offset, length)
        else:
            return
        if refusal is not None:
            self._refuse(exchange, refusal, fin)

    def stream_reset(self, connection: Any, stream_id: int) -> None:
        """The peer gave up sending: an unfinished request is over.

        The stream's own side ends too, also where nothing came before: one that stays open counts
        against the streams that the peer may have.
        """
        state = connection.streams.pop(stream_id, None)
        if state is CLOSED:
            return
        if state is not None:
            self._leave(state)
        if not stream_id & _UNIDIRECTIONAL:
            connection.reset(stream_id, 0)

    def stop_sending(self, connection: Any, stream_id: int) -> bool:
        """The peer wants no answer: its slot goes back, and what it still sends is not read.

        False when nothing of this stream is known.
        """
        state = connection.streams.get(stream_id)
        if state is None or state is CLOSED:
            return state is CLOSED
        ends_itself = (state.__class__ is Exchange and not state.writing) or (
            state.__class__ is Asked and state.is_whole
        )
        self._leave(state)
        if ends_itself:
            del connection.streams[stream_id]
        else:
            connection.streams[stream_id] = CLOSED
            connection.stop(stream_id, 0)
        return True

    def unread(self, connection: Any, stream_id: int) -> None:
        """Nobody reads this answer: it is broken off, and its slot goes back."""
        state = connection.streams.get(stream_id)
        if state is not CLOSED:  # then what the client still sends has to be told from a header
            connection.streams.pop(stream_id, None)
            if state is not None:
                self._leave(state)
        connection.reset(stream_id, int(ResetCode.SLOW_READER))

    def left(self, connection: Any) -> None:
        """The connection is over."""
        for state in connection.streams.values():
            if state is not CLOSED:
                self._leave(state)
        connection.streams.clear()

    def _leave(self, state: Any) -> None:
        """Give back what a stream holds or waits for."""
        if state.__class__ is _Header:
            self._home.deadlines.expect_no_header(state)
        elif state.__class__ is Asked:
            state.ingress.asking.forget(state)
        elif state.live:
            state.ingress.leave(state)

    def drain(self, connection: Any) -> None:
        """The raw protocol says it per request: 503."""

    # What is answered.

    def answer(self, exchange: Exchange, ids: bytes, finish: int) -> None:
        """See `dataplane.exchange.Front`: everything that is there goes in one write."""
        data = ids
        if not exchange.answered:
            exchange.answered = True
            self._answers[_OK] += 1
            data = (
                encode_verdict(
                    _OK, exchange.slot, exchange.request_id, exchange.queue_us, exchange.ingress_us,
                    0, exchange.free_left,
                )
                + ids
            )  # fmt: skip
        connection = exchange.connection
        if finish:
            data += encode_end(finish, exchange.n_tokens, exchange.sent)
            del connection.streams[exchange.stream_id]
            connection.send(exchange.stream_id, data, True)
        else:
            connection.send(exchange.stream_id, data, False)

    def refuse(self, exchange: Exchange, refusal: Refusal) -> None:
        """See `dataplane.exchange.Front`; a `complete_ns` says that the request's end had come."""
        self._refuse(exchange, refusal, ended=exchange.complete_ns != 0)

    def _refuse(self, exchange: Exchange, refusal: Refusal, ended: bool) -> None:
        self.refuse_stream(
            exchange.connection,
            exchange.stream_id,
            exchange.request_id,
            refusal,
            ended,
            exchange.queue_us,
            exchange.ingress,
        )

    def refuse_stream(
        self,
        connection: Any,
        stream_id: int,
        request_id: int,
        refusal: Refusal,
        ended: bool,
        queue_us: int = 0,
        ingress: Ingress | None = None,
    ) -> None:
        """Send the whole answer and FIN, then STOP_SENDING if the client's own FIN has not come.

        `ingress` is who would have admitted it, where that is known.
        """
        status, reason, retry_after_ms = refusal
        self._answers[int(status)] += 1
        ingress = ingress or self._sole
        free_left = ingress.free_slots() if ingress and status != Status.BUSY else 0
        verdict = encode_verdict(
            status, NO_SLOT, request_id, queue_us, 0, retry_after_ms, free_left
        )
        connection.send(stream_id, verdict + reason.encode(), True)
        if ended:
            connection.streams.pop(stream_id, None)
        else:
            connection.streams[stream_id] = CLOSED
            connection.stop(stream_id, 0)

    def fail(self, exchange: Exchange, code: ResetCode) -> None:
        """See `dataplane.exchange.Front`."""
        exchange.connection.streams.pop(exchange.stream_id, None)
        exchange.connection.reset(exchange.stream_id, int(code))
