"""HTTP/3 clients that others wrote: curl (curl_cffi), niquests, Chromium and ngtcp2's own.

Each is a QUIC and HTTP/3 implementation of its own. One that is not here is skipped, with what is
missing: `pip install curl_cffi niquests`, `apt-get install chromium ngtcp2-client`.
"""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
from daemon_process import DaemonProcess, daemon_process
from foreign_clients import (
    BINARY,
    chromium_tab,
    curl_session,
    ngtcp2_pages,
    niquests_session,
)

pytestmark = pytest.mark.foreign

DELAY_S = 0.05
IDS = struct.pack("<3I", 5, 6, 7)
ANSWER = struct.pack("<8I", 5, 6, 7, 0xFFFFFFFF, 1, 3, 3, 0)
TOO_LONG = "the prompt has 500000 tokens; the context is 64"


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """An echo that gives an id back every 50 ms."""
    with daemon_process(
        tmp_path_factory.mktemp("echo"),
        "--runtime=echo",
        "--slots=4",
        "--context=64",
        f"--token-delay-ms={DELAY_S * 1000}",
    ) as daemon:
        yield daemon


def check_stream(lines: list[tuple[float, str]], count: int) -> None:
    """Hold server-sent events, with the times that they came at, to be the echo of 0, 1, ..."""
    events = [(at, line) for at, line in lines if line]
    assert all(line.startswith("data: ") for _, line in events)
    documents = [json.loads(line[6:]) for _, line in events[:-1]]
    pieces = [document["token_ids"] for document in documents[:-1]]
    assert [number for piece in pieces for number in piece] == list(range(count))
    assert documents[-1]["finish_reason"] == "stop"
    assert events[-1][1] == "data: [DONE]"
    # They came as they were made, not all at the end.
    assert len(pieces) > 1
    assert events[-1][0] - events[0][0] > DELAY_S / 2


# ---------------------------------------------------------------- curl


@pytest.fixture
def curl(echo: DaemonProcess) -> Iterator[Any]:
    with curl_session(echo.ca, within=20) as session:
        yield session
    echo.wait_idle()


def test_curl_asks_in_every_form(echo: DaemonProcess, curl: Any) -> None:
    url = f"https://localhost:{echo.port}"
    page = curl.get(f"{url}/health")
    assert (page.status_code, page.http_version) == (200, 30)
    assert page.json()["status"] == "ok"
    answer = curl.post(f"{url}/v1/generate", data=IDS, headers=BINARY)
    assert (answer.status_code, answer.content) == (200, ANSWER)
    assert answer.headers["x-ratelimit-remaining"] == "3"
    answer = curl.post(f"{url}/v1/generate", json={"token_ids": [5, 6, 7]})
    assert (answer.status_code, answer.json()["token_ids"]) == (200, [5, 6, 7])
    assert curl.head(f"{url}/props").status_code == 200


def test_curl_streams(echo: DaemonProcess, curl: Any) -> None:
    url = f"https://localhost:{echo.port}/v1/generate"
    document = {"token_ids": [0, 1, 2, 3], "stream": True}
    with curl.stream("POST", url, json=document) as answer:
        assert answer.status_code == 200
        lines = [(time.monotonic(), line.decode()) for line in answer.iter_lines()]
    check_stream(lines, 4)


def test_curl_that_leaves_frees_its_slot(echo: DaemonProcess, curl: Any) -> None:
    url = f"https://localhost:{echo.port}/v1/generate"
    document = {"token_ids": list(range(64)), "stream": True}
    with curl.stream("POST", url, json=document) as answer:
        next(answer.iter_lines())
    echo.wait_idle()
    assert echo.health()["cancelled"] >= 1


@pytest.mark.parametrize("headers", [BINARY, {"content-type": "text/plain"}])
def test_curl_is_answered_before_its_2_mb_are_sent(
    echo: DaemonProcess, curl: Any, headers: dict[str, str]
) -> None:
    url = f"https://localhost:{echo.port}/v1/generate"
    answer = curl.post(url, data=bytes(2_000_000), headers=headers)
    assert answer.status_code == (400 if headers is BINARY else 415)
    assert answer.headers["content-type"] == "application/problem+json"
    if headers is BINARY:
        assert answer.json()["detail"] == TOO_LONG
    assert curl.post(url, data=IDS, headers=BINARY).content == ANSWER


# ---------------------------------------------------------------- niquests


@pytest.fixture
def niquests(echo: DaemonProcess) -> Iterator[Any]:
    with niquests_session(echo.port) as session:
        yield session
    echo.wait_idle()


def test_niquests_asks_in_every_form(echo: DaemonProcess, niquests: Any) -> None:
    url, ca = f"https://localhost:{echo.port}", str(echo.ca)
    page = niquests.get(f"{url}/health", verify=ca)
    assert (page.status_code, page.http_version) == (200, 30)
    assert page.json()["status"] == "ok"
    answer = niquests.post(f"{url}/v1/generate", data=IDS, headers=BINARY, verify=ca)
    assert (answer.status_code, answer.content) == (200, ANSWER)
    answer = niquests.post(f"{url}/v1/generate", json={"token_ids": [5, 6, 7]}, verify=ca)
    assert (answer.status_code, answer.json()["token_ids"]) == (200, [5, 6, 7])
    answer = niquests.post(f"{url}/v1/generate", data=b"1", headers=BINARY, verify=ca)
    assert answer.status_code == 400
    assert "no whole number of ids" in answer.json()["detail"]


