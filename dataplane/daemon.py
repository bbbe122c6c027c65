"""The composition root of `dataplane serve`: what runs, how it starts and how it ends."""

import asyncio
import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from aioquic.quic.configuration import QuicConfiguration

from dataplane import http_names, prompt1, refusals
from dataplane import quic as private
from dataplane.admin import AdminServer
from dataplane.attach import AttachServer
from dataplane.attachment import Attachment
from dataplane.connection import StreamFront
from dataplane.errors import DataplaneError, ResetCode
from dataplane.fronts.generate import Generate
from dataplane.fronts.prompt1 import Prompt1
from dataplane.identity import Identity, load_identity, make_state_dir
from dataplane.ingress import Ingress, Routes
from dataplane.listener import Engine, Listener, WakingSelector
from dataplane.manifest import DEFAULT_PARTITION, Manifest
from dataplane.pages import Pages, Resident, Runtimes
from dataplane.partitions import check_devices
from dataplane.pump_engine import LISTENERS, PumpEngine
from dataplane.region import create_region
from dataplane.served import CUDA_RUNTIMES, Served
from dataplane.socket_engine import SocketEngine
from dataplane.sockets import bind
from dataplane.stats import Stats
from dataplane.tenants import KeyedRoutes
from dataplane.tenants import read as read_tenants
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
        specs = {partition.name: partition for partition in config.partition}
        names = tuple(specs) or (DEFAULT_PARTITION,)
        self._ingresses = {
            name: Ingress(self.stats, config.body_timeout, config.max_writing, name)
            for name in names
        }
        self._routes = _routes(config, self._ingresses)
        self._listeners = 1 if config.no_pump else LISTENERS
        self.attachments = AttachServer(
            str(config.socket),
            lambda attachment: self._served_by(attachment).attached(attachment),
            lambda attachment, why: self._served_by(attachment).dropped(attachment),
            self._listeners,
            names,
        )
        self._null = Resident()
        runtimes: Mapping[str, Runtimes] = self.attachments.places
        if config.runtime == "null":
            runtimes = {DEFAULT_PARTITION: self._null}
        self._pages = Pages(self.stats, runtimes, self.status)
        self.admin = AdminServer(self._pages)
        self._transport = _transport(config, identity)
        generate = Generate(self._routes, self._pages)
        self.listener = Listener(
            self._transport,
            tuple(self._ingresses.values()),
            {http_names.ALPN: generate, prompt1.ALPN: Prompt1(self._routes)},
            config.max_connections,
            config.handshake_timeout,
            _engine(config, self._routes),
        )
        generate.finish_pass = self.listener.finish_pass
        self._changed = asyncio.Event()
        self.partitions = {
            name: Served(
                config,
                ingress,
                specs.get(name),
                self.attachments,
                self.listener,
                generate,
                self._changed.set,
            )
            for name, ingress in self._ingresses.items()
        }
        self.draining = False
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
        return "ok" if self._is_serving() else "no runtime"

    def _is_serving(self) -> bool:
        """Whether there is a runtime, in one partition at least."""
        return any(ingress.table is not None for ingress in self._ingresses.values())

    def _served_by(self, attachment: Attachment) -> Served:
        return self.partitions[attachment.manifest.partition]

    # Start.

    async def run(self) -> int:
        """Serve until a signal; the exit status."""
        loop = asyncio.get_running_loop()
        for number in _ending_signals():
            loop.add_signal_handler(number, self._signalled)
        sockets = bind("--listen", *self.config.listen, socket.SOCK_DGRAM)
        selector = loop._selector  # type: ignore[attr-defined]  # made in serve()
        try:
            admin = await self.admin.start(*self.config.admin)
            self.listener.start(sockets)
            selector.listener = self.listener
            # Last: a runtime that waits for the daemon may attach at once, and is served from then.
            if self.config.runtime != "null":  # nobody can take its place
                await self.attachments.start()
            self._start_runtimes()
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

    def _start_runtimes(self) -> None:
        if self.config.runtime == "null":
            self._serve_null()
            return
        for partition in self.partitions.values():
            partition.start_runtime()

    def _serve_null(self) -> None:
        config = self.config
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
        (partition,) = self.partitions.values()
        partition.serve(region, null=True)
        self._null.serve(manifest, region)

    async def _wait_until_serving(self) -> None:
        """Wait for the runtimes: for one that serves, and for what becomes of the others."""
        ending = asyncio.ensure_future(self._ending.wait())
        while not self._ending.is_set() and not self._has_started():
            for partition in self.partitions.values():
                if partition.error is not None:
                    self._failed = partition.error
                    self._ending.set()
            self._changed.clear()
            changed = asyncio.ensure_future(self._changed.wait())
            await asyncio.wait([changed, ending], return_when=asyncio.FIRST_COMPLETED)
            changed.cancel()
        ending.cancel()

    def _has_started(self) -> bool:
        if self.config.runtime in ("none", "null"):
            return True
        settled = all(partition.is_settled for partition in self.partitions.values())
        return settled and self._is_serving()

    def _announce(self, sock: socket.socket, admin: tuple[str, int]) -> None:
        host, port = sock.getsockname()[:2]
        regions = [ingress.table.region for ingress in self._ingresses.values() if ingress.table]
        slots = sum(region.slots for region in regions)
        context = min((region.context for region in regions), default=0)
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
        self.draining = True
        for ingress in self._ingresses.values():
            ingress.draining = True
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
        for ingress in self._ingresses.values():
            ingress.draining = True
            ingress.end_all(refusals.draining(), ResetCode.SHUTTING_DOWN)
        if self.listener.started:
            self.listener.engine.end_all(ResetCode.SHUTTING_DOWN)
            self.listener.finish_pass()
            self.listener.close_all(0, "shutting down")
            self.listener.stop()
        for sock in sockets:
            sock.close()
        await self.admin.stop()
        await self.attachments.stop()
        await asyncio.gather(*(partition.stop() for partition in self.partitions.values()))
        # From here on a further signal would end a process that is ending with another status.
        for number in _ending_signals():
            asyncio.get_running_loop().remove_signal_handler(number)
            signal.signal(number, signal.SIG_IGN)


