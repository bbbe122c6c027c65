"""One request at a time, asleep and busy-polling, above a null server: `python -m bench.latency`.

128 tokens over `prompt/1`, one request in flight, daemon and client on a core each; the same with
`--busy-poll` on both sides, in which case both spin. The null server (`null_udp.c`) answers
datagrams of the same sizes in the same two ways, in the same run, round after round with the
daemon. The rules that hold here: a figure is the median of the rounds' own; *spread* is p99 - p50,
what the machine and the server put on some requests and not on others.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from bench import null_udp
from bench.daemons import answered, daemon, load
from bench.measure import CLIENT_CORE
from bench.noqueue.alone import main
from bench.noqueue.cores import on_core
from bench.results import Form, Progress
from bench.tables import aligned, number
from dataplane.load.tally import quantiles
from dataplane.prompt1 import END_MARK_BYTES, TRAILER_BYTES, VERDICT_BYTES, Request, encode_request

TOKENS = 128
DAEMON, NULL = "dataplane raw", "null UDP server"
_SEAL = 1 + 8 + 4 + 16
"""About what a QUIC packet adds: its header and its tag."""
REQUEST_BYTES = len(encode_request(Request(TOKENS))) + 4 * TOKENS + _SEAL
REPLY_BYTES = VERDICT_BYTES + len(END_MARK_BYTES) + TRAILER_BYTES + _SEAL
_ROUNDS = {Form.QUICK: 3, Form.FULL: 9}
_REQUESTS = {Form.QUICK: 10_000, Form.FULL: 100_000}
_WARM = 1000

Times = npt.NDArray[np.float64]


def summary(what: str, busy_poll: bool, rounds: Sequence[Times]) -> dict[str, Any]:
    """Return a row: the medians of the rounds' p50, p99 and spread."""
    each = [_quantiles_us(times) for times in rounds]

    def middle(name: str) -> float:
        return round(statistics.median(one[name] for one in each), 2)

    spreads = [one["p99"] - one["p50"] for one in each]
    return {
        "system": what,
        "busy_poll": busy_poll,
        "p50_us": middle("p50"),
        "p99_us": middle("p99"),
        "p999_us": middle("p999"),
        "spread_us": round(statistics.median(spreads), 2),
        "rounds_p50_us": [one["p50"] for one in each],
        "rounds_p99_us": [one["p99"] for one in each],
    }


def _quantiles_us(times: Times) -> dict[str, float]:
    """Return the quantiles to the nanosecond: some here are a few microseconds."""
    return {name: (value or 0) / 1000 for name, value in quantiles(times * 1000).items()}


def _ask_daemon(requests: int, busy_poll: bool) -> Times:
    """Start a daemon and take the times of its verdicts."""
    with (
        daemon(*(["--busy-poll"] * busy_poll)) as served,
        load(served, TOKENS, busy_poll=busy_poll) as made,
    ):
        made.run(_WARM, 1)
        return answered(made.run(requests, 1)).verdicts_us


def _ask_null(program: Path, requests: int, busy_poll: bool) -> Times:
    with null_udp.serving(program, REPLY_BYTES, not busy_poll) as port:
        null_udp.ask(program, port, _WARM, REQUEST_BYTES, not busy_poll)
        return null_udp.ask(program, port, requests, REQUEST_BYTES, not busy_poll)


def run(form: Form, progress: Progress) -> dict[str, Any]:
    """Measure all four, round after round."""
    requests, rounds = _REQUESTS[form], _ROUNDS[form]
    taken: dict[tuple[str, bool], list[Times]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-") as directory, on_core(CLIENT_CORE):
        program = null_udp.compile_into(Path(directory))
        for count in range(rounds):
            for busy_poll in (False, True):
                progress(f"round {count + 1} of {rounds}, {'spinning' if busy_poll else 'asleep'}")
                null = _ask_null(program, requests, busy_poll)
                taken.setdefault((NULL, busy_poll), []).append(null)
                own = _ask_daemon(requests, busy_poll)
                taken.setdefault((DAEMON, busy_poll), []).append(own)
    return {
        "command": "python -m bench.latency" + " --full" * (form is Form.FULL),
        "tokens": TOKENS,
        "requests": requests,
        "rounds": rounds,
        "bytes": {"request": REQUEST_BYTES, "reply": REPLY_BYTES},
        "rows": [summary(*key, times) for key, times in taken.items()],
    }


def row_of(result: dict[str, Any], what: str, busy_poll: bool) -> dict[str, Any]:
    """Return one of the rows.

    Raises:
        LookupError: It is not there.
    """
    for row in result["rows"]:
        if (row["system"], row["busy_poll"]) == (what, busy_poll):
            found: dict[str, Any] = row
            return found
    raise LookupError(what)


def lines(result: dict[str, Any]) -> list[str]:
    """Return the result as a table."""
    head = ("one request at a time, µs", "", "p50", "p99", "p99.9", "p99 - p50")
    rows = [
        (
            row["system"],
            "busy-polling" if row["busy_poll"] else "sleeping",
            *(number(row[f"{name}_us"]) for name in ("p50", "p99", "p999", "spread")),
        )
        for row in result["rows"]
    ]
    return aligned([head, *rows])


if __name__ == "__main__":
    sys.exit(main(run, lines))
