"""A run of the native load generator (`native/pump/load.h`): its arrays, and what it came to.

The requests are begun, judged and timed in C, on the packet pump's own thread; Python waits for the
end and reads the sums. What counts as an answer is what `dataplane.load.wire` says.
"""

from collections import Counter
from typing import Any, NoReturn

import numpy as np

from dataplane._native import ffi, lib
from dataplane.errors import DataplaneError
from dataplane.load.tally import LOST, RESET, Outcome
from dataplane.prompt1 import VERDICT_MAGIC, ProtocolError, decode_verdict

UNREACHABLE: int = lib.DP_EVENT_UNREACHABLE
RAW: int = lib.DP_LOAD_RAW
H3: int = lib.DP_LOAD_H3
_FAILURES = {lib.DP_LOAD_RESET: RESET, lib.DP_LOAD_LOST: LOST}
_NS = 1e9


class NativeRun:
    """One run over all connections that a pump has for the load.

    Args:
        pump: The `struct dp_pump *`.
        requests, streams, rate: As for `Load.run`.
        stall_s: How long nothing may be answered.
    """

    def __init__(
        self, pump: Any, requests: int, streams: int, rate: float | None, stall_s: float
    ) -> None:
        self._pump = pump
        self._requests = requests
        self._verdicts = np.zeros(requests, np.int64)
        self._totals = np.zeros(requests, np.int64)
        self._ingress = np.zeros(requests, np.uint32)
        self._status = np.zeros(requests, np.uint16)
        run = self._run = ffi.new("struct dp_load_run *")
        run.requests = requests
        run.streams = streams
        run.interval_ns = 0 if rate is None else _NS / rate
        run.stall_ns = round(stall_s * _NS)
        run.verdict_ns = ffi.cast("int64_t *", self._verdicts.ctypes.data)
        run.total_ns = ffi.cast("int64_t *", self._totals.ctypes.data)
        run.ingress_us = ffi.cast("uint32_t *", self._ingress.ctypes.data)
        run.status = ffi.cast("uint16_t *", self._status.ctypes.data)

    def begin(self) -> None:
        """Have it begin."""
        if lib.dp_load_begin(self._pump, self._run):
            raise DataplaneError("the load cannot begin: a run is under way, or there is no memory")

    def progress(self) -> Any:
        """Return where it stands (`struct dp_load_progress`).

        Raises:
            ProtocolError: Something came that is no answer.
        """
        at = lib.dp_load_progress(self._pump)
        if at.broken:
            _explain(at)
        return at

    def stop(self) -> None:
        """Give it up; the arrays are not written any more."""
        lib.dp_load_stop(self._pump)

    def outcome(self, at: Any, cpu_s: float) -> Outcome:
        """Return what it came to; `at` is its last progress."""
        counts = Counter(self._status[: at.ended].tolist())
        answers = {str(code): counts[code] for code in sorted(counts) if code not in _FAILURES}
        failures = {name: counts[code] for code, name in _FAILURES.items() if counts[code]}
        return Outcome(
            self._requests,
            answers | dict(sorted(failures.items())),
            self._verdicts[: at.verdicts] / 1000,
            self._totals[: at.totals] / 1000,
            self._ingress[: at.ingresses].astype(np.float64),
            (at.end_ns - at.start_ns) / _NS,
            cpu_s,
        )


def _explain(at: Any) -> NoReturn:
    """Raise what the first answer that was none is to be told as."""
    if at.why == lib.DP_LOAD_MAGIC:
        magic = at.broken_a.to_bytes(4, "little")
        if magic != VERDICT_MAGIC:
            decode_verdict(magic.ljust(32, b"\0"))
        raise ProtocolError(f"a verdict's status is {at.broken_b}")
    if at.why == lib.DP_LOAD_SHORT:
        raise ProtocolError("an answer ended inside its verdict")
    if at.why == lib.DP_LOAD_CUT:
        raise ProtocolError("an answer ended inside a frame or without a status")
    if at.why == lib.DP_LOAD_FRAME:
        raise ProtocolError(f"a frame of type {at.broken_a:#x} came where none may")
    if at.why == lib.DP_LOAD_FIELDS:
        raise ProtocolError(f"a field section of {at.broken_a} bytes is no answer's")
    if at.why == lib.DP_LOAD_STATUS:
        raise ProtocolError(f"HTTP/3 has no status {at.broken_a}")
    if at.why == lib.DP_LOAD_TRAILER:
        raise ProtocolError("an answer ended without its trailer")
    raise ProtocolError(f"a trailer counts {at.broken_a} ids; {at.broken_b} bytes came")
