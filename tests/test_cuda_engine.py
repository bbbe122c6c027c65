"""An engine of the host's on the `device` table: what `Runtime` promises, promised by
`dataplane.runtime.cuda_engine`, on the kernel as it is, on host threads."""

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import wait_until
from host_gpu import Library
from local_device import LocalDevice, local_device
from native_region import manifest, rung

from dataplane.errors import DataplaneError, DetachedError
from dataplane.prompt1 import Request
from dataplane.runtime import Finish, cuda, cuda_engine

FREE, WRITING, READY, RUNNING, CANCELLING, DONE = range(6)


@pytest.fixture
def on(library: Library) -> Iterator[LocalDevice]:
    with local_device(library, slots=3) as device:
        yield device


# Take.


def test_a_taken_request_is_what_was_published(on: LocalDevice) -> None:
    asked = on.ask([5, 6, 7], 9, temperature=0.5, top_p=0.25, top_k=4, seed=11)
    (request,) = on.runtime.take(0)
    assert (request.slot, request.generation) == (asked.slot, asked.generation)
    assert request.tokens.tolist() == [5, 6, 7]
    assert not request.tokens.flags.writeable
    assert request.address == request.tokens.ctypes.data
    assert (request.request_id, request.max_output, request.seed) == (77, 9, 11)
    assert (request.temperature, request.top_p, request.top_k) == (0.5, 0.25, 4)
    assert asked.state == RUNNING
    assert on.runtime.held == {request.slot: request}
    # Before its first output, by the clock of the publish.
    assert 0 <= asked.stated.taken_ns - asked.stated.published_ns < 20_000_000_000


def test_one_launch_takes_all_that_is_ready(on: LocalDevice) -> None:
    before = on.turns()
    asked = [on.ask([number]) for number in range(3)]
    taken = on.runtime.take(0)
    assert {(r.slot, *r.tokens.tolist()) for r in taken} == {
        (one.slot, number) for number, one in enumerate(asked)
    }
    assert on.turns() == before + 1


def test_take_launches_for_a_reason_only(on: LocalDevice) -> None:
    before = on.turns()
    assert on.runtime.take(0) == on.runtime.take(0.01) == []
    assert on.turns() == before
    on.ask([1])
    (request,) = on.runtime.take(0)
    assert on.turns() == before + 1
    # Held, and nothing new: the model is at work.
    assert on.runtime.take(0) == []
    assert on.turns() == before + 1
    request.emit([9])
    assert on.runtime.take(0) == []
    assert on.turns() == before + 2


@pytest.mark.parametrize("spin_us", [0, 5_000_000])
@pytest.mark.parametrize("mode", ["tick", "persistent"])
def test_take_waits_for_a_request(library: Library, mode: Any, spin_us: int) -> None:
    with local_device(library, mode) as on:
        later = threading.Timer(0.1, lambda: on.ask([3, 4]))
        later.start()
        (request,) = on.runtime.take(None, spin_us)
        assert request.tokens.tolist() == [3, 4]
        later.join()
        # Another one, while the first is held.
        later = threading.Timer(0.1, lambda: on.ask([5]))
        later.start()
        start = time.monotonic()
        (second,) = on.runtime.take(10, spin_us)
        assert second.tokens.tolist() == [5]
        assert time.monotonic() - start < 9
        later.join()


def test_take_waits_as_long_as_it_is_told(on: LocalDevice) -> None:
    on.ask([1])
    on.runtime.take(0)
    start = time.monotonic()
    assert on.runtime.take(0.2) == []
    assert time.monotonic() - start >= 0.2


