"""What a run of the benches leaves behind: where and with what it was measured, and the figures.

A figure without its machine, versions and commands is worth nothing a month later, so they stand in
the same file. The rules that hold here: nothing is written until the run is over, a file appears
whole or not at all, and an earlier day's or run's file is never overwritten (`latest.json` is).
"""

import datetime
import importlib.metadata
import json
import os
import platform
import ssl
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).resolve().parent / "results"
LATEST = "latest.json"

# fmt: off
PACKAGES = (
    "aioquic", "cryptography", "cupy-cuda12x", "cupy-cuda13x", "fastapi", "granian", "httptools",
    "hypercorn", "numpy", "orjson", "pydantic", "pylsqpack", "pyzmq", "starlette", "uvicorn",
    "uvloop",
)
# fmt: on


class Form(StrEnum):
    """How much is measured: in minutes, or thoroughly."""

    QUICK = "quick"
    FULL = "full"


Progress = Callable[[str], None]
"""Says in one line what is being done; the next line takes its place."""

Section = Callable[[Form, Progress], dict[str, Any]]
"""A part of `make bench` besides the rows; what it returns stands under `sections`."""


@dataclass(frozen=True, slots=True)
class Row:
    """One system in one case.

    Attributes:
        case: `<ids>-s<streams on one connection>`, `<ids>-c<connections>`, or an own name.
        system: Whose figures these are.
        protocol, encoding, tls: What it speaks.
        in_flight: How the case's number was made: the connections, and the requests on each.
        loop: `closed` (so many in flight) or `open` (so many a second; times count from when a
            request was due, so that what waits for a slow server shows: coordinated omission).
        server_cpu_us: CPU a request of all its processes, by the scheduler's account.
        runtime_cpu_us: Of that, what a runtime beside the server took; None where there is none.
        client_cpu_us: The generator's own CPU a request.
        p50_us, p99_us, p999_us, max_us: From sending a request to having its whole answer.
        rate_per_s: Requests answered a second.
        ceiling_rate: How many requests a second the generator could make: what its own CPU a
            request allows a core, or for peers in the full form, what it reached against a server
            that only answers. (Such a server is in Python, and slower than the native generator.)
        client_bound: The generator was busier than the server: its latencies are the generator's.
        flags: What the daemon was started with besides; empty for peers.
        gso: Whether the generator sent batches that the kernel cuts into datagrams.
        verdict_p50_us, verdict_p99_us: To the verdict; None for a peer.
        rounds_cpu_us: Server CPU of each round. Every other figure is the median of the rounds'
            own, `requests` and `seconds` are their sums.
    """

    case: str
    system: str
    protocol: str
    encoding: str
    tls: bool
    in_flight: str
    loop: str
    server_cpu_us: float
    runtime_cpu_us: float | None
    client_cpu_us: float
    p50_us: float
    p99_us: float
    p999_us: float
    max_us: float
    requests: int
    seconds: float
    rate_per_s: float
    ceiling_rate: float | None
    client_bound: bool
    flags: str = ""
    gso: bool = False
    verdict_p50_us: float | None = None
    verdict_p99_us: float | None = None
    rounds_cpu_us: list[float] = field(default_factory=list)


def is_client_bound(client_cpu_s: float, server_cpu_s: float) -> bool:
    """Whether over the same time the generator took more of its core than the server of its."""
    return client_cpu_s > server_cpu_s


def machine() -> dict[str, Any]:
    """Return what a reader has to know of the machine; no names and no addresses."""
    cpu = _first("/proc/cpuinfo", "model name")
    memory = _first("/proc/meminfo", "MemTotal")
    flags = _first("/proc/cpuinfo", "flags").split()
    return {
        "cpu": cpu or platform.machine(),
        "cores": os.cpu_count(),
        "memory_gib": round(int(memory.split()[0]) / 2**20, 1) if memory else None,
        "virtual": "hypervisor" in flags,
        "load_1m": round(os.getloadavg()[0], 2),
    }


def _first(path: str, key: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name.strip() == key:
                    return value.strip()
    except OSError:
        pass
    return ""


def versions() -> dict[str, str]:
    """Return what was measured with, as far as it is installed."""
    found = {"python": platform.python_version(), "openssl": ssl.OPENSSL_VERSION}
    for name in ("dataplane", *PACKAGES):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """Return the commit that was measured, with `+` behind it when files differ from it."""
    try:
        head = _git("rev-parse", "HEAD")
        return head + ("+" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True, timeout=30
    )
    return done.stdout.strip()


def document(
    form: Form,
    only: Sequence[str],
    commands: dict[str, str],
    rows: Sequence[Row],
    ceilings: Sequence[dict[str, Any]],
    sections: dict[str, Any],
    failures: Sequence[str],
) -> dict[str, Any]:
    """Put a run together."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "form": str(form),
        "only": list(only),
        "command": bench_command(form, only),
        "commit": commit(),
        "machine": machine(),
        "kernel": platform.release(),
        "versions": versions(),
        "commands": commands,
        "rows": [asdict(row) for row in rows],
        "ceilings": list(ceilings),
        "sections": sections,
        "failures": list(failures),
    }


def bench_command(form: Form, only: Sequence[str]) -> str:
    """Return what to type for the same again."""
    words = ["make", "bench"]
    if form is Form.FULL:
        words.append("BENCH=full")
    if only:
        words.append(f"ONLY={','.join(only)}")
    return " ".join(words)


def write(result: dict[str, Any], directory: Path = RESULTS) -> Path:
    """Write `<date>.json`, or `<date>-2.json` where that is taken, and `latest.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(result, indent=1, ensure_ascii=False) + "\n"
    day = result["date"][:10]
    path = directory / f"{day}.json"
    count = 1
    while path.exists():
        count += 1
        path = directory / f"{day}-{count}.json"
    for target in (path, directory / LATEST):
        part = target.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(target)
    return path


def read_latest(directory: Path = RESULTS) -> dict[str, Any]:
    """Return the newest run."""
    with open(directory / LATEST, encoding="utf-8") as file:
        result: dict[str, Any] = json.load(file)
    return result
