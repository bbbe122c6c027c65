"""What latency counts, when a value leaves its window, and that all get the same percentiles."""

import random
from collections.abc import Iterable

import numpy as np
import pytest
from hdrh.histogram import HdrHistogram
from hypothesis import given, settings
from hypothesis import strategies as st

from dataplane._native import ffi, lib
from dataplane.latency import Latency, Series

PERCENTS = {"p50": 50.0, "p90": 90.0, "p99": 99.0, "p999": 99.9}
EMPTY = {"p50": 0, "p90": 0, "p99": 0, "p999": 0, "max": 0}
MAX_US = 60_000_000
# So many values that HdrHistogram's rounded ranks are NumPy's, which round up: 5000.5, 9000.9, ...
RANKS_AGREE = 10_001
# As Prometheus will have them, in µs.
BOUNDS_US = [
    10, 25, 50, 100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000,
    500_000, 1_000_000, 2_500_000, 5_000_000, 10_000_000, 30_000_000, 60_000_000,
]  # fmt: skip


class Clock:
    """A latency whose time moves when told to."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self.latency = Latency(lambda: self.now)

    def move_to(self, now: float) -> None:
        """Go on, as the owner does at each pass."""
        self.now = now
        self.latency.now_s = int(now)

    def record(self, *microseconds: int, series: Series = Series.INGRESS) -> None:
        for value in microseconds:
            self.latency.record_ns(series, value * 1000)

    def count(self, window_s: int) -> int:
        count: int = self.latency.snapshot(window_s)["count"]
        return count


def recorded(values: Iterable[int]) -> HdrHistogram:
    """Return the reference implementation's histogram of the same values."""
    histogram = HdrHistogram(1, MAX_US, 3)
    for value in values:
        assert histogram.record_value(value)
    return histogram


def percentiles_of(histogram: HdrHistogram) -> dict[str, int]:
    found = {name: histogram.get_value_at_percentile(p) for name, p in PERCENTS.items()}
    return {**found, "max": histogram.get_max_value()}


def skewed(count: int, seed: int = 1) -> list[int]:
    """Return values as latencies are: most are small, some are large, up to the whole range."""
    drawn = random.Random(seed)
    return [min(MAX_US, int(drawn.lognormvariate(5, 3))) for _ in range(count)]


# What is counted.


def test_known_values_give_known_quantiles() -> None:
    clock = Clock()
    clock.record(*range(1, 1001))
    snapshot = clock.latency.snapshot(60)
    assert snapshot["ingress"] == {"p50": 500, "p90": 900, "p99": 990, "p999": 999, "max": 1000}


def test_a_snapshot_is_literally_the_contract() -> None:
    clock = Clock()
    clock.record(7)
    one = dict.fromkeys(EMPTY, 7)
    assert clock.latency.snapshot(60) == {
        "unit": "us",
        "window_s": 60,
        "count": 1,
        "queue": EMPTY,
        "ingress": one,
        "pickup": EMPTY,
    }
    assert list(clock.latency.snapshot(60)) == [
        "unit", "window_s", "count", "queue", "ingress", "pickup",
    ]  # fmt: skip


@pytest.mark.parametrize("window_s", [10, 60, 300])
def test_an_empty_window_is_zeros(window_s: int) -> None:
    assert Clock().latency.snapshot(window_s) == {
        "unit": "us",
        "window_s": window_s,
        "count": 0,
        "queue": EMPTY,
        "ingress": EMPTY,
        "pickup": EMPTY,
    }


def test_the_count_is_what_ingress_holds() -> None:
    clock = Clock()
    clock.record(5, 5, 5, series=Series.QUEUE)
    clock.record(5, 5, series=Series.INGRESS)
    clock.record(5, series=Series.PICKUP)
    assert clock.count(10) == 2


def test_nanoseconds_are_rounded_down_to_microseconds() -> None:
    latency = Clock().latency
    assert latency.record_ns(Series.INGRESS, 41_999) == 41
    assert latency.record_ns(Series.INGRESS, 0) == 0
    assert latency.snapshot(10)["ingress"]["max"] == 41


