"""`bench.gpu`: waived without a GPU, run on host threads where it can be, and its judgements."""

import copy
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import gpu_programs
import numpy as np
import pytest
from host_gpu import HostGpu, Library

from bench import gpu as bench_gpu
from bench import gpu_parts, gpu_report
from bench.results import ROOT, Form
from dataplane import apart, kernel_resources, kernels
from dataplane.errors import DataplaneError
from dataplane.runtime.cuda import CudaError, Gpu

RESULT: dict[str, Any] = {
    "date": "2026-01-02T03:04:05+00:00",
    "command": "python -m bench.gpu",
    "device": {"name": "Fake H100", "architecture": "sm_90"},
    "is_gpu": True,
    "parts": {
        "ping-pong": {"p50_us": 1.5, "p99_us": 2.5, "max_us": 9.0},
        "claim": {
            "rows": [
                {"mode": mode, "host": host, "p50_us": us, "p99_us": 2 * us, "max_us": 3 * us}
                for mode, host, us in (
                    ("tick", "awake", 18.0), ("tick", "asleep", 60.0),
                    ("persistent", "awake", 3.5), ("persistent", "asleep", 70.0),
                )
            ]
        },
        "prompt": {
            "rows": [gpu_parts.prompt_row(16, 1.0, 4.0), gpu_parts.prompt_row(4096, 9.0, 6.0)],
            "staged_wins_from": 4096,
        },
        "first token": {
            "tokens": 128, "first_us": 110.0, "later_us": 100.0, "first_over_later": 1.1,
            "one_connection_p50_us": 80.0, "one_connection_p99_us": 90.0,
            "allocations": {"before_ready": 3, "bytes": 1000, "after_ready": 0},
            "memory_change_bytes": 0,
        },
    },
}  # fmt: skip


def result(**changes: Any) -> dict[str, Any]:
    made = copy.deepcopy(RESULT)
    made["parts"].update(changes)
    made["targets"] = gpu_report.judge(made)
    return made


# Without a GPU.


