"""A listener's connection whose established traffic is the packet pump's.

The same to a front as its base. The handshake goes through aioquic; from then on streams are the
pump's, which tells of them by events. The raw front's requests never come here, except those that
are refused in words.
"""

from collections.abc import Callable
from typing import Any, Protocol

from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import HandshakeCompleted

from dataplane import pump as events
from dataplane import quic as private
from dataplane.connection import Connection, Owner
from dataplane.errors import Refusal
from dataplane.hand_over import HandOver
from dataplane.ingress import Ingress
from dataplane.pump import Event, Pump, Refused, parse_refused

_SERVERS_UNI = 3  # the low bits of a unidirectional stream of this side's


class Pumps(Protocol):
    """What a connection asks of the listener's engine."""

    pump: Pump

    def front_of(self, alpn: str) -> int: ...
    def adopted(self, connection: "PumpedConnection") -> None: ...
    def left(self, handle: int) -> None: ...
    def refusal(self, refused: Refused) -> Refusal: ...
    def break_off(self, handle: int, stream_id: int) -> bool: ...
    def admitter(self, refused: Refused) -> Ingress | None: ...
    def writing(self, handle: int, ingress: Ingress | None = None) -> int: ...


class PumpedConnection(Connection):
    """A connection of a listener with a pump.

    Attributes:
        hand_over: Its passage to the pump.
        unended: Streams that this side stopped, whose end has not been told yet.
        whole: Serves a request that is all of a stream, where the front can (`Session.take_whole`).
    """

    __slots__ = (
        "_engine",
        "_in_pump",
        "_is_raw",
        "_next_uni",
        "_own",
        "_pump",
        "hand_over",
        "unended",
        "whole",
    )

    def __init__(
        self, quic: QuicConnection, owner: Owner, socket: Any, engine: Pumps, number: int
    ) -> None:
        self._own = self._in_pump = 0
        self._is_raw = False
        super().__init__(quic, owner, socket)
        self._engine = engine
        self._pump = engine.pump
        self.hand_over = HandOver(quic, engine.pump, engine.front_of, number)
        self._next_uni = _SERVERS_UNI
        self.unended: set[int] = set()
        self.whole: Callable[[int, Any, int, int, int], bool] | None = None

    @property
    def writing(self) -> int:
        """Slots that it holds in WRITING, those of the raw front as last asked for."""
        return self._own + self._in_pump

    @writing.setter
    def writing(self, count: int) -> None:
        self._own = count - self._in_pump

    def writing_in_pump(self, ingress: Ingress) -> int:
        return self._engine.writing(self.hand_over.handle, ingress)

    # In.

    def receive(self, data: bytes, path: bytes, now: float, at_ns: int) -> None:
        try:
            was_adopted = self.hand_over.adopted
            self.hand_over.receive(data, path, now, at_ns)
            if not was_adopted and self.hand_over.adopted:
                self._engine.adopted(self)
            self._settle(at_ns)
        except Exception as error:
            self.broken(error)

    def _settle(self, at_ns: int) -> None:
        """Act on what aioquic says."""
        if self._events:
            self._handle_events(at_ns)
        if not self.gone and private.is_closing(self.quic):
            self._leave()

    def take(self, event: Event, now: float) -> None:
        """Act on an event of the pump's."""
        if self.over:
            return
        try:
            handler = _HANDLERS.get(event.kind)
            if handler is not None:
                if self.front is not None and not self.gone:
                    handler(self, event)
                return
            self.hand_over.on_event(event, now)
            self._settle(event.at_ns)
            if event.kind != events.DELIVERED or not event.flags:
                self._owner.touched(self)
        except Exception as error:
            self.broken(error)

    def _handshake_completed(self, event: HandshakeCompleted) -> None:
        if self.hand_over.adopted:  # else it is being closed
            self._is_raw = self._engine.front_of(event.alpn_protocol or "") == events.FRONT_RAW
            super()._handshake_completed(event)
            if not self.gone:
                self.whole = getattr(self.extra, "take_whole", None)

    def _leave(self) -> None:
        self.whole = None
        super()._leave()

    def _data(self, event: Event) -> None:
        stream_id, fin = event.stream, bool(event.flags)
        if fin:
            self.unended.discard(stream_id)
        if stream_id in self.stopped:
            if fin:
                self.stopped.discard(stream_id)
        elif self.front is not None:
            if self._is_raw:
                self._in_pump = self._engine.writing(self.hand_over.handle)
            self.front.stream_data(self, stream_id, event.body, fin, event.at_ns)

    def _reset(self, event: Event) -> None:
        self._ended_early(event.stream)

    def _ended_early(self, stream_id: int) -> None:
        self.stopped.discard(stream_id)
        self.unended.discard(stream_id)
        if self.front is not None:
            self.front.stream_reset(self, stream_id)

    def _stopped(self, event: Event) -> None:
        if self.front is not None and not self.front.stop_sending(self, event.stream):
            # Nothing is known of it: it was stopped before any of it came, or is answered already.
            self.stopped.add(event.stream)

    def _closed(self, event: Event) -> None:
        """A stream is over: of one that was stopped the front hears now that nothing comes."""
        self.stopped.discard(event.stream)
        if event.stream in self.unended:
            self._ended_early(event.stream)

    def _refused(self, event: Event) -> None:
        refused = parse_refused(event.body)
        front: Any = self.front  # the raw one, the only one whose requests the pump reads
        front.refuse_stream(
            self,
            event.stream,
            refused.request_id,
            self._engine.refusal(refused),
            bool(event.flags),
            refused.queue_us,
            self._engine.admitter(refused),
        )

    # Out.

    def send(self, stream_id: int, data: bytes, fin: bool) -> None:
        """Queue stream data; it is dropped when the peer stopped this stream meanwhile."""
        handle = self.hand_over.handle
        if self.over or not handle:
            return
        if stream_id & 3 == _SERVERS_UNI:
            while self._next_uni <= stream_id:
                if self._pump.open(handle, uni=True) < 0:
                    return
                self._next_uni += 4
        self._pump.send_later(handle, stream_id, data, fin)
        self._buffered += len(data)

    def next_uni_stream_id(self) -> int:
        return self._next_uni

    def reset(self, stream_id: int, code: int) -> None:
        if not self.over:
            self._pump.reset(self.hand_over.handle, stream_id, code)

    def stop(self, stream_id: int, code: int) -> None:
        if not self.over:
            self.unended.add(stream_id)
            self._pump.stop(self.hand_over.handle, stream_id, code)

    def break_off(self, stream_id: int) -> None:
        if self.gone or self._engine.break_off(self.hand_over.handle, stream_id):
            return
        super().break_off(stream_id)

    def _unacknowledged(self) -> int:
        return self._pump.unacked(self.hand_over.handle)

    def _may_wait(self) -> bool:
        # The raw front's answers are not counted here.
        return self._unacknowledged() > 0

    def _progress(self) -> dict[int, int]:
        return self._pump.progress(self.hand_over.handle)

    def _outgoing(self, now: float) -> list[tuple[bytes, bytes]]:
        out = self.hand_over.transmit(now)
        handle = self.hand_over.handle
        if self.ended and handle:
            # It is forgotten in this pass, and its close has to go out before.
            while (built := self._pump.build(handle, int(now * 1e9))) is not None:
                out.append(built)
        return out

    # Time.

    def _fire(self, now: float) -> None:
        self.hand_over.handle_timer(now)

    def get_timer(self) -> float | None:
        return self.hand_over.get_timer()

    # The end.

    def dismantle(self) -> None:
        handle = self.hand_over.handle
        if handle:
            self._engine.left(handle)
        self.hand_over.forget()
        self.unended.clear()
        super().dismantle()


_HANDLERS = {
    events.DATA: PumpedConnection._data,
    events.RESET: PumpedConnection._reset,
    events.STOPPED: PumpedConnection._stopped,
    events.CLOSED: PumpedConnection._closed,
    events.REFUSED: PumpedConnection._refused,
}
