"""The yardstick of `bench/admission.py`: the least that a server on aioquic does, done with care.

A non-blocking socket drained up to 64 datagrams at a time, routing by connection ID, events after
each datagram and one `datagrams_to_send` a batch. It answers a request, once whole, with the bytes
that it was given, in one write, and does nothing else: no header is read, no id is checked, no slot
is held.
"""

import argparse
import selectors
import socket
import time

from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection
from aioquic.quic.events import ConnectionIdIssued, ConnectionTerminated, StreamDataReceived

BATCH = 64
ALPN = "bare-echo"


def serve(cert: str, key: str, alpn: str, answer: bytes) -> None:
    """Print the port, then answer until the process is ended."""
    configuration = QuicConfiguration(is_client=False, alpn_protocols=[alpn])
    configuration.load_cert_chain(cert, key)
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.bind(("127.0.0.1", 0))
    sock.setblocking(False)
    selector = selectors.DefaultSelector()
    selector.register(sock, selectors.EVENT_READ)
    print(sock.getsockname()[1], flush=True)
    connections: dict[bytes, QuicConnection] = {}
    while True:
        timers = [timer for quic in set(connections.values()) if (timer := quic.get_timer())]
        wait = min(timers, default=time.monotonic() + 1) - time.monotonic()
        touched = set()
        if selector.select(max(0.0, wait)):
            touched = drain(sock, connections, configuration, answer)
        now = time.monotonic()
        for quic in set(connections.values()):
            timer = quic.get_timer()
            if timer is not None and now >= timer:
                quic.handle_timer(now)
                touched.add(quic)
        for quic in touched:
            for data, address in quic.datagrams_to_send(now):
                sock.sendto(data, address)


def drain(
    sock: socket.socket,
    connections: dict[bytes, QuicConnection],
    configuration: QuicConfiguration,
    answer: bytes,
) -> set[QuicConnection]:
    """Take a batch; return the connections that have something to send."""
    now = time.monotonic()
    touched = set()
    for _ in range(BATCH):
        try:
            data, address = sock.recvfrom(2048)
        except BlockingIOError:
            break
        cid = data[6 : 6 + data[5]] if data[0] & 0x80 else data[1:9]
        quic = connections.get(cid)
        if quic is None:
            if not data[0] & 0x80:
                continue
            quic = QuicConnection(
                configuration=configuration, original_destination_connection_id=cid
            )
            connections[cid] = connections[quic.host_cid] = quic
        quic.receive_datagram(data, address, now)
        while (event := quic.next_event()) is not None:
            if isinstance(event, StreamDataReceived):
                if event.end_stream:
                    quic.send_stream_data(event.stream_id, answer, end_stream=True)
            elif isinstance(event, ConnectionIdIssued):
                connections[event.connection_id] = quic
            elif isinstance(event, ConnectionTerminated):
                for name in [name for name, other in connections.items() if other is quic]:
                    del connections[name]
        touched.add(quic)
    return touched


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cert", required=True)
    parser.add_argument("--key", required=True)
    parser.add_argument("--answer", type=bytes.fromhex, metavar="HEX", required=True)
    options = parser.parse_args()
    serve(options.cert, options.key, ALPN, options.answer)
