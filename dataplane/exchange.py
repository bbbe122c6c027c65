"""One request from its claim to the last byte of its answer, and what it runs on.

There is one `Exchange` a slot, made with the slot table and used again by each request that claims
the slot: a request costs no object. Whoever keeps one beyond the current call lets go of it when
the request ends. Where a claim has to wait for a device, the request is an `Asked` until then.
"""

import math
from typing import Any, Protocol

from dataplane.errors import Refusal, ResetCode
from dataplane.prompt1 import Request


class Peer(Protocol):
    """What ingress and egress need of a connection."""

    writing: int  # slots that it holds in WRITING

    def overfull(self) -> bool: ...
    def writing_in_pump(self, ingress: Any) -> int: ...
    def broken(self, error: Exception) -> None: ...


class Front(Protocol):
    """A wire format: how an answer is written. Implemented by `dataplane.fronts`."""

    def decided(self, asked: "Asked", outcome: "Exchange | Refusal") -> None:
        """Go on with a request whose claim was asked for, and what came of it meanwhile."""

    def answer(self, exchange: "Exchange", ids: bytes, finish: int) -> None:
        """Send output ids (u32 LE), after the 200 if that is due, before the end if `finish`."""

    def refuse(self, exchange: "Exchange", refusal: Refusal) -> None:
        """End a request that held a slot and was not answered."""

    def fail(self, exchange: "Exchange", code: ResetCode) -> None:
        """Break off an answer that began with 200."""


class Waiting(Protocol):
    """A stream whose header is not whole."""

    def expire(self) -> None:
        """Refuse it: the header took too long."""


class Asked:
    """A request whose claim the device has not answered.

    Attributes:
        ticket: Names the claim to its table.
        ready_ns: When the header was complete (CLOCK_REALTIME ns).
        body: What came of the body meanwhile; the front takes no more than was declared.
        is_whole: Whether the request's end came, at `whole_ns` (CLOCK_REALTIME ns).
        extra: The front's own.
    """

    # fmt: off
    __slots__ = (
        "body", "connection", "extra", "front", "ingress", "is_whole", "max_output", "ready_ns",
        "request", "request_id", "stream_id", "ticket", "whole_ns",
    )
    # fmt: on

    def __init__(
        self, ingress: Any, front: Front, connection: Any, stream_id: int, request: Request,
        request_id: int, max_output: int, ready_ns: int, ticket: int,
    ) -> None:  # fmt: skip
        self.ingress = ingress
        self.front = front
        self.connection = connection
        self.stream_id = stream_id
        self.request = request
        self.request_id = request_id
        self.max_output = max_output
        self.ready_ns = ready_ns
        self.ticket = ticket
        self.body = bytearray()
        self.is_whole = False
        self.whole_ns = 0
        self.extra: Any = None

    def decided(self, outcome: "Exchange | Refusal") -> None:
        """Have the front go on."""
        try:
            self.front.decided(self, outcome)
        except Exception as error:
            self.connection.broken(error)

    def ends(self, at_ns: int) -> None:
        """The request's end came."""
        self.is_whole = True
        self.whole_ns = at_ns


class Exchange:
    """A request that holds slot `slot` under `generation`.

    Times are CLOCK_REALTIME in ns: `complete_ns` is the kernel's receive time of the request's last
    byte, 0 until that came.

    Attributes:
        live: Whether a request holds it now.
        writing: Whether the slot is in WRITING still.
        answered: Whether the 200 has been written.
        watch: Index in the table's watch from publish on, else -1.
        sent: Output ids handed to the connection.
        ingress: The `dataplane.ingress.Ingress` that the slot is of.
    """

    # fmt: off
    __slots__ = (
        "answered", "body_bytes", "body_due", "complete_ns", "connection", "deadline_at",
        "deadline_ms", "extra", "first_us", "free_left", "front", "generation", "ingress",
        "ingress_us", "live", "max_output", "n_tokens", "pickup_us", "published_ns", "queue_ns",
        "queue_us", "request_id", "sent", "slot", "started", "stream_id", "total_us", "watch",
        "writing",
    )
    # fmt: on

    connection: Any
    front: Front
    stream_id: int
    request_id: int
    n_tokens: int
    max_output: int
    free_left: int
    deadline_ms: int
    deadline_at: float  # monotonic seconds, counted from arrival; inf: none
    body_bytes: int  # of the declared body, where the front knows it before
    body_due: float  # monotonic seconds
    started: float  # monotonic seconds, of the claim
    complete_ns: int
    published_ns: int
    queue_ns: int
    queue_us: int
    ingress_us: int
    pickup_us: int  # as the next two, -1: not yet; -2: the clock went back
    first_us: int
    total_us: int

    def __init__(self, slot: int, ingress: Any = None) -> None:
        self.slot = slot
        self.ingress = ingress
        self.generation = 0
        self.live = False
        self.writing = False
        self.answered = False
        self.watch = -1
        self.sent = 0
        self.deadline_at = math.inf
        self.connection = None
        self.extra: Any = None  # the front's own

    # What a front raises ends its connection, not the pass that serves them all.

    def answer(self, ids: bytes, finish: int) -> None:
        """Have the front answer."""
        try:
            self.front.answer(self, ids, finish)
        except Exception as error:
            self.connection.broken(error)

    def refuse(self, refusal: Refusal) -> None:
        """Have the front refuse it."""
        try:
            self.front.refuse(self, refusal)
        except Exception as error:
            self.connection.broken(error)

    def fail(self, code: ResetCode) -> None:
        """Have the front break the answer off."""
        try:
            self.front.fail(self, code)
        except Exception as error:
            self.connection.broken(error)
