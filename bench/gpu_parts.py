"""The parts of `bench.gpu`, which says what each measures: on a device, or on host threads."""

import contextlib
import ctypes
import os
import shlex
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from bench import daemons
from bench.launch import LaunchError
from bench.results import ROOT, Form
from dataplane._native import ffi, lib
from dataplane.apart import report
from dataplane.device_table import ANSWER_MS, SPIN_US
from dataplane.errors import DataplaneError
from dataplane.load.tally import quantiles
from dataplane.manifest import Manifest
from dataplane.region import Region, create_region
from dataplane.runtime import cuda_echo
from dataplane.runtime.cuda import MODES, Gpu, Mode
from dataplane.runtime.cuda_alone import VOCAB, alone, busy_work
from dataplane.runtime.cuda_device import MeasuredGpu

HOST_SOURCE = Path(__file__).with_name("gpu_host.c")
HOST_LIBRARY = "libgpuhost.so"
LENGTHS = (16, 64, 256, 1024, 4096, 16_384, 65_536, 131_072)
"""Ids of a prompt."""
PAUSES_US = {"awake": 15, "asleep": 2000}
"""Between what the device did last and the claim: within the spin of its host thread, and past it.
"""
TOKENS = 128

_SLOTS = 64
_LINES, _WITHIN_S = 16, 20.0
_PONG_LIMIT_MS = 5000
_BLOCKS_MOST, _THREADS = 256, 256
_READS = 20  # in one timed stretch
_ROUNDS = 7
_BUSY_US = 2000
_COUNTS = {Form.QUICK: 2000, Form.FULL: 20_000}
_STARTS = {Form.QUICK: 3, Form.FULL: 9}
_REQUESTS = {Form.QUICK: 50, Form.FULL: 300}

Part = dict[str, Any]
Times = npt.NDArray[np.float64]


class WaivedError(DataplaneError):
    """This part cannot be measured here; the text says why."""


# The host's half.


class _Verbs(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("admit", "let_go", "pending")]


def compiler() -> list[str]:
    """Return the system's C compiler, as a command."""
    return shlex.split(os.environ.get("CC", "cc"))


def compile_host(directory: Path) -> ctypes.CDLL:
    """Compile `gpu_host.c` with the system's compiler, unless that was done.

    Raises:
        LaunchError: There is none, or it fails.
    """
    library = directory / HOST_LIBRARY
    if library.exists():
        return ctypes.CDLL(str(library))
    command = [
        *compiler(), "-std=gnu11", "-O2", "-shared", "-fPIC",
        f"-I{ROOT / 'native'}", "-o", str(library), str(HOST_SOURCE),
    ]  # fmt: skip
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_WITHIN_S)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        raise LaunchError(f"{HOST_SOURCE.name} cannot be compiled: {said}") from error
    return ctypes.CDLL(str(library))


def _address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def spread(times_ns: npt.NDArray[np.uint32]) -> Part:
    """Return p50, p99 and the most in µs, to the ns."""
    found = quantiles(times_ns.astype(np.float64))
    return {f"{name}_us": (found[name] or 0) / 1000 for name in ("p50", "p99", "max")}


def _looped(what: str, run: Callable[[Any], int], count: int) -> Part:
    """Run a loop of `gpu_host.c` that fills in so many times."""
    times = np.zeros(count, np.uint32)
    status = run(ctypes.c_void_p(times.ctypes.data))
    if status:
        words = {-100: "the device did not answer in time", -101: "a flag came before its data"}
        raise DataplaneError(f"{what}: {words.get(status, f'status {status}')}")
    return spread(times)


# Parts.


class Bench(NamedTuple):
    """What the parts have.

    Attributes:
        gpu: The device, or host threads in its place.
        measured: The same with its clock; None for host threads.
        own_kernels: Why the bench's kernels cannot be had; None where they are loaded.
    """

    gpu: Gpu
    measured: MeasuredGpu | None
    own_kernels: str | None
    host: ctypes.CDLL
    form: Form


@contextlib.contextmanager
def mapped(gpu: Gpu, slots: int, context: int) -> Iterator[tuple[Region, int]]:
    """Make a region and map it into the device; it, and how far the device's addresses are off."""
    manifest = Manifest(
        model="none", table="device", slots=slots, context=context, max_output=1, vocab_size=VOCAB
    )
    region = create_region(manifest, attachment=1, listeners=1)
    base = _address(region.native.base)
    try:
        at = gpu.map(base, region.bytes)
        try:
            yield region, at - base
        finally:
            gpu.unmap(base)
    finally:
        region.close_fd()


def _own(bench: Bench) -> MeasuredGpu:
    if bench.measured is None:
        raise WaivedError("host threads have no bus")
    if bench.own_kernels is not None:
        raise WaivedError(bench.own_kernels)
    return bench.measured


