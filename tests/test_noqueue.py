"""The "no queue" method, overload and interference: what they compute, with a clock that is set.

The figures of a bench are as good as its engine, its schedule and its bounds, so those are tested
without a server. One run of every system, tiny and real, shows that they fit together.
"""

import itertools
import json
import select
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from bench import interference, overload
from bench.noqueue import figures, report
from bench.noqueue.engine import Costs, Engine
from bench.noqueue.exchange import End, Exchange
from bench.noqueue.generator import Client, Generator
from bench.noqueue.http_wire import BadAnswerError, ResponseReader, encode_post, read_event
from bench.noqueue.shape import Shape, moments, shape_of
from bench.results import Form

MS = 1_000_000
TINY = Shape(max_output=4, gaps_ms=(10.0, 30.0), requests=12, patience_s=10.0)


# ---------------------------------------------------------------- the engine


class Work:
    """A request that writes down what the engine does with it."""

    def __init__(self, clock: "Clock", prompt: int = 128, max_output: int = 3) -> None:
        self.tokens = list(range(100, 100 + prompt))
        self.max_output = max_output
        self.temperature = 0.3
        self.cancelled = False
        self.out: list[tuple[int, int]] = []
        self.over = ""
        self._clock = clock

    def emit(self, token: int) -> None:
        self.out.append((self._clock.now_ns, token))

    def finish(self) -> None:
        self.over = "finished"

    def drop(self) -> None:
        self.over = "dropped"


class Clock:
    """A clock that goes on only when somebody waits."""

    def __init__(self) -> None:
        self.now_ns = 0

    def read(self) -> int:
        return self.now_ns

    def wait(self, until_ns: int) -> None:
        self.now_ns = max(self.now_ns, until_ns)


def make_engine(slots: int = 8) -> tuple[Engine, Clock]:
    clock = Clock()
    return Engine(Costs(slots=slots), clock.read, clock.wait), clock


def test_a_step_costs_the_prefill_of_those_that_join_it_and_one_token_of_all() -> None:
    engine, clock = make_engine()
    first, second = Work(clock), Work(clock)
    engine.step([first])
    engine.step([second])
    engine.step([])
    # 128 tokens at 20 µs, and 5 ms.
    assert [at for at, _ in first.out] == [7_560_000, 15_120_000, 20_120_000]
    assert [at for at, _ in second.out] == [15_120_000, 20_120_000]
    assert [token for _, token in first.out] == [100, 101, 102]
    assert (first.over, second.over) == ("finished", "")


def test_two_prompts_of_one_step_share_it() -> None:
    engine, clock = make_engine()
    works = [Work(clock), Work(clock)]
    engine.step(works)
    assert {at for work in works for at, _ in work.out} == {10_120_000}


def test_the_engine_has_no_queue() -> None:
    engine, clock = make_engine(slots=2)
    engine.step([Work(clock)])
    assert engine.room == 1
    with pytest.raises(ValueError, match="2 requests for 1 free slots"):
        engine.step([Work(clock), Work(clock)])


def test_a_cancelled_request_gives_its_slot_back_between_two_steps() -> None:
    engine, clock = make_engine(slots=1)
    work = Work(clock)
    engine.step([work])
    work.cancelled = True
    assert engine.room == 0
    engine.sweep()
    assert (engine.room, engine.busy, work.over) == (1, False, "dropped")


def test_an_idle_engine_takes_no_time() -> None:
    engine, clock = make_engine()
    engine.step([])
    assert (clock.now_ns, engine.steps) == (0, 0)


def test_a_finished_answer_frees_its_slot() -> None:
    engine, clock = make_engine(slots=1)
    engine.step([Work(clock, max_output=1)])
    assert engine.room == 1


def test_capacity_is_what_full_slots_get_through() -> None:
    engine, clock = make_engine()
    served = 0
    while clock.now_ns < 20_000 * MS:
        fresh = [Work(clock, max_output=32) for _ in range(engine.room)]
        engine.step(fresh)
        served += len(fresh)
    # The last ones have begun and not ended, hence the tolerance.
    assert served / 20 == pytest.approx(Costs().capacity(128, 32), rel=0.02)
    assert Costs().capacity(128, 256) == pytest.approx(6.1516, abs=0.001)


# ---------------------------------------------------------------- what is asked


def test_the_full_form_is_the_published_method() -> None:
    shape = shape_of(Form.FULL)
    assert (shape.prompt, shape.max_output, shape.temperature) == (128, 256, 0.3)
    assert (shape.gaps_ms, shape.requests) == ((50.0, 500.0), 10_000)
    assert len(shape.ids()) == 128


