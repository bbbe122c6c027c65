"""The batcher on PyTorch, on a small network: eagerly, and as a GPU captures it."""

import tracemalloc
from typing import Any

import pytest
from engine_bench import Bench, Request

from dataplane.runtime import Finish

pytest.importorskip("torch", reason="no PyTorch: pip install -e '.[torch]'")
pytest.importorskip("gguf", reason="no gguf: pip install -e '.[torch]'")

import torch
from torch_bench import SMALL, plainly, resident_bytes, serve, small_batcher, small_weights

from dataplane.runtime import smollm2_torch
from dataplane.runtime.smollm2_torch import TorchBatcher, TorchError
from dataplane.runtime.torch_prompts import on_host

pytestmark = pytest.mark.usefixtures("one_torch_thread")


def test_prompts_are_looked_at_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    batcher = small_batcher()
    seen: list[int] = []
    embed = batcher.network.embed

    def spy(ids: Any) -> None:
        seen.append(ids.data_ptr())
        embed(ids)

    monkeypatch.setattr(batcher.network, "embed", spy)
    request = Request(1, range(20), max_output=1)
    Bench(request, batcher=batcher).until_done(request)
    assert seen == [request.address + 4 * start for start in (0, 8, 16)]
    view = on_host(request.address, 20)
    request.tokens[3] = 42
    assert view[3] == 42


def test_an_answer_is_that_of_plain_arithmetic() -> None:
    requests = [Request(slot, range(slot, slot + 9), max_output=6) for slot in range(3)]
    Bench(*requests, batcher=small_batcher(), stop_ids=()).until_done(*requests)
    for request in requests:
        ids = request.tokens.tolist()
        for token in request.out:
            logits = plainly(SMALL, small_weights(SMALL), ids)
            assert logits[token] > logits.max() - 1e-3
            ids.append(token)
        assert (len(request.out), request.reason) == (6, Finish.LENGTH)


def test_an_id_outside_the_vocabulary_ends_its_own_request() -> None:
    bad, good = Request(0, [3, 50], max_output=4), Request(1, [3, 4], max_output=4)
    bench = Bench(bad, good, batcher=(batcher := small_batcher()), stop_ids=())
    bench.engine = smollm2_torch._Engine(bench.attachment, batcher, (), bench.said.append)
    bench.until_done(bad, good)
    assert (bad.reason, bad.out) == (Finish.ERROR, [])
    assert (good.reason, len(good.out)) == (Finish.LENGTH, 4)
    assert bench.said == ["slot 0: the model refuses: the id 50 is outside the vocabulary of 50"]
    assert batcher.decode([0, 1], [3, -7], [0, 2]) == -1
    assert batcher.decode([0], [3], [40]) == 1
    assert "41 ids where 40 have room" in batcher.complaint()


def test_a_request_may_fill_its_slot() -> None:
    request = Request(2, [7] * 30, max_output=10)
    Bench(request, batcher=small_batcher(), stop_ids=()).until_done(request)
    assert (request.reason, len(request.out)) == (Finish.LENGTH, 10)


def test_too_much_is_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TorchError, match="129 ids; this model was trained on 128"):
        small_batcher(per_slot=129)
    monkeypatch.setattr(smollm2_torch, "available_memory", lambda: 1 << 20)
    with pytest.raises(TorchError, match=r"take \d+ MiB and 1 MiB .* ask for fewer slots"):
        small_batcher(slots=1024, per_slot=128)
    monkeypatch.undo()
    batcher = small_batcher()
    with pytest.raises(TorchError, match="1 to 8 ids, not 9"):
        batcher.prefill_chunk(0, 0, 0, 9, True)


def test_serving_allocates_nothing_that_stays() -> None:
    batcher = small_batcher(slots=8, chunk=16)
    serve(batcher, 20, list(range(9)))
    tracemalloc.start()
    held, resident = batcher.memory().held, resident_bytes()
    traced = tracemalloc.get_traced_memory()[0]
    serve(batcher, 200, list(range(9)))
    grown = tracemalloc.get_traced_memory()[0] - traced
    tracemalloc.stop()
    assert batcher.memory().held == held
    assert grown < 64 << 10
    assert resident_bytes() - resident < 8 << 20


# What a GPU captures.


def _three_answers(batcher: TorchBatcher, near: float) -> list[list[int]]:
    """Of two greedy requests, which have to be near the best at each id, and one that samples."""
    requests = [Request(slot, range(slot, slot + 19), max_output=9) for slot in range(3)]
    requests[2].temperature, requests[2].seed = 1.0, 3
    Bench(*requests, batcher=batcher, stop_ids=()).until_done(*requests)
    for request in requests[:2]:
        ids = request.tokens.tolist()
        for token in request.out:
            logits = plainly(SMALL, small_weights(SMALL), ids)
            assert logits[token] > logits.max() - near
            ids.append(token)
    return [request.out for request in requests]


def test_fixed_steps_give_what_eager_ones_give() -> None:
    """What is captured on a GPU, run as it is."""
    fixed = small_batcher()
    fixed._steps = fixed._fixed()
    assert _three_answers(fixed, 1e-3) == _three_answers(small_batcher(), 1e-3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="waived: no CUDA device")
def test_captured_steps_answer_on_a_gpu() -> None:
    captured = TorchBatcher(SMALL, small_weights(SMALL), 3, 40, 8, torch.device("cuda"))
    first = _three_answers(captured, 0.3)
    before = captured.memory()
    assert _three_answers(captured, 0.3) == first
    assert captured.memory() == before
