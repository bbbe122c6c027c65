"""The small model on PyTorch, behind the daemon: one step of fixed shape over all slots.

On a GPU each kind of step is captured once as a CUDA graph and replayed, and the slots' words lie
on that device (`cuda_engine`); on the CPU the same code runs eagerly and the words lie in the
region, which is how it is tested where there is no GPU. The loop around it (who is prefilled
when, cancelling, stop ids) is `smollm2.Engine`, the one that llama.cpp runs in. The rules that hold
here:

- Everything that stays is made before "ready": weights, pool, buffers, graphs. A step writes its
  inputs into buffers, runs, and reads ids out of one.
- A prompt is read where it lies, by the look-up of its embeddings, whose launches are the only ones
  of varying length and so stand outside of the graphs.
- An id is looked at on the host before the device sees it: a GPU that indexes outside of a matrix
  is lost to the whole process.
- A slot is let go only once the device has run what reads its prompt: the slot's next prompt may be
  anything. The engine calls `forget` before it finishes a request, and `forget` waits.
- What is written for the device lies in mirrors, which wait by themselves (`torch_stream`).
- One thread computes on the CPU, for the reason that llama.cpp's does.
- A batcher belongs to one thread.
"""

import contextlib
import functools
import gc
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from dataplane import model
from dataplane.errors import DataplaneError
from dataplane.manifest import DEFAULT_PARTITION
from dataplane.region import Region, available_memory
from dataplane.runtime import (
    DetachedError,
    Finish,
    Manifest,
    Runtime,
    attach,
    cuda_engine,
    gguf_weights,
    smollm2,
)
from dataplane.runtime.cuda import KERNELS, CudaError, CupyGpu, Gpu
from dataplane.runtime.cuda_engine import CudaEngineRuntime
from dataplane.runtime.gguf_weights import Shape, Weights
from dataplane.runtime.sampling import COLDEST, Choice, Draws, choose
from dataplane.runtime.torch_prompts import RegionPrompts, copied_to, on_host
from dataplane.runtime.torch_stream import CudaStream, Mirror, Step, Stream
from dataplane.runtime.transformer import Transformer, planned_bytes

CHUNK = {"cpu": 32, "cuda": 256}
"""Ids of a prompt that run in one go: 0.2 to 0.5 s on one core, a millisecond on a GPU."""

_SMALLEST_SPAN = 256
_BAD_ID, _NO_ROOM = -1, 1
# Runs before a capture, in which libraries choose kernels and allocate what they keep.
_TRIAL_RUNS = 3


class TorchError(DataplaneError):
    """There is no room for the model, or more was asked than it can do."""


@dataclass(frozen=True, slots=True)
class Memory:
    """What the model's process holds, in bytes.

    Attributes:
        held: Weights, pool and buffers: fixed by the geometry.
        taken: From the device by PyTorch, or, on the CPU, resident in all.
        used: Of the device's by tensors; None on the CPU.
    """

    held: int
    taken: int
    used: int | None

    def __str__(self) -> str:
        if self.used is None:
            return f"{self.held} bytes held, {self.taken >> 20} MiB resident"
        return f"{self.held} bytes held, {self.used} of {self.taken} taken on the device in use"


