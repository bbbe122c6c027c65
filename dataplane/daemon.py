"""The composition root of `dataplane serve`: what runs, how it starts and how it ends."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
from typing import TYPE_CHECKING

from aioquic.quic.configuration import QuicConfiguration

from dataplane import http_names, prompt1, refusals
from dataplane import quic as private
from dataplane.admin import AdminServer
from dataplane.attach import AttachServer
from dataplane.attachment import Attachment
from dataplane.connection import StreamFront
from dataplane.device_table import DeviceTable, table_of
from dataplane.errors import DataplaneError, ResetCode
from dataplane.fronts.generate import Generate
from dataplane.fronts.prompt1 import Prompt1
from dataplane.identity import Identity, load_identity, make_state_dir
from dataplane.ingress import Ingress
from dataplane.listener import Engine, Listener, SocketEngine, WakingSelector
from dataplane.manifest import Manifest
from dataplane.pages import Pages, Resident
from dataplane.pump_engine import LISTENERS, PumpEngine
from dataplane.region import Region, create_region
from dataplane.sockets import bind
from dataplane.stats import Stats
from dataplane.supervise import Supervisor
from dataplane.warmup import warm_up

if TYPE_CHECKING:
    from dataplane.config import ServeConfig

_log = logging.getLogger("dataplane")

_DRAIN_LOOK_S = 0.02


class Daemon:
    """One daemon: packet loop, attachment, admin port and the bundled runtime's supervision."""

    def __init__(self, config: "ServeConfig", identity: Identity) -> None:
        self.config = config
        self.identity = identity
        self.stats = Stats()
        self.ingress = Ingress(self.stats, config.body_timeout, config.max_writing)
        self._listeners = 1 if config.no_pump else LISTENERS
        self.attachments = AttachServer(
            str(config.socket), self._attached, self._dropped, self._listeners
        )
        (self._place,) = self.attachments.places.values()
        self._null = Resident()
        runtimes = self._null if config.runtime == "null" else self._place
        self._pages = pages = Pages(self.stats, runtimes, self.status)
        self.admin = AdminServer(pages)
        self.generate = Generate(self.ingress, pages)
        self._transport = _transport(config, identity)
        self.listener = Listener(
            self._transport,
            self.ingress,
            {http_names.ALPN: self.generate, prompt1.ALPN: Prompt1(self.ingress)},
            config.max_connections,
            config.handshake_timeout,
            _engine(config),
        )
        self.generate.finish_pass = self.listener.finish_pass
        self.ingress.egress.on_broken = self._broken
        self.supervisor: Supervisor | None = None
        self.draining = False
        self._serving = asyncio.Event()
        self._failed: DataplaneError | None = None
        self._ending = asyncio.Event()
        self._now = asyncio.Event()

    def _fronts(self, ingress: Ingress) -> dict[str, StreamFront]:
        """Return fronts like the daemon's own, for another ingress."""
        return {
            http_names.ALPN: Generate(ingress, self._pages),
            prompt1.ALPN: Prompt1(ingress),
        }

    def status(self) -> str:
        """Return what `/health` says: ok, draining or no runtime."""
        if self.draining:
            return "draining"
        return "ok" if self.ingress.table is not None else "no runtime"

    # The runtime comes and goes.

    def _attached(self, attachment: Attachment) -> None:
        self._serve(attachment.region, null=False)
        self.listener.watch_output(attachment.output)
        if self.supervisor:
            self.supervisor.ready()
        # In a thread: it takes a third of a second. "ready" is said when text is served as well.
        self.generate.use_text(
            attachment.tokenizer, attachment.manifest.chat_template, self._serving.set
        )
        _log.info("runtime %s is ready", attachment.manifest.model)

    def _serve(self, region: Region, null: bool) -> None:
        """Take requests into these slots, the raw front's too where there is one."""
        table = table_of(region)
        self.ingress.attach(table, null)
        if isinstance(table, DeviceTable):
            # The raw front in C swaps the slots' words itself, which lie in the device here: it
            # stays without slots, so its requests come to Python's front, which asks the device.
            table.on_dead = self._gave_up
        else:
            self.listener.engine.attach(
                region, self.ingress.max_writing, self.config.body_timeout, null
            )

    def _dropped(self, attachment: Attachment, why: str) -> None:
        if attachment.ready:
            self.listener.unwatch_output()
            self.listener.engine.detach()
            self.ingress.detach("the runtime is gone; another one is expected")
            self.listener.finish_pass()
        if self.supervisor:
            self.supervisor.lost(attachment.pid)

    def _broken(self, rule: str) -> None:
        """Egress read something that the contract forbids: end the attachment after this pass."""
        _log.error("the runtime broke a rule: %s", rule)
        self._drop_soon(f"it broke a rule: {rule}")

    def _gave_up(self, why: str) -> None:
        """A device does not answer: nothing it holds can end well, and another runtime may."""
        _log.error("%s", why)
        self._drop_soon(why)

    def _drop_soon(self, why: str) -> None:
        place = self._place
        attachment = place.current

        def drop() -> None:
            if place.current is attachment:
                self.attachments.drop(place, why)

        asyncio.get_running_loop().call_soon(drop)

    def _runtime_failed(self, status: int) -> None:
        self._failed = DataplaneError(
            f"the runtime {self.config.runtime} ended with status {status} before it was ready"
            " (what it said stands above)"
        )
        self._serving.set()
        self._ending.set()

    # Start.

    async def run(self) -> int:
        """Serve until a signal; the exit status."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled)
        sockets = bind("--listen", *self.config.listen, socket.SOCK_DGRAM)
        selector = loop._selector  # type: ignore[attr-defined]  # made in serve()
        try:
            if self.config.runtime != "null":  # nobody can take its place
                await self.attachments.start()
            admin = await self.admin.start(*self.config.admin)
            self.listener.start(sockets)
            selector.listener = self.listener
            self._start_runtime()
            await self._wait_until_serving()
            if not self._ending.is_set():
                warm_up(self._transport, self._fronts)
                self._announce(sockets[0], admin)
                _settle_collector()
                await self._ending.wait()
                await self._drain()
        finally:
            await self._stop(sockets)
            selector.listener = None
        if self._failed:
            raise self._failed
        return 0

    def _start_runtime(self) -> None:
        config = self.config
        if config.runtime == "none":
            self._serving.set()
        elif config.runtime == "null":
            manifest = Manifest(
                model="null",
                slots=config.slots,
                context=config.context,
                max_output=config.max_output,
                vocab_size=config.vocab_size,
            )
            manifest.check()
            region = create_region(manifest, 1, self._listeners)
            region.close_fd()
            self._serve(region, null=True)
            self._null.serve(manifest, region)
            self._serving.set()
        else:
            _log.info("starting the runtime %s", config.runtime)
            self.supervisor = Supervisor(_runtime_arguments(config), self._runtime_failed)
            self.supervisor.start()

    async def _wait_until_serving(self) -> None:
        waits = [
            asyncio.ensure_future(self._serving.wait()),
            asyncio.ensure_future(self._ending.wait()),
        ]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()

    def _announce(self, sock: socket.socket, admin: tuple[str, int]) -> None:
        host, port = sock.getsockname()[:2]
        table = self.ingress.table
        slots, context = (table.region.slots, table.region.context) if table else (0, 0)
        print(
            f"ready quic={_address(host, port)} admin={_address(*admin)}"
            f" runtime={self.config.runtime} slots={slots} context={context} ca={self.identity.ca}",
            flush=True,
        )

    # End.

    def _signalled(self) -> None:
        """The first signal drains, the second ends at once."""
        if self._ending.is_set():
            self._now.set()
        self._ending.set()

    async def _drain(self) -> None:
        """Take nothing new; let what is in flight finish, and be read, up to the time-out."""
        self.draining = self.ingress.draining = True
        self.listener.drain()
        if self.stats.in_flight:
            _log.info("draining: %d requests are in flight", self.stats.in_flight)
        loop = asyncio.get_running_loop()
        until = loop.time() + self.config.drain_timeout
        while (
            (self.stats.in_flight or self.listener.has_unread())
            and loop.time() < until
            and not self._now.is_set()
        ):
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._now.wait(), _DRAIN_LOOK_S)
        if self.stats.in_flight or self.listener.has_unread():
            _log.warning("%d requests in flight are broken off", self.stats.in_flight)

    async def _stop(self, sockets: list[socket.socket]) -> None:
        self.ingress.draining = True
        self.ingress.end_all(refusals.draining(), ResetCode.SHUTTING_DOWN)
        if self.listener.started:
            self.listener.engine.end_all(ResetCode.SHUTTING_DOWN)
            self.listener.finish_pass()
            self.listener.close_all(0, "shutting down")
            self.listener.stop()
        for sock in sockets:
            sock.close()
        await self.admin.stop()
        await self.attachments.stop()
        if self.supervisor:
            await self.supervisor.stop()
        # From here on a further signal would end a process that is ending with another status.
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _settle_collector() -> None:
    """Keep the garbage collector off the packet loop's way.

    What start-up made is not looked at again. What a request makes is freed by reference counts,
    and so is a connection (`Connection.dismantle`): rare passes are for what is left.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _runtime_arguments(config: "ServeConfig") -> list[str]:
    arguments = [
        config.runtime,
        f"--socket={config.socket}",
        f"--slots={config.slots}",
        f"--context={config.context}",
        f"--max-output={config.max_output}",
    ]
    if config.runtime == "echo":
        arguments += [
            f"--vocab-size={config.vocab_size}",
            f"--token-delay-ms={config.token_delay_ms}",
        ]
    elif config.runtime == "cuda-echo":
        arguments += [f"--vocab-size={config.vocab_size}", f"--admission={config.admission}"]
    else:
        arguments.append(f"--state-dir={config.state_dir}")
    if config.bundle is not None:
        arguments.append(f"--bundle={config.bundle}")
    return arguments


def _engine(config: "ServeConfig") -> Engine:
    return SocketEngine() if config.no_pump else PumpEngine(config.busy_poll)


def _transport(config: "ServeConfig", identity: Identity) -> QuicConfiguration:
    """The QUIC settings. No session tickets, so there is no 0-RTT (RFC 9001 section 9.2)."""
    transport = QuicConfiguration(
        is_client=False,
        alpn_protocols=[http_names.ALPN, prompt1.ALPN],
        idle_timeout=config.idle_timeout,
    )
    transport.load_cert_chain(identity.cert, identity.key)
    return transport


async def _run(config: "ServeConfig", identity: Identity) -> int:
    return await Daemon(config, identity).run()


def serve(config: "ServeConfig") -> int:
    """Run a daemon until a signal ends it.

    Returns:
        The exit status, 0 after a drain.

    Raises:
        DataplaneError: It cannot start; the text says what to change.
    """
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="dataplane: %(message)s")
    private.check()
    if config.bundle is not None:
        from dataplane.bundle import admit

        admit(config.bundle)
    make_state_dir(config.state_dir)
    identity = load_identity(config.state_dir, config.listen[0], config.cert, config.key)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(WakingSelector())) as runner:
        return runner.run(_run(config, identity))
