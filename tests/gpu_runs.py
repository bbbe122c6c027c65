"""Run every check of `gpu_checks.py`: `make test-gpu`.

Each is a process of its own with a time limit, since an error of CUDA stays with its process and a
kernel may hang, and has one line: passed, FAILED (and what the process said), or waived with the
reason. Without a device all are waived; where there is a driver but CuPy or the kernels cannot be
used, that is a failure. `--json FILE` keeps everything, and is written after each check. The exit
status is 1 when one failed. All of it ends within `TOTAL_S`, and what it takes to end the last one.

`--host-threads` runs the checks on host threads, with what `FAULTS` names.
"""

import argparse
import contextlib
import datetime
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_checks
import gpu_programs
from gpu_checks import CHECKS, WaivedError
from host_gpu import HostGpu, Library

from dataplane import gpus, kernels
from dataplane.apart import Ended, limited, report, run_apart
from dataplane.errors import DataplaneError
from dataplane.runtime import cuda

TOTAL_S = 480.0
LIMIT_S = 45.0
LIMITS_S = {"a model on PyTorch": 120.0, "compute-sanitizer": 150.0}
# As its runtime has it; eagerly, all of PyTorch's kernels would be loaded.
ENVIRON = {"a model on PyTorch": {"CUDA_MODULE_LOADING": "LAZY"}}
FAULTS = "GPU_CHECKS_FAULTS"
"""`check=fault;...`, for host threads: `crash`, `stuck`, or a call of the driver and its result."""
DEVICE = "device"

PASSED, WAIVED, FAILED = "passed", "waived", "failed"
_ATTRIBUTES = {
    18: "integrated",
    78: "stream priorities",
    86: "host native atomics",
    88: "pageable memory access",
    90: "compute preemption",
    91: "host pointers of registered memory",
    99: "host registration",
}

Found = dict[str, Any]


# One check, in its process.


def _open(library: Path | None) -> cuda.Gpu:
    return cuda.CupyGpu() if library is None else HostGpu(Library(library))


def _describe(gpu: cuda.Gpu) -> str:
    """The device, for `DEVICE`."""
    if not isinstance(gpu, cuda.CupyGpu):
        return "host threads, not a GPU"
    import cupy

    runtime = cupy.cuda.runtime
    capability = "{}.{}".format(*gpu.capability)
    attributes = (
        f"{text} ({number}): {gpu.attribute(number)}" for number, text in _ATTRIBUTES.items()
    )
    return (
        f"{gpu.name}, compute capability {capability}, {gpu.free_memory() >> 20} MiB free; driver"
        f" of CUDA {runtime.driverGetVersion()}, runtime {runtime.runtimeGetVersion()}, CuPy"
        f" {cupy.__version__}; {', '.join(attributes)}"
    )


def sow(name: str, gpu: cuda.Gpu) -> None:
    """Have host threads fail as a device may."""
    for one in os.environ.get(FAULTS, "").split(";"):
        check, _, fault = one.partition("=")
        if check != name or not isinstance(gpu, HostGpu):
            continue
        call, _, result = fault.partition("=")
        if fault == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        elif fault == "stuck":
            gpu.get_stuck()
        else:
            gpu.fail(call, int(result))


def _is_lack_of_a_device() -> bool:
    """Whether nothing is to be seen of a device here, or none is to be used."""
    return not gpus.DRIVER.exists() or os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def run_check(name: str, library: Path | None) -> Found:
    """Run one in this process."""
    try:
        gpu = _open(library)
    except DataplaneError as error:
        state = WAIVED if _is_lack_of_a_device() else FAILED
        return {"state": state, "said": " ".join(str(error).split())}
    try:
        sow(name, gpu)
        return {"state": PASSED, "said": (CHECKS | {DEVICE: _describe})[name](gpu)}
    except WaivedError as error:
        return {"state": WAIVED, "said": str(error)}
    except Exception as error:
        traceback.print_exc()
        frames = traceback.extract_tb(error.__traceback__)
        where = [frame for frame in frames if frame.filename == gpu_checks.__file__] or frames
        said = " ".join(str(error).split()) or where[-1].line
        return {"state": FAILED, "said": f"{type(error).__name__} in {where[-1].name}: {said}"}


