"""The model on PyTorch with its slots on the `device` table: its own eager CPU code, on a device of
host threads."""

import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from daemon_process import daemon_process, run, wait_until
from engine_bench import PARIS, Bench, Request, ask
from host_gpu import HostGpu, Library
from local_device import local_device

from dataplane import model
from dataplane.cli.main import main as cli
from dataplane.model import ModelError
from dataplane.runtime.cuda import CudaError

pytest.importorskip("torch", reason="no PyTorch: pip install -e '.[torch]'")
pytest.importorskip("gguf", reason="no gguf: pip install -e '.[torch]'")

from late_stream import LateStream, reads_of
from torch_bench import small_batcher

from dataplane.runtime import smollm2_torch

DONE = 5


def test_a_small_network_answers_as_it_does_elsewhere(library: Library) -> None:
    prompts = [list(range(slot, slot + 19)) for slot in range(3)]
    hot: dict[str, Any] = {"temperature": 1.0, "seed": 3}
    elsewhere = [Request(slot, ids, max_output=9) for slot, ids in enumerate(prompts)]
    elsewhere[2] = Request(2, prompts[2], max_output=9, **hot)
    Bench(*elsewhere, batcher=small_batcher(), stop_ids=()).until_done(*elsewhere)
    with local_device(library, slots=3) as on:
        asked = [on.ask(ids, 9, **(hot if ids is prompts[2] else {})) for ids in prompts]
        engine = smollm2_torch._Engine(on.runtime, small_batcher(), (), print)
        for _ in range(100):
            if all(one.state == DONE for one in asked):
                break
            engine.turn()
        assert [one.out for one in asked] == [one.out for one in elsewhere]
        assert [one.stated.finish_reason for one in asked] == [2, 2, 2]


def test_a_late_device_reads_no_prompt_of_the_slots_next_request(library: Library) -> None:
    first, second = list(range(20)), list(range(30, 49))
    alone = Request(0, second, max_output=4)
    Bench(alone, batcher=small_batcher(), stop_ids=()).until_done(alone)
    with local_device(library, slots=1) as on:
        batcher = small_batcher(stream=LateStream())
        reads = reads_of(batcher)
        engine = smollm2_torch._Engine(on.runtime, batcher, (), print)
        gone = on.ask(first, 4)
        engine.turn()  # a chunk of eight of its ids is under way
        assert gone.cancel()
        engine.turn()
        on.runtime.flush()
        asked = on.ask(second, 4)
        for _ in range(100):
            if asked.state == DONE:
                break
            engine.turn()
        assert (asked.slot, asked.out) == (gone.slot, alone.out)
        assert reads == [first[:8], second[:8], second[8:16], second[16:]]


@pytest.mark.model
@pytest.mark.slow
def test_the_daemon_serves_the_real_model_on_it(tmp_path: Path, library: Library) -> None:
    try:
        model.locate_weights()
    except ModelError as error:
        pytest.skip(f"no model: {error}")
    gpu, said, ended = HostGpu(library), list[str](), list[int]()

    def serve(socket: Path) -> None:
        ended.append(
            smollm2_torch.main(socket, 2, 64, 16, said.append, cache_dir=tmp_path, gpu=gpu)
        )

    with contextlib.ExitStack() as stack:
        daemon = stack.enter_context(daemon_process(tmp_path, "--runtime=none"))
        runtime = threading.Thread(target=serve, args=(daemon.socket,))
        runtime.start()
        stack.callback(runtime.join, 30)
        stack.callback(daemon.stop)
        wait_until("it is ready", lambda: daemon.health()["status"] == "ok", within=150)
        assert '"table":"device"' in daemon.get("/props")[1].replace(" ", "")
        assert run(ask(daemon), within=60) == [PARIS, PARIS[:3], PARIS]
        daemon.wait_idle()
        assert daemon.health()["completed"] == 3
    assert ended == [0]
    assert (gpu.allocated, gpu.mapped) == ({}, {})


@pytest.mark.parametrize(
    ("cuda", "remedy"),
    [(None, "this build is for CPUs"), ("13.0", "the driver be fit for CUDA 13.0")],
)
def test_a_partition_without_its_gpu_is_not_served_by_the_cpu(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cuda: str | None,
    remedy: str,
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.version.cuda", cuda)
    monkeypatch.setattr(model, "locate_weights", lambda: None)
    monkeypatch.setattr(model, "tokenizer_json", lambda files, folder: folder)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    arguments = ["runtime", "smollm2-torch", f"--socket={tmp_path / 'no.sock'}", "--partition=a=5"]
    monkeypatch.setenv("CUDA_DEVICE_ORDER", "")
    assert cli([*arguments, f"--state-dir={tmp_path / 'state'}"]) == 1
    told = capsys.readouterr().err
    assert "sees no GPU for the partition a (CUDA_VISIBLE_DEVICES=5)" in told
    assert remedy in told


def test_a_gpu_without_cupy_is_told_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(model, "locate_weights", lambda: None)
    monkeypatch.setattr(model, "tokenizer_json", lambda files, folder: folder)
    monkeypatch.setitem(sys.modules, "cupy", None)
    said: list[str] = []
    with pytest.raises(CudaError, match=r"CuPy is not installed: .* install -e '\.\[cuda13\]'"):
        smollm2_torch.main(tmp_path / "no.sock", 1, 8, 8, said.append, cache_dir=tmp_path)
    assert said == []
