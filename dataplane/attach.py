"""The daemon's side of an attachment (contract 2): handshake, pulse, end.

A region lives as long as one attachment. The runtime states its manifest, the daemon makes the
region and passes it; then the
socket is only watched: end of file means detached. Two words in the region are the runtime's pulse;
this module reads them, and drops a runtime that falls silent. It trusts nothing that came over the
socket or lies in the region.
"""

import array
import asyncio
import contextlib
import hashlib
import logging
import os
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from dataplane._native import lib
from dataplane.errors import AttachError
from dataplane.locks import locked
from dataplane.manifest import ABI, LINE_MAX, Manifest, decode_manifest
from dataplane.region import Region, create_region, region_bytes

_log = logging.getLogger("dataplane.attach")

HEARTBEAT_MS = 500
READY_WITHIN_S = 120.0
SILENT_RED_S = 2.0
SILENT_DROP_S = 10.0
HANDSHAKE_S = 5.0
LINGER_S = 1.0
INLINE_BYTES = 32 << 20
TOKENIZER_MAX = 256 << 20
_FDS_MAX = 4
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred


class Attachment:
    """One runtime, from its manifest to its end.

    Attributes:
        number: Names it in handles; counts from 1.
        ready: Whether the first heartbeat was seen.
        doorbell, outputs: The eventfds of the runtime and of the listeners, from number 1.
    """

    def __init__(
        self, number: int, manifest: Manifest, region: Region, tokenizer: bytes | None, pid: int
    ) -> None:
        self.number = number
        self.manifest = manifest
        self.region = region
        self.tokenizer = tokenizer
        self.pid = pid
        self.ready = False
        self.doorbell, *self.outputs = _eventfds(1 + region.native.geometry.listeners)
        region.native.doorbell = self.doorbell
        for number, output in enumerate(self.outputs):
            region.native.outputs[number] = output
        self._started = time.monotonic()
        self._beat = self._step = 0
        self._beat_at = self._step_at = self._started
        self._working = False

    def fds(self) -> list[int]:
        """Return what the runtime is passed, in the contract's order."""
        return [self.region.fd, self.doorbell, *self.outputs]

    @property
    def output(self) -> int:
        """The eventfd of listener 1."""
        return self.outputs[0]

    def close(self) -> None:
        """Close the eventfds; verbs that are late ring nobody."""
        self.region.native.doorbell = -1
        for number in range(len(self.outputs)):
            self.region.native.outputs[number] = -1
        for fd in (self.doorbell, *self.outputs):
            os.close(fd)

    def silent_s(self, now: float) -> float:
        """Return how long the heartbeat has stood still."""
        return now - self._beat_at

    def examine(self, now: float) -> str | None:
        """Read the pulse; return why the runtime has to be dropped, or None."""
        header = self.region.native.header
        beat, step = header.heartbeat.value, header.step.value
        if beat != self._beat:
            self._beat, self._beat_at = beat, now
            self.ready = True
        was_working, self._working = self._working, self._is_working()
        # Time counts from when the work was first seen: an idle engine makes no steps.
        if step != self._step or not (was_working and self._working):
            self._step, self._step_at = step, now
        if not self.ready:
            if now - self._started > READY_WITHIN_S:
                return f"it was not ready within {READY_WITHIN_S:.0f} s"
            return None
        if self.silent_s(now) > SILENT_DROP_S:
            return f"its heartbeat stood still for {SILENT_DROP_S:.0f} s"
        if (now - self._step_at) * 1000 > self.manifest.max_step_ms:
            return f"no step for {self.manifest.max_step_ms} ms with work in its slots"
        return None

    def _is_working(self) -> bool:
        """Whether a slot waits on the runtime: READY, RUNNING or CANCELLING."""
        return bool(lib.dp_is_working(self.region.native))


