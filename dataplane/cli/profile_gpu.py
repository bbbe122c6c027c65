"""`dataplane profile --gpu`: what each kernel takes, and how long it takes.

Three parts. What the machine code takes on every target needs no GPU. The kernels' times, occupancy
and bytes are measured on the device, over slots without a daemon, and by the device's own events.
The decode step of the model on PyTorch is measured where the extra `torch`, the model and a GPU
are. A part that cannot be had is waived, with the reason; that is no failure. The last two are each
a process of its own with a time limit: neither waits for a kernel of the other's that hangs.

The rules that hold here: a time is the median of the runs; bytes are counted by hand from what a
kernel has to move at least, so the rate is a lower bound; what it is held against is the card's
memory (twice its clock times the width of its bus, as the driver states both), although the words
and prompts of these kernels lie in the host's memory and cross the bus between, which is slower.
"""

import importlib.util
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dataplane import kernel_resources
from dataplane._native import ffi, lib
from dataplane.apart import limited, report, run_apart
from dataplane.device_table import DeviceTable
from dataplane.errors import DataplaneError
from dataplane.installing import pip_install
from dataplane.runtime import Finish, cuda_echo
from dataplane.runtime.cuda import KERNELS, CudaRuntime, CupyGpu
from dataplane.runtime.cuda_alone import Busy, alone, busy_work, claim_all, ticking
from dataplane.runtime.cuda_device import RESIDENT, TICK, MeasuredGpu, Resources, Stream
from dataplane.runtime.cuda_engine import TURN

SLOTS, TOKENS = 64, 4096
RUNS = 20
_WITHIN_S = {"kernels": 120.0, "torch": 180.0}
_ECHO = "dp_echo"
# As launched here: a thread a listener, a thread a slot.
_THREADS = {TICK: 1, RESIDENT: 1, TURN: 64, _ECHO: 128}
_POLLS = 20_000
_NO_NAP = 0
_LINE = 64
_LEAST_COLUMNS = 120
_BUSY_US = 200
# cudaDeviceAttr.
_MULTIPROCESSORS, _CLOCK_KHZ, _BUS_BITS = 16, 36, 37
_THREADS_AT_ONCE, _SHARED_AT_ONCE, _REGISTERS_AT_ONCE = 39, 81, 82
_BLOCKS_AT_ONCE, _SHARED_RESERVED = 106, 111
_WARP, _REGISTERS_A_STEP = 32, 256


@dataclass(frozen=True, slots=True)
class Measured:
    """A kernel doing one thing.

    Attributes:
        kernel, what: Which, and what it did.
        us: How long it took.
        each_us: That by the number of things that it did; None where it did one.
        moved_bytes: What it has to move at least.
        blocks, occupancy: Blocks that a multiprocessor holds at once, and what share of its threads
            they are; `occupancy_by` says who said so.
        share: The rate, of the bandwidth of the card's memory; None where the driver states none.
    """

    kernel: str
    what: str
    us: float
    each_us: float | None
    threads: int
    registers: int
    shared_bytes: int
    local_bytes: int
    blocks: int
    occupancy: float
    occupancy_by: str
    moved_bytes: int
    gb_per_s: float
    share: float | None


Ask = Callable[[str], dict[str, Any]]
"""Has a part of `PARTS` measured."""


def ask_apart(part: str) -> dict[str, Any]:
    """Measure a part in a process of its own; what ended it early is its `waived`."""
    ended = run_apart([sys.executable, "-m", "dataplane.cli.profile_gpu", part], _WITHIN_S[part])
    found: dict[str, Any] = ended.found or {}
    if ended.why:
        last = ended.output.strip().splitlines()[-1:] if "status" in ended.why else []
        found["waived"] = ": ".join((ended.why, *last))
    return found


def document(fatbin: Path = KERNELS, ask: Ask = ask_apart) -> dict[str, Any]:
    """Return the object of `--json`."""
    static = kernel_resources.look(fatbin)
    found: dict[str, Any] = {
        "machine_code": {
            "by": static.by,
            "waived": static.waived,
            "kernels": [usage._asdict() for usage in static.usages],
        },
        "device": None,
        "kernels": [],
        "waived": None,
        **ask("kernels"),
    }
    found["torch"] = step = ask("torch")
    bandwidth = found["device"] and found["device"]["memory_gb_per_s"]
    if "gb_per_s" in step and bandwidth:
        step["share"] = round(step["gb_per_s"] / bandwidth, 4)
    return found