def test_the_quick_form_has_the_same_shape() -> None:
    quick, full = shape_of(Form.QUICK), shape_of(Form.FULL)
    assert quick.max_output * quick.rate == full.max_output * full.rate
    loads = [shape.rate / shape.capacity(Costs()) for shape in (quick, full)]
    assert loads[0] == pytest.approx(loads[1], abs=0.1)
    assert quick.requests / quick.rate < 15


def test_moments_are_the_same_for_everyone_and_as_far_apart_as_asked() -> None:
    first = list(itertools.islice(moments(10.0, (50.0, 500.0)), 5000))
    assert first == list(itertools.islice(moments(10.0, (50.0, 500.0)), 5000))
    gaps = [later - earlier for earlier, later in itertools.pairwise([0, *first])]
    assert sum(gaps) / len(gaps) == pytest.approx(100 * MS, rel=0.03)
    assert min(gaps) >= 100 * MS * 50 / 275 - 1
    assert max(gaps) <= 100 * MS * 500 / 275 + 1


# ---------------------------------------------------------------- HTTP answers

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
CHUNKS = (
    b'data: {"token_ids":[1,2]}\n\n',
    b'data: {"timings_us":{"queue":3}}\n\ndata:',  # An event need not end with its chunk.
    b" [DONE]\n\n",
    b"",
)
STREAM = HEAD + b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in CHUNKS)


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_a_streamed_answer_may_be_split_anywhere(size: int) -> None:
    reader, exchange = ResponseReader(), Exchange(0, b"", 2, 0)
    for start in range(0, len(STREAM), size):
        for event in reader.feed(STREAM[start : start + size]):
            read_event(exchange, event, 5)
    assert (reader.status, reader.whole) == (200, True)
    assert (exchange.tokens, exchange.first_ns, exchange.says_us) == (2, 5, {"queue": 3})


@pytest.mark.parametrize("size", [1, 1000])
def test_a_refusal_has_a_body(size: int) -> None:
    data = b"HTTP/1.1 503 No\r\ncontent-length: 4\r\nretry-after: 1\r\n\r\nbusy"
    reader = ResponseReader()
    for start in range(0, len(data), size):
        assert reader.feed(data[start : start + size]) == []
    assert (reader.status, reader.whole, reader.body) == (503, True, b"busy")
    assert reader.fields["retry-after"] == "1"


def test_rubbish_is_no_answer() -> None:
    with pytest.raises(BadAnswerError):
        ResponseReader().feed(b"rubbish\r\n\r\n")


def test_a_request_states_its_length() -> None:
    head, _, body = encode_post("/generate", b"{}").partition(b"\r\n\r\n")
    assert head.startswith(b"POST /generate HTTP/1.1\r\n")
    assert b"content-length: 2" in head
    assert body == b"{}"


# ---------------------------------------------------------------- figures


def seen(first_ms: float, sent_ms: float = 0.0, end: End = End.ANSWERED) -> Exchange:
    exchange = Exchange(0, b"", 1, round(sent_ms * MS))
    exchange.begin(round(sent_ms * MS))
    exchange.first_ns = round(first_ms * MS)
    exchange.end = end
    return exchange


def test_a_quantile_is_a_time_that_was_measured() -> None:
    times = [float(ms) for ms in range(1, 101)]
    found = figures.spread(reversed(times))
    assert found == {"p50": 50.0, "p99": 99.0, "p99_minus_p50": 49.0, "max": 100.0}
    assert figures.spread([]) == {"p50": None, "p99": None, "p99_minus_p50": None, "max": None}