def test_a_negative_difference_is_counted_apart_and_dropped() -> None:
    latency = Clock().latency
    assert latency.record_ns(Series.INGRESS, -1) == 0
    assert latency.negative == 1
    assert latency.snapshot(10)["count"] == 0
    assert latency.total(Series.INGRESS).within[-1] == 0


def test_a_pair_goes_into_neighbouring_series() -> None:
    latency = Clock().latency
    assert latency.record_pair_ns(Series.QUEUE, 3_000, 9_000) == 9
    snapshot = latency.snapshot(10)
    assert (snapshot["queue"]["max"], snapshot["ingress"]["max"]) == (3, 9)


def test_of_a_pair_only_the_negative_one_is_dropped() -> None:
    latency = Clock().latency
    assert latency.record_pair_ns(Series.QUEUE, -1, 9_000) == 9
    assert latency.record_pair_ns(Series.QUEUE, 3_000, -1) == 0
    snapshot = latency.snapshot(10)
    assert (snapshot["queue"]["max"], snapshot["ingress"]["max"]) == (3, 9)
    assert snapshot["count"] == 1
    assert latency.negative == 2


def test_what_lies_beyond_the_range_counts_at_its_end() -> None:
    clock = Clock()
    clock.record(10 * MAX_US)
    end = HdrHistogram(1, MAX_US, 3).get_highest_equivalent_value(MAX_US)
    assert clock.latency.snapshot(10)["ingress"]["max"] == end


def test_a_series_that_is_not_there_records_nothing_and_is_empty() -> None:
    native = ffi.gc(lib.dp_latency_new(1), lib.dp_latency_free)
    counts = ffi.new("uint64_t[]", lib.DP_LATENCY_BUCKETS)
    within = ffi.new("uint64_t[]", [1] * (lib.DP_LATENCY_BOUNDS + 1))
    lib.dp_latency_record_pair(native, 0, 5, 5, 1000)
    assert lib.dp_latency_window(native, 0, 10, 1000, counts) == 6
    assert lib.dp_latency_window(native, 1, 10, 1000, counts) == 0
    assert lib.dp_latency_total(native, 1, within) == 0
    assert not any(within)


# Percentiles.


@given(st.integers(0, MAX_US))
@settings(max_examples=500)
def test_buckets_are_the_reference_implementations(value: int) -> None:
    reference = HdrHistogram(1, MAX_US, 3)
    bucket = lib.dp_latency_bucket(value)
    assert bucket == reference.get_counts_array_index(value)
    assert lib.dp_latency_bucket_high(bucket) == reference.get_highest_equivalent_value(value)


def test_there_are_as_many_buckets_as_in_the_reference_implementation() -> None:
    assert HdrHistogram(1, MAX_US, 3).counts_len == lib.DP_LATENCY_BUCKETS == 17_408
    assert lib.dp_latency_bucket(-1) == 0


def test_quantiles_are_numpys_where_buckets_are_exact() -> None:
    """Below 2,048 µs a bucket is one value wide."""
    values = np.random.default_rng(3).integers(0, 2048, RANKS_AGREE)
    clock = Clock()
    clock.record(*values.tolist())
    expected = np.percentile(values, list(PERCENTS.values()), method="inverted_cdf").tolist()
    found = clock.latency.snapshot(60)["ingress"]
    assert [found[name] for name in PERCENTS] == expected
    assert found["max"] == values.max()


def test_quantiles_are_numpys_within_a_thousandth_over_the_whole_range() -> None:
    values = np.array(skewed(RANKS_AGREE))
    clock = Clock()
    clock.record(*values.tolist())
    found = clock.latency.snapshot(60)["ingress"]
    for name, percent in PERCENTS.items():
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert exact <= found[name] <= exact * 1.001 + 1


@pytest.mark.parametrize("count", [*range(1, 40), 101, 150, 999, 1000, 1001, 5000])
def test_whoever_decodes_the_histogram_gets_the_same_percentiles(count: int) -> None:
    values = skewed(count, seed=count)
    clock = Clock()
    clock.record(*values)
    snapshot = clock.latency.snapshot(60)
    decoded = HdrHistogram.decode(clock.latency.encoded(Series.INGRESS, 60))
    assert percentiles_of(decoded) == snapshot["ingress"]
    assert percentiles_of(recorded(values)) == snapshot["ingress"]
    assert decoded.get_total_count() == snapshot["count"] == count


