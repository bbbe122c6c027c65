"""What is built and shipped: sources, headers, the sdist; and the examples, which really run."""

import contextlib
import importlib.metadata
import json
import runpy
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
NATIVE = ROOT / "native"
EXAMPLES = ROOT / "tests" / "examples"
DEADLINE_S = 30.0

FFI = runpy.run_path(str(NATIVE / "build_ffi.py"))


def on_disk(*suffixes: str) -> set[str]:
    return {
        path.relative_to(ROOT).as_posix() for path in NATIVE.rglob("*") if path.suffix in suffixes
    }


# Sources.


def test_every_source_is_built_and_every_built_one_exists() -> None:
    assert set(FFI["SOURCES"]) == on_disk(".c")
    assert len(FFI["SOURCES"]) == len(set(FFI["SOURCES"]))


def test_a_change_to_any_header_rebuilds() -> None:
    assert set(FFI["DEPENDS"]) == on_disk(".h")
    assert {f"native/{name}" for name in FFI["HEADERS"]} <= on_disk(".h")


def test_the_licence_is_there() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text


# Source distribution.


def tracked() -> list[str]:
    """Return the files that git knows and that are there; skips outside a checkout."""
    git = shutil.which("git")
    if git is None or not (ROOT / ".git").exists():
        pytest.skip("not in a git checkout")
    listed = subprocess.run([git, "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode:
        pytest.skip(f"git lists no files: {listed.stderr.decode(errors='replace')}")
    names = listed.stdout.decode().split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


def setuptools_is_new_enough() -> bool:
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


def test_the_sdist_holds_every_tracked_file(tmp_path: Path) -> None:
    names = tracked()
    if not setuptools_is_new_enough():
        pytest.skip("the sdist takes setuptools 77")
    # A copy, so that the build leaves nothing here and sees nothing that is not tracked.
    for name in names:
        copy = tmp_path / "tree" / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, copy)
    command = [sys.executable, "setup.py", "-q", "sdist", "-d", str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path / "tree", capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (archive,) = tmp_path.glob("dataplane-*.tar.gz")
    with tarfile.open(archive) as members:
        shipped = {name.partition("/")[2] for name in members.getnames()}
    assert set(names) - shipped <= {".gitignore"}


# Examples.


class Daemon(NamedTuple):
    process: subprocess.Popen[str]
    server: str
    ca: str
    socket: Path


def ready_line(process: subprocess.Popen[str]) -> dict[str, str]:
    """Wait for the daemon's `ready` line: its words."""
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], DEADLINE_S)[0], "the daemon is not ready"
    word, *pairs = process.stdout.readline().split()
    assert word == "ready"
    return dict(pair.split("=", 1) for pair in pairs)


@contextlib.contextmanager
def daemon(folder: Path) -> Iterator[Daemon]:
    socket = folder / "s"
    command = [
        sys.executable, "-m", "dataplane", "serve", "--runtime", "none",
        "--listen", "localhost:0", "--admin", "localhost:0",
        "--state-dir", str(folder), "--socket", str(socket),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        said = ready_line(process)
        assert (said["runtime"], said["slots"], said["context"]) == ("none", "0", "0")
        yield Daemon(process, said["quic"], said["ca"], socket)
    finally:
        process.kill()
        process.communicate()


def ask(server: Daemon, *options: str) -> tuple[int, dict[str, object]]:
    """Send ids 5, 6, 7, 8 with the command line's client: its exit code and its JSON."""
    command = [
        sys.executable, "-m", "dataplane", "client", "--server", server.server,
        "--ca", server.ca, "--ids", "5,6,7,8", "--json", *options,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    return done.returncode, json.loads(done.stdout)


def ask_until_served(server: Daemon, engine: subprocess.Popen[str]) -> dict[str, object]:
    deadline = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline:
        assert engine.poll() is None, "the engine ended"
        code, answer = ask(server)
        if code != 69:  # 503: not attached, or not ready yet
            return answer
    raise AssertionError("the engine serves nothing")


def start_python(folder: Path) -> list[str]:
    return [sys.executable, str(EXAMPLES / "echo.py")]


def start_c(folder: Path) -> list[str]:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler here")
    sources = [
        EXAMPLES / "echo.c",
        *(NATIVE / f"{name}.c" for name in ("attach", "region", "slots")),
    ]
    binary = folder / "echo"
    flags = ["-std=c11", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{NATIVE}"]
    subprocess.run([compiler, *flags, *map(str, sources), "-o", str(binary)], check=True)
    return [str(binary)]


@pytest.mark.parametrize("example", ["echo.py", "echo.c"])
def test_an_example_serves_and_ends_with_the_daemon(example: str, tmp_path: Path) -> None:
    start = {"echo.py": start_python, "echo.c": start_c}[example]
    with daemon(tmp_path) as server:
        command = [*start(tmp_path), str(server.socket)]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as engine:
            try:
                answer = ask_until_served(server, engine)
                assert (answer["status"], answer["token_ids"]) == (200, [5, 6, 7, 8])
                assert answer["finish_reason"] == "stop"
                code, answer = ask(server, "--max-output", "3")
                assert (code, answer["token_ids"]) == (0, [5, 6, 7])
                assert answer["finish_reason"] == "length"
                server.process.send_signal(signal.SIGTERM)
                assert server.process.wait(DEADLINE_S) == 0
                _, said = engine.communicate(timeout=DEADLINE_S)
            finally:
                engine.kill()
    if example == "echo.py":
        assert (engine.returncode, said) == (1, "the daemon ended the attachment\n")
    else:
        assert (engine.returncode, said) == (0, "")


@pytest.mark.parametrize("example", ["echo.py", "echo.c"])
def test_an_example_says_that_nobody_listens(example: str, tmp_path: Path) -> None:
    start = {"echo.py": start_python, "echo.c": start_c}[example]
    command = [*start(tmp_path), str(tmp_path / "nobody")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(f"no daemon answers at {tmp_path / 'nobody'}: ")


@pytest.mark.parametrize("example", ["echo.py", "echo.c"])
def test_an_example_is_short(example: str) -> None:
    assert len((EXAMPLES / example).read_text(encoding="utf-8").splitlines()) < 40


class CancelledAfterOne:
    """A request of 40 ids that is cancelled once anything was emitted."""

    def __init__(self) -> None:
        self.tokens = list(range(40))
        self.max_output = 100
        self.emitted: list[list[int]] = []
        self.reasons: list[int] = []

    @property
    def cancelled(self) -> bool:
        return bool(self.emitted)

    def emit(self, ids: list[int]) -> bool:
        self.emitted.append(ids)
        return True

    def finish(self, reason: int) -> bool:
        self.reasons.append(reason)
        return True

    def step(self) -> None:
        pass


def test_the_python_example_stops_for_a_cancelled_request() -> None:
    request = CancelledAfterOne()
    runpy.run_path(str(EXAMPLES / "echo.py"))["answer"](request, request)
    assert request.emitted == [list(range(16))]
    assert len(request.reasons) == 1