def test_without_a_gpu_every_part_is_waived_and_nothing_is_kept(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", f"--out={tmp_path}"],
        capture_output=True, text=True, timeout=60, check=False, cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(gpu_parts.PARTS)
    for line, name in zip(lines, gpu_parts.PARTS, strict=True):
        assert line.startswith(f"{name}: waived: "), line
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> gpu_parts.Bench:
    if shutil.which(gpu_programs.cxx()) is None:
        pytest.skip("no C++ compiler here")
    folder = tmp_path_factory.mktemp("gpu")
    gpu = HostGpu(Library(gpu_programs.build_library(folder)))
    return gpu_parts.Bench(cast(Gpu, gpu), None, None, gpu_parts.compile_host(folder), Form.QUICK)


def test_on_host_threads_claims_are_timed_and_nothing_is_left(
    bench: gpu_parts.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "_COUNTS", {Form.QUICK: 40})
    found = gpu_parts.claims(bench)
    assert [(row["mode"], row["host"]) for row in found["rows"]] == [
        ("tick", "awake"), ("tick", "asleep"), ("persistent", "awake"), ("persistent", "asleep"),
    ]  # fmt: skip
    assert all(0 < row["p50_us"] <= row["p99_us"] <= row["max_us"] for row in found["rows"])
    assert cast(HostGpu, bench.gpu).allocated == {}


def test_a_device_that_does_not_answer_ends_the_part_in_words(
    bench: gpu_parts.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dataplane.runtime.cuda_admission.Admission.run", lambda self: None)
    with pytest.raises(DataplaneError, match="claims: status"):
        gpu_parts.claims(bench)


def test_the_first_token_comes_through_a_daemon(
    bench: gpu_parts.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_parts, "_STARTS", {Form.QUICK: 1})
    monkeypatch.setattr(gpu_parts, "_REQUESTS", {Form.QUICK: 3})
    found = gpu_parts.first_token(bench)
    assert found["requests"] == 7
    assert found["first_us"] > 0
    assert found["allocations"]["before_ready"] > 0
    assert found["allocations"]["after_ready"] == 0
    assert found["memory_change_bytes"] == 0


def test_an_allocation_after_ready_is_counted(bench: gpu_parts.Bench) -> None:
    gpu = gpu_parts.Watched(bench.gpu)
    gpu.free(gpu.allocate(64))
    gpu.is_ready = True
    gpu.free(gpu.allocate(32))
    assert (gpu.before, gpu.bytes, gpu.after) == (1, 64, 1)


def test_what_host_threads_did_is_labelled_and_never_kept(
    bench: gpu_parts.Bench, tmp_path: Path
) -> None:
    def measure(name: str) -> dict[str, Any]:
        try:
            return gpu_parts.PARTS[name](bench) if name != "first token" else {"waived": "not now"}
        except gpu_parts.WaivedError as error:
            return {"waived": str(error)}

    device = {"name": "host threads, not a GPU", "architecture": "none"}
    found = bench_gpu.run(device, False, Form.QUICK, measure)
    assert found["targets"] == []
    said = "\n".join(gpu_report.lines(found))
    assert "HOST THREADS" in said
    assert "ping-pong: waived: host threads have no bus" in said
    assert "first token: waived: not now" in said
    with pytest.raises(ValueError, match="only what a GPU did"):
        gpu_report.keep(found, tmp_path / "gpu.json")
    assert list(tmp_path.iterdir()) == []


def of_host_threads(folder: Path, faults: str, *arguments: str) -> Any:
    """Run the whole bench on host threads with faults; the result."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.gpu", "--host-threads", "--json", f"--out={folder}",
         *arguments],
        capture_output=True, text=True, timeout=200, check=False, cwd=ROOT,
        env={**os.environ, "GPU_CHECKS_FAULTS": faults},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert list(folder.iterdir()) == []
    return json.loads(done.stdout)


@pytest.mark.slow
def test_a_part_that_crashes_or_fails_hides_no_other(tmp_path: Path) -> None:
    found = of_host_threads(tmp_path, "claim=cuLaunchKernel=700;ping-pong=crash")
    parts = found["parts"]
    assert parts["ping-pong"]["failed"] == "it was ended by SIGSEGV"
    assert parts["claim"]["failed"].count("an unknown CUDA error, 700") == 2  # by each mode
    assert "touched memory" in parts["claim"]["failed"]
    assert "Traceback" in parts["claim"]["output"]
    assert parts["prompt"] == {"waived": "host threads have no bus"}
    assert parts["first token"]["requests"] > 100
    assert found["complete"] is True


# A part's process.


def ended(found: Any, why: str | None, output: str = "") -> apart.Ended:
    return apart.Ended(found, why, output, 1.0)


def test_a_part_that_hangs_keeps_what_it_had_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def run_apart(command: list[str], within_s: float) -> apart.Ended:
        asked.append([*command[-2:], str(within_s)])
        mode = command[-1]
        row = {"mode": mode, "host": "awake", "p50_us": 3.0, "p99_us": 4.0, "max_us": 5.0}
        why = "it was not done within 60 s" if mode == "tick" else None
        return ended({"rows": [row]}, why, "Timeout!\nin wait")

    monkeypatch.setattr(bench_gpu, "run_apart", run_apart)
    part = bench_gpu.measure_apart("claim", ["bench"], Form.QUICK)
    assert asked == [["--mode", "tick", "60"], ["--mode", "persistent", "60"]]
    assert [row["mode"] for row in part["rows"]] == ["tick", "persistent"]
    assert part["failed"] == "it was not done within 60 s"
    assert "in wait" in part["output"]
    judged = result(claim=part)["targets"]
    assert [row["met"] for row in judged[:2]] == [True, True]
    said = "\n".join(gpu_report.lines(result(claim=part)))
    assert "tick, awake" in said
    assert "claim: FAILED: it was not done within 60 s" in said
    bench_gpu.measure_apart("claim", ["bench"], Form.FULL)
    assert asked[-1][-1] == "300"


def test_why_a_process_ended_is_its_last_word() -> None:
    part = bench_gpu.outcome(ended(None, "it ended with status 1", "Traceback\nCudaError: no\n"))
    assert part["failed"] == "it ended with status 1: CudaError: no"
    assert bench_gpu.outcome(ended({"a": 1}, None)) == {"a": 1}
    assert bench_gpu.outcome(ended({"a": 1}, "it was ended by SIGKILL", "x"))["a"] == 1


def test_a_file_is_kept_after_each_part(tmp_path: Path) -> None:
    path = gpu_report.place(tmp_path)
    kept: list[dict[str, Any]] = []

    def keep(found: dict[str, Any]) -> None:
        gpu_report.keep(found, path)
        kept.append(json.loads(path.read_text(encoding="utf-8")))

    def measure(name: str) -> dict[str, Any]:
        return {"failed": "no"} if name == "claim" else RESULT["parts"][name]

    found = bench_gpu.run(RESULT["device"], True, Form.QUICK, measure, keep)
    assert [len(one["parts"]) for one in kept] == [1, 2, 3, 4]
    assert [one["complete"] for one in kept] == [False] * 3 + [True]
    assert [row["met"] for row in found["targets"]] == [None, None, True, True, True]
    assert gpu_report.place(tmp_path).name == path.name.replace(".json", "-2.json")


def test_a_device_that_cannot_be_used_fails_every_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where there is a driver: else it would read as if all were well."""
    output = "CudaError: there is no CuPy"
    monkeypatch.setattr(
        bench_gpu, "run_apart", lambda *how: ended(None, "it ended with status 1", output)
    )
    assert bench_gpu.main([f"--out={tmp_path}"]) == 1
    [kept] = [path for path in tmp_path.iterdir() if path.suffix == ".json"]
    parts = json.loads(kept.read_text(encoding="utf-8"))["parts"]
    assert set(parts) == set(gpu_parts.PARTS)
    assert all("there is no CuPy" in part["failed"] for part in parts.values())


@pytest.mark.parametrize("is_there", [True, False])
def test_only_without_a_driver_is_a_device_waived(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_there: bool
) -> None:
    def refuse() -> Any:
        raise CudaError("there is no CuPy")

    monkeypatch.setattr(bench_gpu, "CupyGpu", refuse)
    monkeypatch.setattr("dataplane.gpus.DRIVER", tmp_path if is_there else tmp_path / "none")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    with pytest.raises(CudaError if is_there else gpu_parts.WaivedError, match="no CuPy"):
        bench_gpu.describe(False)


# The bench's kernels.


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="waived: there is no nvcc here")
def test_the_kernels_compile_and_read_as_a_prompt_is_read(tmp_path: Path) -> None:
    said = kernels.compile_kernels(
        str(shutil.which("nvcc")), tmp_path / "bench.fatbin", source=bench_gpu.KERNEL_SOURCE,
        flags=("-Xptxas", "-v"),
    )  # fmt: skip
    usages = kernel_resources.of_ptxas(said)
    assert {usage.kernel for usage in usages} == set(bench_gpu.KERNELS)
    assert all(usage.spill_bytes == 0 for usage in usages)
    ptx = tmp_path / "bench.ptx"
    subprocess.run(
        ["nvcc", "-std=c++20", "-O3", f"-I{kernels.SOURCES}", "-arch=compute_80", "-ptx", "-o",
         str(ptx), str(bench_gpu.KERNEL_SOURCE)],
        check=True,
    )  # fmt: skip
    text = ptx.read_text(encoding="utf-8")
    for instruction in ("ld.acquire.sys.global.u64", "st.release.sys.global.u64", "ld.global.v4"):
        assert instruction in text, instruction
    assert not re.search(r"\bld\.[\w.]*nc\b", text)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="waived: there is no nvcc here")
