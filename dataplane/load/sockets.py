"""Finding a server: the addresses of its host, and a socket to one of them."""

import socket
from typing import Any

from dataplane.errors import UnavailableError
from dataplane.kinds import Address

_BUFFER = 1 << 20


def resolve(address: Address) -> list[tuple[socket.AddressFamily, Any]]:
    """Return the addresses of a host, in the order in which they are to be tried.

    Raises:
        UnavailableError: It has none.
    """
    host, port = address
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    except (OSError, UnicodeError) as error:
        raise UnavailableError(f"the host name {host} does not resolve: {error}") from error
    return [(family, peer) for family, _, _, _, peer in found]


def connected(family: socket.AddressFamily, peer: Any) -> socket.socket:
    """Return a UDP socket that sends to `peer` alone, non-blocking.

    Raises:
        UnavailableError: There is no socket, or no way there.
    """
    try:
        sock = socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
    except OSError as error:
        raise UnavailableError(f"a socket cannot be had: {error.strerror}") from error
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        sock.connect(peer)
    except OSError as error:
        sock.close()
        raise UnavailableError(error.strerror or str(error)) from error
    return sock
