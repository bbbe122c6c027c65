"""The bundled engine: its turns against a double, and the real model behind the same loop."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_bench import FRANCE, PARIS, Attachment, Batcher, Bench, Request

from dataplane import model
from dataplane.model import ModelFiles
from dataplane.runtime import DetachedError, Finish, Manifest, smollm2
from dataplane.runtime.llama import CDEF, EngineError, LayoutMismatch, Library, LlamaBatcher
from dataplane.runtime.smollm2 import warm_up
from dataplane.text import Tokenizer

# ---------------------------------------------------------------- the loop


def test_a_prompt_runs_in_chunks_where_it_lies() -> None:
    request = Request(3, range(70), temperature=0.5, top_p=0.9, top_k=7, seed=11)
    bench = Bench(request)
    bench.turns(3)
    at = request.address
    assert bench.batcher.called("begin") == [(3, 0.5, 0.9, 7, 11)]
    assert bench.batcher.called("chunk") == [
        (3, at, 0, 32, False),
        (3, at + 128, 32, 32, False),
        (3, at + 256, 64, 6, True),
    ]
    # The first id comes from the prompt's last logits; the step of the same turn runs it.
    assert bench.batcher.called("decode") == [([3], [100], [70])]
    assert request.out == [100, 101]


def test_prompts_take_turns_and_answers_never_wait_for_more_than_one_chunk() -> None:
    answering = Request(0, [5], max_output=8)
    bench = Bench(answering)
    bench.turns(1)
    bench.attachment.waiting = [Request(1, range(96)), Request(2, range(64))]
    bench.turns(5)
    kinds = [call[:2] for call in bench.batcher.log if call[0] in ("chunk", "decode")]
    assert kinds == [
        ("chunk", 0), ("decode", [0]),
        ("chunk", 1), ("decode", [0]),
        ("chunk", 2), ("decode", [0]),
        ("chunk", 1), ("decode", [0]),
        ("chunk", 2), ("decode", [0, 2]),
        ("chunk", 1), ("decode", [0, 2, 1]),
    ]  # fmt: skip
    assert bench.attachment.steps == 6


def test_an_idle_engine_waits_less_than_a_heartbeat_and_a_busy_one_not_at_all() -> None:
    bench = Bench()
    bench.turns(2)
    bench.attachment.waiting = [Request(0, [5], max_output=3)]
    bench.turns(3)
    assert [timeout > 0 for timeout in bench.attachment.timeouts] == [True, True, True, False, True]
    assert max(bench.attachment.timeouts) < 0.5
    assert bench.attachment.steps == 5
    assert bench.batcher.called("decode") == [([0], [100], [1]), ([0], [101], [2])]


def test_a_stop_id_is_neither_emitted_nor_counted() -> None:
    request = Request(1, [5], max_output=2)
    bench = Bench(request, stop_ids=[102])
    bench.until_done(request)
    assert request.out == [100, 101]
    # The answer was full when the stop id would have come: the length ended it.
    assert request.reason == Finish.LENGTH
    request = Request(1, [5], max_output=3)
    bench = Bench(request, stop_ids=[102])
    bench.until_done(request)
    assert (request.out, request.reason) == ([100, 101], Finish.STOP)
    assert bench.batcher.log[-1] == ("forget", 1)


def test_a_stop_id_may_come_first() -> None:
    request = Request(0, range(40))
    bench = Bench(request, stop_ids=[100])
    bench.until_done(request)
    assert (request.out, request.reason) == ([], Finish.STOP)


def test_cancelling_ends_a_prompt_between_its_chunks() -> None:
    gone, other = Request(0, range(320)), Request(1, [5], max_output=3)
    bench = Bench(gone, other)
    bench.turns(1)
    gone.is_cancelled = True
    bench.until_done(other)
    assert bench.batcher.called("chunk") == [
        (0, gone.address, 0, 32, False),
        (1, other.address, 0, 1, True),
    ]
    assert gone.reason is not None
    assert gone.out == []
    assert other.out == [100, 101, 102]
    assert ("forget", 0) in bench.batcher.log


def test_cancelling_ends_an_answer_and_its_slot_can_be_taken_again() -> None:
    first = Request(0, [5], max_output=500)
    bench = Bench(first)
    bench.turns(3)
    first.is_cancelled = True
    second = Request(0, [6], max_output=2)
    bench.attachment.waiting = [second]
    bench.turns(1)
    assert first.reason is not None
    bench.until_done(second)
    assert (second.out, second.reason) == ([100, 101], Finish.LENGTH)


def test_a_request_that_is_over_is_dropped() -> None:
    request = Request(0, [5], max_output=500)
    bench = Bench(request)
    bench.turns(2)
    request.is_over = True
    bench.turns(1)
    assert request.reason is not None
    assert bench.batcher.log[-1] == ("forget", 0)


def test_a_prompt_that_fails_ends_alone() -> None:
    bad, good = Request(0, range(40)), Request(1, range(40), max_output=2)
    bench = Bench(bad, good)
    bench.batcher.fails = {0}
    bench.until_done(bad, good)
    assert (bad.reason, bad.out) == (Finish.ERROR, [])
    assert (good.reason, good.out) == (Finish.LENGTH, [100, 101])
    assert bench.said == ["slot 0: llama.cpp answers -1: the double's reason"]
    assert ("forget", 0) in bench.batcher.log


def test_a_step_that_fails_ends_only_the_slot_that_fails_alone() -> None:
    requests = [Request(slot, [5], max_output=6) for slot in range(3)]
    bench = Bench(*requests)
    bench.turns(3)
    bench.batcher.fails = {1}
    bench.until_done(*requests)
    assert [request.reason for request in requests] == [
        Finish.LENGTH, Finish.ERROR, Finish.LENGTH,
    ]  # fmt: skip
    assert requests[0].out == requests[2].out == [100, 101, 102, 103, 104, 105]
    assert requests[1].out == [100, 101, 102]
    # A step that failed may have run in part: each sequence goes back to where it stood.
    assert {slot for slot, _ in bench.batcher.called("rewind")} == {0, 1, 2}


@pytest.mark.parametrize(("prompt", "max_output"), [([], 4), ([5], 0)])
def test_a_request_that_breaks_the_contract_ends_with_an_error(
    prompt: list[int], max_output: int
) -> None:
    request = Request(0, prompt, max_output=max_output)
    bench = Bench(request)
    bench.turns(2)
    assert request.reason == Finish.ERROR
    assert bench.batcher.log == []


def test_a_detached_engine_stops() -> None:
    class Gone(Attachment):
        def take(self, timeout: float) -> list[Request]:
            if self.steps == 3:
                raise DetachedError("gone")
            return super().take(timeout)

    attachment = Gone()
    with pytest.raises(DetachedError):
        smollm2.run(attachment, Batcher(), [2], lambda _: None)
    assert attachment.steps == 3


@pytest.mark.parametrize("wrong", ["first prompt", "next id", "first step"])
def test_an_engine_that_computes_something_else_is_never_ready(wrong: str) -> None:
    class Wrong(Batcher):
        def prefill_chunk(self, *call: Any) -> int:
            super().prefill_chunk(*call)
            return -1 if wrong == "first prompt" else 0

        def sample(self, seq: int, index: int) -> int:
            return 5 if wrong == "next id" else 7042

        def decode(self, *call: Any) -> int:
            super().decode(*call)
            return -1

    with pytest.raises(EngineError, match=wrong):
        warm_up(Wrong())


# ---------------------------------------------------------------- the real model


@pytest.fixture(scope="module")
def batcher(model_files: ModelFiles) -> Iterator[LlamaBatcher]:
    with LlamaBatcher(model_files, slots=4, per_slot=256) as real:
        warm_up(real)
        yield real


def _answer(batcher: LlamaBatcher, slot: int = 0, count: int = 12, **how: Any) -> list[int]:
    request = Request(slot, FRANCE, max_output=count, **how)
    Bench(request, batcher=batcher, stop_ids=model.STOP_IDS).until_done(request)
    return request.out


@pytest.mark.model
def test_the_capital_of_france(
    batcher: LlamaBatcher, model_files: ModelFiles, tmp_path: Path
) -> None:
    tokeniser = Tokenizer(model.tokenizer_json(model_files.gguf, tmp_path).read_bytes())
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    request = Request(2, tokeniser.encode_chat(chat, model.CHAT_TEMPLATE), max_output=50)
    Bench(request, batcher=batcher).until_done(request)
    assert tokeniser.decode(request.out) == "The capital of France is Paris."
    assert request.reason == Finish.STOP


@pytest.mark.model
def test_slots_answer_side_by_side(batcher: LlamaBatcher) -> None:
    assert batcher.vocab_size == 49152
    requests = [Request(slot, FRANCE, max_output=5 + slot) for slot in range(4)]
    Bench(*requests, batcher=batcher).until_done(*requests)
    for request in requests:
        assert request.out == PARIS[: request.max_output]
        expected = Finish.LENGTH if request.max_output <= len(PARIS) else Finish.STOP
        assert request.reason == expected


@pytest.mark.model
def test_a_prompt_in_several_chunks_is_one_prompt(batcher: LlamaBatcher) -> None:
    padding = [1, 4093, 198, 12411, 2, 198] * 10  # chats without an answer, to fill some chunks
    request = Request(1, padding + FRANCE, max_output=20)
    small_chunks, batcher.chunk = batcher.chunk, 7
    try:
        Bench(request, batcher=batcher).until_done(request)
    finally:
        batcher.chunk = small_chunks
    again = Request(3, padding + FRANCE, max_output=20)
    Bench(again, batcher=batcher).until_done(again)
    assert request.out[:4] == again.out[:4]
    assert request.out


@pytest.mark.model
def test_the_batch_points_at_the_prompt_itself(
    batcher: LlamaBatcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    ffi, inner = batcher._ffi, batcher._lib

    class Spy:
        def __getattr__(self, name: str) -> Any:
            return getattr(inner, name)

        def llama_decode(self, context: Any, batch: Any) -> Any:
            seen.append(int(ffi.cast("uintptr_t", batch.token)))
            return inner.llama_decode(context, batch)

    monkeypatch.setattr(batcher, "_lib", Spy())
    request = Request(0, FRANCE * 3, max_output=1)
    Bench(request, batcher=batcher).until_done(request)
    assert seen == [request.address, request.address + 32 * 4]


@pytest.mark.model
def test_sampling(batcher: LlamaBatcher, monkeypatch: pytest.MonkeyPatch) -> None:
    hot: dict[str, Any] = {"temperature": 3.0, "top_k": 500, "count": 5}
    seven = _answer(batcher, seed=7, **hot)
    assert _answer(batcher, seed=7, **hot) == seven
    assert _answer(batcher, slot=3, seed=7, **hot) == seven
    assert _answer(batcher, seed=8, **hot) != seven
    greedy = _answer(batcher)
    assert greedy == PARIS
    assert _answer(batcher, temperature=3.0, top_k=1, seed=9) == greedy
    assert _answer(batcher, temperature=3.0, top_p=1e-9, seed=9) == greedy
    assert _answer(batcher, temperature=1e-30, seed=9) == greedy
    assert _answer(batcher, temperature=3.0, seed=9) != greedy
    # Off is off: neither 0 nor 1 narrows anything, and more than the vocabulary is all of it.
    plain = _answer(batcher, temperature=3.0, seed=9, count=4)
    assert _answer(batcher, temperature=3.0, top_p=1.0, seed=9, count=4) == plain
    # The library's own "random" is a seed like any other to a client; a client's zero is random.
    top: dict[str, Any] = {**hot, "seed": 0xFFFFFFFF}
    assert _answer(batcher, **top) == _answer(batcher, **top)
    monkeypatch.setattr("secrets.randbelow", lambda _: 6)
    assert _answer(batcher, seed=0, **hot) == seven
    assert _answer(batcher, temperature=3.0, top_k=2**32 - 1, seed=9, count=1) == plain[:1]


@pytest.mark.model
def test_a_bad_id_ends_its_own_request(batcher: LlamaBatcher) -> None:
    bad = Request(0, [*FRANCE, 49152], max_output=12)
    good = Request(1, FRANCE, max_output=12)
    bench = Bench(bad, good, batcher=batcher)
    bench.until_done(bad, good)
    assert (bad.reason, bad.out) == (Finish.ERROR, [])
    assert (good.reason, good.out) == (Finish.STOP, PARIS)
    assert "llama.cpp answers -1" in bench.said[0]
    assert "49152" in bench.said[0]
    assert _answer(batcher, slot=0) == PARIS


@pytest.mark.model
def test_a_step_with_a_bad_id_ends_its_own_request(batcher: LlamaBatcher) -> None:
    bad, good = (Request(slot, FRANCE, max_output=12) for slot in (0, 1))
    bench = Bench(bad, good, batcher=batcher)
    bench.turns(3)
    (job,) = [job for job in bench.engine._decoding if job.slot == 0]
    job.token = -7
    bench.until_done(bad, good)
    assert bad.reason == Finish.ERROR
    assert (good.reason, good.out) == (Finish.STOP, PARIS)


@pytest.mark.model
def test_a_cancelled_sequence_leaves_nothing_behind(batcher: LlamaBatcher) -> None:
    gone = Request(2, FRANCE * 6, max_output=50)
    bench = Bench(gone, batcher=batcher)
    bench.turns(2)
    gone.is_cancelled = True
    bench.turns(1)
    assert gone.reason is not None
    assert _answer(batcher, slot=2) == PARIS


@pytest.mark.model
@pytest.mark.parametrize(
    ("slots", "per_slot", "reason"),
    [(0, 64, "1 to 256 slots"), (257, 64, "1 to 256 slots"), (1, 8193, "was trained on 8192")],
)
def test_impossible_geometries_are_refused(
    model_files: ModelFiles, slots: int, per_slot: int, reason: str
) -> None:
    with pytest.raises(EngineError, match=reason):
        LlamaBatcher(model_files, slots, per_slot)


@pytest.mark.model
def test_chunks_have_bounds(batcher: LlamaBatcher) -> None:
    for n in (0, batcher.chunk + 1):
        with pytest.raises(EngineError, match="a chunk has 1 to 32 ids"):
            batcher.prefill_chunk(0, 0, 0, n, True)


@pytest.mark.model
def test_weights_that_are_none_are_an_error_in_words(
    model_files: ModelFiles, tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF\x03\x00\x00\x00 and nothing else")
    with pytest.raises(EngineError, match=r"damaged\.gguf cannot be loaded: .*`dataplane model"):
        LlamaBatcher(ModelFiles(damaged, model_files.library), 1, 64)


def test_a_library_that_is_none_is_an_error_in_words(tmp_path: Path) -> None:
    path = tmp_path / "none.so"
    path.write_bytes(b"not a shared object")
    with pytest.raises(EngineError, match=r"none\.so cannot be loaded"):
        Library(str(path))


# ---------------------------------------------------------------- layouts


MODEL_END = "    bool load_mtp;\n"
CONTEXT_END = "    void *ctx_other;\n"


@pytest.mark.model
@pytest.mark.parametrize(
    ("field", "instead", "last"),
    [
        ("    size_t moe_cache_size;\n", "", CONTEXT_END),
        ("    uint32_t n_outputs_max_per_seq;\n", "", CONTEXT_END),
        ("    uint32_t n_rs_seq;\n", "    uint32_t n_rs_seq;\n    uint32_t extra;\n", ""),
        ("    float defrag_thold;\n", "", CONTEXT_END),
        ("    int32_t type_v;\n", "    int32_t type_v;\n    void *extra;\n", ""),
        ("    bool swa_full;\n", "", CONTEXT_END),
        ("    bool embeddings;\n", "    bool embeddings;\n    bool extra;\n", ""),
        ("    int32_t lazy_mode;\n", "", MODEL_END),
        ("    bool vocab_only;\n", "    bool extra;\n    bool vocab_only;\n", ""),
    ],
)
def test_a_shifted_layout_is_refused_in_words(
    model_files: ModelFiles, field: str, instead: str, last: str
) -> None:
    assert field in CDEF
    shifted = CDEF.replace(field, instead, 1)
    if not instead:  # the field is looked at nevertheless, somewhere behind
        shifted = shifted.replace(last, last + field, 1)
    with pytest.raises(LayoutMismatch, match=r"is .* instead of .*`dataplane model install`"):
        Library(str(model_files.library), shifted)


@pytest.mark.model
def test_a_function_that_is_gone_is_refused_in_words(model_files: ModelFiles) -> None:
    with pytest.raises(LayoutMismatch, match="llama_gone"):
        Library(str(model_files.library), CDEF + "void llama_gone(void);")


# ---------------------------------------------------------------- all of it


@pytest.mark.model
def test_main_attaches_with_the_models_manifest(
    model_files: ModelFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(1, FRANCE, max_output=12)
    attached: list[tuple[str, Manifest, Path]] = []
    events: list[str] = []

    class Attached(Attachment):
        def __enter__(self) -> "Attached":
            return self

        def __exit__(self, *_: object) -> None:
            events.append("left")

        def ready(self) -> None:
            events.append("ready")

        def take(self, timeout: float) -> list[Request]:
            if request.reason is not None:
                raise DetachedError("the test is over")
            return super().take(timeout)

    def attach(socket: str, manifest: Manifest, tokenizer: Path) -> Attached:
        attached.append((socket, manifest, tokenizer))
        return Attached(request)

    monkeypatch.setattr(smollm2, "attach", attach)
    say: Callable[[str], None] = events.append
    assert smollm2.main("a.sock", 2, 100, 28, say, cache_dir=tmp_path / "models") == 0
    assert request.out == PARIS
    ((socket, manifest, tokenizer),) = attached
    assert socket == "a.sock"
    assert tokenizer.parent == tmp_path / "models"
    assert (manifest.slots, manifest.context, manifest.max_output) == (2, 100, 28)
    assert (manifest.model, manifest.vocab_size) == ("SmolLM2-135M-Instruct", 49152)
    assert (manifest.stop_ids, manifest.max_step_ms) == ((2,), 10_000)
    assert manifest.chat_template == model.CHAT_TEMPLATE
    manifest.check()
    assert events[1:] == [
        "ready",
        "SmolLM2-135M-Instruct is ready",
        "SmolLM2-135M-Instruct stops: the test is over",
        "left",
    ]
