"""Latency over sliding windows and since the start: constant memory, recorded in C, percentiles
that anyone can recompute.

The series and their meaning are those of contract 5. The rules here:

- A negative difference (a clock that was set) is counted apart and dropped.
- A window holds all of its seconds, and what is left of the slice that its beginning fell into: a
  value leaves the window of 10 s at most 1 s late, those of 60 and 300 s at most 10 s late, and
  none leaves early.
- A quantile is what HdrHistogram makes of the same counts: with n values, the highest value of the
  bucket in which the floor(q * n + 0.5)-th smallest one lies. So `quantiles` and whoever decodes
  `encoded` agree to the digit.
- Pages are made in the packet loop: no Python loop walks the buckets.
"""

import time
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from hdrh.histogram import HdrHistogram

from dataplane._native import ffi, lib

WINDOWS_S = (10, 60, 300)
MAX_US: int = lib.DP_LATENCY_MAX_US
DIGITS = 3
PERCENTILES = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9}
BOUNDS_US: tuple[int, ...] = tuple(lib.dp_latency_bounds_us)
"""Upper bounds under which `Latency.total` counts."""

MOST_US = 2**32 - 1
"""What a verdict has room for; a clock that was set while a request came in can say more."""
_record, _record_pair = lib.dp_latency_record, lib.dp_latency_record_pair
_bucket_high = lib.dp_latency_bucket_high


class Series(IntEnum):
    """What is measured, in µs."""

    QUEUE = 0
    INGRESS = 1
    PICKUP = 2
    FIRST_TOKEN = 3
    TOTAL = 4


class Total(NamedTuple):
    """A series since the start.

    `within` has how many values are at most each of `BOUNDS_US`, and at its end how many there are.
    """

    within: list[int]
    sum_us: int


class Latency:
    """The histograms of one listener; with the packet pump, the raw front's beside its own.

    Attributes:
        negative: Differences that were dropped because the clock went back.
        now_s: The second that values are counted in; the owner moves it once a pass.
        native: The C handle (`struct dp_latency *`).
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        native = lib.dp_latency_new(len(Series))
        if native == ffi.NULL:
            raise MemoryError("no memory for the latency histograms")
        self.native = ffi.gc(native, lib.dp_latency_free)
        self._others: list[Any] = []
        self._buffer = ffi.new("uint64_t[]", lib.DP_LATENCY_BUCKETS)
        self._counts = np.frombuffer(ffi.buffer(self._buffer), dtype=np.uint64)
        self._within = ffi.new("uint64_t[]", lib.DP_LATENCY_BOUNDS + 1)
        self._clock = clock
        self.negative = 0
        self.now_s = int(clock())

    def add(self, native: Any) -> None:
        """Show what is counted in other histograms (`struct dp_latency *`) as well.

        They are somebody else's, who counts in another thread: a value that is being counted while
        they are read may be missed.
        """
        if native not in self._others:
            self._others.append(native)

    def record_ns(self, series: int, difference_ns: int) -> int:
        """Count a difference of two CLOCK_REALTIME stamps; return it in µs, 0 if negative."""
        if difference_ns < 0:
            self.negative += 1
            return 0
        microseconds = min(difference_ns // 1000, MOST_US)
        _record(self.native, series, microseconds, self.now_s)
        return microseconds

    def record_pair_ns(self, series: int, first_ns: int, second_ns: int) -> int:
        """Count `first_ns` in `series` and `second_ns` in the next one; return the second in µs."""
        if first_ns < 0 or second_ns < 0:
            self.record_ns(series, first_ns)
            return self.record_ns(series + 1, second_ns)
        microseconds = min(second_ns // 1000, MOST_US)
        _record_pair(self.native, series, first_ns // 1000, microseconds, self.now_s)
        return microseconds

    def _window(self, series: int, window_s: int, now_s: int) -> npt.NDArray[np.uint64]:
        """Return a window's counts up to the highest bucket in use; good until the next call."""
        used = lib.dp_latency_window(self.native, series, window_s, now_s, self._buffer)
        counts = self._counts[:used]
        for other in self._others:
            before, own = counts.copy(), used
            used = lib.dp_latency_window(other, series, window_s, now_s, self._buffer)
            counts = self._counts[: max(own, used)]
            counts[used:] = 0  # what lies from there on was not written
            counts[:own] += before
            used = max(own, used)
        return counts

    def snapshot(self, window_s: int) -> dict[str, Any]:
        """Return the window as `/health?latency99` gives it; `count` is what ingress holds."""
        now_s = int(self._clock())
        queue, _ = quantiles(self._window(Series.QUEUE, window_s, now_s))
        ingress, count = quantiles(self._window(Series.INGRESS, window_s, now_s))
        pickup, _ = quantiles(self._window(Series.PICKUP, window_s, now_s))
        return {
            "unit": "us",
            "window_s": window_s,
            "count": count,
            "queue": queue,
            "ingress": ingress,
            "pickup": pickup,
        }

    def encoded(self, series: int, window_s: int) -> bytes:
        """Return the window's histogram, base64 of the compressed HdrHistogram V2 encoding."""
        counts = self._window(series, window_s, int(self._clock()))
        histogram = HdrHistogram(1, MAX_US, DIGITS)
        used = np.flatnonzero(counts)
        if used.size:
            target = np.frombuffer(histogram.counts, dtype=np.uint64)
            target[: counts.size] = counts
            first, last = int(used[0]), int(used[-1])
            histogram.set_internal_tacking_values(first, last, int(counts.sum()))
        encoded: bytes = histogram.encode()
        return encoded

    def total(self, series: int) -> Total:
        """Return what a series counted since the start."""
        within, sum_us = self._total(self.native, series)
        for other in self._others:
            more, more_us = self._total(other, series)
            within = [a + b for a, b in zip(within, more, strict=True)]
            sum_us += more_us
        return Total(within, sum_us)

    def _total(self, native: Any, series: int) -> tuple[list[int], int]:
        sum_us = lib.dp_latency_total(native, series, self._within)
        return ffi.unpack(self._within, len(self._within)), sum_us


def quantiles(counts: npt.NDArray[np.uint64]) -> tuple[dict[str, int], int]:
    """Return p50 to p999 and the maximum of bucket counts in µs, and how many values there are.

    All are 0 when there is none.
    """
    seen = np.cumsum(counts)
    total = int(seen[-1]) if seen.size else 0
    if not total:
        return dict.fromkeys((*PERCENTILES, "max"), 0), 0
    # In the order of operations that HdrHistogram has, since the product is rounded.
    ranks = [max(1, int(percent * total / 100 + 0.5)) for percent in PERCENTILES.values()]
    buckets = seen.searchsorted(np.array([*ranks, total], dtype=np.uint64)).tolist()
    names = (*PERCENTILES, "max")
    return {name: _bucket_high(bucket) for name, bucket in zip(names, buckets, strict=True)}, total
