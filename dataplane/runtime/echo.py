"""`echo`: a runtime without a model. It gives the prompt back, for tests and for measuring the way
there and back.

It has no stop ids and no tokeniser; an answer of `max_output` ids ends with `length`, a shorter one
with `stop`. With a token delay it emits one id each so many ms and slot, as a model would; without,
a whole prompt at once.
"""

import os
import time
from collections.abc import Callable

from dataplane.errors import DetachedError
from dataplane.manifest import DEFAULT_PARTITION
from dataplane.runtime import Finish, Manifest, Runtime, Taken, attach

IDLE_S = 0.25
"""Longest time between two steps; below the manifest's `max_step_ms`."""


class _Echo:
    """One request being given back."""

    __slots__ = ("due", "length", "request", "sent")

    def __init__(self, request: Taken, due: float) -> None:
        self.request = request
        self.length = min(request.tokens.size, request.max_output)
        self.sent = 0
        self.due = due

    def emit(self, count: int) -> bool:
        """Emit up to `count` more ids; True once the request is finished."""
        request = self.request
        if request.cancelled:
            request.finish(Finish.STOP)
            return True
        stop = min(self.length, self.sent + count)
        request.emit(request.tokens[self.sent : stop])
        self.sent = stop
        if stop < self.length:
            return False
        request.finish(Finish.LENGTH if stop == request.max_output else Finish.STOP)
        return True


def run(runtime: Runtime, delay_s: float) -> None:
    """Serve until the daemon is gone."""
    running: list[_Echo] = []
    while True:
        now = time.monotonic()
        pause = IDLE_S
        if running:
            pause = max(0.0, min(IDLE_S, min(echo.due for echo in running) - now))
        try:
            taken = runtime.take(pause)
        except DetachedError:
            return
        now = time.monotonic()
        running += [_Echo(request, now + delay_s) for request in taken]
        runtime.step()
        if not running:
            continue
        still = []
        for echo in running:
            if echo.due > now and not echo.request.cancelled:
                still.append(echo)
            elif not echo.emit(1 if delay_s else echo.length):
                echo.due += delay_s
                still.append(echo)
        running = still


def main(
    socket_path: str | os.PathLike[str],
    slots: int,
    context: int,
    max_output: int,
    vocab_size: int,
    token_delay_ms: float = 0.0,
    say: Callable[[str], None] = lambda text: None,
    *,
    partition: str = DEFAULT_PARTITION,
) -> int:
    """Attach and serve; the exit status."""
    manifest = Manifest(
        model="echo",
        partition=partition,
        slots=slots,
        context=context,
        max_output=max_output,
        vocab_size=vocab_size,
    )
    with attach(socket_path, manifest) as runtime:
        runtime.ready()
        say("echo is ready")
        run(runtime, token_delay_ms / 1000)
    return 0
