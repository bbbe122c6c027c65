"""The systems that are compared: how each is started, and how a generator talks to it.

Every peer runs as its own users would start it: one worker, the loop that its documentation
installs (uvloop and httptools with `uvicorn[standard]`, uvloop with granian; hypercorn on asyncio),
no access log, which is the only thing here that its default has otherwise, and in its favour.
"""

import contextlib
import importlib.util
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from bench import work
from bench.cases import ECHO_IDS, TOKEN_DELAY_MS, Case
from bench.clients import Generator
from bench.clients.http1 import Http1, request_bytes
from bench.clients.http2 import Http2, header_block
from bench.clients.quic import PeerH3Dialogue, QuicLoad, peer_h3_request
from bench.clients.tcp import TcpLoad
from bench.launch import Server, free_port, server
from dataplane.http_names import ALPN as H3_ALPN
from dataplane.load.wire import dialogues

SLOTS = 64
SMALL, LARGE = "128-s32", "131072-c1"
"""The cases that every system is measured in, and the daemon without what makes it fast, too."""
AUTHORITY = "localhost"


class Protocol(StrEnum):
    """What is spoken."""

    RAW = "prompt/1"
    H3 = "HTTP/3"
    H1 = "HTTP/1.1"
    H2 = "HTTP/2"


class Files(NamedTuple):
    """Certificate, key and CA, the same for every system, and the directory that they are in."""

    directory: Path
    cert: Path
    key: Path
    ca: Path


class Variant(NamedTuple):
    """What of the daemon, or of the generator that loads it, is otherwise than by default.

    Attributes:
        flags: Of `dataplane serve`.
        gso: Whether the generator sends batches that the kernel cuts into datagrams.
        cases: The cases that it is measured in; empty: all.
    """

    flags: tuple[str, ...] = ()
    gso: bool = True
    cases: tuple[str, ...] = ()


class System(NamedTuple):
    """One system.

    Attributes:
        name: As it stands in the rows.
        module: What must be installed for it, None for the project itself.
        command: What starts it, given the port to listen on (the project itself chooses one) and
            the files.
        main: Whether the quick form measures it in every case, not in `SMALL` and `LARGE` alone.
        variant: Of the project itself, for reference.
    """

    name: str
    protocol: Protocol
    encoding: str
    tls: bool
    module: str | None
    command: Callable[[int, Files], list[str]]
    main: bool
    variant: Variant = Variant()

    @property
    def multiplexes(self) -> bool:
        return self.protocol is not Protocol.H1

    def installed(self) -> bool:
        return self.module is None or importlib.util.find_spec(self.module) is not None

    def takes_part(self, case: Case) -> bool:
        """Whether it is measured in a case at all."""
        return not self.variant.cases or case.name in self.variant.cases


def _daemon(*flags: str) -> Callable[[int, Files], list[str]]:
    def command(port: int, files: Files) -> list[str]:
        return [
            "python", "-m", "dataplane", "serve", "--listen=localhost:0", "--admin=localhost:0",
            f"--state-dir={files.directory}", f"--cert={files.cert}", f"--key={files.key}",
            f"--vocab-size={work.VOCAB}", f"--context={work.CONTEXT}", f"--slots={SLOTS}",
            f"--max-writing={SLOTS}", *flags, "--runtime=null",
        ]  # fmt: skip

    return command


_PLAIN = Variant()


def _own(name: str, protocol: Protocol, variant: Variant = _PLAIN) -> System:
    start = _daemon(*variant.flags)
    return System(name, protocol, "binary", True, None, start, True, variant)


def _uvicorn(app: str, tls: bool) -> Callable[[int, Files], list[str]]:
    def command(port: int, files: Files) -> list[str]:
        words = ["python", "-m", "uvicorn", f"bench.peers.{app}:app", "--workers=1"]
        words += ["--host=127.0.0.1", f"--port={port}", "--no-access-log"]
        return words + ([f"--ssl-certfile={files.cert}", f"--ssl-keyfile={files.key}"] * tls)

    return command


def _granian(app: str, http: int, tls: bool) -> Callable[[int, Files], list[str]]:
    def command(port: int, files: Files) -> list[str]:
        words = ["python", "-m", "granian", "--interface=rsgi", "--loop=uvloop", "--workers=1"]
        words += [f"--http={http}", "--host=127.0.0.1", f"--port={port}"]
        if tls:
            words += [f"--ssl-certificate={files.cert}", f"--ssl-keyfile={files.key}"]
        return [*words, f"bench.peers.{app}:app"]

    return command


def _hypercorn(port: int, files: Files) -> list[str]:
    return [
        "python", "-m", "hypercorn", "--workers=1", f"--bind=127.0.0.1:{port}",
        f"--quic-bind=127.0.0.1:{port}", f"--certfile={files.cert}", f"--keyfile={files.key}",
        "bench.peers.hypercorn_binary:app",
    ]  # fmt: skip