# All of them.


def outcome(ended: Ended) -> Found:
    """What is to be said of a check that ended so."""
    found: Found = ended.found or {"state": FAILED, "said": ""}
    if ended.why:
        said = "; ".join(filter(None, (ended.why, found["said"] and f"before: {found['said']}")))
        found = {"state": FAILED, "said": said}
    found["seconds"] = round(ended.seconds, 2)
    if found["state"] == FAILED:
        found["output"] = ended.output
    return found


class Runs:
    """The checks' outcomes, as they come."""

    def __init__(self, library: Path | None, keep: Path | None, limit_s: float | None) -> None:
        self._library, self._keep, self._limit_s = library, keep, limit_s
        self._until = time.monotonic() + TOTAL_S
        self.found: dict[str, Found] = {}

    def run(self, name: str) -> Found:
        """Run a check apart, and print and keep what became of it."""
        limit_s = self._limit_s or LIMITS_S.get(name, LIMIT_S)
        limit_s = min(limit_s, self._until - time.monotonic())
        if limit_s < 1:
            found = {"state": FAILED, "said": f"not run: {TOTAL_S:g} s are over"}
        else:
            command = [sys.executable, "-X", "faulthandler", __file__, "--check", name]
            if self._library is not None:
                command += ["--library", str(self._library)]
            found = outcome(run_apart(command, limit_s, ENVIRON.get(name)))
        self.note(name, found)
        return found

    def note(self, name: str, found: Found) -> None:
        """Print and keep an outcome."""
        self.found[name] = found
        state = "FAILED" if found["state"] == FAILED else found["state"]
        print(f"{name}: {state}: {found['said']}", flush=True)
        for line in found.get("output", "").splitlines()[-40:]:
            print(f"    {line}", flush=True)
        self.write()

    def write(self) -> None:
        """Keep what there is, whole or not at all."""
        if self._keep is None:
            return
        document = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "is_gpu": self._library is None,
            "complete": all(name in self.found for name in CHECKS),
            "checks": self.found,
        }
        self._keep.parent.mkdir(parents=True, exist_ok=True)
        part = self._keep.with_suffix(".part")
        part.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        part.replace(self._keep)


def run_all(runs: Runs, names: list[str]) -> int:
    """Run the checks, the device first; the exit status."""
    device = runs.run(DEVICE)
    said = device["said"] if device["state"] == WAIVED else "not run: see the device"
    for name in names:
        if device["state"] == PASSED:
            runs.run(name)
        else:
            runs.note(name, {"state": device["state"], "said": said})
    return int(any(found["state"] == FAILED for found in runs.found.values()))


@contextlib.contextmanager
def _library(on_host_threads: bool) -> Iterator[Path | None]:
    if not on_host_threads:
        if not _is_lack_of_a_device():
            kernels.main()  # what it cannot build, the first check says
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="dataplane-gpu-") as folder:
        yield gpu_programs.build_library(Path(folder))


def main(arguments: list[str] | None = None) -> int:
    """Run one check, or all of them."""
    parser = argparse.ArgumentParser(prog="gpu_runs.py")
    parser.add_argument("--only", action="append", choices=list(CHECKS), help="this check alone")
    parser.add_argument("--json", type=Path, help="keep everything here")
    parser.add_argument("--limit", type=float, help="seconds for each check")
    parser.add_argument("--host-threads", action="store_true", help="without a GPU: a smoke test")
    parser.add_argument("--check", choices=[DEVICE, *CHECKS], help=argparse.SUPPRESS)
    parser.add_argument("--library", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.check:
        with limited():
            found = run_check(options.check, options.library)
            report(found)
            print(f"{options.check}: {found['state']}: {found['said']}", flush=True)
        return int("APART_REPORT" not in os.environ and found["state"] == FAILED)
    with _library(options.host_threads) as library:
        runs = Runs(library, options.json, options.limit)
        return run_all(runs, options.only or list(CHECKS))


if __name__ == "__main__":
    sys.exit(main())