def ping_pong(bench: Bench) -> Part:
    """Measure lines there and back."""
    gpu, count = _own(bench), _COUNTS[bench.form]
    limit_ms = _PONG_LIMIT_MS
    with mapped(gpu, 1, 1024) as (region, off):
        lines = region.prompt_address(0)
        stream = gpu.stream()
        ctypes.memset(lines, 0, _LINES * 8)
        stream.launch("dp_bench_pong", 1, 1, lines + off, count, limit_ms)
        try:
            found = _looped(
                "ping-pong",
                lambda times: bench.host.bench_pong(
                    ctypes.c_void_p(lines), ctypes.c_uint32(count),
                    ctypes.c_int64(limit_ms * 1_000_000), times,
                ),
                count,
            )  # fmt: skip
        finally:
            stream.wait()
    return {"rounds": count, "bytes_each_way": 64, **found}


def claims(bench: Bench, modes: Sequence[Mode] = MODES) -> Part:
    """Measure claims by the modes, after both pauses."""
    rows = []
    for mode in modes:
        for state, pause_us in PAUSES_US.items():
            found = _claims(bench, mode, pause_us)
            rows.append({"mode": mode, "host": state, "pause_us": pause_us, **found})
            report({"rows": rows})
    return {"rows": rows}


def _claims(bench: Bench, mode: Mode, pause_us: int) -> Part:
    count = _COUNTS[bench.form] if pause_us < 1000 else _COUNTS[bench.form] // 4
    verbs = _Verbs(
        *(
            _address(ffi.addressof(lib, name))
            for name in ("dp_commands_admit", "dp_commands_let_go", "dp_device_pending")
        )
    )
    with alone(bench.gpu, mode, slots=_SLOTS) as runtime:
        runtime.ready()
        native = runtime.runtime.region.native
        commands = ffi.gc(lib.dp_commands_new(native, 1, SPIN_US, ANSWER_MS), lib.dp_commands_free)

        def run(count: int) -> Callable[[Any], int]:
            return lambda times: int(
                bench.host.bench_claims(
                    ctypes.byref(verbs), ctypes.c_void_p(_address(commands)),
                    ctypes.c_void_p(_address(native)), ctypes.c_uint32(_SLOTS),
                    ctypes.c_uint32(count), ctypes.c_int64(pause_us * 1000),
                    ctypes.c_int64(int(_WITHIN_S * 1e9)), times,
                )
            )  # fmt: skip

        _looped("claims", run(100), 100)
        return {"claims": count, **_looped("claims", run(count), count)}


