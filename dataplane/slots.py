"""The slot's words as Python sees them: every value here comes from the compiled C.

States, events, statuses and finish reasons are read from `native/slots.h` by name at import, so a
number stands once; the transition table stays in `native/slots.c` and is asked through
`next_state`.
"""

from enum import IntEnum

from dataplane._native import lib


class State(IntEnum):
    """Who owns a slot."""

    FREE = lib.DP_FREE
    WRITING = lib.DP_WRITING
    READY = lib.DP_READY
    RUNNING = lib.DP_RUNNING
    CANCELLING = lib.DP_CANCELLING
    DONE = lib.DP_DONE


class Event(IntEnum):
    """What moves a slot from one state to another."""

    CLAIM = lib.DP_CLAIM
    PUBLISH = lib.DP_PUBLISH
    ABORT = lib.DP_ABORT
    TAKE = lib.DP_TAKE
    REVOKE = lib.DP_REVOKE
    CANCEL = lib.DP_CANCEL
    FINISH = lib.DP_FINISH
    RELEASE = lib.DP_RELEASE


class Finish(IntEnum):
    """Why an answer ended; ERROR is never seen on the wire, where it is a reset."""

    STOP = lib.DP_FINISH_STOP
    LENGTH = lib.DP_FINISH_LENGTH
    DEADLINE = lib.DP_FINISH_DEADLINE
    ERROR = lib.DP_FINISH_ERROR


ILLEGAL: int = lib.DP_ILLEGAL
STALE: int = lib.DP_STALE
FULL: int = lib.DP_FULL
OVERFLOW: int = lib.DP_OVERFLOW
BAD_TOKEN: int = lib.DP_BAD_TOKEN
SHORT: int = lib.DP_SHORT
UNANSWERED: int = lib.DP_UNANSWERED
PENDING: int = lib.DP_PENDING


def next_state(event: int, state: int) -> State | None:
    """Return where `event` leads from `state`, or None where the pair is illegal."""
    to = lib.dp_next_state(event, state)
    return State(to) if to >= 0 else None


def unpack_word(word: int) -> tuple[int, int, int]:
    """Split a state word into (state, owner, generation)."""
    return (
        word & lib.DP_STATE_MASK,
        (word >> lib.DP_OWNER_SHIFT) & lib.DP_OWNER_MASK,
        word >> lib.DP_GENERATION_SHIFT,
    )
