"""The bundled runtime as a child process: started, started again with back-off when it ends, ended
with the daemon.

The child ends by itself when its attachment does, so a daemon that was killed leaves none behind.
"""

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable

_log = logging.getLogger("dataplane.runtime")

ATTACH_WITHIN_S = 120.0
"""To load a model; as long again from then on until it is ready."""
BACKOFF_FIRST_S = 0.5
BACKOFF_MAX_S = 30.0
END_WITHIN_S = 5.0


class Supervisor:
    """One bundled runtime.

    Args:
        arguments: Of `dataplane runtime`.
        on_early_end: Called with the exit status when it ends without having been ready since it
            was started; says whether it is to be started again, if it never was ready.
        name: What the log calls it.
        has_attached: Whether a process has; one that has not within `ATTACH_WITHIN_S` is ended.
    """

    def __init__(
        self,
        arguments: list[str],
        on_early_end: Callable[[int], bool],
        name: str = "the runtime",
        has_attached: Callable[[int], bool] = lambda pid: True,
    ) -> None:
        self._arguments = arguments
        self._on_early_end = on_early_end
        self._name = name
        self._has_attached = has_attached
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._is_ready = False
        self._was_ready = False
        self._backoff = BACKOFF_FIRST_S

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run())

    def ready(self) -> None:
        """The runtime serves: the next failure waits the shortest time again."""
        self._is_ready = self._was_ready = True
        self._backoff = BACKOFF_FIRST_S

    def lost(self, pid: int) -> None:
        """The attachment of process `pid` was dropped: if it is the child, it has to end."""
        if self._process is not None and self._process.pid == pid:
            asyncio.get_running_loop().call_later(END_WITHIN_S, _kill, self._process)

    async def _run(self) -> None:
        while True:
            self._is_ready = False
            status = await self._run_once()
            if not self._is_ready and not self._on_early_end(status) and not self._was_ready:
                return
            _log.warning(
                "%s ended with status %d; it starts again in %.1f s",
                self._name, status, self._backoff,
            )  # fmt: skip
            await asyncio.sleep(self._backoff)
            self._backoff = min(BACKOFF_MAX_S, self._backoff * 2)

    async def _run_once(self) -> int:
        """Start the child and wait for its end; its exit status."""
        try:
            # A session of its own: Ctrl-C reaches the daemon alone, which drains first.
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "dataplane", "runtime", *self._arguments,
                stdin=asyncio.subprocess.DEVNULL, stdout=sys.stderr, start_new_session=True,
            )  # fmt: skip
        except OSError as error:  # no memory, no descriptor: another time there may be
            _log.error("the runtime cannot be started: %s", error)
            return 1
        process = self._process
        late = asyncio.get_running_loop().call_later(ATTACH_WITHIN_S, self._end_late, process)
        try:
            return await process.wait()
        finally:
            late.cancel()

    def _end_late(self, process: asyncio.subprocess.Process) -> None:
        """From an attachment on its pulse is watched; nobody else would end what hangs before."""
        if not self._has_attached(process.pid):
            _log.error("%s did not attach within %g s: it is ended", self._name, ATTACH_WITHIN_S)
            _kill(process)

    async def stop(self) -> None:
        """End the child: asked first, killed after a while."""
        if self._task:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), END_WITHIN_S)
            except TimeoutError:
                process.kill()
                await process.wait()


def _kill(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        _log.warning("the runtime, process %d, hangs: it is killed", process.pid)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
