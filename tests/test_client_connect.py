"""Connecting: which addresses are tried, whom the client trusts, and what a failure says."""

import asyncio
import socket
import time
from pathlib import Path
from typing import Any

import pytest
from fake_daemon import (
    Stream,
    fake_daemon,
    whole_answer,
)

from dataplane.client import connect, read_ca
from dataplane.errors import DataplaneError, UnavailableError, UsageError
from dataplane.identity import load_identity

pytestmark = pytest.mark.usefixtures("engine")


async def answer_whole(stream: Stream) -> None:
    stream.send(whole_answer([1]), fin=True)


def failure_to_connect(server: str, ca: Path | None, **options: Any) -> str:
    async def main() -> None:
        async with connect(server, ca, **options):
            pass

    with pytest.raises(DataplaneError) as caught:
        asyncio.run(main())
    assert caught.value.exit_code == UnavailableError.exit_code
    return str(caught.value)


@pytest.fixture
def ca(tmp_path: Path) -> Path:
    path = load_identity(tmp_path / "identity", "localhost").ca
    assert path is not None
    return path


@pytest.fixture
def silent_port() -> Any:
    """A port where datagrams arrive and nothing answers."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        yield sock.getsockname()[1]


def test_nobody_at_the_port_is_said_at_once(ca: Path) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    began = time.monotonic()
    message = failure_to_connect(f"localhost:{port}", ca)
    assert time.monotonic() - began < 5
    assert f"[::1]:{port}: " in message
    assert f"127.0.0.1:{port}: nobody listens there" in message


def test_silence_ends_with_the_time_out(ca: Path, silent_port: int) -> None:
    message = failure_to_connect(f"127.0.0.1:{silent_port}", ca, timeout=0.2)
    assert "no answer within 0.2 s" in message


def test_a_name_that_does_not_resolve_is_said(ca: Path) -> None:
    assert "does not resolve" in failure_to_connect("no-such-host.invalid:1", ca)


def test_localhost_is_tried_on_both_families(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            fake_daemon(tmp_path, answer_whole) as daemon,
            connect(f"localhost:{daemon.port}", daemon.ca) as client,
        ):
            assert (await client.submit([1])).status == 200

    asyncio.run(main())


def test_a_daemon_of_another_authority_is_not_trusted(tmp_path: Path) -> None:
    other = load_identity(tmp_path / "other", "localhost").ca

    async def main() -> None:
        async with fake_daemon(tmp_path, answer_whole) as daemon:
            with pytest.raises(UnavailableError, match=r"TLS: .*issuer certificate"):
                async with connect(daemon.address, other):
                    pass
            with pytest.raises(UnavailableError, match=r"TLS: .*doesn't match"):
                async with connect(daemon.address, daemon.ca, server_name="else.example"):
                    pass

    asyncio.run(main())


def test_a_server_of_another_protocol_is_said(tmp_path: Path) -> None:
    async def main() -> None:
        async with fake_daemon(tmp_path, answer_whole, alpn="h3") as daemon:
            with pytest.raises(UnavailableError, match="another protocol"):
                async with connect(daemon.address, daemon.ca):
                    pass

    asyncio.run(main())


def test_a_missing_ca_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATAPLANE_STATE_DIR", str(tmp_path))
    with pytest.raises(UnavailableError, match="`dataplane serve` makes it") as caught:
        read_ca(None)
    assert str(tmp_path / "ca.pem") in str(caught.value)
    with pytest.raises(UsageError, match=f"no CA file {tmp_path}/x; .*ready"):
        read_ca(tmp_path / "x")
    (tmp_path / "x").write_text("no PEM")
    with pytest.raises(UsageError, match="holds no certificate"):
        read_ca(tmp_path / "x")
    with pytest.raises(UsageError, match="cannot be read"):
        read_ca(tmp_path)


@pytest.mark.parametrize("server", ["localhost", "localhost:0", "::1:4433", "localhost:99999"])
def test_a_server_that_is_no_address_is_refused(ca: Path, server: str) -> None:
    async def main() -> None:
        async with connect(server, ca):
            pass

    with pytest.raises(UsageError, match="it takes HOST:PORT"):
        asyncio.run(main())
