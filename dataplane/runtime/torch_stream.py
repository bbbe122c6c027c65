"""The order in which a device works, and what the host may touch meanwhile.

A device runs late: what the host launches is queued, and a copy from pinned memory reads its source
when the device gets there, not when it is asked for. So two things of the host belong to the device
from the launch until the host has waited: what was sent from a buffer, and a prompt in its slot.
The rules that hold here:

- A buffer that the host sends from is a `Mirror`. Its `array` waits by itself before it is written
  again, and only if nobody has waited since it was sent.
- A slot is let go only after `wait`: the device may not have read its prompt before.
- `wait` costs nothing when nothing was launched since the last one. Each turn with an answer waits
  for its ids in any case; so only a chunk of a prompt that nobody's answer follows is waited for
  apart, just before the next chunk, and the host has done its other work by then.
"""

from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

Step = Callable[[], None]


class Stream:
    """A device that has run what it is given by the time that it has it: the CPU.

    Attributes:
        waits: How often all of the work was waited for.
    """

    def __init__(self) -> None:
        self.waits = 0
        self._is_under_way = False

    def host_side(self, device: Tensor) -> Tensor:
        """The host's buffer of the same shape; the CPU's is the device's own."""
        return device

    def launch(self, step: Step) -> None:
        """Have the device run `step` after all that it was given before."""
        self._is_under_way = True
        step()

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Have it copy, in the same order; `source` is read then."""
        self.launch(lambda: _copy(to, source))

    def wait(self) -> None:
        """Return once everything that was launched has run."""
        if self._is_under_way:
            self._synchronise()
            self._is_under_way = False
            self.waits += 1

    def _synchronise(self) -> None:
        pass


def _copy(to: Tensor, source: Tensor) -> None:
    to.copy_(source, non_blocking=True)


class CudaStream(Stream):
    """A stream of a GPU, which becomes the current one of this thread.

    It runs beside the null stream, whose work would wait for all other work.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(device)
        torch.cuda.set_stream(self._stream)

    def host_side(self, device: Tensor) -> Tensor:
        return torch.zeros_like(device, device="cpu").pin_memory()

    def _synchronise(self) -> None:
        self._stream.synchronize()


class Mirror:
    """A buffer of the device and the host's copy of it; on the CPU these are one."""

    __slots__ = ("_array", "_device", "_host", "_sent", "_stream")

    def __init__(self, stream: Stream, device: Tensor) -> None:
        self._stream = stream
        self._device = device
        self._host = stream.host_side(device)
        self._array: npt.NDArray[Any] = self._host.numpy()
        self._sent = -1  # the stream's waits when it was last sent

    @property
    def array(self) -> npt.NDArray[Any]:
        """The host's copy, to be written until `send`.

        Waits for the device if that may not have read yet what was sent.
        """
        if self._sent == self._stream.waits:
            self._stream.wait()
        return self._array

    def send(self) -> None:
        """Have the device see what was written into `array`, in the order of its work."""
        if self._host is not self._device:
            self._stream.copy(self._device, self._host)
            self._sent = self._stream.waits

    def receive(self) -> npt.NDArray[Any]:
        """Wait for the device's work, and return its results."""
        if self._host is not self._device:
            self._stream.copy(self._host, self._device)
        self._stream.wait()
        return self._array