def _systems() -> list[System]:
    no_pump = Variant(flags=("--no-pump",), cases=(SMALL, LARGE))
    found = [
        _own("dataplane raw", Protocol.RAW),
        _own("dataplane h3", Protocol.H3),
        _own("dataplane raw no-gso", Protocol.RAW, Variant(gso=False, cases=(LARGE,))),
        _own("dataplane raw no-pump", Protocol.RAW, no_pump),
        _own("dataplane h3 no-pump", Protocol.H3, no_pump),
    ]
    for encoding, app, name in (
        ("json", "fastapi_json", "fastapi json"),
        ("json", "uvicorn_json", "uvicorn json"),
        ("binary", "uvicorn_binary", "uvicorn binary"),
    ):
        module = name.split()[0]
        for tls in (False, True):
            full = f"{name} tls" if tls else name
            start = _uvicorn(app, tls)
            found.append(System(full, Protocol.H1, encoding, tls, module, start, not tls))
    for encoding in ("json", "binary"):
        for http, tls in ((1, False), (1, True), (2, True)):
            name = f"granian h{http} {encoding}" + " tls" * tls
            start = _granian(f"granian_{encoding}", http, tls)
            protocol = Protocol.H1 if http == 1 else Protocol.H2
            main = encoding == "binary" and (http == 2 or not tls)
            found.append(System(name, protocol, encoding, tls, "granian", start, main))
    hypercorn = System("hypercorn h3", Protocol.H3, "binary", True, "hypercorn", _hypercorn, True)
    return [*found, hypercorn]


SYSTEMS = {system.name: system for system in _systems()}


class Running(NamedTuple):
    """A system that takes requests."""

    system: System
    server: Server
    port: int
    files: Files


def command_of(system: System, case: Case, files: Files, port: int) -> list[str]:
    """Return what starts a system for a case."""
    words = system.command(port, files)
    if system.module is None and case.output:
        words[-1] = "--runtime=echo"
        words += [f"--token-delay-ms={TOKEN_DELAY_MS}", f"--max-output={ECHO_IDS}"]
    return words


@contextlib.contextmanager
def running(system: System, case: Case, files: Files) -> Iterator[Running]:
    """Start a system and wait until it serves; end it with the block.

    Raises:
        LaunchError: It does not start.
    """
    port = free_port()
    delay = {work.DELAY_VARIABLE: str(TOKEN_DELAY_MS / 1000)}
    with server(command_of(system, case, files, port), environment=delay) as child:
        if system.module is None:
            port = int(child.wait_output(r"(?m)^ready quic=127\.0\.0\.1:(\d+) ")[1])
        else:
            child.wait_tcp(port)
        yield Running(system, child, port, files)


def shape_of(system: System, case: Case) -> tuple[int, int]:
    """Return how many connections, and how many requests in flight on each."""
    if system.multiplexes:
        return case.connections, case.streams
    return case.in_flight, 1


def in_flight_words(system: System, case: Case) -> str:
    """Say how a case was run."""
    connections, streams = shape_of(system, case)
    words = f"{connections} connection{'s' * (connections > 1)}, {streams} in flight on each"
    if (connections, streams) != (case.connections, case.streams):
        words += f" (HTTP/1.1 has no {case.streams} streams on one)"
    return words


def answer_body(system: System, case: Case) -> bytes:
    """Return what a peer has to answer with."""
    if case.output:
        return work.streamed(work.prompt(case.ids)[: case.output], system.encoding)
    make = work.binary_verdict if system.encoding == "binary" else work.json_verdict
    return make(case.ids)


def question_of(system: System, case: Case) -> tuple[str, str, bytes]:
    """Return a request's path, media type and body."""
    ids = work.prompt(case.ids)
    path = work.STREAM_PATH if case.output else work.PATH
    if system.encoding == "binary":
        return path, work.BINARY, work.binary_body(ids)
    return path, work.JSON, work.json_body(ids)


def generator(system: System, case: Case, port: int, files: Files) -> Generator:
    """Make what loads a system in a case."""
    shape = shape_of(system, case)
    path, media, body = question_of(system, case)
    expected = answer_body(system, case)
    ca = str(files.ca)
    if system.protocol is Protocol.H1:
        request = request_bytes(path, media, body)
        return TcpLoad(port, lambda: Http1(request, expected), *shape, ca if system.tls else None)
    if system.protocol is Protocol.H2:
        block = header_block(path, media, len(body))
        return TcpLoad(port, lambda: Http2(block, body, expected), *shape, ca)
    ca_pem = files.ca.read_bytes()
    if system.module is None:
        kind = "raw" if system.protocol is Protocol.RAW else "h3"
        alpn, dialogue = dialogues(kind, AUTHORITY, body, case.output)
        return QuicLoad(port, ca_pem, alpn, dialogue, *shape, system.variant.gso)
    sent = peer_h3_request(path, body)
    return QuicLoad(port, ca_pem, H3_ALPN, lambda: PeerH3Dialogue(sent, expected), *shape)
