"""The slot's words as Python sees them: every value here comes from the compiled C.

States, events, statuses and finish reasons are read from `native/slots.h` by name at import, so a number stands once;
the transition table stays in `native/slots.c` and is asked through `next_state`.
"""

from enum import IntEnum

from dataplane._native import lib


def _values(prefix: str, *names: str) -> dict[str, int]:
    return {name: getattr(lib, prefix + name) for name in names}


State = IntEnum(  # type: ignore[misc]
    "State", _values("DP_", "FREE", "WRITING", "READY", "RUNNING", "CANCELLING", "DONE")
)
Event = IntEnum(  # type: ignore[misc]
    "Event",
    _values("DP_", "CLAIM", "PUBLISH", "ABORT", "TAKE", "REVOKE", "CANCEL", "FINISH", "RELEASE"),
)
Finish = IntEnum("Finish", _values("DP_FINISH_", "STOP", "LENGTH", "DEADLINE", "ERROR"))  # type: ignore[misc]

ILLEGAL: int = lib.DP_ILLEGAL
STALE: int = lib.DP_STALE
FULL: int = lib.DP_FULL
OVERFLOW: int = lib.DP_OVERFLOW
BAD_TOKEN: int = lib.DP_BAD_TOKEN


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
