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
to a file that did not come from a GPU. Without one each part is waived and the exit status is 0.
`--host-threads` runs the parts that can be run so on the kernels as host threads: it shows that the
bench works, and its times say nothing of a GPU.
"""

import argparse
import datetime
import importlib
import json
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import cast

from bench.gpu_parts import PARTS, Bench, Part, WaivedError, compile_host
from bench.gpu_report import judge, lines, write
from bench.launch import LaunchError
from bench.progress import Line
from bench.results import RESULTS, ROOT, Form, Progress, commit, machine, versions
from dataplane.errors import DataplaneError
from dataplane.kernels import KernelsError, compile_kernels
from dataplane.runtime.cuda import CupyGpu, Gpu
from dataplane.runtime.cuda_device import MeasuredGpu

KERNEL_SOURCE = Path(__file__).with_name("gpu_kernels.cu")
KERNELS = ("dp_bench_pong", "dp_bench_read")


def run(bench: Bench, progress: Progress) -> Part:
    """Measure every part that can be; a part that cannot has `waived` with the reason."""
    parts: Part = {}
    for name, measure in PARTS.items():
        progress(name)
        try:
            parts[name] = measure(bench)
        except WaivedError as error:
            parts[name] = {"waived": str(error)}
    measured = bench.measured
    device = (
        {"name": measured.name, "architecture": "sm_{}{}".format(*measured.capability)}
        if measured is not None
        else {"name": "host threads, not a GPU", "architecture": "none"}
    )
    result = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "form": str(bench.form),
        "command": "python -m bench.gpu" + " --full" * (bench.form is Form.FULL),
        "commit": commit(),
        "device": device,
        "is_gpu": measured is not None,
        "machine": machine(),
        "kernel": platform.release(),
        "versions": versions(),
        "parts": parts,
    }
    result["targets"] = judge(result) if measured is not None else []
    return result


def _load_kernels(gpu: MeasuredGpu, directory: Path) -> str | None:
    """Compile the bench's kernels and load them; why not, or None."""
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "there is no nvcc on the PATH to compile bench/gpu_kernels.cu"
    image = directory / "bench.fatbin"
    try:
        compile_kernels(nvcc, image, source=KERNEL_SOURCE)
    except KernelsError as error:
        return str(error)
    gpu.more_kernels(image, KERNELS)
    return None


def host_threads(directory: Path) -> Gpu:
    """Return the kernels on host threads, which the tests have."""
    sys.path.insert(0, str(ROOT / "tests"))
    programs, host = (importlib.import_module(name) for name in ("gpu_programs", "host_gpu"))
    return cast(Gpu, host.HostGpu(host.Library(programs.build_library(directory))))


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and keep what a GPU did; 1 when a target is missed or a part fails."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu")
    parser.add_argument("--full", action="store_true", help="the long form")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where results are kept")
    parser.add_argument(
        "--host-threads", action="store_true", help="a smoke test without a GPU; keeps nothing"
    )
    options = parser.parse_args(arguments)
    form = Form.FULL if options.full else Form.QUICK
    progress = Line()
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        try:
            bench = _open(Path(folder), form, options.host_threads)
        except WaivedError as error:
            for name in PARTS:
                print(f"{name}: waived: {error}")
            return 0
        try:
            result = run(bench, progress)
        except (LaunchError, DataplaneError, RuntimeError) as error:
            progress.keep(f"bench.gpu: {error}")
            return 1
    progress.keep("")
    print(json.dumps(result) if options.json else "\n".join(lines(result)))
    if result["is_gpu"]:
        progress.keep(f"written to {write(result, options.out)}")
    return int(any(row["met"] is False for row in result["targets"]))


def _open(folder: Path, form: Form, on_host_threads: bool) -> Bench:
    if on_host_threads:
        return Bench(host_threads(folder), None, None, compile_host(folder), form)
    try:
        gpu = CupyGpu()
    except DataplaneError as error:
        raise WaivedError(" ".join(str(error).split())) from error
    return Bench(gpu, gpu, _load_kernels(gpu, folder), compile_host(folder), form)


if __name__ == "__main__":
    sys.exit(main())
