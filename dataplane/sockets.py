"""Binding: every address of a host, all on one port."""

import errno
import socket

from dataplane.errors import UsageError

_TRIES = 20
_UDP_BUFFER = 4 << 20


def bind(flag: str, host: str, port: int, kind: socket.SocketKind) -> list[socket.socket]:
    """Bind every address of a host, IPv4 first, non-blocking.

    Args:
        flag: The setting that the address came from, for errors.
        host: A name or an address.
        port: The port; 0 takes a free one that all addresses can have.
        kind: SOCK_DGRAM or SOCK_STREAM.

    Raises:
        UsageError: The host does not resolve, or the port is taken or not allowed.
    """
    addresses = _addresses(flag, host, kind)
    for _ in range(_TRIES):
        bound: list[socket.socket] = []
        try:
            for family, address in addresses:
                at = bound[0].getsockname()[1] if bound else port
                bound.append(_bind_one(family, kind, address, at))
            return bound
        except OSError as error:
            for sock in bound:
                sock.close()
            if port or error.errno != errno.EADDRINUSE:
                raise UsageError(
                    f"{flag}: {host}:{port} cannot be used: {error.strerror}"
                ) from error
    raise UsageError(f"{flag}: no free port that every address of {host} can have")


def _addresses(flag: str, host: str, kind: socket.SocketKind) -> list[tuple[int, str]]:
    """Return a host's addresses by family, IPv4 first."""
    if host == "localhost":
        # Both loopback addresses, whatever /etc/hosts says (RFC 6761 section 6.3): browsers try
        # the IPv6 one first.
        loopback: list[tuple[int, str]] = [(socket.AF_INET, "127.0.0.1")]
        return [*loopback, (socket.AF_INET6, "::1")] if _has_ipv6() else loopback
    try:
        found = socket.getaddrinfo(host, 0, type=kind, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise UsageError(f"{flag}: {host} does not resolve: {error.strerror}") from error
    return sorted({(int(family), str(address[0])) for family, _, _, _, address in found})


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def _bind_one(family: int, kind: socket.SocketKind, address: str, port: int) -> socket.socket:
    sock = socket.socket(family, kind)
    try:
        sock.setblocking(False)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        if kind == socket.SOCK_DGRAM:
            for option in (socket.SO_RCVBUF, socket.SO_SNDBUF):
                sock.setsockopt(socket.SOL_SOCKET, option, _UDP_BUFFER)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address, port))
    except OSError:
        sock.close()
        raise
    return sock
