"""A client and a daemon in one process whose slots lie in a device, for several test files.

The admission kernel is as it is, and runs when the test has it tick.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from host_gpu import HostDevice, Library
from pair import Answer, Pair, request_bytes

from dataplane.device_table import AskingTable
from dataplane.exchange import Asked
from dataplane.slots import State
from dataplane.table import HostTable

IDS = [1, 2, 3]
WHOLE = request_bytes(IDS)
HEADER = 48


class DeviceJob:
    """A request that the engine took on the device."""

    def __init__(self, device: HostDevice, slot: int, generation: int) -> None:
        self._device = device
        self._handle = (slot, generation)

    def emit(self, ids: list[int]) -> None:
        assert self._device.emit(*self._handle, ids) == 0

    def finish(self, reason: int = 1) -> int:
        return self._device.finish(*self._handle, reason)

    @property
    def cancelled(self) -> bool:
        return self._device.is_cancelled(*self._handle)


class DevicePair(Pair):
    """A pair whose slots lie in a device, which answers when it ticks.

    Attributes:
        gave_up: Why the device was given up, each time.
    """

    def __init__(self, library: Library, state_dir: Path, **options: Any) -> None:
        self._library = library
        self.gave_up: list[str] = []
        super().__init__(state_dir, table="device", **options)

    def make_table(self) -> HostTable:
        self.device = HostDevice(self._library, self.region)
        table = AskingTable(self.region, clock=lambda: self.now)
        table.on_dead = self.gave_up.append
        return table

    def states(self) -> list[str]:
        return [State(self.device.word(slot)[0]).name for slot in range(self.region.slots)]

    def tick(self) -> None:
        """Let the device do what it was told, and the daemon hear of it."""
        self.device.tick()
        self.serve()

    def take_one(self) -> DeviceJob:
        """Take the READY slot, of which there has to be one."""
        self.device.tick()
        for slot in range(self.region.slots):
            status, generation = self.device.take(slot)
            if status >= 0:
                return DeviceJob(self.device, slot, generation)
        raise AssertionError(f"none is READY: {self.states()}")

    def answer_one(self, stream: int, ids: list[int]) -> Answer:
        """Have the engine answer the only request; what the client got."""
        job = self.take_one()
        job.emit(ids)
        job.finish()
        return self.answer(stream)

    def check_at_rest(self) -> None:
        self.engine = self.device.tick
        super().check_at_rest()


StartPair = Callable[..., DevicePair]


def asked(pair: Pair, stream: int) -> Asked:
    """The stream's state, which waits for the device."""
    found = pair.server.streams[stream]
    assert isinstance(found, Asked)
    return found


def header(pair: DevicePair) -> int:
    return pair.open(WHOLE[:HEADER], False)


def partial(pair: DevicePair) -> int:
    return pair.open(WHOLE[:-2], False)


def whole(pair: DevicePair) -> int:
    return pair.open(WHOLE, True)


def reset(pair: Pair, stream: int) -> None:
    pair.client.reset_stream(stream, 9)


def stop(pair: Pair, stream: int) -> None:
    pair.client.stop_stream(stream, 9)


def both(pair: Pair, stream: int) -> None:
    reset(pair, stream)
    stop(pair, stream)


def close(pair: Pair, stream: int) -> None:
    pair.client.close()
