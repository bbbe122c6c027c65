"""A `cuda-echo` on host threads that takes its time: `slow_device.py`, arguments as `host_gpu.py`.

It gives out an id in each `STEP_S`. While SIGUSR2 was sent an odd number of times its engine stands
still, and the admission kernel goes on: what is published stays READY.
"""

import signal
import sys
import threading
import time
from pathlib import Path

import host_gpu

from dataplane.errors import DataplaneError
from dataplane.runtime.cuda_echo import main as cuda_echo

STEP_S = 0.05
_LOOK_S = 0.01


class _SlowStream(host_gpu.HostStream):
    def __init__(self, gpu: "_SlowGpu") -> None:
        super().__init__(gpu)
        self._held = gpu.held

    def launch(self, kernel: str, blocks: int, threads: int, *arguments: int) -> None:
        if kernel == "dp_echo":
            while self._held.is_set():
                time.sleep(_LOOK_S)
            time.sleep(STEP_S)
            device, jobs, *_ = arguments
            arguments = (device, jobs, 1, 1)  # one id in one look
        super().launch(kernel, blocks, threads, *arguments)


class _SlowGpu(host_gpu.HostGpu):
    def __init__(self, library: host_gpu.Library) -> None:
        super().__init__(library)
        self.held = threading.Event()

    def stream(self, urgent: bool = False) -> _SlowStream:
        return _SlowStream(self)

    def turn(self) -> None:
        """Stand still, or go on."""
        if self.held.is_set():
            self.held.clear()
        else:
            self.held.set()


def main(arguments: list[str]) -> int:
    library, socket, slots, context, max_output, mode = arguments
    gpu = _SlowGpu(host_gpu.Library(Path(library)))
    signal.signal(signal.SIGUSR2, lambda number, frame: gpu.turn())
    try:
        return cuda_echo(
            socket, int(slots), int(context), int(max_output), 50_000,
            lambda text: print(text, flush=True), gpu=gpu, mode=mode,  # type: ignore[arg-type]
        )  # fmt: skip
    except DataplaneError as error:
        print(f"slow_device: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
