"""What `connection.streams` has for a request over HTTP/3, from its header on.

An `Asked` while a device has to grant its slot, a `Gathering` while a JSON body comes, else the
`Exchange`.
"""

from typing import Any, NamedTuple

from dataplane.exchange import Asked, Exchange
from dataplane.prompt1 import Request


class Wanted(NamedTuple):
    """What the header of a `/v1/generate` asked for, which a claim is made for."""

    kind: bytes
    request_id: bytes  # the client's own, or none
    accept: bytes | None
    length: int


class Gathering:
    """A JSON request under way: it holds a slot, and its body is not whole."""

    __slots__ = ("accept", "data", "exchange", "length", "request", "request_id")

    def __init__(
        self,
        exchange: Exchange,
        request: Request,
        request_id: bytes,
        accept: bytes | None,
        length: int,
    ) -> None:
        self.exchange = exchange
        self.request = request
        self.request_id = request_id
        self.accept = accept
        self.length = length
        self.data = bytearray()


def exchange_of(state: Any) -> Exchange:
    """Return the exchange of a stream's state."""
    exchange: Exchange = state.exchange if state.__class__ is Gathering else state
    return exchange


def is_whole(state: Any) -> bool:
    """Whether the end of a stream's request came."""
    if state.__class__ is Asked:
        whole: bool = state.is_whole
        return whole
    return exchange_of(state).complete_ns != 0
