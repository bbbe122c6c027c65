"""One partition in a daemon: its slots, and the runtime that serves them, which comes and goes.

A daemon has one, or one for each `--partition`. What happens in one is nobody's business in
another: a runtime that dies, breaks a rule or cannot start ends what is in flight in its own.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from dataplane.attach import AttachServer
from dataplane.attachment import Attachment
from dataplane.device_table import DeviceTable, table_of
from dataplane.errors import DataplaneError, UsageError
from dataplane.fronts.generate import Generate
from dataplane.ingress import Ingress
from dataplane.listener import Listener
from dataplane.partitions import Partition
from dataplane.region import Region
from dataplane.supervise import Supervisor

if TYPE_CHECKING:
    from dataplane.config import ServeConfig

_log = logging.getLogger("dataplane")

CUDA_RUNTIMES = ("cuda-echo", "smollm2-torch")
"""Bundled runtimes that use a device where there is one, which may come back."""


class Served:
    """One partition's slots, and its runtime.

    Args:
        config: The daemon's settings.
        ingress: Admits to its slots; its name is the partition's.
        partition: As it was asked for; None: the only one, on whatever device.
        attachments: Where its runtime attaches.
        listener, generate: The daemon's; `listener.ingresses` has this one's.
        on_change: Called when `is_settled` or `error` may have become something else.

    Attributes:
        is_settled: Whether it serves, text too, or its runtime failed before it was ready.
        error: Why the daemon cannot go on, if it cannot.
    """

    def __init__(
        self,
        config: "ServeConfig",
        ingress: Ingress,
        partition: Partition | None,
        attachments: AttachServer,
        listener: Listener,
        generate: Generate,
        on_change: Callable[[], None],
    ) -> None:
        self.ingress = ingress
        self.is_settled = False
        self.error: DataplaneError | None = None
        self._config = config
        self._partition = partition
        self._attachments = attachments
        self._place = attachments.places[ingress.name]
        self._listener = listener
        self._generate = generate
        self._on_change = on_change
        self._supervisor: Supervisor | None = None
        ingress.egress.on_broken = self._broken

    def _say(self) -> str:
        """Return the bundled runtime as messages call it."""
        return f"the runtime {self._config.runtime}{self._where()}"

    def _where(self) -> str:
        return "" if self._partition is None else f" in partition {self.ingress.name}"

    def start_runtime(self) -> None:
        """Start the bundled runtime, if one was asked for."""
        if self._config.runtime == "none":
            self._settle()
            return
        _log.info("starting %s", self._say())
        arguments = runtime_arguments(self._config, self._partition)
        self._supervisor = Supervisor(arguments, self._ended_early, self._say(), self._has_attached)
        self._supervisor.start()

    def serve(self, region: Region, null: bool = False) -> None:
        """Take requests into these slots, the raw front's too where there is one."""
        table = table_of(region)
        self.ingress.attach(table, null)
        if isinstance(table, DeviceTable):
            table.on_dead = self._gave_up
        self._listener.engine.attach(self.ingress, region, null)

    # The runtime comes and goes.

    def attached(self, attachment: Attachment) -> None:
        """The runtime that attached here is ready."""
        self.serve(attachment.region)
        self._listener.watch_output(self.ingress, attachment.output)
        if self._supervisor:
            self._supervisor.ready()
        # In a thread: it takes a third of a second. "ready" is said when text is served as well.
        self._generate.use_text(
            self.ingress, attachment.tokenizer, attachment.manifest.chat_template, self._settle
        )
        _log.info(
            "runtime %s is ready%s",
            attachment.manifest.model,
            self._where(),
        )

    def _settle(self) -> None:
        self.is_settled = True
        self._on_change()

    def dropped(self, attachment: Attachment) -> None:
        """The attachment is over: what was in flight ends."""
        if self._supervisor:
            self._supervisor.lost(attachment.pid)
        if attachment.ready:
            self._listener.unwatch_output(self.ingress)
            self._listener.engine.detach(self.ingress)
            self.ingress.detach("the runtime is gone; another one is expected")
            self._listener.finish_pass()

    def _broken(self, rule: str) -> None:
        """Egress read something that the contract forbids: end the attachment after this pass."""
        _log.error("the runtime%s broke a rule: %s", self._where(), rule)
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
                self._attachments.drop(place, why)

        asyncio.get_running_loop().call_soon(drop)

    def _has_attached(self, pid: int) -> bool:
        current = self._place.current
        return current is not None and current.pid == pid

    def _ended_early(self, status: int) -> bool:
        """The bundled runtime ended before it was ready; whether to start it again.

        A device may come back, and another partition's runtime is not to fall with this one. What
        fails on a CPU will fail again, and so will a command line.
        """
        words = f"{self._say()} ended with status {status} before it was ready"
        may_recover = self._config.runtime in CUDA_RUNTIMES and status != UsageError.exit_code
        if len(self._attachments.places) == 1 and not may_recover and not self.is_settled:
            self.error = DataplaneError(f"{words} (what it said stands above)")
        else:
            self.ingress.why_unavailable = f"{words}; it is started again, and the log says why"
        self._settle()
        return self.error is None

    async def stop(self) -> None:
        """End the bundled runtime."""
        if self._supervisor:
            await self._supervisor.stop()


def runtime_arguments(config: "ServeConfig", partition: Partition | None) -> list[str]:
    """Return what `dataplane runtime` is told, to run a bundled one for this daemon."""
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
    if partition is not None:
        arguments.append(f"--partition={partition}")
    return arguments
