"""One runtime's attachment: its region, its eventfds, its pulse; and the place it takes.

Two words in the region are the runtime's pulse. They are read here, and what they say is judged:
whether it is ready, silent, or stands still with work in its slots (contract 2).
"""

import contextlib
import os
import socket
import time

from dataplane._native import lib
from dataplane.manifest import Manifest
from dataplane.region import Region

HEARTBEAT_MS = 500
READY_WITHIN_S = 120.0
SILENT_RED_S = 2.0
SILENT_DROP_S = 10.0


class Attachment:
    """One runtime, from its manifest to its end.

    Attributes:
        number: Names it in handles; counts from 1.
        ready: Whether the first heartbeat was seen.
        announced: Whether the daemon was told of that.
        connection: To the runtime's process, once it was greeted.
        doorbell, outputs: The eventfds of the runtime and of the listeners, from number 1.
    """

    def __init__(
        self, number: int, manifest: Manifest, region: Region, tokenizer: bytes | None, pid: int
    ) -> None:
        self.number = number
        self.manifest = manifest
        self.region = region
        self.tokenizer = tokenizer
        self.pid = pid
        self.ready = False
        self.announced = False
        self.connection: socket.socket | None = None
        self.doorbell, *self.outputs = _eventfds(1 + region.native.geometry.listeners)
        region.native.doorbell = self.doorbell
        for number, output in enumerate(self.outputs):
            region.native.outputs[number] = output
        self._started = time.monotonic()
        self._beat = self._step = 0
        self._beat_at = self._step_at = self._started
        self._working = False

    def fds(self) -> list[int]:
        """Return what the runtime is passed, in the contract's order."""
        return [self.region.fd, self.doorbell, *self.outputs]

    @property
    def output(self) -> int:
        """The eventfd of listener 1."""
        return self.outputs[0]

    def close(self) -> None:
        """End the runtime's side, and close the eventfds: verbs that are late ring nobody."""
        if self.connection is not None:
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        self.region.native.doorbell = -1
        for number in range(len(self.outputs)):
            self.region.native.outputs[number] = -1
        for fd in (self.doorbell, *self.outputs):
            os.close(fd)

    def silent_s(self, now: float) -> float:
        """Return how long the heartbeat has stood still."""
        return now - self._beat_at

    def examine(self, now: float) -> str | None:
        """Read the pulse; return why the runtime has to be dropped, or None."""
        header = self.region.native.header
        beat, step = header.heartbeat.value, header.step.value
        if beat != self._beat:
            self._beat, self._beat_at = beat, now
            self.ready = True
        was_working, self._working = self._working, self._is_working()
        # Time counts from when the work was first seen: an idle engine makes no steps.
        if step != self._step or not (was_working and self._working):
            self._step, self._step_at = step, now
        if not self.ready:
            if now - self._started > READY_WITHIN_S:
                return f"it was not ready within {READY_WITHIN_S:.0f} s"
            return None
        if self.silent_s(now) > SILENT_DROP_S:
            return f"its heartbeat stood still for {SILENT_DROP_S:.0f} s"
        if (now - self._step_at) * 1000 > self.manifest.max_step_ms:
            return f"no step for {self.manifest.max_step_ms} ms with work in its slots"
        return None

    def _is_working(self) -> bool:
        """Whether a slot waits on the runtime: READY, RUNNING or CANCELLING."""
        return bool(lib.dp_is_working(self.region.native))


class Place:
    """Where the runtime of one partition attaches, one at a time.

    Attributes:
        name: The partition's.
        current: The runtime that has the place; None: it is free.
        admitting: Whether one is about to have it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.current: Attachment | None = None
        self.admitting = False

    def is_responsive(self) -> bool:
        """Whether a ready runtime's heartbeat is fresh: what `/readyz` says."""
        current = self.current
        return (
            current is not None
            and current.ready
            and current.silent_s(time.monotonic()) <= SILENT_RED_S
        )


def _eventfds(count: int) -> list[int]:
    """Make so many, or none."""
    made: list[int] = []
    try:
        for _ in range(count):
            made.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    except OSError:
        for fd in made:
            os.close(fd)
        raise
    return made