def _eventfds(count: int) -> list[int]:
    """Make so many, or none."""
    made: list[int] = []
    try:
        for _ in range(count):
            made.append(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
    except OSError:
        for fd in made:
            os.close(fd)
        raise
    return made


class AttachServer:
    """The Unix socket that runtimes attach to; one at a time.

    Args:
        path: Where to listen; made with mode 0600.
        on_ready: Called when an attachment serves from now on.
        on_drop: Called with an attachment and why it ended, before its region goes.
        listeners: How many share each region's slots.
    """

    def __init__(
        self,
        path: str,
        on_ready: Callable[[Attachment], None],
        on_drop: Callable[[Attachment, str], None],
        listeners: int = 1,
    ) -> None:
        self.path = path
        self.current: Attachment | None = None
        self._on_ready = on_ready
        self._on_drop = on_drop
        self._listeners = listeners
        self._announced = False
        self._admitting = False
        self._number = 0
        self._socket: socket.socket | None = None
        self._inode = 0
        self._runtime: socket.socket | None = None
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
        """Let the runtime go and remove the socket."""
        self.drop("the daemon ended")
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
        try:
            async with asyncio.timeout(HANDSHAKE_S):
                pid = check_peer(connection)
                line = await _read_line(connection, fds)
                if line is None:
                    connection.close()  # Somebody looked whether anyone listens here.
                    return
                manifest = self._check(line)
            attachment = await self._admit(manifest, fds, pid)
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
            await _refuse(connection, f"no whole line within {HANDSHAKE_S:.0f} s")
            return
        except AttachError as error:
            await _refuse(connection, str(error))
            return
        except OSError as error:
            self._withdraw()
            await _refuse(connection, f"the handshake failed: {error}")
            return
        finally:
            for fd in fds:
                os.close(fd)
        await self._follow(attachment, connection)

    def _withdraw(self) -> None:
        """The runtime vanished before it had its region."""
        if self.current is not None and self._runtime is None:
            self.current.close()
            self.current = None

    def _check(self, line: bytes) -> Manifest:
        """Read a manifest and hold it against what this daemon has."""
        manifest = decode_manifest(line)
        if manifest.partition != "default":
            raise AttachError(f"there is no partition {manifest.partition!r}, only 'default'")
        if self._admitting:
            raise AttachError(f"partition {manifest.partition!r} is getting a runtime already")
        if self.current is not None:
            raise AttachError(
                f"partition {manifest.partition!r} has a runtime already"
                f" (attachment {self.current.number}, process {self.current.pid})"
            )
        return manifest

    async def _admit(self, manifest: Manifest, fds: list[int], pid: int) -> Attachment:
        """Make the region; a large one in a thread, since its pages are all touched."""
        tokenizer = read_tokenizer(manifest, fds)
        self._number += 1
        self._admitting = True
        try:
            if region_bytes(manifest) > INLINE_BYTES:
                region = await asyncio.to_thread(
                    create_region, manifest, self._number, self._listeners
                )
            else:
                region = create_region(manifest, self._number, self._listeners)
        finally:
            self._admitting = False
        self.current = Attachment(self._number, manifest, region, tokenizer, pid)
        self._announced = False
        _log.info(
            "runtime %s attached (process %d): %d slots x %d tokens, %d KiB",
            manifest.model, pid, manifest.slots, manifest.context, region.bytes >> 10,
        )  # fmt: skip
        return self.current

    async def _follow(self, attachment: Attachment, connection: socket.socket) -> None:
        """Watch the pulse and the socket until one of them ends the attachment."""
        self._runtime = connection
        loop = asyncio.get_running_loop()
        closed = loop.create_future()
        loop.add_reader(connection, _settle, closed)
        try:
            while self.current is attachment:
                await asyncio.wait([closed], timeout=HEARTBEAT_MS / 2000)
                if self.current is not attachment:
                    break
                why = attachment.examine(time.monotonic())
                if attachment.ready and not self._announced and why is None:
                    self._announced = True
                    self._on_ready(attachment)
                if why is None and closed.done():
                    why = "the runtime closed the attachment"
                if why is not None:
                    self.drop(why)
        except Exception as error:  # of a callback: the next runtime must not find the place taken
            _log.error("following attachment %d failed: %s", attachment.number, error)
            self.drop(f"the daemon failed on it: {error}")
        finally:
            loop.remove_reader(connection)
            connection.close()
            if self._runtime is connection:
                self._runtime = None

    def drop(self, why: str) -> None:
        """End the current attachment."""
        attachment, self.current = self.current, None
        if attachment is None:
            return
        _log.warning("attachment %d ended: %s", attachment.number, why)
        self._announced = False
        self._on_drop(attachment, why)
        if self._runtime is not None:
            with contextlib.suppress(OSError):
                self._runtime.shutdown(socket.SHUT_RDWR)
        attachment.close()

    def is_responsive(self) -> bool:
        """Whether a ready runtime's heartbeat is fresh: what `/readyz` says."""
        current = self.current
        return (
            current is not None
            and current.ready
            and current.silent_s(time.monotonic()) <= SILENT_RED_S
        )


def _settle(future: "asyncio.Future[None]") -> None:
    """The runtime's socket is readable: it ended, or said something where nothing is to be said."""
    if not future.done():
        future.set_result(None)


def listen_unix(path: str) -> socket.socket:
    """Bind a Unix socket of mode 0600, taking the place of one that nobody listens on any more.

    Under the directory's lock: of two daemons that start at once, the second must not take the
    first's socket, bound and not yet listening, for a stale one.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setblocking(False)
    old = os.umask(0o177)
    try:
        with locked(Path(path).parent):
            _bind_unix(sock, path)
    except OSError as error:
        sock.close()
        raise _unusable(path, error) from error
    except AttachError:
        sock.close()
        raise
    finally:
        os.umask(old)
    return sock


def _bind_unix(sock: socket.socket, path: str) -> None:
    try:
        sock.bind(path)
    except OSError as error:
        if not _is_socket(path):
            raise
        if not _is_stale(path):
            raise AttachError(
                f"--socket: another daemon listens at {path}: end it, or give this one"
                " another --socket"
            ) from error
        os.unlink(path)
        sock.bind(path)
    sock.listen(8)


def _unusable(path: str, error: OSError) -> AttachError:
    return AttachError(f"--socket: {path} cannot be used: {error.strerror or error}")


def _is_socket(path: str) -> bool:
    try:
        return stat.S_ISSOCK(os.stat(path).st_mode)
    except (OSError, ValueError):
        return False


def _is_stale(path: str) -> bool:
    """Whether nobody answers on a socket file (a daemon that was killed left it)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)  # A live one with a full backlog would keep us waiting.
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False