def test_the_encoded_histogram_is_that_of_the_contract() -> None:
    values = [0, 0, 1, 2047, 2048, 2049, 1_000_000, MAX_US]
    clock = Clock()
    clock.record(*values, series=Series.TOTAL)
    decoded = HdrHistogram.decode(clock.latency.encoded(Series.TOTAL, 10))
    assert decoded.lowest_trackable_value == 1
    assert decoded.highest_trackable_value == 60_000_000
    assert decoded.significant_figures == 3
    assert decoded.equals(recorded(values))


def test_encoded_histograms_can_be_merged() -> None:
    merged = HdrHistogram(1, MAX_US, 3)
    for part in (skewed(500, 1), skewed(500, 2)):
        clock = Clock()
        clock.record(*part)
        merged.decode_and_add(clock.latency.encoded(Series.INGRESS, 300))
    assert merged.equals(recorded(skewed(500, 1) + skewed(500, 2)))


def test_an_empty_window_is_an_empty_histogram() -> None:
    decoded = HdrHistogram.decode(Clock().latency.encoded(Series.QUEUE, 300))
    assert decoded.get_total_count() == 0
    assert decoded.get_value_at_percentile(99.0) == 0


# Windows.


@pytest.mark.parametrize(("window_s", "late_s"), [(10, 1), (60, 10), (300, 10)])
@pytest.mark.parametrize("start", [1000.0, 1003.5, 1009.999])
def test_a_value_leaves_its_window_in_time(window_s: int, late_s: int, start: float) -> None:
    clock = Clock(start)
    clock.record(5)
    for after in np.arange(0, window_s + 0.001, 0.5).tolist():
        clock.move_to(start + after)
        assert clock.count(window_s) == 1, f"gone after {after} s"
    clock.move_to(start + window_s + late_s)
    assert clock.count(window_s) == 0


def test_a_value_that_left_does_not_come_back() -> None:
    """Slices are used again: what stood in them 11 s or 310 s ago is somebody else's."""
    clock = Clock(1000)
    clock.record(5, 70, 900_000)
    for after in range(1, 2000):
        clock.move_to(1000 + after)
        assert clock.count(10) == (3 if after <= 10 else 0)
        assert clock.count(300) == (3 if after < 310 else 0)


@pytest.mark.parametrize("silence_s", [11, 22, 310, 620, 3100])
def test_a_slice_is_emptied_before_it_is_used_again(silence_s: int) -> None:
    clock = Clock(1000)
    clock.record(5, 6, 7)
    clock.move_to(1000 + silence_s)
    clock.record(8)
    assert clock.latency.snapshot(10)["ingress"] == dict.fromkeys(EMPTY, 8)
    if silence_s >= 310:
        assert clock.count(300) == 1


def test_a_window_sums_its_slices() -> None:
    clock = Clock(1000)
    for second in range(1000, 1400):
        clock.move_to(second)
        clock.record(second)
    counts = {window_s: clock.count(window_s) for window_s in (10, 60, 300)}
    # All of a window's seconds, and what is left of the slice that it began in.
    assert counts == {10: 11, 60: 70, 300: 310}
    assert clock.latency.snapshot(10)["ingress"] == {
        "p50": 1394, "p90": 1398, "p99": 1399, "p999": 1399, "max": 1399,
    }  # fmt: skip


# Since the start.


def test_totals_count_under_their_bounds_and_never_leave() -> None:
    clock = Clock(1000)
    for bound in BOUNDS_US:
        clock.record(bound, bound + 1)
    clock.move_to(9000)
    total = clock.latency.total(Series.INGRESS)
    # Each bound takes its own value and the one above the bound before it.
    assert total.within == [*range(1, 2 * len(BOUNDS_US), 2), 2 * len(BOUNDS_US)]
    assert total.sum_us == sum(2 * bound + 1 for bound in BOUNDS_US)
    assert clock.count(300) == 0


def test_totals_of_nothing_are_zeros() -> None:
    assert Clock().latency.total(Series.TOTAL) == ([0] * (len(BOUNDS_US) + 1), 0)
