"""A daemon on the server's core, for the sections: started, attached to, filled and loaded."""

import contextlib
import http.client
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench import work
from bench.launch import LaunchError, Server, server
from bench.measure import CLIENT_CORE
from dataplane.cli.demo import parse_ready
from dataplane.kinds import Address, parse_address
from dataplane.load import Load
from dataplane.load import Server as Target
from dataplane.load.tally import Outcome
from dataplane.load.wire import dialogues

AUTHORITY = "localhost"
CONTEXT = 4096
ENGINES: dict[str, tuple[str, ...]] = {"pump": (), "no pump": ("--no-pump",)}
"""What runs the packets, and the flags of `serve` that choose it."""
_READY_WITHIN_S = 30.0


class Daemon(NamedTuple):
    """A daemon that runs."""

    child: Server
    quic: Address
    admin: Address
    ca: Path
    socket: Path

    @property
    def target(self) -> Target:
        """Where a load goes."""
        return Target(self.quic, self.ca.read_bytes())

    def cpu_s(self) -> float:
        """Return what it and its children have used so far."""
        return sum(self.child.cpu().all.values()) / 1e9


@contextlib.contextmanager
def daemon(
    *flags: str, runtime: str = "null", slots: int = 64, context: int = CONTEXT
) -> Iterator[Daemon]:
    """Serve until the block ends.

    Raises:
        LaunchError: It does not start.
    """
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        socket = Path(directory) / "runtime.sock"
        command = [
            "python", "-m", "dataplane", "serve", f"--runtime={runtime}", "--listen=localhost:0",
            "--admin=localhost:0", f"--state-dir={directory}", f"--socket={socket}",
            f"--max-writing={slots}", "--drain-timeout=0.2",
        ]  # fmt: skip
        if runtime != "none":
            command += [f"--slots={slots}", f"--context={context}"]
        with server([*command, *flags]) as child:
            ready = parse_ready(child.wait_output(r"(?m)^ready .*$")[0])
            assert ready is not None
            yield Daemon(child, parse_address(ready.quic), ready.admin, ready.ca, socket)


@contextlib.contextmanager
def attached(
    served: Daemon, slots: int, *, hold: bool = False, tokenizer: Path | None = None
) -> Iterator[Server]:
    """Attach `bench.plain_runtime` on the server's core, until the block ends."""
    command = ["python", "-m", "bench.plain_runtime", f"--socket={served.socket}"]
    command += [f"--slots={slots}", f"--context={CONTEXT}"]
    command += ["--hold"] * hold
    command += [f"--tokenizer={tokenizer}"] * (tokenizer is not None)
    with server(command) as child:
        child.wait_output("ready")
        _wait_ready(served.admin)
        yield child


def _wait_ready(admin: Address) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while page(admin, "/readyz")[0] != http.HTTPStatus.OK:
        if time.monotonic() > deadline:
            raise LaunchError(f"the daemon was not ready within {_READY_WITHIN_S:g} s")
        time.sleep(0.02)


def page(admin: Address, target: str) -> tuple[int, bytes]:
    """Return status and body of a page of the admin port."""
    connection = http.client.HTTPConnection(*admin, timeout=5)
    try:
        connection.request("GET", target)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


@contextlib.contextmanager
def holding(served: Daemon, slots: int, *, whole: bool) -> Iterator[None]:
    """Have every slot taken while the block runs.

    Args:
        served: By whom.
        slots: How many it has.
        whole: Whether the requests are complete, for a runtime to hold; else they stay in WRITING.
    """
    command = ["python", "-m", "bench.holder", f"--port={served.quic[1]}", f"--ca={served.ca}"]
    command += [f"--slots={slots}", *(["--whole"] * whole)]
    with server(command, CLIENT_CORE) as child:
        child.wait_output("held")
        yield


@contextlib.contextmanager
def load(
    served: Daemon,
    tokens: int = 128,
    connections: int = 1,
    output: int = 1,
    *,
    busy_poll: bool = False,
) -> Iterator[Load]:
    """Connect the native generator of `prompt/1`."""
    ids = work.binary_body([number % 1000 for number in range(tokens)])
    alpn, dialogue = dialogues("raw", AUTHORITY, ids, output)
    with Load(served.target, alpn, dialogue, connections, busy_poll=busy_poll) as made:
        made.connect()
        yield made


def answered(outcome: Outcome, status: int = 200) -> Outcome:
    """Pass an outcome on in which every answer has this status.

    Raises:
        RuntimeError: One has not.
    """
    if outcome.by_status != {str(status): outcome.requests}:
        raise RuntimeError(f"not every answer was {status}: {outcome.by_status}")
    return outcome


def requests_for(seconds: float, outcome: Outcome, least: int = 100) -> int:
    """Return how many requests take so long at the speed of an earlier run."""
    return max(least, round(seconds * outcome.requests / outcome.seconds))


def threads_named(cpu: dict[tuple[int, int], int], name: str) -> set[tuple[int, int]]:
    """Return those threads that carry a name."""
    found = set()
    for process, thread in cpu:
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{process}/task/{thread}/comm").read_text(encoding="ascii")
            if re.fullmatch(name, text.strip()):
                found.add((process, thread))
    return found
