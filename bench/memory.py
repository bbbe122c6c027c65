"""What a connection takes: `python -m bench.memory`.

The daemon's resident memory, what it shares left out, with none, 200 and 1000 connections that are
open and have each asked once; with the packet pump, and on aioquic alone. A connection's bytes are
the difference between the last two, so that what is loaded with the first ones does not count. The
pump's own are those with it less those without: aioquic keeps each connection's control plane in
both.
"""

import contextlib
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.daemons import ENGINES, Daemon, answered, daemon, load
from bench.launch import family_of
from bench.measure import CLIENT_CORE, rss_bytes
from bench.noqueue.alone import main
from bench.noqueue.cores import on_core
from bench.results import Form, Progress
from bench.tables import aligned, number

STEPS = (200, 1000)
_FLAGS = ("--max-connections=2048", "--idle-timeout=600")
_SETTLE_S = 0.5
_SPARE_FILES = 256


def per_connection(bytes_at: Mapping[int, int]) -> float:
    """Return the bytes that each connection adds between the last two steps."""
    first, last = sorted(bytes_at)[-2:]
    return (bytes_at[last] - bytes_at[first]) / (last - first)


def _rss(served: Daemon) -> int:
    time.sleep(_SETTLE_S)
    members = {pid for pid, _ in served.child.cpu().all}
    return sum(rss_bytes(pid) for pid in members if family_of(pid))


def _measure(name: str, flags: Sequence[str], progress: Progress) -> dict[str, Any]:
    with (
        daemon(*_FLAGS, *flags) as served,
        on_core(CLIENT_CORE),
        contextlib.ExitStack() as stack,
    ):
        bytes_at, open_now = {0: _rss(served)}, 0
        for count in STEPS:
            progress(f"{name}: {count} connections")
            made = stack.enter_context(load(served, connections=count - open_now))
            answered(made.run(count - open_now, 1))
            bytes_at[count] = _rss(served)
            open_now = count
    return {
        "rss_bytes": {str(count): found for count, found in bytes_at.items()},
        "per_connection_bytes": round(per_connection(bytes_at)),
    }


@contextlib.contextmanager
def _more_files() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = STEPS[-1] + _SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def run(form: Form, progress: Progress) -> dict[str, Any]:
    """Measure with the pump and without."""
    with _more_files():
        engines = {name: _measure(name, flags, progress) for name, flags in ENGINES.items()}
    with_pump, without = (engines[name]["per_connection_bytes"] for name in ENGINES)
    return {
        "command": "python -m bench.memory" + " --full" * (form is Form.FULL),
        "engines": engines,
        "pump_bytes": with_pump - without,
    }


def lines(result: Mapping[str, Any]) -> list[str]:
    """Return the result as a table."""
    counts = list(next(iter(result["engines"].values()))["rss_bytes"])
    head = ("engine", *(f"{count} connections, MiB" for count in counts), "KiB a connection")
    rows = [
        (
            name,
            *(number(found / 2**20) for found in engine["rss_bytes"].values()),
            number(engine["per_connection_bytes"] / 1024),
        )
        for name, engine in result["engines"].items()
    ]
    own = f"The pump's own: {result['pump_bytes'] / 1024:.1f} KiB a connection."
    return [*aligned([head, *rows]), "", own]


if __name__ == "__main__":
    sys.exit(main(run, lines))
