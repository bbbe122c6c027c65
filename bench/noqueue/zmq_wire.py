"""What group C's two processes say to each other, in msgpack over ZMQ."""

import msgspec

INPUT = "input"
OUTPUT = "output"
"""Names of the Unix sockets, in the directory that both are given."""


class Add(msgspec.Struct, tag=True, array_like=True):
    """A request for the engine."""

    number: int
    tokens: list[int]
    max_output: int
    temperature: float


class Abort(msgspec.Struct, tag=True, array_like=True):
    """Nobody waits for it any more."""

    number: int


class Output(msgspec.Struct, array_like=True):
    """One token of one request; with the first one, what the engine says of the request's wait."""

    number: int
    token: int
    whole: bool
    times_us: dict[str, int]


class Outputs(msgspec.Struct, array_like=True):
    """What one step made."""

    outputs: list[Output]