def _ending_signals() -> list[signal.Signals]:
    """Return what ends a daemon: a terminal that closes too, unless that is ignored (`nohup`)."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return numbers


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


def _routes(config: "ServeConfig", ingresses: Mapping[str, Ingress]) -> Routes:
    """Return who admits whom."""
    if config.tenants is None:
        (only,) = ingresses.values()
        return only
    return KeyedRoutes(ingresses, read_tenants(config.tenants, tuple(ingresses)))


def _check_devices(config: "ServeConfig") -> None:
    """Hold what was asked for against the devices that there are, before anything is started."""
    partitions = config.partition
    if config.bundle is not None:
        from dataplane.bundle import admit

        admit(config.bundle, [partition.environ() for partition in partitions] or [os.environ])
    if partitions and config.runtime in ("none", *CUDA_RUNTIMES):
        from dataplane.gpus import look

        gpus = look()
        if gpus.devices:
            check_devices(partitions, gpus)
        else:
            _log.warning(
                "whether the devices of the partitions are there cannot be told: %s",
                gpus.missing or "the driver lists none",
            )


def _engine(config: "ServeConfig", routes: Routes) -> Engine:
    return SocketEngine() if config.no_pump else PumpEngine(config.busy_poll, routes.keys)


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
    _check_devices(config)
    make_state_dir(config.state_dir)
    identity = load_identity(config.state_dir, config.listen[0], config.cert, config.key)
    with asyncio.Runner(loop_factory=lambda: asyncio.SelectorEventLoop(WakingSelector())) as runner:
        return runner.run(_run(config, identity))