def test_the_client_bounds_the_wait_without_believing_anyone() -> None:
    # Alone in its step: prefill and step take 7.56 ms, the way there and back 0.5 ms.
    wait = figures.Wait([seen(10.0)], Costs(), 128, MS // 2)
    assert wait.upper_ns == [round(2.44 * MS)]
    assert wait.lower_ns == [round(1.94 * MS)]


def test_a_prompt_that_joined_the_same_step_may_have_made_it_longer() -> None:
    others = [seen(10.1), seen(15.0)]  # The second one came a step later.
    wait = figures.Wait([seen(10.0), *others], Costs(), 128, 0)
    assert wait.upper_ns[0] == round(2.44 * MS)
    assert wait.lower_ns[0] == 0
    assert wait.lower_ns[2] == round(7.44 * MS)


def test_what_the_server_leaves_out_is_the_bound_less_what_it_says() -> None:
    exchange = seen(10.0)
    exchange.says_us = {"queue": 100, "pickup": 40}
    wait = figures.Wait([exchange], Costs(), 128, 0)
    assert wait.unsaid_ms(("queue", "pickup"))["p50"] == 2.3


def test_goodput_counts_whole_answers_in_time() -> None:
    exchanges = [seen(100.0), seen(300.0), seen(100.0, end=End.BROKEN)]
    assert figures.goodput(exchanges, 200.0) == 1
    assert figures.goodput(exchanges, 400.0) == 2


def test_times_count_from_when_a_request_was_due() -> None:
    exchange = seen(10.0)
    exchange.due_ns = -5 * MS
    assert figures.first_tokens_ms([exchange]) == [15.0]


# ---------------------------------------------------------------- the generator


class FakeWire:
    """Answers as it is told, at once or never."""

    def __init__(self, answer: Callable[[Exchange], None]) -> None:
        self.ended: list[Exchange] = []
        self.given_up: list[int] = []
        self._answer = answer

    def connect(self, epoll: select.epoll) -> None: ...
    def readable(self, descriptor: int) -> None: ...
    def flush(self) -> None: ...
    def on_timer(self) -> None: ...
    def close(self) -> None: ...

    def due_ns(self) -> int | None:
        return None

    def send(self, exchange: Exchange) -> None:
        self._answer(exchange)
        if exchange.end is not None:
            self.ended.append(exchange)

    def give_up(self, exchange: Exchange) -> None:
        self.given_up.append(exchange.number)


def answer(exchange: Exchange) -> None:
    now_ns = time.monotonic_ns()
    exchange.decide(200, now_ns)
    exchange.take(exchange.expected, now_ns)
    exchange.complete(now_ns)


def refuse(exchange: Exchange) -> None:
    exchange.decide(429, time.monotonic_ns())
    exchange.retry_after_ms = 5
    exchange.complete(time.monotonic_ns())


def ask(
    wire: FakeWire, offsets_ms: Sequence[float], patience_s: float = 5.0, **more: Any
) -> list[Exchange]:
    client = Client(b"", 3, patience_s, more.pop("retries", False))
    with Generator(wire) as generator:
        return generator.run([round(at * MS) for at in offsets_ms], client, **more).exchanges


def test_requests_are_sent_when_they_are_due() -> None:
    exchanges = ask(FakeWire(answer), [0, 10, 10, 20])
    assert [one.end for one in exchanges] == [End.ANSWERED] * 4
    assert all(one.sent_ns >= one.due_ns for one in exchanges)
    assert exchanges[3].due_ns - exchanges[0].due_ns == 20 * MS


def test_a_client_leaves_when_its_patience_is_over() -> None:
    wire = FakeWire(lambda exchange: None)
    exchanges = ask(wire, [0, 5], patience_s=0.02)
    assert [one.end for one in exchanges] == [End.GAVE_UP] * 2
    assert wire.given_up == [0, 1]
    assert all(one.end_ns - one.due_ns >= 20 * MS for one in exchanges)


def test_who_is_refused_may_try_again_and_its_time_goes_on() -> None:
    def third_time(exchange: Exchange) -> None:
        (answer if exchange.attempts == 3 else refuse)(exchange)

    (exchange,) = ask(FakeWire(third_time), [0], retries=True)
    assert (exchange.end, exchange.attempts) == (End.ANSWERED, 3)
    assert exchange.first_ns - exchange.due_ns >= 10 * MS


def test_who_is_refused_for_good_has_its_patience_too() -> None:
    (exchange,) = ask(FakeWire(refuse), [0], patience_s=0.03, retries=True)
    assert exchange.end is End.GAVE_UP
    assert ask(FakeWire(refuse), [0])[0].end is End.REFUSED


def test_an_answer_of_too_few_tokens_is_broken() -> None:
    def short(exchange: Exchange) -> None:
        exchange.decide(200, 1)
        exchange.take(1, 1)
        exchange.complete(1)

    (exchange,) = ask(FakeWire(short), [0])
    assert (exchange.end, exchange.reason) == (End.BROKEN, "1 tokens came instead of 3")


def test_a_run_can_be_stopped_and_hooks_are_called() -> None:
    called: list[int] = []
    exchanges = ask(
        FakeWire(answer),
        [0, 10, 10_000],
        hooks=[(5 * MS, lambda: called.append(1)), (9_000 * MS, lambda: called.append(2))],
        stop=lambda exchange: exchange.number == 1,
    )
    assert len(exchanges) == 2
    assert called == [1]


# ---------------------------------------------------------------- overload, interference


def test_recovery_is_the_first_row_whose_median_is_as_before() -> None:
    recovery = overload.Recovery(burst_requests=10, base_ms=10.0)
    assert not recovery(numbered(3, 1.0))
    slow = [numbered(10 + i, 50.0) for i in range(15)]
    fast = [numbered(25 + i, 10.5) for i in range(40)]
    told = [recovery(exchange) for exchange in [*slow, *fast]]
    # The median of a row of 20 is low enough once more than half of it is fast.
    assert recovery.since == 25 - 9
    assert told.index(True) == recovery.since - 10 + 19


def test_there_is_no_recovery_while_requests_get_no_token() -> None:
    recovery = overload.Recovery(burst_requests=0, base_ms=10.0)
    assert not any(recovery(numbered(i, None)) for i in range(100))


def numbered(number: int, first_ms: float | None) -> Exchange:
    exchange = Exchange(number, b"", 1, 0)
    exchange.first_ns = 0 if first_ms is None else round(first_ms * MS)
    return exchange


def test_answers_a_second_are_those_that_the_burst_saw() -> None:
    exchanges = [seen(100.0), seen(300.0), seen(100.0), seen(0.0, end=End.REFUSED)]
    for exchange, end_ms in zip(exchanges, (500, 600, 1200, 1), strict=True):
        exchange.end_ns = end_ms * MS
    row = overload.describe(exchanges, 2.0, 0, 1.0)
    assert (row["answers_per_s"], row["goodput_per_s"], row["answered"]) == (2.0, 1.0, 3)
    assert (row["refusals_per_s"], row["goodput_by_target_ms"]["500"]) == (1.0, 2.0)


def test_half_the_load_follows_a_burst() -> None:
    due, burst = overload.offsets(TINY, 100.0, 10.0, 2.0, 5.0)
    assert burst == pytest.approx(200, abs=15)
    assert len(due) - burst == pytest.approx(50, abs=8)
    assert due == sorted(due)
    assert due[burst - 1] < 2000 * MS <= due[burst]


def test_kept_is_one_when_nothing_changes() -> None:
    row = {
        "answers_per_s": 10.0,
        "verdict_ms": {"p50": 1.0, "p99": 2.0},
        "first_token_ms": {"p50": 8.0, "p99": 16.0},
    }
    assert set(interference.kept(row, row).values()) == {1.0}
    slow = row | {"answers_per_s": 5.0, "verdict_ms": {"p50": 1.0, "p99": 8.0}}
    found = interference.kept(row, slow)
    assert (found["throughput"], found["verdict_p99"]) == (0.5, 0.25)


# ---------------------------------------------------------------- all of it, tiny


@pytest.mark.slow
def test_every_system_answers_and_the_result_can_be_shown(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn")
    pytest.importorskip("zmq")
    from bench.noqueue.groups import measure
    from bench.noqueue.section import GROUPS

    groups = [
        measure(starter, TINY, Costs(), lambda text: None, retries) for starter, retries in GROUPS
    ]
    for group in groups:
        assert group["answered"] == TINY.requests, group["reasons"]
        assert group["first_token_ms"]["p50"] >= 7.56
        assert group["server_says"]["queue_us"]["p50"] is not None
        assert group["client_bounds"]["wait"]["upper_ms"]["p99"] is not None
    assert groups[0]["memory"]["slots_bytes"] > 0
    result = {
        "shape": TINY.described(),
        "engine": {"slots": 8},
        "form": "quick",
        "load": 0.5,
        "groups": groups,
        "vllm": "not run: VLLM_BIN is not set",
    }
    text = "\n".join(report.lines(json.loads(json.dumps(result))))
    assert all(group["group"] in text for group in groups)
    pytest.importorskip("matplotlib")
    report.plot(result, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_burst_beyond_the_slots_is_refused_or_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("uvicorn")
    monkeypatch.setattr(overload, "LOADS", (0.5, 4.0))
    length = overload.Length(burst=0.5, recovery=2.0, patience=0.5)
    found = overload.measure_systems(TINY, Costs(), length, lambda text: None)
    rows = {system["system"]: system["rows"][-1] for system in found}
    assert rows["dataplane"]["refused"] > 0
    assert rows["asyncio queue"]["refused"] == 0
    assert rows["asyncio queue, bounded"]["refused"] > 0
    assert all(row["broken"] == 0 for row in rows.values()), rows