def test_a_take_that_waits_sleeps(on: LocalDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    wait = on.runtime.cuda.wait_for_news

    def note(timeout: float) -> None:
        waits.append(timeout)
        wait(timeout)

    monkeypatch.setattr(on.runtime.cuda, "wait_for_news", note)
    on.ask([1])
    on.runtime.take(0)
    waits.clear()
    on.runtime.take(0.2)
    assert len(waits) < 5
    assert 0.1 < max(waits) <= 0.2


def test_what_is_mirrored_before_it_is_so_is_not_slept_through(
    on: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A resident kernel writes the mirror, which rings, and then swaps the word."""
    monkeypatch.setattr(cuda_engine, "_LOOK_S", 30.0)
    slot = on.table.admit(Request(1), 77, 8)
    generation = on.table.generation
    on.region.native.states[slot] += READY - WRITING
    other = on.table.admit(Request(1), 78, 8)  # a launch, after which the mirrors are looked at
    assert on.runtime.take(0) == []
    taken: list[Any] = []
    engine = threading.Thread(target=lambda: taken.extend(on.runtime.take(20)))
    engine.start()
    before = on.turns()
    wait_until("it looked again", lambda: on.turns() > before + 1)
    assert on.table.submit(slot, generation, b"\5\0\0\0", 0, 4) > 0
    engine.join(10)
    assert [(one.slot, one.generation) for one in taken] == [(slot, generation)]
    assert on.table.let_go(other, on.table.generation) == FREE


# When verbs take effect.


def test_verbs_take_effect_at_the_next_take(on: LocalDevice) -> None:
    asked = on.ask([1])
    (request,) = on.runtime.take(0)
    before = on.turns()
    assert request.emit([10, 11])
    assert request.emit([])
    assert request.emit([12])
    assert request.finish(Finish.LENGTH)
    assert (asked.out, asked.state) == ([], RUNNING)
    assert on.runtime.held == {}
    other = on.ask([2])
    # The same launch carries out and takes.
    (taken,) = on.runtime.take(0)
    assert on.turns() == before + 1
    assert (asked.out, asked.state) == ([10, 11, 12], DONE)
    assert asked.stated.finish_reason == 2
    assert taken.slot == other.slot


def test_a_flush_carries_out_and_takes_nothing(on: LocalDevice) -> None:
    asked = on.ask([1])
    (request,) = on.runtime.take(0)
    other = on.ask([2])
    request.emit([10])
    on.runtime.flush()
    assert (asked.out, asked.state, other.state) == ([10], RUNNING, READY)
    before = on.turns()
    on.runtime.flush()
    assert on.turns() == before
    request.finish(Finish.STOP)
    on.runtime.flush()
    assert asked.state == DONE
    assert [one.slot for one in on.runtime.take(0)] == [other.slot]


def test_a_detaching_engine_leaves_nothing_undone(library: Library) -> None:
    with local_device(library) as on:
        asked = on.ask([1])
        (request,) = on.runtime.take(0)
        request.emit([10])
        request.finish(Finish.STOP)
        on.runtime.detach()
        assert (asked.out, asked.state) == ([10], DONE)
        # From now on verbs do nothing.
        before = on.turns()
        assert not request.emit([11])
        on.runtime.flush()
        assert on.turns() == before


def test_an_answer_may_be_longer_than_a_turn(library: Library) -> None:
    most = cuda_engine.IDS_A_TURN
    with local_device(library, max_output=4 * most) as on:
        asked = on.ask([1], 4 * most)
        (request,) = on.runtime.take(0)
        ids = list(range(3 * most - 6))
        before = on.turns()
        assert request.emit(ids[:10])
        assert request.emit(ids[10:])
        # What made room is out; the rest waits.
        assert on.turns() == before + 2
        assert asked.out == ids[: 2 * most]
        on.runtime.take(0)
        assert asked.out == ids


# What ends a request.


def test_more_than_the_request_allows_is_refused_at_once(on: LocalDevice) -> None:
    asked = on.ask([1], 3)
    (request,) = on.runtime.take(0)
    assert request.emit([10, 11])
    with pytest.raises(DataplaneError, match="2 more ids would exceed max_output 3"):
        request.emit([12, 13])
    on.runtime.flush()
    assert asked.out == [10, 11]
    assert request.emit([12])
    with pytest.raises(DataplaneError, match="1 more ids"):
        request.emit([13])
    on.runtime.flush()
    assert asked.out == [10, 11, 12]


@pytest.mark.parametrize("mode", ["tick", "persistent"])
def test_a_cancelled_request_is_seen_and_given_back(library: Library, mode: Any) -> None:
    with local_device(library, mode) as on:
        asked, other = on.ask([1]), on.ask([2])
        gone, kept = sorted(on.runtime.take(0), key=lambda one: one.slot != asked.slot)
        assert not gone.cancelled
        later = threading.Timer(0.1, asked.cancel)
        later.start()
        assert on.runtime.take(10) == []
        later.join()
        assert gone.cancelled
        assert not kept.cancelled
        # What is still emitted does no harm.
        assert gone.emit([9])
        assert gone.finish(Finish.STOP)
        on.runtime.flush()
        assert asked.state == FREE
        assert other.state == RUNNING
        assert not gone.cancelled


def test_a_cancel_that_comes_between_asking_and_the_launch(on: LocalDevice) -> None:
    asked = on.ask([1])
    (request,) = on.runtime.take(0)
    request.emit([10])
    request.finish(Finish.STOP)
    assert asked.cancel() == CANCELLING
    on.runtime.flush()
    assert asked.state == FREE


def test_a_request_that_is_over_stays_over(on: LocalDevice) -> None:
    first = on.ask([1])
    (old,) = on.runtime.take(0)
    assert old.finish(Finish.STOP)
    assert not old.finish(Finish.STOP)
    assert not old.emit([10])
    on.runtime.flush()
    assert first.release() == FREE
    asked = [on.ask([2]) for _ in range(3)]
    taken = {one.slot: one for one in on.runtime.take(0)}
    again = next(one for one in asked if one.slot == first.slot)
    assert again.generation == first.generation + 1
    assert not old.emit([10])
    assert not old.finish(Finish.ERROR)
    assert not old.cancelled
    on.runtime.flush()
    assert (again.out, again.state) == ([], RUNNING)
    assert on.runtime.held == taken


def test_a_slot_that_was_given_out_behind_the_engines_back(library: Library) -> None:
    """Only another kernel could do that; the engine's verbs do not reach the next request."""
    with local_device(library, slots=1) as on:
        first = on.ask([1])
        (old,) = on.runtime.take(0)
        device = on.runtime.cuda.device
        assert library.native.host_finish(device, first.slot, first.generation, 1) == DONE
        assert first.release() == FREE
        second = on.ask([2])
        assert old.emit([11])
        # A slot is one request's of this engine, until that is finished.
        assert on.runtime.take(0) == []
        assert (second.out, second.state) == ([], READY)
        assert not old.emit([12])
        assert not old.finish(Finish.STOP)
        (new,) = on.runtime.take(0)
        assert new.generation == second.generation
        assert new.emit([13])
        assert not old.emit([14])
        on.runtime.flush()
        assert (second.out, second.state) == ([13], RUNNING)


def test_a_reason_that_is_none_is_a_mistake(on: LocalDevice) -> None:
    on.ask([1])
    (request,) = on.runtime.take(0)
    with pytest.raises(ValueError, match="0 is not a valid Finish"):
        request.finish(0)  # type: ignore[arg-type]


# The runtime.


def test_nothing_is_allocated_while_it_serves(on: LocalDevice) -> None:
    allocated, mapped = dict(on.gpu.allocated), dict(on.gpu.mapped)
    for number in range(30):
        asked = on.ask([number], 4)
        (request,) = on.runtime.take(0)
        request.emit([number] * 4)
        request.finish(Finish.LENGTH)
        on.runtime.flush()
        assert asked.out == [number] * 4
        assert asked.release() == FREE
    assert on.gpu.allocated == allocated
    assert on.gpu.mapped == mapped


def test_every_launch_has_the_same_addresses(on: LocalDevice) -> None:
    """What differs from turn to turn is written in memory, so nothing is bound anew."""
    for _ in range(2):
        on.ask([1])
        (request,) = on.runtime.take(0)
        request.emit([2, 3])
        on.runtime.flush()
    assert on.turns() > 2
    assert len(set(on.launches)) == 1


def test_it_steps_and_says_what_was_agreed(
    on: LocalDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[int] = []
    attachment = on.runtime.cuda.runtime
    monkeypatch.setattr(attachment, "step", lambda: steps.append(1))
    on.runtime.step()
    assert steps == [1]
    assert on.runtime.manifest.table == "device"
    assert on.runtime.fileno() == attachment.fileno()
    assert on.runtime.mapped == on.runtime.cuda.mapped != 0


def test_a_daemon_that_is_gone_ends_a_take(library: Library) -> None:
    with local_device(library) as on:
        on.ask([1])
        (request,) = on.runtime.take(0)
        request.emit([9])
        on.leave()
        with pytest.raises(DetachedError):
            on.runtime.take(None)


def test_a_failing_device_ends_a_take(on: LocalDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    on.ask([1])

    def fail() -> None:
        raise cuda.CudaError("a kernel failed")

    with monkeypatch.context() as patched:
        patched.setattr(on.runtime._stream, "wait", fail)
        with pytest.raises(cuda.CudaError, match="a kernel failed"):
            on.runtime.take(0)


def test_without_cupy_an_engine_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(cuda.CudaError, match="CuPy is not installed"):
        cuda_engine.attach(tmp_path / "no.sock", manifest(table="device"))


def test_a_listener_that_sleeps_is_rung(on: LocalDevice) -> None:
    on.ask([1])
    (request,) = on.runtime.take(0)
    request.emit([9])
    doorbell = on.region.native.outputs[0]
    on.table.sleep()
    rung(doorbell)
    on.runtime.flush()
    assert rung(doorbell) == 1
