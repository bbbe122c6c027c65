"""The runtime's end of the Unix socket, as a test wants it: byte for byte, or breaking rules.

The literals are contract 2's; `dataplane.runtime` is not asked, so that a mistake in it hides none
in the daemon.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from daemon_process import DaemonProcess, wait_until

from dataplane._native import lib
from dataplane.manifest import Manifest
from dataplane.runtime import Finish, Runtime, Taken, attach

MANIFEST: dict[str, Any] = {
    "abi": 1, "model": "test", "partition": "default", "table": "host", "slots": 2, "context": 64,
    "max_output": 16, "vocab_size": 50_000, "stop_ids": [], "chat_template": None,
    "tokenizer_sha256": None, "max_step_ms": 5000,
}  # fmt: skip

ANSWER_WITHIN_S = 5.0


def manifest_line(**changes: Any) -> bytes:
    """Return a manifest as one line; a value of `...` leaves the field out."""
    fields = {**MANIFEST, **changes}
    return json.dumps({k: v for k, v in fields.items() if v is not ...}).encode() + b"\n"


class RawRuntime:
    """A connection to the daemon's socket."""

    def __init__(self, path: Path) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(ANSWER_WITHIN_S)
        self.socket.connect(str(path))
        self.fds: list[int] = []

    def say(self, data: bytes, *fds: int) -> None:
        """Send bytes, with descriptors along the first of them."""
        if fds:
            sent = socket.send_fds(self.socket, [data], list(fds))
            data = data[sent:]
        # The daemon may have refused before it read everything.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.socket.sendall(data)

    def end(self) -> None:
        """Say that no more will come."""
        self.socket.shutdown(socket.SHUT_WR)

    def answer(self) -> dict[str, Any]:
        """Read the daemon's line; its descriptors are in `fds` then."""
        data = b""
        while not data.endswith(b"\n"):
            part, fds, _, _ = socket.recv_fds(self.socket, 65536, 32)
            self.fds += fds
            assert part, f"the daemon closed after {data!r}"
            data += part
        line: dict[str, Any] = json.loads(data)
        return line

    def is_closed(self) -> bool:
        """Whether the daemon ended the connection, without a word more."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True  # It did not read all that was sent.

    def close(self) -> None:
        self.socket.close()
        while self.fds:
            os.close(self.fds.pop())


@contextlib.contextmanager
def raw_runtime(path: Path) -> Iterator[RawRuntime]:
    """Connect, and close at the end."""
    runtime = RawRuntime(path)
    try:
        yield runtime
    finally:
        runtime.close()


def refusal(path: Path, data: bytes, *fds: int) -> str:
    """Say this to the daemon, which has to refuse it, in words, and to close."""
    with raw_runtime(path) as runtime:
        runtime.say(data, *fds)
        runtime.end()
        answer = runtime.answer()
        assert set(answer) == {"error"}, answer
        assert runtime.is_closed()
        assert runtime.fds == []
        words: str = answer["error"]
        return words


class Puppet:
    """An attached runtime in this process that does what a test tells it, and nothing by itself.

    Its heartbeat is a thread of its own, as in every runtime.
    """

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.native = runtime.region.native

    def take(self, count: int = 1) -> list[Taken]:
        """Take so many requests, as they come."""
        taken: list[Taken] = []

        def enough() -> bool:
            taken.extend(self.runtime.take(0))
            return len(taken) >= count

        wait_until(f"{count} requests are ready", enough)
        assert len(taken) == count
        return taken

    def ring(self) -> None:
        """Wake the listener, as emit and finish do."""
        os.eventfd_write(self.native.outputs[0], 1)

    def set_progress(self, taken: Taken, count: int, generations: int = 0) -> None:
        """Write a slot's progress word; `generations` away from the request's own."""
        generation = taken.generation + generations
        self.native.progress[taken.slot] = generation << lib.DP_GENERATION_SHIFT | count
        self.ring()

    def set_state(self, taken: Taken, state: int, generations: int = 0, owner: int = 1) -> None:
        """Write a slot's state word."""
        word = taken.generation + generations << lib.DP_GENERATION_SHIFT
        self.native.states[taken.slot] = word | owner << lib.DP_OWNER_SHIFT | state
        self.ring()

    def finish(self, taken: Taken, reason: int) -> None:
        """Finish with any reason, allowed or not."""
        lib.dp_finish(self.native, taken.slot, taken.generation, reason)


@contextlib.contextmanager
def puppet(daemon: DaemonProcess, **changes: Any) -> Iterator[Puppet]:
    """Attach a puppet until the end of the block; the daemon serves meanwhile."""
    fields = {name: MANIFEST[name] for name in ("slots", "context", "max_output", "vocab_size")}
    manifest = Manifest(model="puppet", **{**fields, **changes})
    with attach(daemon.socket, manifest) as runtime:
        runtime.ready()
        daemon.wait_for_status("ok")
        yield Puppet(runtime)
    daemon.wait_for_status("no runtime")


def serve_one(taken: Taken, ids: list[int]) -> None:
    """Answer one request."""
    taken.emit(ids)
    taken.finish(Finish.STOP)
