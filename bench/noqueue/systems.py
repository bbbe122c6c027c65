"""The systems that are compared, each started as its users would, all with the same engine.

Server and engine share one core and the generator has another: what a front end costs its engine
shows, and the generator does not.
"""

import array
import contextlib
import http.client
import itertools
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.launch import Server, server, spent_s
from bench.measure import rss_bytes
from bench.noqueue.engine import Costs
from bench.noqueue.generator import Wire
from bench.noqueue.http_wire import HttpWire, encode_post
from bench.noqueue.quic_wire import QuicWire
from bench.noqueue.shape import VOCAB_SIZE, Shape
from dataplane.cli.demo import parse_ready
from dataplane.kinds import Address, parse_address
from dataplane.prompt1 import Request, encode_request

DATAPLANE = "dataplane"
QUEUE = "asyncio queue"
BOUNDED = "asyncio queue, bounded"
VLLM_SHAPED = "vLLM-shaped"

_READY_WITHIN_S = 20.0
_IDLE_TIMEOUT_S = 300
_CONTEXT, _OUTPUT = 1024, 512
"""Of a slot, as bundled runtimes have it: more than these requests need."""
_PORT = r"ready port=(\d+)"

Cpu = dict[str, dict[tuple[int, int], int]]
"""What each thread of each process of a system has used."""


@dataclass
class System:
    """A system that is up.

    Attributes:
        name: What it is called in results.
        wire: Makes a client's connections to it.
        payload: One request.
        probe: A request that is refused for its content, before any engine: the way there and back.
        servers: Its processes, by what they are.
        commands: How they were started.
        admin: Where the daemon's pages are.
        region_bytes: What the slots take, where they are memory of their own.
    """

    name: str
    wire: Callable[[], Wire]
    payload: bytes
    probe: bytes
    servers: dict[str, Server]
    commands: list[str]
    admin: Address | None = None
    region_bytes: int | None = None

    def cpu(self) -> Cpu:
        """Return what each process took so far."""
        return {name: one.cpu().all for name, one in self.servers.items()}

    def rss_bytes(self) -> int:
        """Return the resident memory of all processes, the shared region left out."""
        threads = itertools.chain.from_iterable(self.cpu().values())
        return sum(map(rss_bytes, {process for process, _ in threads}))

    def page(self, target: str) -> Any:
        """Return a page of the daemon's admin port."""
        assert self.admin is not None
        status, body = get(self.admin, target)
        if status != 200:
            raise RuntimeError(f"{target} answered {status}")
        return json.loads(body)


def get(address: Address, target: str) -> tuple[int, bytes]:
    """Return status and body of a page."""
    connection = http.client.HTTPConnection(*address, timeout=5)
    try:
        connection.request("GET", target)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


Starter = Callable[[Shape, Costs], contextlib.AbstractContextManager[System]]


def spent(before: Cpu, after: Cpu) -> dict[str, float]:
    """Return the CPU seconds of each process between two readings."""
    return {name: spent_s(before[name], threads) for name, threads in after.items()}


class _Start:
    """The processes of a system, as they are started; a context manager that ends them."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self.servers: dict[str, Server] = {}
        self.commands: list[str] = []
        self.directory = Path()

    def __enter__(self) -> "_Start":
        made = tempfile.TemporaryDirectory(prefix="noqueue-")
        self.directory = Path(self._stack.enter_context(made))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, name: str, module: str, *options: str) -> Server:
        """Start a module as one of the system's processes."""
        command = ["python", "-m", module, *options]
        self.commands.append(" ".join(command).replace(str(self.directory), "DIR"))
        self.servers[name] = self._stack.enter_context(server(command))
        return self.servers[name]


@contextlib.contextmanager
def dataplane(shape: Shape, costs: Costs) -> Iterator[System]:
    """Group A: a daemon, and the engine attached to it."""
    with _Start() as made:
        socket = made.directory / "runtime.sock"
        daemon = made.start(
            "daemon", "dataplane", "serve", "--runtime=none", "--listen=localhost:0",
            "--admin=localhost:0", f"--state-dir={made.directory}", f"--socket={socket}",
            "--drain-timeout=1", f"--idle-timeout={_IDLE_TIMEOUT_S}",
        )  # fmt: skip
        ready = parse_ready(daemon.wait_output(r"(?m)^ready .*$")[0])
        assert ready is not None
        engine = made.start(
            "engine", "bench.noqueue.slots_engine", f"--socket={socket}", f"--slots={costs.slots}",
            f"--context={max(_CONTEXT, shape.prompt)}",
            f"--max-output={max(_OUTPUT, shape.max_output)}", f"--vocab-size={VOCAB_SIZE}",
        )  # fmt: skip
        region_bytes = int(engine.wait_output(r"region_bytes=(\d+)")[1])
        _wait_ready(ready.admin)
        address = parse_address(ready.quic)
        yield System(
            DATAPLANE,
            lambda: QuicWire(address, ready.ca),
            _raw_payload(shape),
            encode_request(Request(0)),
            made.servers,
            made.commands,
            ready.admin,
            region_bytes,
        )


def _wait_ready(admin: Address) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while get(admin, "/readyz")[0] != 200:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the daemon was not ready within {_READY_WITHIN_S:g} s")
        time.sleep(0.02)


def _raw_payload(shape: Shape) -> bytes:
    header = Request(shape.prompt, max_output=shape.max_output, temperature=shape.temperature)
    return encode_request(header) + array.array("I", shape.ids()).tobytes()


def queue_front(limit: int | None = None) -> Starter:
    """Group B: queue, batching and engine in one process; with a limit, 503 beyond so many."""

    @contextlib.contextmanager
    def start(shape: Shape, costs: Costs) -> Iterator[System]:
        options = [f"--slots={costs.slots}", f"--vocab-size={VOCAB_SIZE}"]
        if limit is not None:
            options.append(f"--limit={limit}")
        with _Start() as made:
            front = made.start("server and engine", "bench.noqueue.queue_front", *options)
            name = QUEUE if limit is None else BOUNDED
            yield _http_system(name, shape, made, int(front.wait_output(_PORT)[1]))

    return start


@contextlib.contextmanager
def vllm_shaped(shape: Shape, costs: Costs) -> Iterator[System]:
    """Group C: an HTTP process, ZMQ, and the engine's process."""
    with _Start() as made:
        directory = f"--directory={made.directory}"
        front = made.start(
            "server", "bench.noqueue.zmq_front", directory, f"--vocab-size={VOCAB_SIZE}"
        )
        port = int(front.wait_output(_PORT)[1])
        engine = made.start(
            "engine", "bench.noqueue.zmq_engine", directory, f"--slots={costs.slots}"
        )
        engine.wait_output("ready")
        yield _http_system(VLLM_SHAPED, shape, made, port)


def _http_system(name: str, shape: Shape, made: _Start, port: int) -> System:
    return System(
        name,
        lambda: HttpWire(("127.0.0.1", port)),
        _json_payload(shape, shape.ids()),
        _json_payload(shape, []),
        made.servers,
        made.commands,
    )


def _json_payload(shape: Shape, ids: list[int]) -> bytes:
    body = {
        "token_ids": ids,
        "max_tokens": shape.max_output,
        "temperature": shape.temperature,
        "stream": True,
    }
    return encode_post("/generate", msgspec.json.encode(body))
