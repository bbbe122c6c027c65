"""One cell of the comparison: a system in a case, and the ceiling of the generator that loads it.

The rules that hold here: a warm-up comes first, and how fast it went decides how many requests fit
into the time; CPU is read directly before and after the measured requests, on both sides; the
collector of this process rests meanwhile.
"""

import contextlib
import gc
import time
from collections.abc import Iterator
from typing import NamedTuple

from bench import work
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
from dataplane.prompt1 import ALPN, encode_end, encode_verdict
from dataplane.runtime import Finish

_WARM_S = 0.3
_WARM_REQUESTS = 400
_LEAST = 8


class Measured(NamedTuple):
    """What a run came to, on both sides."""

    outcome: Outcome
    server_cpu_s: float
    runtime_cpu_s: float


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
) -> Measured:
    """Warm up, and load a server for as long as the limits say."""
    load.connect()
    with _resting_collector():
        speed = rate or warm_up(load, case)
        if rate:
            warm_up(load, case)
        requests = max(_LEAST, case.in_flight, min(limits.requests, int(speed * limits.seconds)))
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
    system = run.system
    with contextlib.closing(generator(system, case, run.port, run.files)) as load:
        measured = measure(load, run.server, case, limits, rate)
    outcome, count = measured.outcome, measured.outcome.requests
    times = {name: float(value or 0) for name, value in quantiles(outcome.times_us).items()}
    runtime_us = round(measured.runtime_cpu_s / count * 1e6, 2)
    return Row(
        case=case.name,
        system=system.name,
        protocol=str(system.protocol),
        encoding=system.encoding,
        tls=system.tls,
        in_flight=in_flight_words(system, case),
        loop="closed" if rate is None else f"open, {rate:.0f} a second",
        server_cpu_us=round(measured.server_cpu_s / count * 1e6, 2),
        runtime_cpu_us=runtime_us or None,
        client_cpu_us=round(outcome.cpu_s / count * 1e6, 2),
        p50_us=times["p50"],
        p99_us=times["p99"],
        p999_us=times["p999"],
        max_us=times["max"],
        requests=count,
        seconds=round(outcome.seconds, 3),
        rate_per_s=round(count / outcome.seconds, 1),
        ceiling_rate=ceiling,
        client_bound=is_client_bound(outcome.cpu_s, measured.server_cpu_s),
    )


def null_command(system: System, case: Case, files: Files) -> list[str]:
    """Return what starts the server that answers a system's requests without doing their work."""
    answer = answer_body(system, case)
    tls = [f"--cert={files.cert}", f"--key={files.key}"] if system.tls else []
    words = ["python", "-m", "bench.null_servers"]
    if system.protocol is Protocol.H1:
        size = len(request_bytes(*question_of(system, case)))
        head = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(answer)
        return [*words, "h1", f"--request-bytes={size}", f"--answer={(head + answer).hex()}", *tls]
    if system.protocol is Protocol.H2:
        return [*words, "h2", f"--answer={answer.hex()}", *tls]
    if system.module is None:
        ids = work.binary_body(work.prompt(case.ids)[: case.output])
        answer = ids + encode_end(int(Finish.STOP), case.ids, case.output)
    if system.protocol is Protocol.RAW:
        answer = encode_verdict(200, 0, 1, 0, 0, 0, 1) + answer
        return [*words, "raw", f"--alpn={ALPN}", f"--answer={answer.hex()}", *tls]
    head = Http3(is_client=False).encode_headers(0, [(b":status", b"200")])
    answer = head + data_frame_header(len(answer)) + answer
    return [*words, "h3", f"--answer={answer.hex()}", *tls]


def measure_ceiling(system: System, case: Case, limits: Limits, files: Files) -> Ceiling:
    """Measure what loads a system against a server that only answers."""
    with server(null_command(system, case, files)) as child:
        port = int(child.wait_output(r"(?m)^(\d+)$")[1])
        with contextlib.closing(generator(system, case, port, files)) as load:
            measured = measure(load, child, case, limits)
    outcome, count = measured.outcome, measured.outcome.requests
    return Ceiling(
        str(system.protocol),
        system.encoding,
        system.tls,
        in_flight_words(system, case),
        case.name,
        count,
        round(count / outcome.seconds, 1),
        round(outcome.cpu_s / count * 1e6, 2),
        round(measured.server_cpu_s / count * 1e6, 2),
    )
