"""One QUIC connection of a client: resolve, connect, open streams, learn at once when it is over.

It knows nothing of what the streams carry. The rules that hold here:

- Nobody waits for what cannot come: every open stream hears of the connection's end, whoever ended
  it and however (a close, silence, a refused datagram, TLS).
- The UDP socket is connected, so that the kernel tells when nobody listens.
- While an answer is awaited the link is kept alive: a model may think for longer than a connection
  may be silent.
"""

import asyncio
import socket
from typing import Any, Protocol, TypeVar, cast

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.events import (
    ConnectionTerminated,
    HandshakeCompleted,
    QuicEvent,
    StreamDataReceived,
    StreamReset,
)
from aioquic.quic.packet import QuicErrorCode
from aioquic.tls import AlertDescription

from dataplane.client.transport import PumpTransport, Transport
from dataplane.errors import UnavailableError
from dataplane.kinds import Address, format_address
from dataplane.quic import ProbingConnection

KEEP_ALIVE_S = 0.5
_RECEIVE_BUFFER = 1 << 20
_BY_SERVER = 1


class Receiver(Protocol):
    """Whoever opened a stream."""

    def on_data(self, data: bytes, fin: bool) -> None:
        """The stream's next bytes."""

    def on_reset(self, code: int) -> None:
        """The peer gave the stream up."""

    def on_lost(self, why: str) -> None:
        """The connection is over."""