def test_without_compilers_what_was_compiled_ahead_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead, folder, empty = (tmp_path / name for name in ("ahead", "folder", "empty"))
    folder.mkdir()
    empty.mkdir()
    assert bench_gpu.prepare_ahead(ahead) == 0
    bench_gpu._take_ahead(folder, ahead)
    assert list(folder.iterdir()) == [], "compilers that are there are used"
    monkeypatch.setenv("PATH", str(empty))
    assert "no nvcc" in str(bench_gpu._compile_kernels(folder))
    bench_gpu._take_ahead(folder, ahead)
    assert bench_gpu._compile_kernels(folder) is None
    assert gpu_parts.compile_host(folder).bench_pong


# Ping-pong's host side, with a thread in the kernel's place.


class Answering(HostGpu):
    """Answers `dp_bench_pong` in Python, or wrongly, or never."""

    def __init__(self, add: int | None) -> None:
        super().__init__(cast(Library, type("Nothing", (), {"native": None})()))
        self.add = add

    def stream(self, urgent: bool = False) -> Any:
        return self

    def wait(self) -> None:
        self.thread.join()

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: int) -> None:
        import ctypes
        import threading

        address, rounds, _ = arguments
        lines = (ctypes.c_uint64 * 16).from_address(address)

        def answer() -> None:
            for number in range(1, rounds + 1 if self.add is not None else 0):
                while lines[7] != number:
                    pass
                for i in range(7):
                    lines[8 + i] = lines[i] + (self.add or 0)
                lines[15] = number

        self.thread = threading.Thread(target=answer)
        self.thread.start()


