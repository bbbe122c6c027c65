"""The attachment's handshake over a real Unix socket: what is taken, what is refused, in words."""

import array
import errno
import hashlib
import json
import mmap
import os
import socket
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, command, open_fds, wait_until
from raw_runtime import MANIFEST, manifest_line, raw_runtime, refusal

from dataplane.errors import AttachError
from dataplane.greeting import check_peer, listen_unix

TOKENIZER = b'{"version": "1.0"}'
TOKENIZER_SHA256 = hashlib.sha256(TOKENIZER).hexdigest()


@pytest.fixture(scope="module")
def fds_at_rest(bare_daemon: DaemonProcess) -> int:
    """How many descriptors the daemon holds before anybody came."""
    return open_fds(bare_daemon.pid)


@pytest.fixture(autouse=True)
def unharmed(bare_daemon: DaemonProcess, fds_at_rest: int) -> Iterator[None]:
    """Whatever a test says to the daemon: it takes the next runtime, and keeps no descriptor."""
    yield
    attach_and_leave(bare_daemon.socket)
    bare_daemon.wait_for_status("no runtime")
    wait_until("its descriptors are closed", lambda: open_fds(bare_daemon.pid) == fds_at_rest)


def attach_and_leave(path: Path, **changes: Any) -> dict[str, Any]:
    """Attach as soon as no other runtime is attached any more; return the answer."""

    def attempt() -> dict[str, Any] | None:
        with raw_runtime(path) as runtime:
            runtime.say(manifest_line(**changes))
            answer = runtime.answer()
        error = answer.get("error", "")
        assert not error or "has a runtime already" in error, error
        return None if error else answer

    return wait_until("a runtime can attach", attempt)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Iterator[int]:
    """A descriptor of a tokenizer.json."""
    path = tmp_path / "tokenizer.json"
    path.write_bytes(TOKENIZER)
    with path.open("rb") as file:
        yield file.fileno()


# ---------------------------------------------------------------- what is taken


def test_the_answer_is_the_contracts(bare_daemon: DaemonProcess) -> None:
    with raw_runtime(bare_daemon.socket) as runtime:
        runtime.say(manifest_line())
        answer = runtime.answer()
        assert set(answer) == {"abi", "attachment", "region_bytes", "heartbeat_ms"}
        assert (answer["abi"], answer["heartbeat_ms"]) == (1, 500)
        region, doorbell, *outputs = runtime.fds
        assert os.fstat(region).st_size == answer["region_bytes"]
        with mmap.mmap(region, answer["region_bytes"]) as mapped:
            assert struct.unpack_from("<Q", mapped, 16) == (answer["attachment"],)
        for bell in (doorbell, *outputs):
            os.eventfd_write(bell, 1)
            assert os.eventfd_read(bell) == 1


def test_each_attachment_has_a_new_number_and_a_new_region(bare_daemon: DaemonProcess) -> None:
    first = attach_and_leave(bare_daemon.socket)
    second = attach_and_leave(bare_daemon.socket, context=4096)
    assert second["attachment"] == first["attachment"] + 1
    assert second["region_bytes"] != first["region_bytes"]


def test_defaults_may_be_left_out(bare_daemon: DaemonProcess) -> None:
    optional = ("partition", "table", "stop_ids", "chat_template", "tokenizer_sha256")
    attach_and_leave(bare_daemon.socket, **dict.fromkeys((*optional, "max_step_ms"), ...))


def test_a_line_may_come_byte_by_byte(bare_daemon: DaemonProcess) -> None:
    with raw_runtime(bare_daemon.socket) as runtime:
        for byte in manifest_line():
            runtime.say(bytes([byte]))
        assert runtime.answer()["abi"] == 1


def test_a_tokeniser_is_taken_and_shown(bare_daemon: DaemonProcess, tokenizer: int) -> None:
    assert bare_daemon.get("/tokenizer.json")[0] == 404
    with raw_runtime(bare_daemon.socket) as runtime:
        runtime.say(manifest_line(tokenizer_sha256=TOKENIZER_SHA256), tokenizer)
        assert "error" not in runtime.answer()
        assert bare_daemon.get("/tokenizer.json") == (200, TOKENIZER.decode())
        status, props = bare_daemon.get("/props")
        assert (status, json.loads(props)["tokenizer_sha256"]) == (200, TOKENIZER_SHA256)


