"""The errors of the package: what they mean to a process that ends with one, and to a client.

Two families. `DataplaneError` and its kinds are raised to a person or to the code that called; each
says what happened, to which input, and what to do. `Refusal` is no exception: it is the answer to
one request, made on the hot path, and carries the status that goes on the wire (contract 4 lists
when each applies).
"""

from enum import IntEnum
from typing import NamedTuple


class DataplaneError(Exception):
    """Something that the user can act on; `exit_code` is what a command ends with."""

    exit_code = 1


class UsageError(DataplaneError):
    """A flag, a setting or a configuration file that cannot be taken as it is."""

    exit_code = 2


class UnavailableError(DataplaneError):
    """Nobody answers at the address, or the answer is 503 (sysexits.h EX_UNAVAILABLE)."""

    exit_code = 69


class BusyError(DataplaneError):
    """Every slot was taken (sysexits.h EX_TEMPFAIL)."""

    exit_code = 75


class AttachError(DataplaneError):
    """The daemon and the runtime did not come together; the text says which side refused what."""


class DetachedError(DataplaneError):
    """The attachment is over: the daemon ended, or dropped this runtime."""


class Status(IntEnum):
    """Every status that an answer can carry, on the raw wire and over HTTP/3 alike."""

    OK = 200
    BAD_REQUEST = 400
    UNAUTHORIZED = 401
    FORBIDDEN = 403
    NOT_FOUND = 404
    METHOD_NOT_ALLOWED = 405
    TIMEOUT = 408
    LENGTH_REQUIRED = 411
    TOO_LARGE = 413
    MEDIA_TYPE = 415
    BUSY = 429
    FIELDS_TOO_LARGE = 431
    NO_TOKENIZER = 501
    UNAVAILABLE = 503


class Refusal(NamedTuple):
    """An answer other than 200: the status and a reason that the client can act on."""

    status: Status
    reason: str
    retry_after_ms: int = 0


class ResetCode(IntEnum):
    """RESET_STREAM codes of `prompt/1` after a 200 (contract 3)."""

    RUNTIME_LOST = 1
    RUNTIME_ERROR = 2
    SLOW_READER = 3
    SHUTTING_DOWN = 4
