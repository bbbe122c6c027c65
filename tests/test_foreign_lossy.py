"""HTTP/3 clients that others wrote, over a bad link: every request completes all the same."""

import json
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from daemon_process import DaemonProcess, daemon_process
from foreign_clients import (
    BINARY,
    chromium_tab,
    curl_session,
    ngtcp2_pages,
    niquests_session,
)
from lossy_proxy import PATIENT, Link, LossyProxy, lossy_proxy

pytestmark = [pytest.mark.pump_only, pytest.mark.foreign, pytest.mark.slow]

VOCAB = 50_000
SLOTS = 4
SOME = Link(loss=0.07, reordering=0.05, duplication=0.02)
IDS = random.Random(7).choices(range(VOCAB), k=3000)
BODY = struct.pack(f"<{len(IDS)}I", *IDS)
ROUNDS = 5
FETCH = """
const ids = new Uint32Array(BODY);
const answer = await fetch('/v1/generate', {
    method: 'POST', headers: {'content-type': 'application/octet-stream'}, body: ids,
});
const got = new Uint32Array(await answer.arrayBuffer());
const entries = performance.getEntriesByType('resource');
return [answer.status, entries[entries.length - 1].nextHopProtocol, Array.from(got)];
"""


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with daemon_process(
        tmp_path_factory.mktemp("echo"), "--runtime=echo", f"--slots={SLOTS}", "--context=8192",
        "--max-output=8192", f"--vocab-size={VOCAB}", *PATIENT,
    ) as daemon:  # fmt: skip
        yield daemon


@pytest.fixture
def lossy(echo: DaemonProcess) -> Iterator[LossyProxy]:
    with lossy_proxy(echo.port, SOME) as proxy:
        yield proxy
    echo.wait_idle()


def test_curl_completes(echo: DaemonProcess, lossy: LossyProxy) -> None:
    url = f"https://localhost:{lossy.port}/v1/generate"
    with curl_session(echo.ca, within=60) as session:
        for _ in range(ROUNDS):
            answer = session.post(url, data=BODY, headers=BINARY)
            assert (answer.status_code, answer.http_version) == (200, 30)
            assert answer.content[: len(BODY)] == BODY


def test_niquests_completes(echo: DaemonProcess, lossy: LossyProxy) -> None:
    url, ca = f"https://localhost:{lossy.port}/v1/generate", str(echo.ca)
    with niquests_session(lossy.port) as session:
        for _ in range(ROUNDS):
            answer = session.post(url, data=BODY, headers=BINARY, verify=ca, timeout=60)
            assert answer.status_code == 200
            assert answer.content[: len(BODY)] == BODY


def test_chromium_completes(echo: DaemonProcess, lossy: LossyProxy, tmp_path: Path) -> None:
    script = FETCH.replace("BODY", json.dumps(IDS))
    with chromium_tab(echo.ca, tmp_path, lossy.port) as tab:
        for _ in range(ROUNDS):
            status, protocol, got = tab.run(script)
            assert (status, protocol) == (200, "h3")
            assert got[: len(IDS)] == IDS


def test_ngtcp2_completes(lossy: LossyProxy, tmp_path: Path) -> None:
    pages = ngtcp2_pages(lossy.port, ("health", "props", "slots"), tmp_path, within=60)
    assert pages["props"]["model"] == "echo"
    assert len(pages["slots"]["slots"]) == SLOTS