@pytest.mark.parametrize(
    ("name", "least", "most"),
    [("slots", 1, 1024), ("context", 1, 1_048_576), ("max_output", 1, 262_144)],
)
def test_geometry_has_bounds(bare_daemon: DaemonProcess, name: str, least: int, most: int) -> None:
    one = {"slots": 1, "context": 1, "max_output": 1}
    for value in (least, most):
        attach_and_leave(bare_daemon.socket, **{**one, name: value})
    for value in (-1, least - 1, most + 1, 2**32, 2**32 + 1, 10**30):
        assert name in refusal(bare_daemon.socket, manifest_line(**{**one, name: value}))


# ---------------------------------------------------------------- what is refused

REFUSED = {
    "another ABI": (manifest_line(abi=2), "ABI 2"),
    "another ABI, other fields": (b'{"abi": 2, "tensor": 1}\n', "ABI 2"),
    "no ABI": (manifest_line(abi=...), "abi"),
    "no JSON": (b"hello\n", "cannot be read"),
    "an empty line": (b"\n", "cannot be read"),
    "no object": (b"[1]\n", "cannot be read"),
    "no UTF-8": (b'{"abi": 1, "model": "\xff"}\n', "cannot be read"),
    "half an object": (manifest_line()[:40] + b"\n", "cannot be read"),
    "deep nesting": (b"[" * 60_000 + b"\n", "cannot be read"),
    "no model": (manifest_line(model=...), "model"),
    "an unknown field": (manifest_line(priority=1), "priority"),
    "text for a number": (manifest_line(slots="2"), "slots"),
    "a fraction": (manifest_line(slots=2.5), "slots"),
    "no number": (manifest_line(slots=None), "slots"),
    "no vocabulary": (manifest_line(vocab_size=0), "vocab_size"),
    "a vocabulary over 31 bits": (manifest_line(vocab_size=2**31), "vocab_size"),
    "an unknown table": (manifest_line(table="magic"), "'magic'"),
    "another partition": (manifest_line(partition="big"), "'big'"),
    "a partition without a name": (manifest_line(partition=""), "partition"),
    "a foreign stop id": (manifest_line(stop_ids=[2, 50_000]), "stop id 50000"),
    "a negative stop id": (manifest_line(stop_ids=[-1]), "stop id -1"),
    "steps without time": (manifest_line(max_step_ms=0), "max_step_ms"),
    "a step of a day": (manifest_line(max_step_ms=86_400_000), "max_step_ms"),
    "bytes behind the line": (manifest_line() + b"x", "behind the line"),
    "a second line": (manifest_line() * 2, "behind the line"),
    "64 KiB and no end": (b" " * 65537, "longer than 65536 bytes"),
    "a line of 64 KiB and 1": (
        manifest_line()[:-1] + b" " * (65537 - len(manifest_line())) + b"\n",
        "longer than 65536 bytes",
    ),
    "a hash without a file": (manifest_line(tokenizer_sha256="0" * 64), "no descriptor"),
}


