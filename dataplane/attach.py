"""The daemon's side of attaching (contract 2): handshake, watch, end.

A region lives as long as one attachment. The runtime states its manifest, the daemon makes the
region and passes it; then the socket is only watched: end of file means detached, and a pulse that
fails drops the runtime (`dataplane.attachment`). It trusts nothing that came over the socket or
lies in the region.

Each partition has a place of its own, with a region of its own: nothing is shared between two.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from dataplane.attachment import HEARTBEAT_MS, Attachment, Place
from dataplane.errors import AttachError
from dataplane.greeting import check_peer, listen_unix, read_line, read_tokenizer, refuse, settle
from dataplane.manifest import ABI, DEFAULT_PARTITION, Manifest, decode_manifest
from dataplane.region import create_region, region_bytes

_log = logging.getLogger("dataplane.attach")

HANDSHAKE_S = 5.0
LOOK_S = HEARTBEAT_MS / 2000
"""How often the pulse is looked at. At first at once, then after twice as long each time: a runtime
that is quick to load is ready soon, and one that is slow costs little."""
_LOOK_FIRST_S = 0.005
INLINE_BYTES = 32 << 20


class AttachServer:
    """The Unix socket that runtimes attach to; one at a time in each partition.

    Args:
        path: Where to listen; made with mode 0600.
        on_ready: Called when an attachment serves from now on.
        on_drop: Called with an attachment and why it ended, before its region goes.
        listeners: How many share each region's slots.
        partitions: Their names.

    Attributes:
        places: By partition.
    """

    def __init__(
        self,
        path: str,
        on_ready: Callable[[Attachment], None],
        on_drop: Callable[[Attachment, str], None],
        listeners: int = 1,
        partitions: Sequence[str] = (DEFAULT_PARTITION,),
    ) -> None:
        self.path = path
        self.places = {name: Place(name) for name in partitions}
        self._on_ready = on_ready
        self._on_drop = on_drop
        self._listeners = listeners
        self._number = 0
        self._socket: socket.socket | None = None
        self._inode = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen.

        Raises:
            AttachError: Another daemon listens there, or the path cannot be used.
        """
        self._socket = listen_unix(self.path)
        self._inode = os.stat(self.path).st_ino
        self._spawn(self._accept())

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        """Let the runtimes go and remove the socket."""
        for place in self.places.values():
            self.drop(place, "the daemon ended")
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._socket:
            self._socket.close()
            with contextlib.suppress(FileNotFoundError):
                # Somebody may have removed it, and another daemon made its own there.
                if os.stat(self.path).st_ino == self._inode:
                    os.unlink(self.path)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        assert self._socket is not None
        while True:
            try:
                connection, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                _log.error("accepting a runtime failed: %s", error)
                await asyncio.sleep(0.1)
                continue
            connection.setblocking(False)
            self._spawn(self._greet(connection))

    async def _greet(self, connection: socket.socket) -> None:
        """One handshake; whatever goes wrong in it is answered and closes this connection only."""
        fds: list[int] = []
        attachment: Attachment | None = None
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                pid = check_peer(connection)
                line = await read_line(connection, fds)
                if line is None:
                    connection.close()  # Somebody looked whether anyone listens here.
                    return
                manifest = decode_manifest(line)
                place = self._place(manifest)
            attachment = await self._admit(place, manifest, fds, pid)
            reply = msgspec.json.encode(
                {
                    "abi": ABI,
                    "attachment": attachment.number,
                    "region_bytes": attachment.region.bytes,
                    "heartbeat_ms": HEARTBEAT_MS,
                }
            )
            socket.send_fds(connection, [reply + b"\n"], attachment.fds())
            attachment.region.close_fd()
        except TimeoutError:
            await refuse(connection, f"no whole line within {HANDSHAKE_S:.0f} s")
            return
        except AttachError as error:
            await refuse(connection, str(error))
            return
        except OSError as error:
            if attachment is not None:  # the runtime vanished before it had its region
                place.current = None
                attachment.close()
            await refuse(connection, f"the handshake failed: {error}")
            return
        finally:
            for fd in fds:
                os.close(fd)
        await self._follow(place, attachment, connection)

    def _place(self, manifest: Manifest) -> Place:
        """Find the place that a runtime asks for, which must be free."""
        name = manifest.partition
        place = self.places.get(name)
        if place is None:
            raise AttachError(f"there is no partition {name!r}, only {_listed(self.places)}")
        if place.admitting:
            raise AttachError(f"partition {name!r} is getting a runtime already")
        if place.current is not None:
            raise AttachError(
                f"partition {name!r} has a runtime already"
                f" (attachment {place.current.number}, process {place.current.pid})"
            )
        return place

    async def _admit(
        self, place: Place, manifest: Manifest, fds: list[int], pid: int
    ) -> Attachment:
        """Make the region; a large one in a thread, since its pages are all touched."""
        tokenizer = read_tokenizer(manifest, fds)
        number = self._number = self._number + 1
        place.admitting = True
        try:
            if region_bytes(manifest) > INLINE_BYTES:
                region = await asyncio.to_thread(create_region, manifest, number, self._listeners)
            else:
                region = create_region(manifest, number, self._listeners)
        finally:
            place.admitting = False
        place.current = Attachment(number, manifest, region, tokenizer, pid)
        _log.info(
            "runtime %s attached%s (process %d): %d slots x %d tokens, %d KiB",
            manifest.model, _in_partition(place), pid, manifest.slots, manifest.context,
            region.bytes >> 10,
        )  # fmt: skip
        return place.current

    async def _follow(
        self, place: Place, attachment: Attachment, connection: socket.socket
    ) -> None:
        """Watch the pulse and the socket until one of them ends the attachment."""
        attachment.connection = connection
        loop = asyncio.get_running_loop()
        closed = loop.create_future()
        loop.add_reader(connection, settle, closed)
        look_s = _LOOK_FIRST_S
        try:
            while place.current is attachment:
                await asyncio.wait([closed], timeout=look_s)
                look_s = min(2 * look_s, LOOK_S)
                if place.current is not attachment:
                    break
                why = attachment.examine(time.monotonic())
                if attachment.ready and not attachment.announced and why is None:
                    attachment.announced = True
                    self._on_ready(attachment)
                if why is None and closed.done():
                    why = "the runtime closed the attachment"
                if why is not None:
                    self.drop(place, why)
        except Exception as error:  # of a callback: the next runtime must not find the place taken
            _log.error("following attachment %d failed: %s", attachment.number, error)
            self.drop(place, f"the daemon failed on it: {error}")
        finally:
            loop.remove_reader(connection)
            connection.close()

    def drop(self, place: Place, why: str) -> None:
        """End the attachment that has a place."""
        attachment, place.current = place.current, None
        if attachment is None:
            return
        _log.warning("attachment %d%s ended: %s", attachment.number, _in_partition(place), why)
        try:
            self._on_drop(attachment, why)
        except Exception:  # the next runtime gets the place all the same
            _log.exception("ending attachment %d failed", attachment.number)
        finally:
            attachment.close()


def _in_partition(place: Place) -> str:
    return "" if place.name == DEFAULT_PARTITION else f" in partition {place.name}"


def _listed(names: Sequence[str] | dict[str, Place]) -> str:
    """Return names as an error lists them."""
    quoted = [repr(name) for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"
