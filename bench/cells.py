"""One cell of the comparison: a system in a case, and the ceiling of the generator that loads it.

The rules that hold here: a warm-up comes first, and how fast it went decides how many requests fit
into a round; CPU is read directly before and after each round's requests, on both sides; a row is
the median of its rounds; the collector of this process rests meanwhile.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bench.cases import Case, Limits
from bench.clients import Generator, Outcome
from bench.clients.http1 import request_bytes
from bench.launch import Server, server, spent_s
from bench.results import Row, is_client_bound
from bench.systems import (
    Files,
    Protocol,
    Running,
    System,
    answer_body,
    generator,
    in_flight_words,
    question_of,
)
from dataplane.http3 import Http3, data_frame_header
from dataplane.load.tally import quantiles

_WARM_S = 0.2
_WARM_REQUESTS = 400
_LEAST = 8


class Measured(NamedTuple):
    """What a round came to, on both sides."""

    outcome: Outcome
    server_cpu_s: float
    runtime_cpu_s: float

    @property
    def server_cpu_us(self) -> float:
        """A request."""
        return self.server_cpu_s / self.outcome.requests * 1e6

    @property
    def runtime_cpu_us(self) -> float:
        """A request."""
        return self.runtime_cpu_s / self.outcome.requests * 1e6

    @property
    def client_cpu_us(self) -> float:
        """A request."""
        return self.outcome.cpu_s / self.outcome.requests * 1e6


class Ceiling(NamedTuple):
    """What a generator reached against a server that only answers.

    `rate_per_s` is of both together; whichever is busier bounds it.
    """

    protocol: str
    encoding: str
    tls: bool
    in_flight: str
    case: str
    requests: int
    rate_per_s: float
    client_cpu_us: float
    server_cpu_us: float


@contextlib.contextmanager
def _resting_collector() -> Iterator[None]:
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def warm_up(load: Generator, case: Case) -> float:
    """Load a server for a moment; the rate at which it answered last."""
    batch = max(case.in_flight, _LEAST // 2)
    done, start = 0, time.monotonic()
    while True:
        outcome = load.run(batch)
        done += batch
        if time.monotonic() - start > _WARM_S or done >= _WARM_REQUESTS:
            return batch / outcome.seconds
        batch = min(batch * 2, _WARM_REQUESTS)


def measure(
    load: Generator, child: Server, case: Case, limits: Limits, rate: float | None = None
) -> list[Measured]:
    """Warm up, and load a server for as many rounds, and as long, as the limits say."""
    load.connect()
    with _resting_collector():
        speed = warm_up(load, case)
        requests = max(
            _LEAST, case.in_flight, min(limits.requests, int((rate or speed) * limits.seconds))
        )
        return [_round(load, child, requests, rate) for _ in range(limits.rounds)]


def _round(load: Generator, child: Server, requests: int, rate: float | None) -> Measured:
    before = child.cpu()
    outcome = load.run(requests, rate)
    after = child.cpu()
    return Measured(
        outcome, spent_s(before.all, after.all), spent_s(before.runtimes, after.runtimes)
    )


def measure_row(
    run: Running, case: Case, limits: Limits, ceiling: float | None, rate: float | None = None
) -> Row:
    """Measure a cell.

    Raises:
        WrongAnswerError, UnavailableError, OSError: The system does not do what it should.
    """
    with contextlib.closing(generator(run.system, case, run.port, run.files)) as load:
        rounds = measure(load, run.server, case, limits, rate)
    return row_of(run.system, case, rounds, ceiling, rate)


def row_of(
    system: System,
    case: Case,
    rounds: Sequence[Measured],
    ceiling: float | None,
    rate: float | None = None,
) -> Row:
    """Put a cell together: sums of requests and time, and medians of the rounds' figures."""

    def middle(figure: Callable[[Measured], float], digits: int = 2) -> float:
        return round(statistics.median(map(figure, rounds)), digits)

    def time_at(name: str) -> float:
        return middle(lambda one: quantiles(one.outcome.times_us)[name] or 0.0)

    client_cpu_us = middle(lambda one: one.client_cpu_us)
    if ceiling is None and client_cpu_us:
        ceiling = round(1e6 / client_cpu_us, 1)
    return Row(
        case=case.name,
        system=system.name,
        protocol=str(system.protocol),
        encoding=system.encoding,
        tls=system.tls,
        in_flight=in_flight_words(system, case),
        loop="closed" if rate is None else f"open, {rate:.0f} a second",
        server_cpu_us=middle(lambda one: one.server_cpu_us),
        runtime_cpu_us=middle(lambda one: one.runtime_cpu_us) or None,
        client_cpu_us=client_cpu_us,
        p50_us=time_at("p50"),
        p99_us=time_at("p99"),
        p999_us=time_at("p999"),
        max_us=time_at("max"),
        requests=sum(one.outcome.requests for one in rounds),
        seconds=round(sum(one.outcome.seconds for one in rounds), 3),
        rate_per_s=middle(lambda one: one.outcome.requests / one.outcome.seconds, 1),
        ceiling_rate=ceiling,
        client_bound=is_client_bound(
            middle(lambda one: one.outcome.cpu_s, 6), middle(lambda one: one.server_cpu_s, 6)
        ),
        flags=" ".join(system.variant.flags),
        gso=system.module is None and system.variant.gso,
        verdict_p50_us=_verdict_at(rounds, "p50"),
        verdict_p99_us=_verdict_at(rounds, "p99"),
        rounds_cpu_us=[round(one.server_cpu_us, 2) for one in rounds],
    )


def _verdict_at(rounds: Sequence[Measured], name: str) -> float | None:
    """Return the median of the rounds' quantiles of the verdicts' times; None without verdicts."""
    times = [one.outcome.verdicts_us for one in rounds]
    found = [quantiles(one)[name] or 0 for one in times if one is not None and len(one)]
    return float(statistics.median(found)) if found else None


def null_command(system: System, case: Case, files: Files) -> list[str]:
    """Return what starts the server that answers a peer's requests without doing their work."""
    answer = answer_body(system, case)
    tls = [f"--cert={files.cert}", f"--key={files.key}"] if system.tls else []
    words = ["python", "-m", "bench.null_servers"]
    if system.protocol is Protocol.H1:
        size = len(request_bytes(*question_of(system, case)))
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer)
        return [*words, "h1", f"--request-bytes={size}", f"--answer={(head + answer).hex()}", *tls]
    if system.protocol is Protocol.H2:
        return [*words, "h2", f"--answer={answer.hex()}", *tls]
    head = Http3(is_client=False).encode_headers(0, [(b":status", b"200")])
    answer = head + data_frame_header(len(answer)) + answer
    return [*words, "h3", f"--answer={answer.hex()}", *tls]


def measure_ceiling(system: System, case: Case, limits: Limits, files: Files) -> Ceiling:
    """Measure what loads a peer against a server that only answers."""
    with server(null_command(system, case, files)) as child:
        port = int(child.wait_output(r"(?m)^(\d+)$")[1])
        with contextlib.closing(generator(system, case, port, files)) as load:
            (measured,) = measure(load, child, case, limits)
    outcome, count = measured.outcome, measured.outcome.requests
    return Ceiling(
        str(system.protocol),
        system.encoding,
        system.tls,
        in_flight_words(system, case),
        case.name,
        count,
        round(count / outcome.seconds, 1),
        round(measured.client_cpu_us, 2),
        round(measured.server_cpu_us, 2),
    )