class Link(asyncio.DatagramProtocol):
    """A connection. `lost` is why it is over, or None.

    A protocol that needs more than the streams that this side opens derives from it.
    """

    # The error codes with which streams are given up and the connection is closed.
    cancel_code = 0
    close_code = 0

    def __init__(self, quic: Transport) -> None:
        self._loop = asyncio.get_running_loop()
        self.established: asyncio.Future[None] = self._loop.create_future()
        self.lost: str | None = None
        self._quic = quic
        self._socket: asyncio.DatagramTransport | None = None
        self._receivers: dict[int, Receiver] = {}
        self._heard = False
        self._flush_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at: float | None = None
        self._keep_alive: asyncio.TimerHandle | None = None

    # -------------------------------------------------------- streams

    def open(self, receiver: Receiver, data: bytes, fin: bool) -> int:
        """Open a stream with its first bytes.

        Raises:
            UnavailableError: The connection is over.
        """
        if self.lost is not None:
            raise UnavailableError(self.lost)
        stream_id = self._quic.open(data, fin)
        if stream_id < 0:
            raise UnavailableError("the connection is closing")
        self._receivers[stream_id] = receiver
        self._flush_soon()
        if self._keep_alive is None:
            self._keep_alive = self._loop.call_later(KEEP_ALIVE_S, self._stay_alive)
        return stream_id

    def open_uni(self, data: bytes) -> None:
        """Open a stream that only this side sends on, and leave it open."""
        self._quic.open(data, False, uni=True)
        self._flush_soon()

    def send(self, stream_id: int, data: bytes, fin: bool) -> bool:
        """Send more on a stream; False if the peer has stopped it or the connection is over."""
        if self.lost is not None or not self._quic.send(stream_id, data, fin):
            return False
        self._flush_soon()
        return True

    def abandon(self, stream_id: int) -> None:
        """Give a stream up in both directions: STOP_SENDING and RESET_STREAM."""
        if self._receivers.pop(stream_id, None) is None or self.lost is not None:
            return
        blocked = self._quic.is_blocked(stream_id)
        if blocked is None:
            return
        if blocked:
            # It waits for the peer to allow more streams, and to reset it even so would end the
            # connection. The request goes out in its time, and its answer's first bytes end it.
            self._receivers[stream_id] = _Unwanted(self, stream_id)
            return
        self._quic.give_up(stream_id, self.cancel_code)
        self._flush_soon()

    def shut(self, why: str = "the connection was closed by this side", code: int = -1) -> None:
        """Close the connection from this side; `code` is the protocol's usual one if negative."""
        self._finish(why, code)

    # -------------------------------------------------------- what a protocol may want to know

    def on_up(self) -> None:
        """The handshake is complete."""

    def on_peer_data(self, stream_id: int, data: bytes, fin: bool) -> None:
        """The next bytes of a stream that the peer opened."""

    def on_peer_reset(self, stream_id: int) -> None:
        """The peer gave up a stream that it had opened."""

    # -------------------------------------------------------- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._socket = cast(asyncio.DatagramTransport, transport)
        self._quic.connect(self._loop.time())
        self._transmit()

    def datagram_received(self, data: bytes, addr: Any) -> None:
        if self.lost is not None:
            return
        self._heard = True
        self._quic.receive(data, self._loop.time())
        self._take_events()
        if self.lost is None:
            self._transmit()
            if self._quic.is_closing:
                self._skip_closing_period()

    def error_received(self, exc: Exception) -> None:
        if isinstance(exc, ConnectionRefusedError):
            self._finish(
                "nobody listens there any more" if self._is_up() else "nobody listens there"
            )
        elif not self._is_up():
            self._finish(str(exc))

    def connection_lost(self, exc: Exception | None) -> None:
        self._finish(f"the socket was closed: {exc}")

    # -------------------------------------------------------- inside

    def _take_events(self) -> None:
        events = self._quic.events
        while events:
            self._take_event(events.popleft())

    def _take_event(self, event: QuicEvent) -> None:
        if isinstance(event, (StreamDataReceived, StreamReset)) and event.stream_id & _BY_SERVER:
            if isinstance(event, StreamReset):
                self.on_peer_reset(event.stream_id)
            else:
                self.on_peer_data(event.stream_id, event.data, event.end_stream)
        elif isinstance(event, StreamDataReceived):
            receiver = self._receivers.get(event.stream_id)
            if event.end_stream:
                self._receivers.pop(event.stream_id, None)
            if receiver is not None:
                receiver.on_data(event.data, event.end_stream)
        elif isinstance(event, StreamReset):
            receiver = self._receivers.pop(event.stream_id, None)
            if receiver is not None:
                receiver.on_reset(event.error_code)
        elif isinstance(event, HandshakeCompleted):
            self.on_up()
            if not self.established.done():
                self.established.set_result(None)
        elif isinstance(event, ConnectionTerminated):
            self._finish(closing_words(event, self._is_up()))

    def _is_up(self) -> bool:
        return self.established.done() and self.established.exception() is None

    def _flush_soon(self) -> None:
        """One datagram for all that is sent in one turn of the loop."""
        if not self._flush_due:
            self._flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self.lost is None:
            self._transmit()

    def _transmit(self) -> None:
        """Send what is due, and set the timer."""
        if self._socket is None:
            return
        for data in self._quic.datagrams(self._loop.time()):
            self._socket.sendto(data)
        due = self._quic.timer()
        if due == self._timer_at:
            return
        self._disarm()
        if due is not None:
            self._timer_at = due
            self._timer = self._loop.call_at(due, self._on_timer, due)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._timer_at = None

    def _on_timer(self, due: float) -> None:
        self._timer = self._timer_at = None
        self._quic.handle_timer(max(due, self._loop.time()))
        self._take_events()
        if self.lost is None:
            self._transmit()

    def _stay_alive(self) -> None:
        self._keep_alive = None
        if not self._receivers or self.lost is not None:
            return
        if not self._heard:
            self._quic.ping()
            self._transmit()
        self._heard = False
        self._keep_alive = self._loop.call_later(KEEP_ALIVE_S, self._stay_alive)

    def _skip_closing_period(self) -> None:
        self._quic.skip_closing_period()
        self._take_events()

    def _finish(self, why: str, code: int = -1) -> None:
        if self.lost is not None:
            return
        self.lost = why
        # Nothing, if that is how it ended.
        self._quic.close(self.close_code if code < 0 else code)
        self._transmit()
        self._disarm()
        self._quic.free()
        if self._keep_alive is not None:
            self._keep_alive.cancel()
        if not self.established.done():
            self.established.set_exception(UnavailableError(why))
            self.established.exception()  # whoever gave up waiting leaves no complaint behind
        receivers, self._receivers = self._receivers, {}
        for receiver in receivers.values():
            receiver.on_lost(why)
        if self._socket is not None:
            self._socket.close()


