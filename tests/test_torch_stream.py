"""The model on a device that runs late: nothing that it has yet to read may change."""

from collections.abc import Sequence
from typing import Any

import pytest
from engine_bench import Bench, Request

from dataplane.runtime import Finish

torch = pytest.importorskip("torch", reason="no PyTorch: pip install -e '.[torch]'")
pytest.importorskip("gguf", reason="no gguf: pip install -e '.[torch]'")

from late_stream import LateStream, reads_of  # noqa: E402
from torch_bench import small_batcher  # noqa: E402

from dataplane.runtime import smollm2_torch  # noqa: E402
from dataplane.runtime.smollm2_torch import TorchBatcher  # noqa: E402
from dataplane.runtime.torch_stream import Mirror  # noqa: E402

# No packet's way depends on the model.
pytestmark = [pytest.mark.pump_only, pytest.mark.usefixtures("one_torch_thread")]

CHUNK = 8
ANOTHERS = 2**31 - 1


class _Reused(Request):
    """A request whose slot is another's as soon as it ends: its prompt is overwritten."""

    def finish(self, reason: Finish) -> bool:
        self.tokens[:] = ANOTHERS
        return super().finish(reason)


def _late(fixed: bool = False) -> TorchBatcher:
    """A batcher whose device is late; with the steps that a GPU captures, or eager ones."""
    batcher = small_batcher(chunk=CHUNK, stream=LateStream())
    if fixed:
        batcher._steps = batcher._fixed()
    return batcher


def _bench(batcher: TorchBatcher, *requests: Request) -> Bench:
    bench = Bench(*requests, batcher=batcher, stop_ids=())
    bench.engine = smollm2_torch._Engine(bench.attachment, batcher, (), bench.said.append)
    return bench


def _answers(batcher: TorchBatcher, prompts: Sequence[list[int]], **how: Any) -> list[list[int]]:
    requests = [Request(slot, ids, max_output=6, **how) for slot, ids in enumerate(prompts)]
    _bench(batcher, *requests).until_done(*requests)
    return [request.out for request in requests]


def _prompt(length: int, first: int = 3) -> list[int]:
    return [(7 * i + first) % 50 for i in range(length)]


# ---------------------------------------------------------------- buffers


def test_a_late_device_has_run_nothing_before_it_is_waited_for() -> None:
    """The double can fail what it is for: a buffer written too soon is seen as it is then."""
    stream = LateStream()
    device, ran = torch.zeros(1), list[int]()
    mirror = Mirror(stream, device)
    held = mirror.array
    held[0] = 1
    mirror.send()
    stream.launch(lambda: ran.append(int(device[0])))
    held[0] = 2
    assert ran == []
    stream.wait()
    assert ran == [2]


def test_a_buffer_is_written_again_only_after_the_device_has_read_it() -> None:
    stream = LateStream()
    device, ran = torch.zeros(1), list[int]()
    mirror = Mirror(stream, device)
    for value in (1, 2, 3):
        mirror.array[0] = value
        mirror.send()
        stream.launch(lambda: ran.append(int(device[0])))
    assert mirror.receive()[0] == 3
    assert ran == [1, 2, 3]


def test_nobody_waits_for_what_does_not_concern_them() -> None:
    stream = LateStream()
    mirror, other = (Mirror(stream, torch.zeros(1)) for _ in range(2))
    mirror.send()
    stream.wait()
    other.send()  # under way, while `mirror` was read long ago
    mirror.array[0] = 1
    assert (len(stream.pending), stream.waits) == (1, 1)
    stream.wait()
    stream.wait()  # nothing to wait for
    assert stream.waits == 2


# ---------------------------------------------------------------- answers


@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "fixed"])
@pytest.mark.parametrize("length", [5, 8, 9, 16, 19, 30])
def test_a_prompt_of_any_number_of_chunks_is_answered_alike(length: int, fixed: bool) -> None:
    prompt = [_prompt(length)]
    assert _answers(_late(fixed), prompt) == _answers(small_batcher(chunk=CHUNK), prompt)


@pytest.mark.parametrize("fixed", [False, True], ids=["eager", "fixed"])
def test_prompts_that_take_turns_do_not_mix(fixed: bool) -> None:
    prompts = [_prompt(19, 1), _prompt(30, 2), _prompt(9, 3)]
    expected = _answers(small_batcher(chunk=CHUNK), prompts)
    assert _answers(_late(fixed), prompts) == expected
    # One by one they are the same: the reference does not mix them either.
    assert [_answers(_late(fixed), [prompt])[0] for prompt in prompts] == expected


def test_sampled_answers_are_the_same() -> None:
    prompts = [_prompt(19, 1), _prompt(30, 2)]
    hot: dict[str, Any] = {"temperature": 1.5, "top_k": 20, "seed": 5}
    assert _answers(_late(), prompts, **hot) == _answers(small_batcher(chunk=CHUNK), prompts, **hot)


def test_a_turn_with_an_answer_waits_once() -> None:
    """A step is launched behind a chunk without a wait between: the device does not stand idle."""
    batcher = _late()
    bench = _bench(batcher, Request(0, [5], max_output=10))
    bench.turns(1)
    bench.attachment.waiting = [Request(1, _prompt(24))]
    bench.turns(1)
    before = batcher._stream.waits
    bench.turns(1)
    assert batcher._stream.waits == before + 1


# ---------------------------------------------------------------- slots that are let go


@pytest.mark.parametrize("end", ["cancelled", "refused"])
def test_a_prompt_is_read_before_its_slot_is_let_go(end: str) -> None:
    ids = _prompt(20)
    if end == "refused":
        ids[CHUNK + 2] = 50
    batcher = _late()
    reads = reads_of(batcher)
    gone = _Reused(0, ids)
    bench = _bench(batcher, gone)
    bench.turns(1)  # its first chunk is under way
    assert reads == []
    gone.is_cancelled = end == "cancelled"
    bench.turns(1)
    assert gone.reason == (Finish.STOP if end == "cancelled" else Finish.ERROR)
    # Neither the slot's next request nor another is disturbed.
    prompts = [_prompt(13), _prompt(20, 4)]
    others = [_Reused(slot, prompt, max_output=6) for slot, prompt in enumerate(prompts)]
    bench.attachment.waiting = list(others)
    bench.until_done(*others)
    assert [other.out for other in others] == _answers(small_batcher(chunk=CHUNK), prompts)
    first, second = prompts
    assert reads == [ids[:8], first[:8], second[:8], first[8:], second[8:16], second[16:]]


def test_ids_that_change_after_they_were_checked_disturb_nobody_else() -> None:
    """A rule broken by whoever writes prompts; on a GPU it would cost every request."""
    batcher = _late()
    changing, other = Request(0, _prompt(20)), Request(1, _prompt(9, 4), max_output=6)
    bench = _bench(batcher, changing, other)
    bench.turns(1)
    changing.tokens[:4] = [ANOTHERS, -1, 50, -(2**31)]
    bench.until_done(changing, other)
    assert changing.reason == Finish.LENGTH
    assert other.out == _answers(small_batcher(chunk=CHUNK), [[5], _prompt(9, 4)])[1]
