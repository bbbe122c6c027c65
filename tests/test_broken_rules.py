"""A runtime that breaks the rules, through a mapping that it may write as it likes.

Contract 1 and 2: nothing that lies in the region is trusted; whoever breaks a rule is dropped with
its region, what was in flight ends with an error, and the next attachment is served.
"""

import asyncio
from collections.abc import Callable

import pytest
from daemon_process import DaemonProcess, run
from raw_runtime import Puppet, puppet, serve_one

from dataplane.client import Answer, Client, ResetError, connect
from dataplane.prompt1 import Request, encode_request
from dataplane.runtime import Taken

MAX_OUTPUT = 16
HALF = encode_request(Request(n_tokens=3)) + b"\1\0\0\0"
FREE, WRITING, READY, RUNNING, CANCELLING, DONE = range(6)
STOP, DEADLINE = 1, 3

Mischief = Callable[[Puppet, Taken], None]


def beyond_max_output(runtime: Puppet, taken: Taken) -> None:
    runtime.set_progress(taken, 8 + 1)


def far_beyond(runtime: Puppet, taken: Taken) -> None:
    runtime.set_progress(taken, 0xFFFFFF)


def going_back(runtime: Puppet, taken: Taken) -> None:
    runtime.set_progress(taken, 1)


def beyond_and_done(runtime: Puppet, taken: Taken) -> None:
    runtime.set_progress(taken, 8 + 1)
    runtime.finish(taken, STOP)


def finish_with(reason: int) -> Mischief:
    return lambda runtime, taken: runtime.finish(taken, reason)


def state(value: int) -> Mischief:
    return lambda runtime, taken: runtime.set_state(taken, value)


def another_generation(runtime: Puppet, taken: Taken) -> None:
    runtime.set_state(taken, RUNNING, generations=1)


def done_of_another_generation(runtime: Puppet, taken: Taken) -> None:
    runtime.set_state(taken, DONE, generations=-1)


BROKEN: dict[str, tuple[Mischief, str]] = {
    "count over the request's maximum": (beyond_max_output, "9 output ids, 8 allowed"),
    "count over everything": (far_beyond, "16777215 output ids, 8 allowed"),
    "count going back": (going_back, "went back from 2 to 1"),
    "count over the maximum, then done": (beyond_and_done, "9 output ids, 8 allowed"),
    "no finish reason": (finish_with(0), "finish reason 0"),
    "the daemon's finish reason": (finish_with(DEADLINE), "finish reason 3"),
    "bogus finish reason": (finish_with(2**32 - 1), "finish reason 4294967295"),
    "state FREE": (state(FREE), "left this listener's hands"),
    "state WRITING": (state(WRITING), "left this listener's hands"),
    "state CANCELLING": (state(CANCELLING), "left this listener's hands"),
    "state 6": (state(6), "left this listener's hands"),
    "state 255": (state(255), "left this listener's hands"),
    "another generation": (another_generation, "left this listener's hands"),
    "an old generation, done": (done_of_another_generation, "left this listener's hands"),
}


async def lose(answer: Answer) -> int:
    """The code of an answer that was broken off."""
    with pytest.raises(ResetError) as caught:
        await answer.result()
    return caught.value.code


async def check_dropped(client: Client, runtime: Puppet, mischief: Mischief) -> None:
    half = await client.raw(HALF, fin=False)
    victim, bystander = [await client.submit([1, 2, 3], max_output=8) for _ in range(2)]
    taken, other = runtime.take(2)
    for one, answer in ((taken, victim), (other, bystander)):
        one.emit([4, 5])
        assert await anext(answer) == [4, 5]
    mischief(runtime, taken)
    assert [await lose(victim), await lose(bystander)] == [1, 1]
    verdict = await half.opened()
    assert (verdict.status, verdict.slot) == (503, None)
    # Neither was told ids that were never counted as they should be.
    assert victim.token_ids == bystander.token_ids == [4, 5]
    # A verb on the dead attachment reaches nobody.
    other.emit([6])
    runtime.finish(other, STOP)


async def check_served(daemon: DaemonProcess) -> None:
    async with connect(daemon.address, daemon.ca) as client:
        with puppet(daemon) as runtime:
            answer = await client.submit([1])
            (taken,) = runtime.take()
            serve_one(taken, [7, 8])
            assert (await answer.result()).token_ids == [7, 8]
            await asyncio.to_thread(daemon.wait_idle)


@pytest.mark.parametrize(("mischief", "words"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_rule_ends_the_attachment(
    bare_daemon: DaemonProcess, mischief: Mischief, words: str
) -> None:
    said = len(bare_daemon.stderr)

    async def main() -> None:
        async with connect(bare_daemon.address, bare_daemon.ca) as client:
            with puppet(bare_daemon, slots=4, max_output=MAX_OUTPUT) as runtime:
                await check_dropped(client, runtime, mischief)
            assert (await client.submit([1])).status == 503
        await check_served(bare_daemon)

    run(main())
    log = bare_daemon.stderr[said:]
    assert words in log
    assert "ended: it broke a rule: slot " in log
    assert "Traceback" not in log


async def alone(daemon: DaemonProcess, play: Callable[[Puppet, Taken], None]) -> list[int]:
    """Serve one request as `play` does; its output."""
    async with connect(daemon.address, daemon.ca) as client:
        with puppet(daemon, slots=2) as runtime:
            answer = await client.submit([1, 2, 3], max_output=8)
            (taken,) = runtime.take()
            play(runtime, taken)
            result = await answer.result()
            assert result.finish_reason == "stop"
            return result.token_ids


def test_progress_of_another_generation_is_ignored(bare_daemon: DaemonProcess) -> None:
    def late_write(runtime: Puppet, taken: Taken) -> None:
        for generations in (-1, 1, 5):
            runtime.set_progress(taken, 5, generations)
        taken.finish(STOP)  # type: ignore[arg-type]

    assert run(alone(bare_daemon, late_write)) == []


def test_progress_is_counted_from_the_last_of_its_own(bare_daemon: DaemonProcess) -> None:
    def emit_around_it(runtime: Puppet, taken: Taken) -> None:
        taken.emit([4])
        runtime.set_progress(taken, 5, generations=-1)
        runtime.set_progress(taken, 1)
        taken.emit([5])
        taken.finish(STOP)  # type: ignore[arg-type]

    assert run(alone(bare_daemon, emit_around_it)) == [4, 5]


def test_a_stray_ring_changes_nothing(bare_daemon: DaemonProcess) -> None:
    def ring_often(runtime: Puppet, taken: Taken) -> None:
        for number in range(8):
            runtime.ring()
            taken.emit([number])
            runtime.ring()
        taken.finish(STOP)  # type: ignore[arg-type]
        runtime.ring()

    assert run(alone(bare_daemon, ring_often)) == list(range(8))
