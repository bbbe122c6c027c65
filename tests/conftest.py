"""Fixtures that several test files share: daemons as processes of their own."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess, daemon_process

from dataplane.client import connect
from dataplane.load import Load

StartDaemon = Callable[..., DaemonProcess]


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[StartDaemon]:
    """Start daemons: `daemon("--runtime=echo", "--slots=4")`.

    Each has to end with status 0 and to leave no process, no socket file and no shared memory.
    """
    with contextlib.ExitStack() as stack:

        def start(*arguments: str) -> DaemonProcess:
            return stack.enter_context(daemon_process(tmp_path, *arguments))

        yield start


@pytest.fixture(scope="module")
def bare_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon without a runtime for all tests of a file; whoever attaches to it detaches."""
    directory = tmp_path_factory.mktemp("daemon")
    with daemon_process(directory, "--runtime=none", "--idle-timeout=20") as daemon:
        yield daemon


@pytest.fixture(params=["pump", "aioquic"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Have clients and loads of this process run on each engine in turn; its name."""
    for made in (connect, Load.__init__):
        defaults = made.__kwdefaults__
        assert defaults is not None
        monkeypatch.setitem(defaults, "pump", request.param == "pump")
    name: str = request.param
    return name