def kernels_part() -> dict[str, Any]:
    """Measure the kernels; what is had so far is reported as it comes."""
    found: dict[str, Any] = {"device": None, "kernels": [], "waived": None}
    try:
        gpu = CupyGpu()
        found["device"] = device_of(gpu)
        for one in measure(gpu):
            found["kernels"].append(asdict(one))
            report(found)
    except DataplaneError as error:
        found["waived"] = " ".join(str(error).split())
    return found


def run(as_json: bool) -> int:
    """Measure and print; 0."""
    found = document()
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)
    return 0


# The device.


def device_of(gpu: MeasuredGpu) -> dict[str, Any]:
    """What is said of the card. Its bandwidth: two transfers a clock over the whole bus."""
    clock, bits = gpu.attribute(_CLOCK_KHZ), gpu.attribute(_BUS_BITS)
    return {
        "name": gpu.name,
        "architecture": "sm_{}{}".format(*gpu.capability),
        "multiprocessors": gpu.attribute(_MULTIPROCESSORS),
        "memory_clock_khz": clock,
        "memory_bus_bits": bits,
        "memory_gb_per_s": round(2 * clock * 1000 * bits / 8 / 1e9, 1),
    }


def computed_blocks(resources: Resources, threads: int, attribute: Callable[[int], int]) -> int:
    """How many blocks a multiprocessor holds at once, where the driver does not say.

    The least of what its places for blocks, its threads, its registers (given out by the warp in
    steps of 256) and its shared memory (less what each block reserves) allow.
    """
    warps = -(-threads // _WARP)
    step = _REGISTERS_A_STEP
    of_warp = -(-max(1, resources.registers) * _WARP // step) * step
    shared = resources.shared_bytes + attribute(_SHARED_RESERVED)
    return min(
        attribute(_BLOCKS_AT_ONCE),
        attribute(_THREADS_AT_ONCE) // (warps * _WARP),
        attribute(_REGISTERS_AT_ONCE) // (of_warp * warps),
        attribute(_SHARED_AT_ONCE) // max(1, shared),
    )


class _Bench:
    """A runtime alone on the device, its kernels timed one by one."""

    def __init__(self, gpu: MeasuredGpu, runtime: CudaRuntime, busy: Busy) -> None:
        self.gpu = gpu
        self.busy = busy
        self.runtime = runtime
        self.slots = runtime.runtime.manifest.slots
        self.tokens = runtime.runtime.manifest.context
        self.stream: Stream = gpu.stream()
        # Sleeping at once, since a tick takes longer than any spin; `ring` wakes it.
        self.table = DeviceTable(runtime.runtime.region, spin_us=0)
        self.jobs = runtime.allocate(self.slots * cuda_echo.JOB_BYTES)

    def tick(self) -> None:
        self.stream.launch(TICK, 1, 1, self.runtime.device, 4096)

    def tick_and_wait(self) -> None:
        self.tick()
        self.stream.wait()
        self.runtime.ring()

    def resident(self) -> None:
        self.stream.launch(RESIDENT, 1, 1, self.runtime.device, _POLLS, _NO_NAP)

    def echo(self) -> None:
        # A turn moves as much as a slot holds.
        blocks, threads = min(self.slots, 64), _THREADS[_ECHO]
        self.stream.launch(_ECHO, blocks, threads, self.runtime.device, self.jobs, self.tokens, 1)

    def claim_all(self) -> list[int]:
        """Claim every slot; the generations."""
        held: list[int] = []
        ticking(
            self.tick_and_wait,
            lambda: held.extend(claim_all(self.table, self.slots, self.tokens, self.tokens)),
        )
        return held

    def publish_all(self) -> list[int]:
        """Claim every slot and publish a prompt in it; the generations."""
        held, body = self.claim_all(), b"\1\0\0\0" * self.tokens
        for slot, generation in enumerate(held):
            when = self.table.submit(slot, generation, body, 0, len(body))
            if when < 0:
                raise DataplaneError(f"publishing a prompt was answered with {when}")
        self.tick_and_wait()
        return held

    def let_go_all(self, held: list[int]) -> None:
        for slot, generation in enumerate(held):
            self.table.let_go(slot, generation)

    def time(self, launch: Callable[[], None]) -> float:
        return self.gpu.elapsed_us(self.stream, launch, lambda: self.busy(self.stream, _BUSY_US))


@contextmanager
def _bench(gpu: MeasuredGpu, slots: int, tokens: int) -> Iterator[_Bench]:
    with (
        alone(gpu, slots=slots, context=tokens, max_output=tokens) as runtime,
        busy_work(gpu) as busy,
    ):
        yield _Bench(gpu, runtime, busy)


def measure(
    gpu: MeasuredGpu, slots: int = SLOTS, tokens: int = TOKENS, runs: int = RUNS
) -> Iterator[Measured]:
    """Run every kernel of the image on the device.

    Raises:
        DataplaneError: The device cannot be used.
    """
    with _bench(gpu, slots, tokens) as bench:
        lib.dp_device_stop(bench.runtime.runtime.region.native, 0)
        for kernel, what, take, count, moved in (
            (TICK, "nothing posted", _idle(bench), 1, _LINE),
            # A command is two lines of the ring and two words that tell what became of it.
            (TICK, f"lets {slots} slots go", _letting_go(bench), slots, slots * 2 * _LINE),
            (RESIDENT, f"looks {_POLLS:,} times", _looking(bench), _POLLS, _POLLS * _LINE),
            # Of a slot, its part of the turn, its word, its mirror and when it was taken.
            (TURN, f"takes {slots} requests", _taking(bench), slots, slots * (_LINE + 3 * 8)),
            (_ECHO, f"{slots} prompts of {tokens:,} ids, read and given back", _echoing(bench), 1,
             slots * tokens * 8),
        ):  # fmt: skip
            take()
            us = statistics.median(take() for _ in range(runs))
            yield _measured(gpu, kernel, what, us, count, moved)


def _idle(bench: _Bench) -> Callable[[], float]:
    return lambda: bench.time(bench.tick)


def _looking(bench: _Bench) -> Callable[[], float]:
    return lambda: bench.time(bench.resident)


def _letting_go(bench: _Bench) -> Callable[[], float]:
    def take() -> float:
        bench.let_go_all(bench.claim_all())
        return bench.time(bench.tick)

    return take


class _Turn:
    """The paper of a turn (`native/gpu/turn.h`), here in the device's memory."""

    def __init__(self, bench: _Bench) -> None:
        self._bench = bench
        size = lib.dp_turn_bytes(bench.runtime.runtime.region.native, 0)
        self._address = bench.runtime.allocate(size)
        self._image = ffi.new("char[]", size)
        self._paper = ffi.cast("struct dp_turn *", self._image)

    def write(self, finish: list[int]) -> None:
        """Ask for the end of the requests of these generations; for what is READY without."""
        self._paper.take = not finish
        for slot in range(self._bench.slots):
            part = lib.dp_turn_at(self._paper, slot)
            part.held = bool(finish)
            part.generation = finish[slot] if finish else 0
            part.reason = int(Finish.STOP)
        self._bench.gpu.upload(self._address, bytes(ffi.buffer(self._image)))

    def launch(self) -> None:
        self._bench.stream.launch(
            TURN, 1, _THREADS[TURN], self._bench.runtime.device, self._address
        )


def _taking(bench: _Bench) -> Callable[[], float]:
    turn = _Turn(bench)

    def take() -> float:
        held = bench.publish_all()
        turn.write([])
        us = bench.time(turn.launch)
        turn.write(held)
        turn.launch()
        bench.stream.wait()
        bench.let_go_all(held)
        bench.tick_and_wait()
        return us

    return take


def _echoing(bench: _Bench) -> Callable[[], float]:
    def take() -> float:
        held = bench.publish_all()
        us = bench.time(bench.echo)
        bench.let_go_all(held)
        bench.tick_and_wait()
        return us

    return take


def _measured(
    gpu: MeasuredGpu, kernel: str, what: str, us: float, count: int, moved: int
) -> Measured:
    threads, resources = _THREADS[kernel], gpu.resources(kernel)
    blocks = gpu.resident_blocks(kernel, threads)
    by = "the driver"
    if blocks is None:
        blocks, by = computed_blocks(resources, threads, gpu.attribute), "computed"
    rate = moved / us / 1000 if us else 0.0
    bandwidth = device_of(gpu)["memory_gb_per_s"]
    return Measured(
        kernel=kernel,
        what=what,
        us=round(us, 2),
        each_us=round(us / count, 4) if count > 1 else None,
        threads=threads,
        registers=resources.registers,
        shared_bytes=resources.shared_bytes,
        local_bytes=resources.local_bytes,
        blocks=blocks,
        occupancy=round(blocks * threads / gpu.attribute(_THREADS_AT_ONCE), 4),
        occupancy_by=by,
        moved_bytes=moved,
        gb_per_s=round(rate, 5),
        share=round(rate / bandwidth, 6) if bandwidth else None,
    )


# The model on PyTorch.


def torch_step() -> dict[str, Any]:
    """Return the time and the rate of a decode step of SmolLM2 over all slots, or why not."""
    if importlib.util.find_spec("torch") is None:
        return {"waived": f"PyTorch is not installed: {pip_install('torch')}"}
    import torch

    if not torch.cuda.is_available():
        return {"waived": "PyTorch sees no GPU"}
    try:
        return _timed_step(torch)
    except (DataplaneError, ImportError, RuntimeError) as error:  # PyTorch's are the last
        return {"waived": " ".join(str(error).split())}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {"kernels": kernels_part, "torch": torch_step}


def _timed_step(torch: Any, slots: int = 8, per_slot: int = 2048) -> dict[str, Any]:
    from dataplane import model
    from dataplane.runtime import smollm2_torch

    device = torch.device("cuda")
    batcher = smollm2_torch.load(model.locate_weights(), slots, per_slot, device)
    smollm2_torch.warm_up(batcher)
    rows, times = list(range(slots)), []
    for _ in range(RUNS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        batcher.decode(rows, [1] * slots, [per_slot - 1] * slots)
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000)
    us = statistics.median(times)
    moved = batcher.memory().held
    properties = torch.cuda.get_device_properties(device)
    return {
        "what": f"a decode step over {slots} slots of {per_slot} ids, one captured graph",
        "device": properties.name,
        "us": round(us, 2),
        "moved_bytes": moved,
        "gb_per_s": round(moved / us / 1000, 1),
        "note": "every byte that the model holds, weights and pool, read once; launching is in the"
        " time; registers and occupancy are those of PyTorch's own kernels",
    }


# What is printed.


def _show(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    console.width = max(console.width, _LEAST_COLUMNS)  # a figure is never cut off
    code = found["machine_code"]
    if code["waived"]:
        print(f"machine code: waived: {code['waived']}")
    else:
        console.print(_code_table(code["kernels"]))
        print(f"by {code['by']}")
    print()
    if found["kernels"]:
        device = found["device"]
        console.print(_times_table(found["kernels"]))
        print(
            f"{device['name']} ({device['architecture']}), {device['multiprocessors']}"
            f" multiprocessors; memory {device['memory_gb_per_s']:,} GB/s (2 x"
            f" {device['memory_clock_khz']:,} kHz x {device['memory_bus_bits']:,} bits). Bytes are"
            " what has to be moved at least; these kernels move theirs over the bus, too. Occupancy"
            f" by {found['kernels'][0]['occupancy_by']}"
        )
    if found["waived"]:
        print(f"times, occupancy, bytes moved: waived: {found['waived']}")
    step = found["torch"]
    if "waived" in step:
        print(f"decode step on PyTorch: waived: {step['waived']}")
    else:
        of = f", {step['share']:.0%} of the memory's" if "share" in step else ""
        print(f"decode step on PyTorch: {step['us']:,} µs, {step['gb_per_s']:,} GB/s{of}")
        print(f"  {step['what']}; {step['note']}")


def _columns(*heads: str) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(heads[0], no_wrap=True)
    for head in heads[1:]:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def _code_table(usages: list[dict[str, Any]]) -> Table:
    table = _columns("kernel", "target", "registers", "shared", "stack", "spills")
    for usage in usages:
        spills = usage["spill_bytes"]
        table.add_row(
            usage["kernel"], usage["target"], str(usage["registers"]), str(usage["shared_bytes"]),
            str(usage["stack_bytes"]), "?" if spills is None else str(spills),
        )  # fmt: skip
    return table


def _times_table(kernels: list[dict[str, Any]]) -> Table:
    table = _columns(
        "kernel",
        "µs",
        "each",
        "registers",
        "shared",
        "local",
        "occupancy",
        "GB/s",
        "of memory's",
    )
    table.add_column("what")  # what alone gives way where there is no room
    for row in kernels:
        each = "" if row["each_us"] is None else f"{row['each_us']:g}"
        table.add_row(
            row["kernel"], f"{row['us']:,}", each, str(row["registers"]), str(row["shared_bytes"]),
            str(row["local_bytes"]), f"{row['occupancy']:.1%}", f"{row['gb_per_s']:g}",
            "?" if row["share"] is None else f"{row['share']:.2%}", row["what"],
        )  # fmt: skip
    return table


if __name__ == "__main__":
    with limited():
        report(PARTS[sys.argv[1]]())
