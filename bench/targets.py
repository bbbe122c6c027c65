"""What a run has to reach, and whether it did.

Each target is one figure of a run, a ratio of figures of the same run wherever another system is in
it, and a bound. What was not measured is neither met nor missed.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from bench import latency
from bench.tables import aligned, number

RAW, H3, NO_GSO = "dataplane raw", "dataplane h3", "dataplane raw no-gso"
OWN = "dataplane"
STREAMS, CONNECTIONS, UPLOAD = "128-s32", "128-c32", "131072-c1"

Row = Mapping[str, Any]


class Figures:
    """A run's figures by what they are of; `LookupError` for what is not there."""

    def __init__(self, result: Mapping[str, Any]) -> None:
        self._rows: list[Row] = result["rows"]
        self._sections: Mapping[str, Any] = result["sections"]

    def cpu_us(self, system: str, case: str) -> float:
        """Return a system's server CPU a request in a case."""
        for row in self._rows:
            if (row["system"], row["case"]) == (system, case):
                return float(row["server_cpu_us"])
        raise LookupError(f"{system}, {case}")

    def cheapest_peer_us(self, case: str, wanted: Callable[[Row], bool] | None = None) -> float:
        """Return the least server CPU of the peers that are wanted."""
        found = [
            float(row["server_cpu_us"])
            for row in self._rows
            if row["case"] == case and OWN not in row["system"] and (not wanted or wanted(row))
        ]
        if not found:
            raise LookupError(f"peers, {case}")
        return min(found)

    def section(self, name: str) -> Mapping[str, Any]:
        """Return what a section found."""
        found: Mapping[str, Any] = self._sections[name]
        if "error" in found:
            raise LookupError(name)
        return found


class Target(NamedTuple):
    """One of them: the figure has to be at most the bound, or at least."""

    name: str
    figure: Callable[[Figures], float]
    bound: float
    unit: str = ""
    at_least: bool = False


def _is_plain_binary(row: Row) -> bool:
    return not row["tls"] and row["encoding"] == "binary"


def _advantage(peer: Callable[[Figures], float]) -> Callable[[Figures], float]:
    """How many times as much a peer takes as the daemon over `prompt/1`, 128 tokens, 32 streams."""
    return lambda of: peer(of) / of.cpu_us(RAW, STREAMS)


def _spread_ratio(of: Figures) -> float:
    found = dict(of.section("latency"))
    null = latency.row_of(found, latency.NULL, busy_poll=True)["spread_us"]
    return float(latency.row_of(found, latency.DAEMON, busy_poll=True)["spread_us"] / null)


def _busy_p50(of: Figures) -> float:
    return float(
        latency.row_of(dict(of.section("latency")), latency.DAEMON, busy_poll=True)["p50_us"]
    )


def _upload_over(wanted: Callable[[Row], bool]) -> Callable[[Figures], float]:
    return lambda of: of.cpu_us(RAW, UPLOAD) / of.cheapest_peer_us(UPLOAD, wanted)


TARGETS = (
    Target("raw 128-s32, server CPU a request", lambda of: of.cpu_us(RAW, STREAMS), 5.0, "µs"),
    Target("raw 128-c32, server CPU a request", lambda of: of.cpu_us(RAW, CONNECTIONS), 7.0, "µs"),
    Target(
        "128-s32: uvicorn + FastAPI with JSON, over raw",
        _advantage(lambda of: of.cpu_us("fastapi json", STREAMS)),
        25.0,
        at_least=True,
    ),
    Target(
        "128-s32: bare uvicorn with a binary body, over raw",
        _advantage(lambda of: of.cpu_us("uvicorn binary", STREAMS)),
        5.0,
        at_least=True,
    ),
    Target(
        "128-s32: the fastest peer, over raw",
        _advantage(lambda of: of.cheapest_peer_us(STREAMS)),
        3.0,
        at_least=True,
    ),
    Target("h3 128-s32, server CPU a request", lambda of: of.cpu_us(H3, STREAMS), 15.0, "µs"),
    Target("raw 128-c1 busy-polling, verdict p50", _busy_p50, 25.0, "µs"),
    Target("the same, p99 - p50, over the null server's", _spread_ratio, 2.0),
    Target(
        "raw 131072-c1, GSO sender, server CPU",
        lambda of: of.cpu_us(RAW, UPLOAD) / 1000,
        0.55,
        "ms",
    ),
    Target(
        "the same, over the fastest peer's upload with TLS",
        _upload_over(lambda row: row["tls"]),
        1.0,
    ),
    Target(
        "the same, over the fastest binary upload on plain TCP", _upload_over(_is_plain_binary), 4.0
    ),
    Target(
        "raw 131072-c1, sender without GSO, server CPU",
        lambda of: of.cpu_us(NO_GSO, UPLOAD) / 1000,
        1.3,
        "ms",
    ),
    Target(
        "a refusal's CPU, over an admission's",
        lambda of: float(of.section("refusals")["ratio"]),
        1.0,
    ),
    Target(
        "goodput at 10x, of its peak",
        lambda of: 100 * float(of.section("goodput")["engines"]["pump"]["last_of_peak"]),
        95.0,
        "%",
        at_least=True,
    ),
    Target(
        "memory a connection besides aioquic's own",
        lambda of: float(of.section("memory")["pump_bytes"]) / 1024,
        16.0,
        "KiB",
    ),
)


def judged(result: Mapping[str, Any], targets: Iterable[Target] = TARGETS) -> list[dict[str, Any]]:
    """Return each target with its figure and whether it is met; None for what was not measured."""
    of = Figures(result)
    found = []
    for target in targets:
        value = _figure(target, of)
        found.append(
            {
                "name": target.name,
                "value": value,
                "unit": target.unit,
                "bound": target.bound,
                "at_least": target.at_least,
                "met": None if value is None else _is_met(target, value),
            }
        )
    return found


def _figure(target: Target, of: Figures) -> float | None:
    try:
        return round(target.figure(of), 3)
    except (LookupError, ZeroDivisionError):
        return None


def _is_met(target: Target, value: float) -> bool:
    return value >= target.bound if target.at_least else value <= target.bound


def lines(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return what was judged as a table."""
    words = {True: "met", False: "**missed**", None: "not measured"}
    rows = [
        (
            one["name"],
            _with_unit(one["value"], one["unit"]),
            ("at least " if one["at_least"] else "at most ")
            + f"{one['bound']:g} {one['unit']}".strip(),
            words[one["met"]],
        )
        for one in found
    ]
    return aligned([("what is to be reached", "measured", "target", ""), *rows])


def _with_unit(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    return f"{number(value, 0 if value >= 100 else 2)} {unit}".strip()
