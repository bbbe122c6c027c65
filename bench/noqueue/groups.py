"""One group of the published method: the system up, warmed, loaded, and what it came to.

What the server says stands beside what the client can bound, and neither is worked into the other.
"""

import itertools
import re
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

from bench.measure import CLIENT_CORE
from bench.noqueue import figures
from bench.noqueue.cores import on_core
from bench.noqueue.engine import Costs
from bench.noqueue.exchange import End, Exchange
from bench.noqueue.generator import Client, Generator, Run
from bench.noqueue.shape import Shape, moments
from bench.noqueue.systems import DATAPLANE, Starter, System, get, spent
from bench.results import Progress

PROBES = 50
_PROBE_GAP_NS = 10_000_000
_PROBE_PATIENCE_S = 5.0
_WARM_UP = 16
_SAMPLE_NS = 250_000_000
_TELL_S = 3.0
_WINDOWS_S = (10, 60, 300)
_NS = 1_000_000_000

# How each system accounts for a request's wait, and what of it comes with the answer.
SAID = {
    DATAPLANE: ("queue", "ingress"),
}
_SAID_OTHERWISE = ("queue", "pickup")


class Ticker:
    """Tells every few seconds how far a run is."""

    def __init__(self, progress: Progress, what: str, total: int | None = None) -> None:
        self._progress = progress
        self._what = what
        self._total = f" of {total}" if total is not None else ""
        self._ended = 0
        self._due = 0.0

    def __call__(self, exchange: Exchange) -> bool:
        self._ended += 1
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + _TELL_S
            self._progress(f"{self._what}: {self._ended}{self._total} requests")
        return False


class Memory:
    """The resident memory of a system, looked at now and then."""

    def __init__(self, system: System) -> None:
        self._system = system
        self.ready = self.peak = system.rss_bytes()

    def look(self) -> None:
        self.peak = max(self.peak, self._system.rss_bytes())

    def hooks(self, seconds: float) -> Iterable[tuple[int, Callable[[], None]]]:
        """Return the looks of a run of so many seconds."""
        looks = int(seconds * _NS) // _SAMPLE_NS
        return [(number * _SAMPLE_NS, self.look) for number in range(1, looks + 1)]


def client_of(system: System, shape: Shape, retries: bool = False) -> Client:
    """Return the clients that ask for what the shape says."""
    return Client(system.payload, shape.max_output, shape.patience_s, retries)


def measure_path(generator: Generator, system: System) -> list[int]:
    """Return the times of the way there and back, without an engine, at rest."""
    client = Client(system.probe, 0, _PROBE_PATIENCE_S)
    run = generator.run((i * _PROBE_GAP_NS for i in range(PROBES)), client)
    if any(one.status != 400 for one in run.exchanges):
        raise RuntimeError(f"a bad request was answered with {run.exchanges[0].status}")
    return sorted(one.end_ns - one.sent_ns for one in run.exchanges)


def warm_up(generator: Generator, system: System, shape: Shape) -> None:
    """Have each code path run once before anything is measured."""
    offsets = itertools.islice(moments(shape.rate, shape.gaps_ms, seed=0), _WARM_UP)
    generator.run(offsets, client_of(system, shape))


def measure(
    starter: Starter, shape: Shape, costs: Costs, progress: Progress, retries: bool = False
) -> dict[str, Any]:
    """Run one group.

    Args:
        starter: Starts the system.
        shape: What is asked of it.
        costs: The engine's.
        progress: Is told how far it is.
        retries: Whether clients that are refused try again.
    """
    progress("starting")
    with starter(shape, costs) as system, on_core(CLIENT_CORE):
        memory = Memory(system)
        title = system.name + (", clients retry" if retries else "")
        with Generator(system.wire()) as generator:
            path_ns = measure_path(generator, system)
            warm_up(generator, system, shape)
            pickup = _pickup_total(system)
            before = system.cpu()
            seconds = shape.requests / shape.rate
            run = generator.run(
                itertools.islice(moments(shape.rate, shape.gaps_ms), shape.requests),
                client_of(system, shape, retries),
                memory.hooks(seconds * 2),
                Ticker(progress, title, shape.requests),
            )
            taken_s = spent(before, system.cpu())
        return {
            "group": title,
            **_client_side(run),
            "server_says": _server_side(system, run, pickup),
            "client_bounds": _bounds(system, run, costs, shape, path_ns, pickup),
            "memory": {
                "slots_bytes": system.region_bytes,
                "rss_ready_bytes": memory.ready,
                "rss_growth_bytes": memory.peak - memory.ready,
            },
            "cpu": cpu(taken_s, run),
            "generator": generator_share(run),
            "commands": system.commands,
        }