def prompts(bench: Bench) -> Part:
    """Measure reads of mapped memory against a copy that is read, by length."""
    gpu = _own(bench)
    slots, longest = 32, max(LENGTHS)
    rows = []
    with mapped(gpu, slots, longest) as (region, off), busy_work(gpu) as busy:
        stream = gpu.stream()
        sums = gpu.allocate(_BLOCKS_MOST * _THREADS * 4)
        copy = gpu.allocate(longest * 4)
        host = [region.prompt_address(slot) for slot in range(slots)]
        for address in host:
            ids = np.ctypeslib.as_array((ctypes.c_uint32 * longest).from_address(address))
            ids[:] = np.arange(longest)
        try:
            for length in LENGTHS:
                blocks = min(_BLOCKS_MOST, -(-length // 4 // _THREADS))

                def read(at: int, blocks: int = blocks, length: int = length) -> None:
                    stream.launch("dp_bench_read", blocks, _THREADS, at, sums, length)

                def read_mapped() -> None:
                    for turn in range(_READS):
                        read(host[turn % slots] + off)

                def read_staged(length: int = length) -> None:
                    for turn in range(_READS):
                        gpu.copy(stream, copy, host[turn % slots], length * 4)
                        read(copy)

                def take(work: Callable[[], None]) -> float:
                    return gpu.elapsed_us(stream, work, lambda: busy(stream, _BUSY_US)) / _READS

                for work in (read_mapped, read_staged):
                    take(work)
                    _check_sum(gpu, sums, blocks, length)
                mapped_us = statistics.median(take(read_mapped) for _ in range(_ROUNDS))
                staged_us = statistics.median(take(read_staged) for _ in range(_ROUNDS))
                rows.append(prompt_row(length, mapped_us, staged_us))
                report({"rows": rows})
        finally:
            gpu.free(sums)
            gpu.free(copy)
    return {"rows": rows, "staged_wins_from": staged_wins_from(rows)}


def _check_sum(gpu: Gpu, sums: int, blocks: int, length: int) -> None:
    """Say so when the kernel did not read what lies there."""
    found = np.frombuffer(gpu.download(sums, blocks * _THREADS * 4), np.uint32)
    wanted = int(np.arange(length, dtype=np.uint64).sum()) % 2**32
    if int(found.sum(dtype=np.uint64)) % 2**32 != wanted:
        raise DataplaneError(f"a prompt of {length} ids was not read as it lies in memory")


def prompt_row(length: int, mapped_us: float, staged_us: float) -> Part:
    """Return a length's row: times, and rates of its bytes."""
    size = length * 4
    return {
        "tokens": length,
        "mapped_us": round(mapped_us, 2),
        "staged_us": round(staged_us, 2),
        "mapped_gb_per_s": round(size / mapped_us / 1000, 3),
        "staged_gb_per_s": round(size / staged_us / 1000, 3),
        "wins": "mapped" if mapped_us <= staged_us else "staged",
    }


def staged_wins_from(rows: list[Part]) -> int | None:
    """Return the length from which on the copy is quicker at every length; None: at none."""
    found = None
    for row in reversed(rows):
        if row["wins"] != "staged":
            break
        found = row["tokens"]
    return found


class Watched:
    """A device that counts what is allocated on it, before and after `is_ready`."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.is_ready = False
        self.bytes = 0
        self.before = self.after = 0

    def allocate(self, size: int) -> int:
        if self.is_ready:
            self.after += 1
        else:
            self.before += 1
            self.bytes += size
        return self._gpu.allocate(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._gpu, name)


class Start(NamedTuple):
    """What one start of `cuda-echo` showed: times in µs, memory in bytes."""

    first_us: float
    later_us: list[float]
    same_us: list[float]
    gpu: Watched
    free: tuple[int, int]


def first_token(bench: Bench) -> Part:
    """Measure requests through a daemon: the first of all, and later ones, over several starts.

    Each of both is the first of a connection of its own, so that only what was warmed before
    `ready` is between them.
    """
    with daemons.daemon() as served:
        _ask(served, 1)  # so that the client is not cold either
    starts = [_start(bench) for _ in range(_STARTS[bench.form])]
    first = statistics.median(start.first_us for start in starts)
    later = statistics.median(us for start in starts for us in start.later_us)
    same = sorted(us for start in starts for us in start.same_us)
    changes = [start.free[0] - start.free[1] for start in starts]
    return {
        "tokens": TOKENS,
        "starts": len(starts),
        "first_us": round(first, 1),
        "firsts_us": [round(start.first_us, 1) for start in starts],
        "later_us": round(later, 1),
        "first_over_later": round(first / later, 3),
        "one_connection_p50_us": round(statistics.median(same), 1),
        "one_connection_p99_us": round(same[int(len(same) * 0.99)], 1),
        "requests": sum(1 + len(start.later_us) + len(start.same_us) for start in starts),
        "allocations": {
            "before_ready": starts[0].gpu.before,
            "bytes": starts[0].gpu.bytes,
            "after_ready": max(start.gpu.after for start in starts),
        },
        "free_bytes": [start.free for start in starts],
        "memory_change_bytes": max(changes, key=abs),
    }


def _start(bench: Bench) -> Start:
    """Start a daemon and `cuda-echo`, and ask."""
    later = _REQUESTS[bench.form]
    gpu = Watched(bench.gpu)
    free: list[int] = []
    failed: list[Exception] = []
    ready = threading.Event()

    def say(text: str) -> None:
        gpu.is_ready = True
        free.append(gpu.free_memory())
        ready.set()

    def serve(socket: Path) -> None:
        try:
            cuda_echo.main(socket, 8, 1024, 16, VOCAB, say, cast(Gpu, gpu))
        except Exception as error:
            failed.append(error)
            ready.set()

    # The runtime ends when its daemon does, and no later than this process.
    with daemons.daemon(runtime="none") as served:
        thread = threading.Thread(target=serve, args=(served.socket,), daemon=True)
        thread.start()
        if not ready.wait(_WITHIN_S) or failed:
            raise DataplaneError(f"cuda-echo does not start: {failed or 'it is silent'}")
        _wait_ready(served)
        times = [_ask(served, 1)[0] for _ in range(1 + later)]
        same = _ask(served, later)
        free.append(gpu.free_memory())
    thread.join(_WITHIN_S)
    return Start(times[0], times[1:], same, gpu, (free[0], free[1]))


def _wait_ready(served: daemons.Daemon) -> None:
    until = time.monotonic() + _WITHIN_S
    while daemons.page(served.admin, "/readyz")[0] != HTTPStatus.OK:
        if time.monotonic() > until:
            raise LaunchError("the daemon was not ready in time")
        time.sleep(0.02)


def _ask(served: daemons.Daemon, requests: int) -> list[float]:
    """Ask on a new connection, one after the other, for one id; the time to each answer in µs."""
    with daemons.load(served, TOKENS) as made:
        return [float(us) for us in daemons.answered(made.run(requests, 1)).totals_us]


PARTS: dict[str, Callable[..., Part]] = {
    "ping-pong": ping_pong,
    "claim": claims,
    "prompt": prompts,
    "first token": first_token,
}