def pong(bench: gpu_parts.Bench, add: int | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    gpu: Any = Answering(add)
    monkeypatch.setattr(gpu_parts, "_COUNTS", {Form.QUICK: 5 if add == 1 else 1})
    monkeypatch.setattr(gpu_parts, "_PONG_LIMIT_MS", 300)
    return gpu_parts.ping_pong(bench._replace(gpu=gpu, measured=gpu))


def test_ping_pong_times_every_round(
    bench: gpu_parts.Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = pong(bench, 1, monkeypatch)
    assert found["rounds"] == 5
    assert 0 < found["p50_us"] <= found["max_us"]


@pytest.mark.parametrize(("add", "told"), [(2, "before its data"), (None, "did not answer")])
def test_ping_pong_notices_torn_data_and_silence(
    bench: gpu_parts.Bench, monkeypatch: pytest.MonkeyPatch, add: int | None, told: str
) -> None:
    with pytest.raises(DataplaneError, match=told):
        pong(bench, add, monkeypatch)


# What is made of the figures.


def test_where_the_copy_wins_is_from_where_it_wins_at_every_length() -> None:
    def rows(*wins: str) -> list[dict[str, Any]]:
        return [{"tokens": 4**i, "wins": way} for i, way in enumerate(wins)]

    assert gpu_parts.staged_wins_from(rows("mapped", "staged", "staged")) == 4
    assert gpu_parts.staged_wins_from(rows("staged", "mapped", "staged")) == 16
    assert gpu_parts.staged_wins_from(rows("staged", "mapped")) is None
    row = gpu_parts.prompt_row(1000, 2.0, 4.0)
    assert (row["mapped_gb_per_s"], row["staged_gb_per_s"], row["wins"]) == (2.0, 1.0, "mapped")


def test_quantiles_are_times_that_were_measured() -> None:
    found = gpu_parts.spread(np.arange(1, 101, dtype=np.uint32) * 1000)
    assert found == {"p50_us": 50.0, "p99_us": 99.0, "max_us": 100.0}


def test_a_prompt_that_was_not_read_right_is_noticed(bench: gpu_parts.Bench) -> None:
    size = gpu_parts._THREADS * 4
    address = bench.gpu.allocate(size)
    bench.gpu.upload(address, (120).to_bytes(4, "little"))
    gpu_parts._check_sum(bench.gpu, address, 1, 16)
    with pytest.raises(DataplaneError, match="17 ids was not read"):
        gpu_parts._check_sum(bench.gpu, address, 1, 17)
    bench.gpu.free(address)


def test_targets_are_met_missed_or_waived() -> None:
    assert [row["met"] for row in result()["targets"]] == [True] * 5
    slow = result(claim={"waived": "no"}, **{"first token": {
        **RESULT["parts"]["first token"], "first_over_later": 1.3, "memory_change_bytes": -512,
    }})  # fmt: skip
    assert [row["met"] for row in slow["targets"]] == [None, None, False, True, False]
    said = gpu_report.target_lines(slow["targets"])
    assert [line.split("|")[-2].strip() for line in said[2:]] == [
        "waived", "waived", "MISSED", "met", "MISSED",
    ]  # fmt: skip


def test_the_picture_is_of_what_there_is(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    gpu_report.plot(result(), tmp_path / "gpu.png")
    assert (tmp_path / "gpu.png").stat().st_size > 5000
    for lack in ({"waived": "no"}, {"failed": "no", "output": ""}):
        gpu_report.plot(result(**dict.fromkeys(RESULT["parts"], lack)), tmp_path / "empty.png")
        assert (tmp_path / "empty.png").stat().st_size > 1000


def test_the_text_has_every_part() -> None:
    said = "\n".join(gpu_report.lines(result()))
    for words in ("p50 1.50 µs", "persistent, awake", "wins from 4,096 ids on", "free memory"):
        assert words in said
