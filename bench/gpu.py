"""What the way to a CUDA device and back costs: `python -m bench.gpu`.

- *ping-pong*: a line of data and a flag to a kernel and as much back, through mapped memory: the
  floor of everything that follows.
- *claim*: from the command in the ring to the verdict (what a listener does), by tick and by the
  resident kernel, each shortly after the last command and after a pause in which the host's
  threads fall asleep. The admission thread is the runtime's own.
- *prompt*: a kernel that reads a prompt where it lies in mapped memory, against one that reads a
  copy of it in device memory that is made first, by length.
- *first token*: through a daemon with `cuda-echo`; the first request of all against later ones, and
  whether anything is allocated on the device once it is ready.

The rules that hold here: times of the host are taken in C (`gpu_host.c`), times of the device by
its events, behind a kernel that keeps it busy so that launching is not in them; no time is written
to a file that did not come from a GPU. Each part is a process of its own with a time limit, since
an error of CUDA stays with its process and a kernel may hang; the file is written after each part,
with what a part that failed had measured until then. Without a GPU each part is waived and the exit
status is 0. Where there are no compilers, what `make kernels` compiled ahead is taken.
`--host-threads` runs the parts that can be run so on the kernels as host threads: it shows that the
bench works, and its times say nothing of a GPU.
"""

import argparse
import contextlib
import datetime
import importlib
import json
import os
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

from bench.gpu_parts import (
    HOST_LIBRARY,
    PARTS,
    Bench,
    Part,
    WaivedError,
    compile_host,
    compiler,
)
from bench.gpu_report import judge, keep, lines, place, plot
from bench.launch import LaunchError
from bench.progress import Line
from bench.results import RESULTS, ROOT, Form, Progress, commit, machine, versions
from dataplane import gpus, kernels
from dataplane.apart import Ended, limited, report, run_apart
from dataplane.errors import DataplaneError
from dataplane.runtime.cuda import MODES, CupyGpu, Gpu
from dataplane.runtime.cuda_device import MeasuredGpu

KERNEL_SOURCE = Path(__file__).with_name("gpu_kernels.cu")
KERNELS = ("dp_bench_pong", "dp_bench_read")
DEVICE = "device"
AHEAD = ROOT / "build" / "gpu"
"""What `--prepare` compiled."""

_WITHIN_S = {DEVICE: 40, "ping-pong": 40, "claim": 60, "prompt": 80, "first token": 120}
"""Of each process in the quick form; there is one for each way to claim."""
_FULL_TIMES = 5
_IMAGE = "bench.fatbin"
_HOST_GPU = "libhostgpu.so"
_KEPT_OUTPUT = 4000


# One part, in its process.


def host_threads(directory: Path) -> Gpu:
    """Return the kernels on host threads, which the tests have."""
    sys.path.insert(0, str(ROOT / "tests"))
    programs, host = (importlib.import_module(name) for name in ("gpu_programs", "host_gpu"))
    library = directory / _HOST_GPU
    if not library.exists():
        library = programs.build_library(directory)
    return cast(Gpu, host.HostGpu(host.Library(library)))


def _compile_kernels(directory: Path) -> str | None:
    """Compile the bench's kernels, unless that was done; why not, or None."""
    image = directory / _IMAGE
    if image.exists():
        return None
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "there is no nvcc on the PATH to compile bench/gpu_kernels.cu"
    try:
        kernels.compile_kernels(nvcc, image, source=KERNEL_SOURCE)
    except kernels.KernelsError as error:
        return str(error)
    return None


def _open(folder: Path, form: Form, on_host_threads: bool) -> Bench:
    if on_host_threads:
        return Bench(host_threads(folder), None, None, compile_host(folder), form)
    gpu = _open_gpu()
    lack = _compile_kernels(folder)
    if lack is None:
        gpu.more_kernels(folder / _IMAGE, KERNELS)
    return Bench(gpu, gpu, lack, compile_host(folder), form)


def _open_gpu() -> MeasuredGpu:
    """Open the device; that there is none is no failure."""
    try:
        return CupyGpu()
    except DataplaneError as error:
        if _is_there():
            raise
        raise WaivedError(" ".join(str(error).split())) from error


def _is_there() -> bool:
    """Whether a driver is loaded, and its devices are not hidden."""
    return gpus.DRIVER.exists() and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")


def describe(on_host_threads: bool) -> Part:
    """Return what was measured on, for `DEVICE`."""
    if on_host_threads:
        return {"name": "host threads, not a GPU", "architecture": "none"}
    gpu = _open_gpu()
    return {"name": gpu.name, "architecture": "sm_{}{}".format(*gpu.capability)}


def run_part(options: argparse.Namespace) -> int:
    """Measure one part in this process, and report it; what goes wrong ends the process."""
    try:
        if options.part == DEVICE:
            found = describe(options.host_threads)
        else:
            bench = _open(options.work, _form(options), options.host_threads)
            if options.host_threads:
                importlib.import_module("gpu_runs").sow(options.part, bench.gpu)
            how = {"modes": (options.mode,)} if options.mode else {}
            found = PARTS[options.part](bench, **how)
    except WaivedError as error:
        found = {"waived": str(error)}
    report(found)
    return 0


# All of them.


def outcome(ended: Ended) -> Part:
    """Return a part as its process left it: what it found, and why it failed."""
    part: Part = dict(ended.found or {})
    if ended.why:
        said = ended.output.strip().splitlines()[-1:] if "status" in ended.why else []
        part["failed"] = ": ".join((ended.why, *said))
        part["output"] = ended.output[-_KEPT_OUTPUT:]
    return part


