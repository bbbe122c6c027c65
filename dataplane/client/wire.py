"""The client's half of `prompt/1` without a socket: a prompt to bytes, and back from an answer's.

Why apart from `client`: this is where a byte can be at the wrong place, and it can be tested one
byte at a time. The rules that hold here:

- An answer may be split anywhere; what `feed` returns does not depend on where.
- An answer is over only when it is whole: a 200 needs its trailer, and the trailer must agree with
  what came before. Anything else is a `ProtocolError`, never a short answer that looks complete.
"""

import array
import struct
import sys
from collections.abc import Iterable, Sequence

from dataplane.errors import ResetCode, Status, UsageError
from dataplane.http_names import FINISH_WORDS
from dataplane.prompt1 import (
    API_KEY_MAX,
    END_MARK,
    TRAILER_BYTES,
    VERDICT_BYTES,
    ProtocolError,
    Request,
    Trailer,
    Verdict,
    decode_trailer,
    decode_verdict,
    encode_request,
)

_RESET_WORDS: dict[int, str] = {
    ResetCode.RUNTIME_LOST: "the runtime was lost",
    ResetCode.RUNTIME_ERROR: "the runtime failed at this request",
    ResetCode.SLOW_READER: "the answer was read too slowly",
    ResetCode.SHUTTING_DOWN: "the daemon is shutting down",
}
_TYPE_OF_WIDTH = {2: "H", 4: "I"}
_U32_FIELDS = ("max_output", "affinity", "top_k", "seed", "deadline_ms")
LONGEST_REASON = 65536


def reset_words(code: int) -> str:
    """What a RESET_STREAM code means."""
    return _RESET_WORDS.get(code, "for a reason that prompt/1 does not know")


# ---------------------------------------------------------------- to the wire


def encode_ids(ids: Iterable[int], width: int = 4) -> bytes:
    """Return the ids as they stand on the wire.

    Raises:
        UsageError: An id does not fit the width, or is no whole number.
    """
    code = _TYPE_OF_WIDTH.get(width)
    if code is None:
        raise UsageError(f"the id width is {width!r}; it must be 2 or 4")
    given = ids if isinstance(ids, Sequence) else list(ids)
    try:
        packed = array.array(code, given)
    except (OverflowError, TypeError, ValueError) as error:
        raise UsageError(_explain_id(given, width)) from error
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def _explain_id(ids: Sequence[int], width: int) -> str:
    most = 256**width - 1
    for place, number in enumerate(ids):
        try:
            fits = 0 <= number <= most and number == int(number)
        except (TypeError, ValueError):
            fits = False
        if not fits:
            return f"id {place} of the prompt is {number!r}; it must be from 0 to {most}"
    return "the prompt is no sequence of whole numbers"


def encode_prompt(request: Request, ids: bytes) -> bytes:
    """Return the whole request: header and ids.

    Raises:
        UsageError: A value does not fit its field.
    """
    for name in _U32_FIELDS:
        _check_range(name, getattr(request, name), 2**32 - 1)
    _check_range("request_id", request.request_id, 2**64 - 1)
    key = request.api_key
    if key is not None and len(key) > API_KEY_MAX:
        raise UsageError(f"the API key has {len(key)} bytes; {API_KEY_MAX} fit a header")
    try:
        return encode_request(request) + ids
    except (struct.error, OverflowError) as error:
        raise UsageError(f"the request cannot be encoded: {error}") from error


def _check_range(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise UsageError(f"{name} is {value}; it must be from 0 to {most}")


# ---------------------------------------------------------------- from the wire


class IdsReader:
    """Output ids, end mark and trailer, as they come in (contract 3).

    Attributes:
        trailer: What stands behind the ids, once it is there.
        count: Ids so far.
    """

    __slots__ = ("_data", "_ids_end", "count", "trailer")

    def __init__(self) -> None:
        self._data = bytearray()
        self._ids_end = False
        self.trailer: Trailer | None = None
        self.count = 0

    def feed(self, data: bytes) -> list[int]:
        """Take the next bytes; return the ids that became whole.

        Raises:
            ProtocolError: The bytes are no output.
        """
        self._data += data
        if self._ids_end:
            self._take_trailer()
            return []
        words = len(self._data) // 4
        ids = list(struct.unpack_from(f"<{words}I", self._data))
        if END_MARK in ids:
            del ids[ids.index(END_MARK) :]
            self._ids_end = True
        taken = len(ids) + (1 if self._ids_end else 0)
        del self._data[: taken * 4]
        self.count += len(ids)
        if self._ids_end:
            self._take_trailer()
        return ids

    def end(self) -> Trailer:
        """Return the trailer, now that no more will come.

        Raises:
            ProtocolError: It is not there.
        """
        if self.trailer is None:
            raise ProtocolError(f"the answer ended after {self.count} ids, without its trailer")
        return self.trailer

    def _take_trailer(self) -> None:
        if len(self._data) > TRAILER_BYTES:
            raise ProtocolError("the answer goes on behind its trailer")
        if len(self._data) < TRAILER_BYTES or self.trailer is not None:
            return
        trailer = decode_trailer(bytes(self._data))
        if trailer.finish_reason not in FINISH_WORDS:
            raise ProtocolError(f"the finish reason {trailer.finish_reason} is unknown")
        if trailer.output_tokens != self.count:
            raise ProtocolError(
                f"the trailer counts {trailer.output_tokens} ids, but {self.count} came"
            )
        self.trailer = trailer


class AnswerReader:
    """One answer as it comes in.

    Attributes:
        verdict: The first 32 bytes, once they are there.
        whole: Whether the answer is complete.
    """

    __slots__ = ("_data", "_ids", "verdict", "whole")

    def __init__(self) -> None:
        self._data = bytearray()
        self._ids = IdsReader()
        self.verdict: Verdict | None = None
        self.whole = False

    @property
    def reason(self) -> str:
        """A refusal's text, as far as it is there."""
        if self.verdict is None or self.verdict.status == Status.OK:
            return ""
        return self._data.decode("utf-8", "replace")

    @property
    def trailer(self) -> Trailer | None:
        """What stands behind the ids, once it is there."""
        return self._ids.trailer

    def feed(self, data: bytes, fin: bool) -> list[int]:
        """Take the stream's next bytes; return the ids that became whole.

        Raises:
            ProtocolError: The bytes are no answer, or the stream ends inside one.
        """
        ids: list[int] = []
        if self.verdict is None or self.verdict.status != Status.OK:
            self._data += data
            data = b""
        if self.verdict is None and len(self._data) >= VERDICT_BYTES:
            self.verdict = decode_verdict(bytes(self._data[:VERDICT_BYTES]))
            del self._data[:VERDICT_BYTES]
            if self.verdict.status == Status.OK:
                data = bytes(self._data)
        if self.verdict is not None:
            if self.verdict.status == Status.OK:
                ids = self._ids.feed(data)
            elif len(self._data) > LONGEST_REASON:
                raise ProtocolError(f"the reason of a refusal is over {LONGEST_REASON} bytes")
        if fin:
            self._end()
        return ids

    def _end(self) -> None:
        if self.verdict is None:
            raise ProtocolError(
                f"the answer ended inside its verdict, after {len(self._data)} bytes"
            )
        if self.verdict.status == Status.OK:
            self._ids.end()
        self.whole = True
