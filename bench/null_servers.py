"""Servers that only answer: what a generator reaches against one is its ceiling.

`python -m bench.null_servers h1|h2|h3 --request-bytes N --answer HEX ...` prints its port and
answers every request with the same bytes. Nothing is parsed but what tells where a request ends: of
HTTP/1.1 its length, which is known, of HTTP/2 the frame's heads, of QUIC what aioquic does anyway
(`bench/bare_echo.py`). A ceiling is therefore what generator and answering reach together, and the
generator's own is not below it.
"""

import argparse
import selectors
import socket
import ssl
import struct
from typing import Protocol

from bench.bare_echo import serve as serve_quic
from bench.clients import http2

_READ = 1 << 18
_AGAIN = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)


class _Answering(Protocol):
    """One connection's half."""

    def receive(self, data: memoryview) -> bytes:
        """Return what to send back."""
        ...


class Counting:
    """HTTP/1.1: a request is over after so many bytes."""

    def __init__(self, request_bytes: int, answer: bytes) -> None:
        self._request_bytes = request_bytes
        self._answer = answer
        self._missing = request_bytes

    def receive(self, data: memoryview) -> bytes:
        self._missing -= len(data)
        if self._missing > 0:
            return b""
        self._missing += self._request_bytes
        return self._answer


class Framing:
    """HTTP/2: a request is over with the frame that says END_STREAM."""

    _WIDE = 1 << 30
    _STATUS = bytes([http2.STATUS_200])

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._held = b""
        self._skip = len(http2.PREFACE)
        self._taken = 0

    def receive(self, data: memoryview) -> bytes:
        out = []
        whole = self._held + data if self._held else bytes(data)
        at = 0
        if self._skip:
            if len(whole) < self._skip:
                self._held = whole
                return b""
            at, self._skip = self._skip, 0
            window = struct.pack(">I", self._WIDE)
            settings = struct.pack(">HI", http2.INITIAL_WINDOW_SIZE, self._WIDE)
            out.append(http2.frame(http2.SETTINGS, 0, 0, settings))
            out.append(http2.frame(http2.WINDOW_UPDATE, 0, 0, window))
        while len(whole) - at >= 9:
            length = int.from_bytes(whole[at : at + 3], "big")
            if len(whole) - at < 9 + length:
                break
            kind, flags = whole[at + 3], whole[at + 4]
            if kind == http2.DATA:
                self._taken += length
                if flags & http2.END_STREAM:
                    out.append(self._answer_on(int.from_bytes(whole[at + 5 : at + 9], "big")))
            at += 9 + length
        self._held = whole[at:]
        return b"".join(out)

    def _answer_on(self, stream_id: int) -> bytes:
        head = http2.frame(http2.HEADERS, http2.END_HEADERS, stream_id, self._STATUS)
        answer = head + http2.frame(http2.DATA, http2.END_STREAM, stream_id, self._answer)
        if self._taken > self._WIDE // 2:
            more = struct.pack(">I", self._taken)
            answer += http2.frame(http2.WINDOW_UPDATE, 0, 0, more)
            self._taken = 0
        return answer


def serve_tcp(options: argparse.Namespace) -> None:
    """Print the port and answer until the process is ended."""
    context = None
    if options.cert:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(options.cert, options.key)
        context.set_alpn_protocols(["h2" if options.protocol == "h2" else "http/1.1"])
    answer = bytes.fromhex(options.answer)
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    selector = selectors.EpollSelector()
    selector.register(listener, selectors.EVENT_READ)
    print(listener.getsockname()[1], flush=True)
    buffer = bytearray(_READ)
    while True:
        for key, _ in selector.select():
            if key.fileobj is listener:
                sock, _ = listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if context is not None:
                    sock = context.wrap_socket(sock, server_side=True)
                sock.setblocking(False)
                half: _Answering = (
                    Framing(answer)
                    if options.protocol == "h2"
                    else Counting(options.request_bytes, answer)
                )
                selector.register(sock, selectors.EVENT_READ, half)
            elif isinstance(key.fileobj, socket.socket) and not _turn(
                key.fileobj, key.data, buffer
            ):
                selector.unregister(key.fileobj)
                key.fileobj.close()


def _turn(sock: socket.socket, half: _Answering, buffer: bytearray) -> bool:
    """Take what a connection has to say and answer; False when it is over.

    An answer is small and its reader waits for it, so it is sent whole or the connection is over.
    """
    while True:
        try:
            size = sock.recv_into(buffer)
            if not size:
                return False
            answer = half.receive(memoryview(buffer)[:size])
            if answer and sock.send(answer) != len(answer):
                return False
        except _AGAIN:
            return True
        except OSError:
            return False
        if not isinstance(sock, ssl.SSLSocket) or not sock.pending():
            return True


def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("protocol", choices=("h1", "h2", "h3"))
    parser.add_argument("--request-bytes", type=int, default=0)
    parser.add_argument("--answer", required=True, help="in hexadecimal")
    parser.add_argument("--cert")
    parser.add_argument("--key")
    options = parser.parse_args()
    if options.protocol in ("h1", "h2"):
        serve_tcp(options)
    else:
        serve_quic(options.cert, options.key, "h3", bytes.fromhex(options.answer))


if __name__ == "__main__":
    main()
