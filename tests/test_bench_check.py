"""The guard over the committed ratios fails when one got worse, and only then."""

import json

from bench.check import COMMITTED, judge, memcpy_us


def test_a_quarter_is_forgiven_and_no_more() -> None:
    committed = {"a": 1.0, "b": 2.0}
    assert judge({"a": 1.25, "b": 2.0}, committed) == []
    assert judge({"a": 0.1, "b": 2.51}, committed) == ["b: 2.51, committed is 2: 1.25 times"]


def test_the_committed_ratios_are_those_that_are_measured() -> None:
    committed = json.loads(COMMITTED.read_text(encoding="utf-8"))
    assert set(committed) == {"raw / uvicorn binary", "h3 / raw", "upload / memcpy"}
    assert all(value > 0 for value in committed.values())


def test_a_copy_takes_time() -> None:
    assert memcpy_us() > 1
