"""What a request is told that is refused after its header: each text once, whoever found the fault.

The packet pump's raw front says in numbers what was wrong, and the reference finds the same itself.
"""

from dataplane.errors import Refusal, Status
from dataplane.prompt1 import Request
from dataplane.region import Region

RETRY_MS = 1000
"""When to come back if nothing is known of when there will be a runtime."""
BUSY = "every slot is taken"
DRAINING = "the daemon is shutting down: send the request to another one"
STUCK = "the device that admits requests does not answer: send the request again in a while"
LOST = "the runtime was lost before the request reached it: send it again"


def out_of_bounds(request: Request, region: Region) -> Refusal:
    """A prompt or an answer longer than a slot has room for."""
    reason = f"max_output is {request.max_output}; a slot has room for {region.max_output}"
    if request.n_tokens > region.context:
        reason = f"the prompt has {request.n_tokens} tokens; the context is {region.context}"
    return Refusal(Status.BAD_REQUEST, reason)


def capped(writing: int, retry_after_ms: int) -> Refusal:
    """A connection that holds as many slots in WRITING as it may."""
    return Refusal(
        Status.BUSY,
        f"this connection already holds {writing} slots whose prompts are not"
        " complete, which is its cap: finish those first",
        retry_after_ms,
    )


def bad_token(index: int, token: int, vocab_size: int) -> Refusal:
    """An id outside the vocabulary."""
    return Refusal(Status.BAD_REQUEST, f"token {index} is {token}; the vocabulary has {vocab_size}")


def too_long(n_tokens: int) -> Refusal:
    """More of a body than was declared."""
    return Refusal(
        Status.BAD_REQUEST,
        f"the body is longer than the {n_tokens} tokens that were declared",
    )


def too_short(whole: int, partial: int, n_tokens: int) -> Refusal:
    """A body that ended early, after `whole` ids and some bytes of the next."""
    reason = f"the body ended after {whole} of {n_tokens} tokens"
    if partial:
        reason += f" and {partial} bytes of the next"
    return Refusal(Status.BAD_REQUEST, reason)


def late(whole: int, n_tokens: int) -> Refusal:
    """A body that was not complete in time."""
    reason = f"only {whole} of {n_tokens} tokens came in time"
    if whole == n_tokens:
        reason = "all tokens came, but not the request's end (FIN) in time"
    return Refusal(Status.TIMEOUT, reason)


def header_late(received: int) -> Refusal:
    """A header that was not complete in time."""
    return Refusal(Status.TIMEOUT, f"only {received} bytes of the header came in time")


def lost() -> Refusal:
    """The runtime went away."""
    return Refusal(Status.UNAVAILABLE, LOST, RETRY_MS)


def stuck() -> Refusal:
    """The device does not answer."""
    return Refusal(Status.UNAVAILABLE, STUCK, RETRY_MS)


def draining() -> Refusal:
    """The daemon goes away."""
    return Refusal(Status.UNAVAILABLE, DRAINING, RETRY_MS)