def check_peer(connection: socket.socket) -> int:
    """Return the peer's process number; another user is refused.

    Raises:
        AttachError: The peer's user is not the daemon's.
    """
    credentials = connection.getsockopt(
        socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER_CREDENTIALS.size
    )
    pid, uid, _ = _PEER_CREDENTIALS.unpack(credentials)
    if uid != os.getuid():
        raise AttachError(f"user {uid} may not attach; the daemon is user {os.getuid()}'s")
    return int(pid)


async def _read_line(connection: socket.socket, fds: list[int]) -> bytes | None:
    """Read up to a newline, adding descriptors that come along to `fds`; None when nothing came."""
    data = bytearray()
    while b"\n" not in data:
        if len(data) >= LINE_MAX:
            raise AttachError(f"the line is longer than {LINE_MAX} bytes")
        part = await _receive(connection, LINE_MAX - len(data), fds)
        if not part:
            if data:
                raise AttachError("the connection ended inside the line")
            return None
        data += part
    line, _, rest = bytes(data).partition(b"\n")
    if rest:
        raise AttachError("there are bytes behind the line")
    return line


async def _receive(connection: socket.socket, size: int, fds: list[int]) -> bytes:
    loop = asyncio.get_running_loop()
    while True:
        try:
            data, ancillary, flags, _ = connection.recvmsg(
                size,
                socket.CMSG_SPACE(_FDS_MAX * array.array("i").itemsize),
                socket.MSG_CMSG_CLOEXEC,
            )
        except BlockingIOError:
            readable = loop.create_future()
            loop.add_reader(connection, _settle, readable)
            try:
                await readable
            finally:
                loop.remove_reader(connection)
            continue
        for level, kind, payload in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                received = array.array("i")
                received.frombytes(payload[: len(payload) - len(payload) % received.itemsize])
                fds.extend(received)
        if flags & socket.MSG_CTRUNC or len(fds) > 1:
            raise AttachError("more descriptors than the tokeniser's one")
        return data


def read_tokenizer(manifest: Manifest, fds: list[int]) -> bytes | None:
    """Read the tokenizer.json that came with a manifest, and hold it against its hash."""
    if not fds:
        if manifest.tokenizer_sha256 is not None:
            raise AttachError("the manifest has a tokenizer_sha256 but no descriptor came with it")
        return None
    if manifest.tokenizer_sha256 is None:
        raise AttachError("a descriptor came, but the manifest has no tokenizer_sha256")
    status = os.fstat(fds[0])
    if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= TOKENIZER_MAX:
        raise AttachError(f"the tokeniser must be a file of 1 to {TOKENIZER_MAX} bytes")
    text = b""
    while len(text) < status.st_size:
        part = os.pread(fds[0], status.st_size - len(text), len(text))
        if not part:
            break
        text += part
    if hashlib.sha256(text).hexdigest() != manifest.tokenizer_sha256:
        raise AttachError("the tokeniser's bytes do not match tokenizer_sha256")
    return text


async def _refuse(connection: socket.socket, why: str) -> None:
    """Say why, and stay until the peer has read it.

    A socket that is closed while bytes wait in it takes back what it said.
    """
    _log.warning("a runtime was refused: %s", why)
    loop = asyncio.get_running_loop()
    try:
        connection.send(msgspec.json.encode({"error": why}) + b"\n")
        connection.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(LINGER_S):
            while await loop.sock_recv(connection, LINE_MAX):
                pass
    except (OSError, TimeoutError):
        pass
    finally:
        connection.close()