class TorchBatcher:
    """The network as `smollm2.Engine` wants it: chunks and steps that return 0, or what failed."""

    def __init__(
        self,
        shape: Shape,
        weights: Weights,
        slots: int,
        per_slot: int,
        chunk: int,
        device: torch.device,
        stream: Stream | None = None,
    ) -> None:
        if per_slot > shape.trained_context:
            raise TorchError(
                f"context and max_output together are {per_slot} ids; "
                f"this model was trained on {shape.trained_context}"
            )
        self.slots, self.chunk, self.per_slot = slots, chunk, per_slot
        self.vocab_size = shape.vocab_size
        self.device = device
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        _check_room(planned_bytes(shape, slots, per_slot, dtype), device)
        self._stream = stream or _stream_of(device)
        self.network = Transformer(shape, weights, slots, per_slot, chunk, device, dtype)
        self._choice = Choice(slots, device)
        self._draws: list[Draws | None] = [None] * slots
        self._ids = torch.zeros(slots, dtype=torch.int64, device=device)
        mirror, network = functools.partial(Mirror, self._stream), self.network
        self._found = mirror(self._ids)
        self._tokens, self._positions = mirror(network.tokens), mirror(network.positions)
        self._place = [mirror(buffer) for buffer in (network.row, network.start, network.count)]
        self._how = [mirror(buffer) for buffer in self._choice.tensors()]
        self._ran: Sequence[int] = ()
        self._picked: dict[int, int] = {}
        self._complaint = ""
        self._ids_at: Callable[[int, int], Tensor] = on_host
        self._graphs: list[torch.cuda.CUDAGraph] = []
        self._steps: dict[str, Step] = {}
        if device.type == "cuda":
            self._ids_at = lambda address, count: copied_to(device, address, count)
            self._capture()

    # ------------------------------------------------------------ steps, captured or not

    def _fixed(self) -> dict[str, Step]:
        """Every kind of step at its widest: the same kernels on the same addresses each time."""
        network = self.network
        return {
            "prefill": lambda: network.prefill(network.length),
            "decode": lambda: network.decode(network.length),
            "greedy": self._pick_greedily,
            "choose": self._pick_all,
        }

    def _capture(self) -> None:
        """Capture the fixed steps.

        They share one pool of memory, in any order: each one's results lie in buffers outside of
        it, and no two run at once.
        """
        # What would be collected in the middle of a capture might call CUDA, which it forbids.
        gc.collect()
        self.network.count.fill_(1)
        pool = torch.cuda.graph_pool_handle()
        for name, step in self._fixed().items():
            for _ in range(_TRIAL_RUNS):
                step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.current_stream()):
                step()
            self._graphs.append(graph)
            self._steps[name] = graph.replay

    def _span(self, end: int) -> int:
        """The span of an eager step: the smallest that holds `end` positions."""
        span = _SMALLEST_SPAN
        while span < end:
            span *= 2
        return min(span, self.network.length)

    def _run(self, name: str, eagerly: Step) -> None:
        self._stream.launch(self._steps.get(name, eagerly))

    def prefill_chunk(self, seq: int, token_address: int, start: int, n: int, last: bool) -> int:
        """Run `n` ids that lie at `token_address` as positions `start`... of `seq`.

        The next id of `seq` can then be sampled. The ids may be read as late as that, or as the
        `forget` that ends the prompt early.
        """
        if not 1 <= n <= self.chunk:
            raise TorchError(f"a chunk has 1 to {self.chunk} ids, not {n}")
        seen = on_host(token_address, n).numpy()
        code = self._refuse(seen, start + n)
        if code:
            return code
        for place, value in zip(self._place, (seq, start, n), strict=True):
            place.array[0] = value
            place.send()
        ids = self._ids_at(token_address, n)
        self._stream.launch(lambda: self.network.embed(ids))
        self._run("prefill", lambda: self.network.prefill(self._span(start + n)))
        self._ran = (seq,) if last else ()
        self._picked.clear()
        return 0

    def decode(self, seqs: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> int:
        """Run one id for each of `seqs`; the next id of each can then be sampled."""
        end = max(positions) + 1
        code = self._refuse(np.array(tokens), end)
        if code:
            return code
        self._tokens.array.fill(0)
        self._positions.array.fill(self.network.spare)
        rows = list(seqs)
        self._tokens.array[rows], self._positions.array[rows] = tokens, positions
        self._tokens.send()
        self._positions.send()
        self._run("decode", lambda: self.network.decode(self._span(end)))
        self._ran = tuple(seqs)
        self._picked.clear()
        return 0

    def _refuse(self, ids: npt.NDArray[np.integer[Any]], end: int) -> int:
        bad = ids[(ids < 0) | (ids >= self.vocab_size)]
        if bad.size:
            self._complaint = f"the id {bad[0]} is outside the vocabulary of {self.vocab_size}"
            return _BAD_ID
        if end > self.per_slot:
            self._complaint = f"{end} ids where {self.per_slot} have room"
            return _NO_ROOM
        return 0

    # ------------------------------------------------------------ a request's beginning and end

    def begin(self, seq: int, temperature: float, top_p: float, top_k: int, seed: int) -> None:
        """Set how `seq` samples. Zero: greedy, off, off, random; a top_p of 1 is off as well."""
        self._draws[seq] = None if temperature < COLDEST else Draws(seed)
        for how, value in zip(self._how, (temperature, top_p, top_k, 0.0), strict=True):
            how.array[seq] = value

    def forget(self, seq: int) -> None:
        """Make `seq` ready for the next request, which overwrites what it will look at.

        Nothing reads the prompt from then on.
        """
        self._stream.wait()
        self.begin(seq, 0.0, 0.0, 0, 0)

    def rewind(self, seq: int, position: int) -> None:
        """Nothing: what lies behind a position is overwritten before it is looked at."""

    def complaint(self) -> str:
        """Why the last chunk or step was refused."""
        return self._complaint

    # ------------------------------------------------------------ the next ids

    def sample(self, seq: int, index: int) -> int:
        """The next id of `seq`, which was in what ran last; its index there does not matter."""
        if not self._picked:
            self._picked.update(self._pick())
        return self._picked[seq]

    def _pick(self) -> dict[int, int]:
        """The next ids of all that ran, at once: a request draws one number for each id."""
        drawing = [(seq, draws) for seq in self._ran if (draws := self._draws[seq])]
        if not drawing:
            self._run("greedy", self._pick_greedily)
        else:
            for seq, draws in drawing:
                self._how[-1].array[seq] = draws.next()
            for how in self._how:
                how.send()
            self._run("choose", lambda: self._pick_of(torch.tensor(self._ran)))
        found = self._found.receive()
        return {seq: int(found[seq]) for seq in self._ran}

    def _pick_greedily(self) -> None:
        self._ids.copy_(self.network.logits.argmax(-1))

    def _pick_all(self) -> None:
        self._ids.copy_(choose(self.network.logits, self._choice))

    def _pick_of(self, rows: Tensor) -> None:
        """The same for some rows: sorting a vocabulary takes the CPU milliseconds."""
        self._ids[rows] = choose(self.network.logits[rows], self._choice.of(rows))

    # ------------------------------------------------------------ memory

    @contextlib.contextmanager
    def reading(self, region: Region, mapped: int) -> Iterator[None]:
        """Read prompts where a region holds them; the CPU does in any case.

        Args:
            region: The attachment's.
            mapped: Where the batcher's GPU sees it.
        """
        if self.device.type == "cpu":
            yield
            return
        prompts, before = RegionPrompts(region, mapped, self.device), self._ids_at
        try:
            self._ids_at = prompts.ids
            self.prefill_chunk(0, region.prompt_address(0), 0, 1, False)  # so that it has run
            self._stream.wait()
            yield
        finally:
            self._ids_at = before
            self._stream.wait()

    def memory(self) -> Memory:
        """What is held now."""
        held = self.network.held_bytes
        if self.device.type == "cuda":
            return Memory(held, torch.cuda.memory_reserved(), torch.cuda.memory_allocated())
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
        return Memory(held, pages * os.sysconf("SC_PAGE_SIZE"), None)


class _Engine(smollm2.Engine):
    def _fail(self, job: smollm2._Job, code: int) -> None:
        self._say(f"slot {job.slot}: the model refuses: {self._batcher.complaint()}")
        self._end(job, Finish.ERROR)


def _stream_of(device: torch.device) -> Stream:
    return CudaStream(device) if device.type == "cuda" else Stream()


def _check_room(needed: int, device: torch.device) -> None:
    free = available_memory() if device.type == "cpu" else torch.cuda.mem_get_info(device)[0]
    if free is not None and needed > free:
        raise TorchError(
            f"the model and its slots take {needed >> 20} MiB and {free >> 20} MiB of memory are "
            "free: ask for fewer slots or a smaller context"
        )


def load(gguf: Path, slots: int, per_slot: int, device: torch.device) -> TorchBatcher:
    """Read the weights and make everything; nothing of the file is kept."""
    shape, weights = gguf_weights.load(gguf)
    batcher = TorchBatcher(shape, weights, slots, per_slot, CHUNK[device.type], device)
    gc.collect()
    return batcher


def warm_up(batcher: TorchBatcher) -> None:
    """Run every kind of step, and check that the model says what it should."""
    smollm2.warm_up(batcher)
    batcher.begin(0, 1.0, 0.9, 40, 1)
    batcher.decode([0], [0], [0])
    batcher.sample(0, 0)
    batcher.forget(0)


def run(
    attachment: smollm2.Attachment, batcher: TorchBatcher, say: Callable[[str], None]
) -> NoReturn:
    """Serve until the attachment ends, which raises `DetachedError`."""
    engine = _Engine(attachment, batcher, model.STOP_IDS, say)
    while True:
        engine.turn()


@contextlib.contextmanager
def _attached(
    socket_path: str | os.PathLike[str],
    manifest: Manifest,
    tokenizer: Path,
    batcher: TorchBatcher,
    gpu: Gpu | None,
) -> Iterator[Runtime | CudaEngineRuntime]:
    """Attach, on the device's slot table where there is a device, and read prompts in place."""
    if gpu is None:
        with attach(socket_path, manifest, tokenizer) as on_host_table:
            yield on_host_table
        return
    with (
        cuda_engine.attach(socket_path, manifest, tokenizer, gpu) as runtime,
        batcher.reading(runtime.region, runtime.mapped),
    ):
        yield runtime


def _no_device(partition: str) -> CudaError:
    """Say why PyTorch has no GPU for a partition, and what to do."""
    cuda = torch.version.cuda
    remedy = "this build is for CPUs: install PyTorch's for CUDA"
    if cuda:
        remedy = f"`nvidia-smi` must work, list that device, and the driver be fit for CUDA {cuda}"
    device = os.environ.get("CUDA_VISIBLE_DEVICES")
    return CudaError(
        f"PyTorch {torch.__version__} sees no GPU for the partition {partition}"
        f" (CUDA_VISIBLE_DEVICES={device}): {remedy}"
    )


def main(
    socket_path: str | os.PathLike[str],
    slots: int,
    context: int,
    max_output: int,
    say: Callable[[str], None],
    *,
    cache_dir: Path,
    partition: str = DEFAULT_PARTITION,
    gpu: Gpu | None = None,
    kernels: Path = KERNELS,
    needs_device: bool = False,
) -> int:
    """Load the model, attach, and serve until the daemon is gone; the exit status.

    It runs on the first GPU that PyTorch sees (`CUDA_VISIBLE_DEVICES` chooses), with the slots'
    words on that device; else on the CPU, with the words in the region. The arguments are those of
    `smollm2.main`.

    Args:
        gpu: The device that has the slots' words, where it is another.
        kernels: The image of the kernels that act on those, for the first GPU.
        needs_device: Whether the CPU will not do: a partition has a device of its own.

    Raises:
        CudaError: PyTorch sees a GPU that CuPy or the kernels cannot use, or none where one is
            needed; the text says what to do.
    """
    gguf = model.locate_weights()
    tokenizer = model.tokenizer_json(gguf, cache_dir)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if needs_device and device.type == "cpu":
        raise _no_device(partition)
    if gpu is None and device.type == "cuda":
        gpu = CupyGpu(kernels=kernels)  # before the model: what is missing is said at once
    torch.set_num_threads(1)
    say(f"loading {model.NAME} for {slots} slots of {context} + {max_output} ids on {device}")
    batcher = load(gguf, slots, context + max_output, device)
    warm_up(batcher)
    manifest = Manifest(
        model=model.NAME,
        partition=partition,
        slots=slots,
        context=context,
        max_output=max_output,
        vocab_size=batcher.vocab_size,
        stop_ids=model.STOP_IDS,
        chat_template=model.CHAT_TEMPLATE,
        max_step_ms=smollm2.MAX_STEP_MS,
    )
    with _attached(socket_path, manifest, tokenizer, batcher, gpu) as runtime:
        runtime.ready()
        say(f"{model.NAME} is ready: {batcher.memory()}")
        try:
            run(runtime, batcher, say)
        except DetachedError as error:
            say(f"{model.NAME} stops: {error}; {batcher.memory()}")
    return 0
