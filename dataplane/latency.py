"""Latency over sliding windows: constant memory, recorded in C, percentiles that anyone can
recompute.

The series and their meaning are those of contract 5. Negative differences (a clock that was set)
are counted apart and dropped.
"""

import base64
import time
from enum import IntEnum
from typing import Any

from hdrh.histogram import HdrHistogram

from dataplane._native import ffi, lib

WINDOWS_S = (10, 60, 300)
MAX_US: int = lib.DP_LATENCY_MAX_US
DIGITS = 3
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}

_record, _record_pair = lib.dp_latency_record, lib.dp_latency_record_pair


class Series(IntEnum):
    """What is measured, in µs."""

    QUEUE = 0
    INGRESS = 1
    PICKUP = 2
    FIRST_TOKEN = 3
    TOTAL = 4


class Latency:
    """The histograms of one listener.

    Attributes:
        negative: Differences that were dropped because the clock went back.
        now_s: The second that values are counted in; the owner moves it once a pass.
    """

    def __init__(self) -> None:
        self._native = ffi.gc(lib.dp_latency_new(len(Series)), lib.dp_latency_free)
        self._counts = ffi.new("uint64_t[]", lib.DP_LATENCY_BUCKETS)
        self.negative = 0
        self.now_s = int(time.monotonic())

    def record_ns(self, series: int, difference_ns: int) -> int:
        """Count a difference of two CLOCK_REALTIME stamps; return it in µs, 0 if negative."""
        if difference_ns < 0:
            self.negative += 1
            return 0
        microseconds = difference_ns // 1000
        _record(self._native, series, microseconds, self.now_s)
        return microseconds

    def record_pair_ns(self, series: int, first_ns: int, second_ns: int) -> int:
        """Count `first_ns` in `series` and `second_ns` in the next one; return the second in µs."""
        if first_ns < 0 or second_ns < 0:
            self.record_ns(series, first_ns)
            return self.record_ns(series + 1, second_ns)
        microseconds = second_ns // 1000
        _record_pair(self._native, series, first_ns // 1000, microseconds, self.now_s)
        return microseconds

    def _window(self, series: int, window_s: int) -> int:
        now_s = int(time.monotonic())
        return int(lib.dp_latency_window(self._native, series, window_s, now_s, self._counts))

    def quantiles(self, series: int, window_s: int) -> dict[str, int]:
        """Return p50 to p999 and the maximum of a window in µs; all 0 when it is empty.

        A quantile q is the highest value of the bucket in which the ceil(q * n)-th smallest value
        lies, as in HdrHistogram.
        """
        total = self._window(series, window_s)
        result = dict.fromkeys((*QUANTILES, "max"), 0)
        if not total:
            return result
        ranks = {name: max(1, -int(-quantile * total // 1)) for name, quantile in QUANTILES.items()}
        seen = 0
        for bucket in range(lib.DP_LATENCY_BUCKETS):
            count = self._counts[bucket]
            if not count:
                continue
            seen += count
            high = lib.dp_latency_bucket_high(bucket)
            for name, rank in ranks.items():
                if seen - count < rank <= seen:
                    result[name] = high
            if seen == total:
                result["max"] = high
                break
        return result

    def snapshot(self, window_s: int) -> dict[str, Any]:
        """Return the window as `/health?latency99` gives it."""
        return {
            "unit": "us",
            "window_s": window_s,
            "count": self._window(Series.INGRESS, window_s),
            "queue": self.quantiles(Series.QUEUE, window_s),
            "ingress": self.quantiles(Series.INGRESS, window_s),
            "pickup": self.quantiles(Series.PICKUP, window_s),
        }

    def encoded(self, series: int, window_s: int) -> bytes:
        """Return the window's histogram, base64 of the compressed HdrHistogram V2 encoding."""
        histogram = HdrHistogram(1, MAX_US, DIGITS)
        total = self._window(series, window_s)
        seen = 0
        for bucket in range(lib.DP_LATENCY_BUCKETS):
            count = self._counts[bucket]
            if count:
                histogram.record_value(max(1, lib.dp_latency_bucket_high(bucket)), count)
                seen += count
                if seen == total:
                    break
        encoded = histogram.encode()
        return encoded if isinstance(encoded, bytes) else base64.b64encode(encoded)