def joined(parts: Sequence[Part]) -> Part:
    """Return parts with rows as one."""
    whole: Part = {}
    for part in parts:
        rows = [*whole.get("rows", ()), *part.get("rows", ())]
        texts: Part = {
            key: "; ".join(one[key] for one in (whole, part) if key in one)
            for key in ("failed", "output", "waived")
            if key in whole or key in part
        }
        whole = {**whole, **part, **({"rows": rows} if rows else {}), **texts}
    return whole


def measure_apart(name: str, command: Sequence[str], form: Form) -> Part:
    """Measure a part, the claims by each mode apart."""
    within_s = _WITHIN_S[name] * (_FULL_TIMES if form is Form.FULL else 1)
    modes = [["--mode", mode] for mode in MODES] if name == "claim" else [[]]
    return joined(
        [outcome(run_apart([*command, "--part", name, *mode], within_s)) for mode in modes]
    )


def run(
    device: Part,
    is_gpu: bool,
    form: Form,
    measure: Callable[[str], Part],
    kept: Callable[[Part], object] = lambda result: None,
) -> Part:
    """Measure every part; one that cannot be, or fails, has `waived` or `failed` with the reason.

    Args:
        device: What is measured on.
        is_gpu: Whether that is a GPU.
        form: How much.
        measure: Measures the part of that name.
        kept: Keeps the result, after each part.
    """
    parts: Part = {}
    result: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "form": str(form),
        "command": "python -m bench.gpu" + " --full" * (form is Form.FULL),
        "commit": commit(),
        "device": device,
        "is_gpu": is_gpu,
        "complete": False,
        "machine": machine(),
        "kernel": platform.release(),
        "versions": versions(),
        "parts": parts,
        "targets": [],
    }
    for name in PARTS:
        parts[name] = measure(name)
        result["complete"] = len(parts) == len(PARTS)
        result["targets"] = judge(result) if is_gpu else []
        kept(result)
    return result


def _form(options: argparse.Namespace) -> Form:
    return Form.FULL if options.full else Form.QUICK


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and keep what a GPU did; 1 when a target is missed or a part fails."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("--full", action="store_true", help="the long form")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument(
        "--host-threads", action="store_true", help="a smoke test without a GPU; keeps nothing"
    )
    parser.add_argument("--prepare", action="store_true", help="compile ahead, and measure nothing")
    for internal in ("--part", "--mode"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.prepare:
        return prepare_ahead()
    if options.part:
        with limited():
            return run_part(options)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        return _run_all(options, Path(folder))


def _run_all(options: argparse.Namespace, folder: Path) -> int:
    progress, form = Line(), _form(options)
    command = [sys.executable, "-m", "bench.gpu", "--work", str(folder)]
    command += ["--full"] * options.full + ["--host-threads"] * options.host_threads
    _prepare(options, folder, progress)
    device = measure_apart(DEVICE, command, form)
    if "waived" in device:
        for name in PARTS:
            print(f"{name}: waived: {device['waived']}")
        return 0

    def measure(name: str) -> Part:
        if "failed" in device:
            return {"failed": f"not run: the device: {device['failed']}"}
        progress(name)
        return measure_apart(name, command, form)

    is_gpu = not options.host_threads
    path = place(options.out) if is_gpu else None

    def kept(result: Part) -> None:
        if path is not None:
            keep(result, path)

    named = {"name": "unknown", "architecture": "unknown", **device}
    result = run(named, is_gpu, form, measure, kept)
    progress.keep("")
    print(json.dumps(result) if options.json else "\n".join(lines(result)))
    if path is not None:
        progress.keep(f"written to {path}")
        _draw(result, path.with_name("gpu.png"), progress)
    failed = any("failed" in part for part in result["parts"].values())
    return int(failed or any(row["met"] is False for row in result["targets"]))


def prepare_ahead(folder: Path = AHEAD) -> int:
    """Compile what the parts need, for a machine that has a GPU but no compilers."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (_IMAGE, HOST_LIBRARY):
        (folder / name).unlink(missing_ok=True)
    lack = _compile_kernels(folder)
    compile_host(folder)
    print(lack or f"{folder}: {_IMAGE}, {HOST_LIBRARY}")
    return int(lack is not None)


def _take_ahead(folder: Path, ahead: Path = AHEAD) -> None:
    for name, tool in ((_IMAGE, "nvcc"), (HOST_LIBRARY, compiler()[0])):
        if shutil.which(tool) is None and (ahead / name).is_file():
            shutil.copy(ahead / name, folder)


def _prepare(options: argparse.Namespace, folder: Path, progress: Progress) -> None:
    """Compile what several parts need; a part that needs what is missing says so."""
    if options.host_threads:
        progress("compiling")
        host_threads(folder)
    elif _is_there():
        progress("compiling")
        with contextlib.redirect_stdout(sys.stderr):  # the result may be all that is to be there
            kernels.main()
        _take_ahead(folder)
        _compile_kernels(folder)
    else:
        return
    try:
        compile_host(folder)
    except LaunchError as error:
        print(error, file=sys.stderr)


def _draw(result: Part, path: Path, progress: Line) -> None:
    try:
        plot(result, path)
    except Exception as error:  # the figures are kept by then
        progress.keep(f"there is no picture: {type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main())