AnyLink = TypeVar("AnyLink", bound=Link)


class _Unwanted:
    """Takes the place of a receiver that gave up before its stream could be given up."""

    def __init__(self, link: Link, stream_id: int) -> None:
        self._link = link
        self._stream_id = stream_id

    def on_data(self, data: bytes, fin: bool) -> None:
        if not fin:
            self._link.abandon(self._stream_id)

    def on_reset(self, code: int) -> None:
        pass

    def on_lost(self, why: str) -> None:
        pass


def closing_words(event: ConnectionTerminated, was_up: bool) -> str:
    """Say why a connection ended."""
    reason = event.reason_phrase
    alert = event.error_code - QuicErrorCode.CRYPTO_ERROR
    if 0 <= alert < 256:
        if alert == AlertDescription.no_application_protocol:
            return "the server speaks another protocol (ALPN)"
        return f"TLS: {reason or f'alert {alert}'}"
    if reason == "Idle timeout":
        return "the server fell silent" if was_up else "no answer"
    if event.error_code == QuicErrorCode.CONNECTION_REFUSED:
        return f"the server refuses connections{': ' * bool(reason)}{reason}"
    code = "" if event.error_code == QuicErrorCode.NO_ERROR else f" with code {event.error_code}"
    return f"the server closed the connection{code}{': ' * bool(reason)}{reason}"


# ---------------------------------------------------------------- connecting


async def _resolve(host: str, port: int) -> list[tuple[socket.AddressFamily, Any]]:
    if host == "localhost":
        # A hosts file may know one of them only, or another than the daemon bound.
        return [
            (socket.AF_INET6, ("::1", port, 0, 0)),
            (socket.AF_INET, ("127.0.0.1", port)),
        ]
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"the host name {host} does not resolve: {error}") from error
    return [(family, address) for family, _, _, _, address in found]


async def _attempt(
    family: socket.AddressFamily,
    address: Any,
    configuration: QuicConfiguration,
    kind: type[AnyLink],
    timeout: float,
    pump: bool,
) -> AnyLink:
    """One address. Raises `UnavailableError` with the reason alone."""
    try:
        sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise UnavailableError(error.strerror or str(error)) from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER)
        sock.connect(address)
        quic = ProbingConnection(configuration=configuration)
        transport = PumpTransport(quic, address) if pump else Transport(quic, address)
        _, link = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: kind(transport), sock=sock
        )
    except OSError as error:
        sock.close()
        raise UnavailableError(error.strerror or str(error)) from error
    try:
        async with asyncio.timeout(timeout):
            await asyncio.shield(link.established)
    except TimeoutError:
        link.shut()
        raise UnavailableError(f"no answer within {timeout:.1f} s") from None
    except BaseException:
        link.shut()
        raise
    return link


async def open_link(
    server: Address,
    ca_pem: bytes,
    alpn: str,
    kind: type[AnyLink],
    *,
    timeout: float,
    idle_timeout: float,
    server_name: str | None,
    pump: bool,
) -> AnyLink:
    """Connect to the first of a host's addresses that takes the connection.

    With `pump` the packet pump does its packets, else aioquic alone.

    Raises:
        UnavailableError: None does; the text gives each one's reason.
    """
    host, port = server
    configuration = QuicConfiguration(
        is_client=True,
        alpn_protocols=[alpn],
        cadata=ca_pem,
        server_name=server_name or host,
        idle_timeout=idle_timeout,
    )
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout
    addresses = await _resolve(host, port)
    reasons = []
    for place, (family, address) in enumerate(addresses):
        share = (deadline - loop.time()) / (len(addresses) - place)
        try:
            return await _attempt(family, address, configuration, kind, max(0.0, share), pump)
        except UnavailableError as error:
            reasons.append(f"{format_address(address[:2])}: {error}")
    raise UnavailableError(f"no connection to {format_address(server)} ({'; '.join(reasons)})")