def _client_side(run: Run) -> dict[str, Any]:
    exchanges = run.exchanges
    first_ms = figures.first_tokens_ms(exchanges)
    answered = [one for one in exchanges if one.end is End.ANSWERED]
    return {
        **figures.ends(exchanges),
        "seconds": round(run.seconds, 3),
        "first_token_ms": figures.spread(first_ms),
        "first_token_curve_ms": figures.curve(first_ms),
        "verdict_ms": figures.spread(figures.verdicts_ms(exchanges)),
        "refusal_ms": figures.spread(figures.verdicts_ms(exchanges, End.REFUSED)),
        "total_ms": figures.spread((one.end_ns - one.due_ns) / 1e6 for one in answered),
    }


def cpu(taken_s: dict[str, float], run: Run) -> dict[str, Any]:
    """Return each process's CPU a request and the share of the core that all take."""
    requests = len(run.exchanges)
    return {
        "us_per_request": {
            name: round(taken * 1e6 / requests, 1) for name, taken in taken_s.items()
        },
        "core_share": round(sum(taken_s.values()) / run.seconds, 4),
    }


def generator_share(run: Run) -> dict[str, Any]:
    """Return how late the generator was, and how busy: what it may have added itself."""
    return {
        "late_ms": figures.spread(ns / 1e6 for ns in run.late_ns),
        "core_share": round(run.cpu_s / run.seconds, 4),
    }


# ---------------------------------------------------------------- what the server says


class _Total:
    """A series since the daemon's start."""

    def __init__(self, seconds: float, count: int) -> None:
        self.seconds = seconds
        self.count = count


def _pickup_total(system: System) -> _Total | None:
    """Read the daemon's pickups so far; None for other systems."""
    if system.admin is None:
        return None
    text = get(system.admin, "/metrics")[1].decode()
    found = dict(re.findall(r"^dataplane_pickup_seconds_(sum|count) (\S+)$", text, re.MULTILINE))
    return _Total(float(found["sum"]), int(found["count"]))


def _mean_pickup_us(system: System, before: _Total | None) -> float | None:
    now = _pickup_total(system)
    if now is None or before is None or now.count == before.count:
        return None
    return (now.seconds - before.seconds) * 1e6 / (now.count - before.count)


def _server_side(system: System, run: Run, pickup: _Total | None) -> dict[str, Any]:
    """Return the server's own figures, and where they come from."""
    exchanges = run.exchanges
    said: dict[str, Any] = {"queue_us": figures.says(exchanges, "queue")}
    if system.name == DATAPLANE:
        window = next((one for one in _WINDOWS_S if one >= run.seconds), _WINDOWS_S[-1])
        page = system.page(f"/health?latency99&window={window}")
        said["ingress_us"] = figures.says(exchanges, "ingress")
        p50, p99 = (float(page["pickup"][name]) for name in ("p50", "p99"))
        said["pickup_us"] = {
            "p50": p50, "p99": p99, "p99_minus_p50": p99 - p50, "max": float(page["pickup"]["max"])
        }  # fmt: skip
        said["pickup_window_s"] = window
        said["pickup_mean_us"] = _rounded(_mean_pickup_us(system, pickup))
    else:
        said["pickup_us"] = figures.says(exchanges, "pickup")
    return said


# ---------------------------------------------------------------- what the client can bound


def _bounds(
    system: System,
    run: Run,
    costs: Costs,
    shape: Shape,
    path_ns: list[int],
    pickup: _Total | None,
) -> dict[str, Any]:
    """Return the client's bounds, and what of the wait the server does not account for."""
    wait = figures.Wait(run.exchanges, costs, shape.prompt, round(figures.quantile(path_ns, 0.99)))
    names = SAID.get(system.name, _SAID_OTHERWISE)
    said_us = [sum(one.says_us.get(name, 0) for name in names) for one in wait.exchanges]
    result: dict[str, Any] = {
        "path_ms": figures.spread(ns / 1e6 for ns in path_ns),
        "decision_upper_ms": figures.spread(
            (one.verdict_ns - one.sent_ns) / 1e6 for one in run.exchanges if one.verdict_ns
        ),
        "wait": wait.described(),
    }
    if wait.exchanges:
        said_mean_us = statistics.fmean(said_us) + (_mean_pickup_us(system, pickup) or 0.0)
        result["said_mean_ms"] = round(said_mean_us / 1e3, 3)
        result["unsaid_mean_ms"] = {
            name: round(statistics.fmean(bound_ns) / 1e6 - said_mean_us / 1e3, 3)
            for name, bound_ns in (("lower", wait.lower_ns), ("upper", wait.upper_ns))
        }
    # The daemon's raw protocol carries no pickup, so for it there is the mean alone.
    result["unsaid_ms"] = None if system.name == DATAPLANE else wait.unsaid_ms(names)
    return result


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)
