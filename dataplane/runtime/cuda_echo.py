"""`cuda-echo`: gives the prompt back, all in kernels (`native/gpu/echo.cu`).

Take, read, emit and finish happen on the device; this process only launches the same kernel again
while a slot has work. As `echo`, it has no stop ids and no tokeniser; an answer of `max_output` ids
ends with `length`, a shorter one with `stop`.
"""

import os
from collections.abc import Callable

from dataplane.errors import DetachedError
from dataplane.manifest import DEFAULT_PARTITION, Manifest
from dataplane.runtime.cuda import CudaRuntime, Gpu, Mode, Stream, attach

JOB_BYTES = 24
"""`struct dp_echo_job`."""
IDLE_S = 0.25
"""Longest time between two steps; below the manifest's `max_step_ms`."""
_PIECE = 4096
_TURNS = 64
_BLOCKS = 64
_THREADS = 128


class _Echo:
    def __init__(self, runtime: CudaRuntime) -> None:
        self._runtime = runtime
        slots = runtime.runtime.manifest.slots
        self._blocks = min(slots, _BLOCKS)
        self._jobs = runtime.allocate(slots * JOB_BYTES)
        self._stream: Stream = runtime.gpu.stream()
        self.launch(1)  # loads the kernel; there is nothing to take yet

    def launch(self, turns: int = _TURNS) -> None:
        """Look at each slot so often, and ring listeners meanwhile."""
        self._stream.launch(
            "dp_echo", self._blocks, _THREADS, self._runtime.device, self._jobs, _PIECE, turns
        )
        self._runtime.follow(self._stream)

    def run(self) -> None:
        """Serve until the daemon is gone."""
        while True:
            try:
                working = self._runtime.wait(IDLE_S)
            except DetachedError:
                return
            if working:
                self.launch()
            self._runtime.step()


def main(
    socket_path: str | os.PathLike[str],
    slots: int,
    context: int,
    max_output: int,
    vocab_size: int,
    say: Callable[[str], None] = lambda text: None,
    gpu: Gpu | None = None,
    mode: Mode = "tick",
    *,
    partition: str = DEFAULT_PARTITION,
) -> int:
    """Attach and serve; the exit status."""
    manifest = Manifest(
        model="cuda-echo",
        partition=partition,
        table="device",
        slots=slots,
        context=context,
        max_output=max_output,
        vocab_size=vocab_size,
    )
    with attach(socket_path, manifest, gpu=gpu, mode=mode) as runtime:
        echo = _Echo(runtime)
        runtime.ready()
        say("cuda-echo is ready")
        echo.run()
    return 0