def test_niquests_streams(echo: DaemonProcess, niquests: Any) -> None:
    url = f"https://localhost:{echo.port}/v1/generate"
    document = {"token_ids": [0, 1, 2, 3], "stream": True}
    answer = niquests.post(url, json=document, stream=True, verify=str(echo.ca))
    assert answer.status_code == 200
    lines = [(time.monotonic(), line.decode()) for line in answer.iter_lines()]
    check_stream(lines, 4)


def test_niquests_is_answered_early(echo: DaemonProcess, niquests: Any) -> None:
    url, ca = f"https://localhost:{echo.port}/v1/generate", str(echo.ca)
    answer = niquests.post(url, data=bytes(2_000_000), headers=BINARY, verify=ca)
    assert (answer.status_code, answer.json()["detail"]) == (400, TOO_LONG)
    assert niquests.post(url, data=IDS, headers=BINARY, verify=ca).content == ANSWER


# ---------------------------------------------------------------- Chromium

FETCH = """
const answer = await fetch('/v1/generate', {method: 'POST', headers: HEADERS, body: BODY});
const reader = answer.body.getReader();
const parts = [];
for (;;) {
    const {done, value} = await reader.read();
    if (done) break;
    parts.push([performance.now(), Array.from(value)]);
}
const entries = performance.getEntriesByType('resource');
return {
    status: answer.status,
    type: answer.headers.get('content-type'),
    remaining: answer.headers.get('x-ratelimit-remaining'),
    parts: parts,
    protocol: entries[entries.length - 1].nextHopProtocol,
};
"""
LEAVE = """
const leaving = new AbortController();
const body = JSON.stringify({token_ids: Array.from({length: 64}, (_, n) => n), stream: true});
const answer = await fetch('/v1/generate', {
    method: 'POST', headers: {'content-type': 'application/json'}, body, signal: leaving.signal,
});
await answer.body.getReader().read();
leaving.abort();
return answer.status;
"""


@pytest.fixture(scope="module")
def tab(echo: DaemonProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Tab]:
    with chromium_tab(echo.ca, tmp_path_factory.mktemp("chromium"), echo.port) as opened:
        yield opened


def fetch(tab: chromium.Tab, headers: dict[str, str], body: str) -> dict[str, Any]:
    """Fetch `/v1/generate`; `body` is JavaScript."""
    script = FETCH.replace("HEADERS", json.dumps(headers)).replace("BODY", body)
    result: dict[str, Any] = tab.run(script)
    assert result["protocol"] == "h3"
    return result


def test_chromium_opens_a_page(tab: chromium.Tab) -> None:
    assert json.loads(tab.run("return document.body.innerText"))["status"] == "ok"


def test_chromium_fetches_ids(echo: DaemonProcess, tab: chromium.Tab) -> None:
    result = fetch(tab, BINARY, "new Uint32Array([5, 6, 7])")
    assert (result["status"], result["remaining"]) == (200, "3")
    assert result["type"] == "application/octet-stream"
    assert b"".join(bytes(part) for _, part in result["parts"]) == ANSWER
    echo.wait_idle()


def test_chromium_streams(echo: DaemonProcess, tab: chromium.Tab) -> None:
    document = json.dumps({"token_ids": [0, 1, 2, 3], "stream": True})
    result = fetch(tab, {"content-type": "application/json"}, json.dumps(document))
    lines = [
        (at / 1000, line)
        for at, part in result["parts"]
        for line in bytes(part).decode().split("\n")
    ]
    check_stream(lines, 4)
    echo.wait_idle()


def test_chromium_reads_a_refusal(echo: DaemonProcess, tab: chromium.Tab) -> None:
    """Of a request that was sent whole. To an upload that STOP_SENDING ends under way, version 150
    waits for its answer for ever, though it has it."""
    result = fetch(tab, BINARY, "new Uint8Array(5)")
    assert (result["status"], result["type"]) == (400, "application/problem+json")
    detail = "the body of 5 bytes is no whole number of ids of 4 bytes"
    assert json.loads(bytes(result["parts"][0][1]))["detail"] == detail
    assert fetch(tab, BINARY, "new Uint32Array([5, 6, 7])")["status"] == 200
    echo.wait_idle()


def test_chromium_that_leaves_frees_its_slot(echo: DaemonProcess, tab: chromium.Tab) -> None:
    before = echo.health()["cancelled"]
    assert tab.run(LEAVE) == 200
    echo.wait_idle()
    assert echo.health()["cancelled"] == before + 1


# ---------------------------------------------------------------- ngtcp2


def test_ngtcp2_fetches_pages(echo: DaemonProcess, tmp_path: Path) -> None:
    pages = ngtcp2_pages(echo.port, ("health", "props", "slots"), tmp_path, within=20)
    assert pages["health"]["status"] == "ok"
    assert pages["props"]["model"] == "echo"
    assert len(pages["slots"]["slots"]) == 4
