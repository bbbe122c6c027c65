"""What ends the process of a CUDA runtime whose engine does not come back.

Whoever waits for a kernel that hangs waits in CUDA, and only the end of the process ends that, and
gives back what the kernel uses. An engine that is busy on the host is left alone: it finds out at
its next `wait` or `take` that the daemon is gone. So the process ends only when all of this holds:

- the attachment has been over for `GRACE_S`;
- the engine waits for a kernel in a call of this package, or has work in its slots;
- for the manifest's `max_step_ms` and `GRACE_S` it neither stepped, nor began or ended such a call.

By the second alone a kernel that an engine waits for in another way (PyTorch's) is found too: an
engine with work that makes no step within `max_step_ms` is stuck by what it agreed to.
"""

import os
import select
import sys
import threading
import time
from collections.abc import Callable
from typing import Protocol

from dataplane.runtime.cuda_admission import END_WITHIN_S

GRACE_S = END_WITHIN_S + 1
_LOOK_S = 0.25


class Attachment(Protocol):
    """What is asked of one."""

    def fileno(self) -> int:
        """Return a descriptor that is readable once the daemon is gone; -1 after `detach`."""


class Progress:
    """What the engine's thread does; as a context manager, a call that waits for a kernel."""

    def __init__(self) -> None:
        self.calls = 0
        self._moved_s = time.monotonic()

    def move(self) -> None:
        """Note that the engine goes on."""
        self._moved_s = time.monotonic()

    def still_s(self) -> float:
        """Return for how many seconds it has not."""
        return time.monotonic() - self._moved_s

    def __enter__(self) -> None:
        self.calls += 1
        self.move()

    def __exit__(self, *error: object) -> None:
        self.calls -= 1
        self.move()


def end_process(why: str) -> None:
    """End this process at once; nothing that could wait for the device is run."""
    print(f"dataplane: {why}; this process ends", file=sys.stderr, flush=True)
    os._exit(1)


class Watchdog(threading.Thread):
    """Ends the process when the module's rule says so, until `stop`.

    Args:
        attachment: The attachment to watch.
        progress: What the engine's thread writes down.
        is_working: Whether a slot waits on the engine.
        max_step_s: The longest that a step may take, in seconds.
    """

    def __init__(
        self,
        attachment: Attachment,
        progress: Progress,
        is_working: Callable[[], bool],
        max_step_s: float,
    ) -> None:
        super().__init__(name="watchdog", daemon=True)
        self._attachment = attachment
        self._progress = progress
        self._is_working = is_working
        self._limit_s = max_step_s + GRACE_S
        self._stopped = threading.Event()

    def stop(self) -> None:
        self._stopped.set()
        self.join()

    def run(self) -> None:
        since = None
        while not self._stopped.wait(_LOOK_S):
            now = time.monotonic()
            if since is None:
                since = now if self._is_over() else None
            elif now - since > GRACE_S and self._progress.still_s() > self._limit_s:
                self._judge()

    def _judge(self) -> None:
        if self._progress.calls:
            end_process("a kernel hangs on the device")
        elif self._is_working():
            end_process(
                "the daemon is gone, and the engine, which had work, made no step for"
                f" {self._limit_s:g} s"
            )

    def _is_over(self) -> bool:
        """Whether the daemon ended the attachment, or this process does."""
        fd = self._attachment.fileno()
        if fd < 0:
            return True
        found = select.poll()
        found.register(fd, select.POLLIN)
        return bool(found.poll(0))  # one that was closed meanwhile is found too
