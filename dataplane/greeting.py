"""The Unix socket that runtimes attach to, as a file and as a peer (contract 2): binding it, whose
process calls, one line and one descriptor each way. What comes is not trusted.
"""

import array
import asyncio
import hashlib
import logging
import os
import socket
import stat
import struct
from pathlib import Path

import msgspec

from dataplane.errors import AttachError
from dataplane.locks import locked
from dataplane.manifest import LINE_MAX, Manifest

_log = logging.getLogger("dataplane.attach")

TOKENIZER_MAX = 256 << 20
_LINGER_S = 1.0
_FDS_MAX = 4
_PEER_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid: struct ucred


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


async def read_line(connection: socket.socket, fds: list[int]) -> bytes | None:
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
            loop.add_reader(connection, settle, readable)
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


async def refuse(connection: socket.socket, why: str) -> None:
    """Say why, and stay until the peer has read it.

    A socket that is closed while bytes wait in it takes back what it said.
    """
    _log.warning("a runtime was refused: %s", why)
    loop = asyncio.get_running_loop()
    try:
        connection.send(msgspec.json.encode({"error": why}) + b"\n")
        connection.shutdown(socket.SHUT_WR)
        async with asyncio.timeout(_LINGER_S):
            while await loop.sock_recv(connection, LINE_MAX):
                pass
    except (OSError, TimeoutError):
        pass
    finally:
        connection.close()


def settle(future: "asyncio.Future[None]") -> None:
    """The runtime's socket is readable: it ended, or said something where nothing is to be said."""
    if not future.done():
        future.set_result(None)