@pytest.mark.parametrize(("data", "words"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_in_words(bare_daemon: DaemonProcess, data: bytes, words: str) -> None:
    assert words in refusal(bare_daemon.socket, data)


def test_a_line_of_64_kib_is_taken(bare_daemon: DaemonProcess) -> None:
    with raw_runtime(bare_daemon.socket) as runtime:
        padding = b" " * (65536 - len(manifest_line()))
        runtime.say(manifest_line()[:-1] + padding + b"\n")
        assert "error" not in runtime.answer()


def test_a_descriptor_has_to_be_announced(bare_daemon: DaemonProcess, tokenizer: int) -> None:
    words = refusal(bare_daemon.socket, manifest_line(), tokenizer)
    assert "no tokenizer_sha256" in words


@pytest.mark.parametrize("digest", ["0" * 64, TOKENIZER_SHA256.upper(), ""])
def test_a_hash_has_to_match(bare_daemon: DaemonProcess, tokenizer: int, digest: str) -> None:
    line = manifest_line(tokenizer_sha256=digest)
    assert "do not match" in refusal(bare_daemon.socket, line, tokenizer)


@pytest.mark.parametrize("count", [2, 4, 9])
def test_one_descriptor_is_enough(bare_daemon: DaemonProcess, tokenizer: int, count: int) -> None:
    line = manifest_line(tokenizer_sha256=TOKENIZER_SHA256)
    words = refusal(bare_daemon.socket, line, *[tokenizer] * count)
    assert "more descriptors" in words


def test_a_second_descriptor_may_not_come_later(bare_daemon: DaemonProcess, tokenizer: int) -> None:
    line = manifest_line(tokenizer_sha256=TOKENIZER_SHA256)
    with raw_runtime(bare_daemon.socket) as runtime:
        runtime.say(line[:20], tokenizer)
        runtime.say(line[20:], tokenizer)
        assert "more descriptors" in runtime.answer()["error"]


def strange_files(directory: Path) -> Iterator[tuple[int, str]]:
    """Descriptors that are no tokenizer.json, and a word of what is said about them."""
    reader, writer = os.pipe()
    os.close(writer)
    yield reader, "must be a file"
    yield os.open(directory, os.O_RDONLY), "must be a file"
    yield os.open("/dev/zero", os.O_RDONLY), "must be a file"
    empty = directory / "empty"
    empty.touch()
    yield os.open(empty, os.O_RDONLY), "must be a file of 1"
    yield os.open(empty, os.O_PATH), "must be a file of 1"
    huge = directory / "huge"
    with huge.open("wb") as file:
        file.truncate((256 << 20) + 1)  # sparse
    yield os.open(huge, os.O_RDONLY), "bytes"
    full = directory / "full"
    full.write_bytes(TOKENIZER)
    yield os.open(full, os.O_WRONLY), "handshake failed"


def test_a_strange_file_is_refused(bare_daemon: DaemonProcess, tmp_path: Path) -> None:
    line = manifest_line(tokenizer_sha256=TOKENIZER_SHA256)
    for fd, words in strange_files(tmp_path):
        try:
            assert words in refusal(bare_daemon.socket, line, fd)
        finally:
            os.close(fd)


# ---------------------------------------------------------------- ends and silences


def test_end_of_file_at_every_byte(bare_daemon: DaemonProcess) -> None:
    line = manifest_line()
    for length in range(1, len(line)):
        assert "ended inside the line" in refusal(bare_daemon.socket, line[:length])
    with raw_runtime(bare_daemon.socket) as runtime:
        runtime.end()
        assert runtime.is_closed()  # Somebody looked whether anyone listens; no words are due.


def test_gone_before_the_answer(bare_daemon: DaemonProcess) -> None:
    for _ in range(20):
        with raw_runtime(bare_daemon.socket) as runtime:
            runtime.say(manifest_line())
        attach_and_leave(bare_daemon.socket)


def test_half_closed_is_detached(bare_daemon: DaemonProcess) -> None:
    with raw_runtime(bare_daemon.socket) as runtime:
        runtime.say(manifest_line())
        runtime.answer()
        runtime.end()
        assert runtime.is_closed()


def test_more_words_end_the_attachment(bare_daemon: DaemonProcess) -> None:
    with raw_runtime(bare_daemon.socket) as runtime:
        runtime.say(manifest_line())
        runtime.answer()
        runtime.say(b"x")
        assert runtime.is_closed()


def test_a_second_runtime_is_refused_and_the_first_goes_on(bare_daemon: DaemonProcess) -> None:
    with raw_runtime(bare_daemon.socket) as first:
        first.say(manifest_line())
        number = first.answer()["attachment"]
        for _ in range(3):
            words = refusal(bare_daemon.socket, manifest_line())
            assert "'default' has a runtime already" in words
            assert f"attachment {number}, process {os.getpid()}" in words
        first.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):  # Not closed: the daemon still wants it.
            first.socket.recv(1)


# ---------------------------------------------------------------- who may


class _PeerOfUser:
    """A socket whose peer is a process of some user."""

    def __init__(self, uid: int) -> None:
        self._uid = uid

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        assert (level, option) == (socket.SOL_SOCKET, socket.SO_PEERCRED)
        return array.array("i", [4711, self._uid, 0]).tobytes()[:size]


def test_only_the_daemons_user_may_attach() -> None:
    own: Any = _PeerOfUser(os.getuid())
    assert check_peer(own) == 4711
    other: Any = _PeerOfUser(os.getuid() + 1)
    with pytest.raises(AttachError, match=f"user {os.getuid() + 1} may not attach"):
        check_peer(other)


AS_NOBODY = """
import os, socket, sys
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
client = socket.socket(socket.AF_UNIX)
client.settimeout(5)
try:
    client.connect(sys.argv[1])
except PermissionError:
    print("kept out")
else:
    try:
        client.sendall(sys.argv[2].encode() + b"\\n")
    except BrokenPipeError:
        pass  # It was refused before it said a word.
    print(client.recv(4096).decode())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="waived: it takes root to be somebody else")
def test_another_user_is_kept_out(daemon: Any) -> None:
    line = json.dumps(MANIFEST)
    with tempfile.TemporaryDirectory() as directory:
        os.chmod(directory, 0o755)
        path = Path(directory) / "runtime.sock"
        daemon(f"--socket={path}")
        arguments = [sys.executable, "-c", AS_NOBODY, str(path), line]

        def attempt() -> str:
            done = subprocess.run(arguments, capture_output=True, text=True, timeout=20, check=True)
            return done.stdout

        assert attempt() == "kept out\n"
        path.chmod(0o666)  # The mode is the first fence; the peer's credentials are the second.
        assert "user 65534 may not attach" in json.loads(attempt())["error"]


# ---------------------------------------------------------------- the socket's file


def test_the_socket_is_the_users_alone(bare_daemon: DaemonProcess, tmp_path: Path) -> None:
    assert stat.S_IMODE(bare_daemon.socket.stat().st_mode) == 0o600
    old = os.umask(0)
    try:
        listening = listen_unix(str(tmp_path / "own.sock"))
        assert os.umask(0) == 0  # It was put back.
    finally:
        os.umask(old)
    listening.close()
    assert stat.S_IMODE((tmp_path / "own.sock").stat().st_mode) == 0o600


def test_a_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "old.sock"
    for _ in range(2):
        listening = listen_unix(str(path))
        with raw_runtime(path):
            pass
        listening.close()  # Not unlinked, as after a SIGKILL.


def test_a_live_socket_is_refused(bare_daemon: DaemonProcess, tmp_path: Path) -> None:
    line = command(tmp_path, f"--socket={bare_daemon.socket}")
    done = subprocess.run(line, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert f"--socket: another daemon listens at {bare_daemon.socket}" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_busy_socket_is_refused_at_once(tmp_path: Path) -> None:
    """Its backlog is full: whoever asks whether it is alive must not wait for room in it."""
    path = tmp_path / "busy.sock"
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        waiting = []
        refused = 0
        while not refused:
            waiting.append(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            waiting[-1].setblocking(False)
            refused = waiting[-1].connect_ex(str(path))
        assert refused == errno.EAGAIN
        with pytest.raises(AttachError, match="another daemon listens"):
            listen_unix(str(path))
        for client in waiting:
            client.close()


@pytest.mark.parametrize("kind", ["file", "directory", "missing"])
def test_what_is_no_socket_is_left_alone(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "thing"
    if kind == "file":
        path.write_text("precious")
    elif kind == "directory":
        path.mkdir()
    else:
        path = tmp_path / "missing" / "runtime.sock"
    with pytest.raises(AttachError, match=f"--socket: {path} cannot be used: \\w+"):
        listen_unix(str(path))
    assert kind != "file" or path.read_text() == "precious"


def test_a_path_that_is_too_long_is_refused_in_words(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 200)
    with pytest.raises(AttachError, match=r"cannot be used: (?!None)\w+"):
        listen_unix(str(path))
