"""What a front keeps of streams that are over, and how long and large things may be before that."""

import asyncio
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, run
from generate_checks import attached, finish, take
from h3_client import body_frame, frame, h3_client, head, post_fields, request_fields, words
from pair import Pair, echo, request_bytes
from tiny_tokenizer import TEMPLATE, byte_ids, make_tokenizer

from dataplane.client.h3_link import Http3Link
from dataplane.connection import BUFFER_LIMIT
from dataplane.fronts import session
from dataplane.fronts.generate import Generate
from dataplane.http3_fields import Fields
from dataplane.ingress import Ingress
from dataplane.manifest import Manifest
from dataplane.pages import Pages, Resident
from dataplane.text import TextError, Tokenizer

PAGE = b"x" * (1 << 20)
GOOD = head(post_fields(12)) + body_frame(words([1, 2, 3]))
UNI = 0x40 | 0x21  # a type that is greased


def h3_front(ingress: Ingress) -> Generate:
    return Generate(ingress, Pages(ingress.stats, {"default": Resident()}, lambda: "ok"))


def h3_pair(state_dir: Path, **options: Any) -> Pair:
    pair = Pair(state_dir, front=h3_front, **options)
    pair.connect()
    control = pair.client.get_next_available_stream_id(is_unidirectional=True)
    pair.client.send_stream_data(control, b"\0" + frame(4, b""), False)
    return pair


def streams_of_every_kind(pair: Pair, good: bytes, bad: bytes, part: bytes) -> None:
    """Open some hundred streams; each is over in both directions in the end."""
    pair.engine = echo(pair)
    client = pair.client
    for turn in range(40):
        for data, fin in ((good, True), (bad, True), (bad, False), (part, False), (part, False)):
            stream_id = pair.open(data, fin)
            if not fin:
                pair.deliver()
                client.reset_stream(stream_id, 0)
        stopped = pair.open(part, False)
        pair.deliver()
        client.stop_stream(stopped, 0)
        pair.deliver()
        client.reset_stream(stopped, 0)
        for data, fin in ((bytes((UNI, 1)), True), (b"", True), (bytes((UNI,)), False)):
            uni = client.get_next_available_stream_id(is_unidirectional=True)
            client.send_stream_data(uni, data, fin)
            if not fin:
                pair.deliver()
                client.reset_stream(uni, 0)
        if turn % 8 == 7:
            pair.run_for(0.5)
    pair.run_for(2.0)


def test_raw_streams_that_are_over_leave_nothing(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.connect()
    good = request_bytes([1, 2, 3])
    streams_of_every_kind(pair, good, b"GET " * 20, good[:20])
    assert (pair.server.streams, pair.server.stopped) == ({}, set())
    pair.check_at_rest()


def test_h3_streams_that_are_over_leave_nothing(tmp_path: Path) -> None:
    pair = h3_pair(tmp_path)
    streams_of_every_kind(pair, GOOD, head(request_fields()), GOOD[:10])
    of_server = pair.server.extra
    assert (pair.server.streams, pair.server.stopped) == ({}, set())
    assert (of_server.http3.streams, of_server.headers) == ({}, {})
    assert len(of_server.http3.peer) == 1  # the client's control stream
    assert of_server.http3.buffered == 0
    pair.check_at_rest()


@pytest.mark.parametrize("part", [b"\x01", GOOD[:10]])
def test_an_unfinished_field_section_is_408(tmp_path: Path, part: bytes) -> None:
    pair = h3_pair(tmp_path, body_timeout=1.0)
    answer = pair.answers[pair.open(part, False)]
    pair.run_until(lambda: answer.fin, 3.0)
    assert b"the header did not come in time" in answer.data
    assert answer.stopped == 0x100
    assert pair.server.extra.headers == {}


def test_a_header_that_comes_late_is_taken(tmp_path: Path) -> None:
    pair = h3_pair(tmp_path, body_timeout=1.0)
    pair.engine = echo(pair)
    stream_id = pair.open(GOOD[:10], False)
    pair.run_for(0.5)
    pair.client.send_stream_data(stream_id, GOOD[10:], True)
    answer = pair.answer(stream_id)
    assert words([1, 2, 3]) in answer.data
    pair.check_at_rest()


def test_pages_that_nobody_reads_are_503(tmp_path: Path, monkeypatch: Any) -> None:
    manifest = Manifest(model="m", slots=4, context=64, max_output=8, vocab_size=100)
    resident = Resident()

    def front(ingress: Ingress) -> Generate:
        return Generate(ingress, Pages(ingress.stats, {"default": resident}, lambda: "ok"))

    pair = Pair(tmp_path, front=front)
    resident.serve(manifest, pair.region)
    assert resident.current is not None
    resident.current = resident.current._replace(tokenizer=PAGE)  # type: ignore[attr-defined]
    pair.connect()
    get = head(request_fields(b"GET", b"/tokenizer.json"))
    for _ in range(40):
        pair.open(get, True)
    pair.transmit()
    pair.now += 0.005
    pair.serve([data for to_server, data in pair._due() if to_server])
    sent = sum(len(data) for _, data, _ in pair.sends)
    assert sent < BUFFER_LIMIT + 2 * len(PAGE)
    assert any(b"too much waits on this connection" in data for _, data, _ in pair.sends)


def test_without_a_runtime_a_long_json_body_is_503(bare_daemon: DaemonProcess) -> None:
    async def main() -> None:
        async with h3_client(bare_daemon) as client:
            answer = await client.post_json({"prompt": "a" * 100_000}).answer()
            assert answer.status == 503

    run(main())


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return make_tokenizer(tmp_path / "tokenizer.json")


def test_text_that_is_plainly_too_long_is_not_tokenised(tokenizer: Path) -> None:
    made = Tokenizer(tokenizer.read_bytes())
    assert made._longest == len("<|im_start|>")
    with pytest.raises(TextError, match=r"over 64 tokens.*the context is 64"):
        made.encode("a" * (64 * made._longest + 1), 64)
    assert len(made.encode("a" * 64 * made._longest, 64)) == 64 * made._longest
    message = {"role": "user", "content": "a" * 10_000}
    with pytest.raises(TextError, match="over 64 tokens"):
        made.encode_chat([message], TEMPLATE, 64)


def test_long_text_lets_other_threads_run(tokenizer: Path) -> None:
    made = Tokenizer(tokenizer.read_bytes())
    ran: list[float] = []
    over = threading.Event()

    def tick() -> None:
        while not over.is_set():
            time.sleep(0.001)
            ran.append(time.monotonic())

    other = threading.Thread(target=tick)
    other.start()
    began = time.monotonic()
    made.encode("long text " * 100_000)
    took = time.monotonic() - began
    over.set()
    other.join()
    seen = [began, *(at for at in ran if began < at < began + took), began + took]
    assert max(after - before for before, after in pairwise(seen)) < took / 2


def json_request(text: str, more: Any = ()) -> bytes:
    body = b'{"prompt": "%s"}' % text.encode()
    fields = post_fields(len(body), b"application/json", dict(more))
    return head(fields) + body_frame(body)


async def text_pair(
    state_dir: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Pair, Generate]:
    """A pair whose every text is tokenised in a thread."""
    monkeypatch.setattr(session, "_INLINE_TEXT", 0)
    pair = h3_pair(state_dir, body_timeout=1.0)
    front: Generate = pair.server.front  # type: ignore[assignment]
    ready = asyncio.Event()
    front.use_text(pair.ingress, tokenizer.read_bytes(), TEMPLATE, ready.set)
    answer = pair.answer(pair.open(json_request("early"), True))
    assert b"the runtime's tokeniser is being read" in answer.data
    await ready.wait()
    return pair, front


def slowly(monkeypatch: pytest.MonkeyPatch, encode: Callable[..., Any]) -> None:
    monkeypatch.setattr(Tokenizer, "encode", encode)


def test_a_slow_text_is_waited_for(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Tokenizer.encode

    def slow(*arguments: Any) -> list[int]:
        time.sleep(0.2)
        return real(*arguments)

    async def main() -> None:
        pair, front = await text_pair(tmp_path, tokenizer, monkeypatch)
        slowly(monkeypatch, slow)
        passed = asyncio.Event()
        front.finish_pass = passed.set
        stream_id = pair.open(json_request("hello"), True)
        pair.run_for(5.0)  # the time-out of bodies is not for this one
        assert pair.held() == ["WRITING"]
        await passed.wait()
        pair.engine = echo(pair)
        assert b'"text":"hello"' in pair.answer(stream_id).data
        # One that leaves frees its slot at once, and what the thread brings goes nowhere.
        passed.clear()
        stream_id = pair.open(json_request("again"), True)
        pair.deliver()
        assert pair.held() == ["WRITING"]
        pair.client.stop_stream(stream_id, 0)
        pair.deliver()
        assert pair.held() == []
        await asyncio.sleep(0.4)
        assert not passed.is_set()
        # A deadline holds.
        answer = pair.answers[pair.open(json_request("x", {"x-deadline-ms": "500"}), True)]
        pair.run_until(lambda: answer.fin, 3.0)
        assert b"the deadline passed while its text" in answer.data
        await asyncio.sleep(0.4)
        pair.check_at_rest()

    asyncio.run(main())


def test_a_tokeniser_that_fails_is_400(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> list[int]:
        raise ZeroDivisionError

    async def main() -> None:
        pair, front = await text_pair(tmp_path, tokenizer, monkeypatch)
        slowly(monkeypatch, fail)
        passed = asyncio.Event()
        front.finish_pass = passed.set
        stream_id = pair.open(json_request("hello"), True)
        pair.deliver()
        await passed.wait()
        assert b"the tokeniser failed at this text" in pair.answer(stream_id).data
        pair.check_at_rest()

    asyncio.run(main())


def test_a_daemon_tokenises_long_text(bare_daemon: DaemonProcess, tokenizer: Path) -> None:
    async def main(runtime: Any) -> None:
        async with h3_client(bare_daemon) as client:
            refused = await client.post_json({"prompt": "a" * 40_000}).answer()
            assert (refused.status, "the context is 64" in refused.problem()["detail"]) == (400, 1)
            more = {"prompt": "hi", "ignored": "a" * 4000}
            stream = client.post_json(more)
            taken = (await take(runtime))[0]
            assert taken.tokens.tolist() == byte_ids("hi")
            finish(taken, byte_ids("yes"))
            assert (await stream.answer()).json()["text"] == "yes"

    with attached(bare_daemon, tokenizer, TEMPLATE) as runtime:
        run(main(runtime))


class _Leaver:
    """A consumer that leaves at its answer's header."""

    def __init__(self, link: Http3Link) -> None:
        self.link = link
        self.stream_id = -1

    def on_head(self, fields: Fields) -> None:
        self.link.abandon(self.stream_id)

    def on_body(self, data: bytes) -> None: ...
    def on_end(self) -> None: ...
    def on_error(self, error: Any) -> None: ...
    def on_lost(self, why: str) -> None: ...


def test_answers_that_a_client_gave_up_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataplane.client.link.Link.abandon", lambda self, stream_id: None)
    link: Any = Http3Link.__new__(Http3Link)
    from dataplane.http3 import Http3

    link.http3, link._consumers, link._receiving = Http3(is_client=True), {}, -1
    answer = head([(b":status", b"200"), (b"content-length", b"9")])
    for number in range(0, 1200, 4):
        consumer = link._consumers[number] = _Leaver(link)
        consumer.stream_id = number
        if number % 3 == 0:
            link.http3.encode_headers(number, [(b":method", b"HEAD")])
            link.receive(number, answer[:3], False)
            link.abandon(number)
        else:
            link.receive(number, answer + b"\0", False)
    assert (link.http3.streams, link.http3._heads, link._consumers) == ({}, set(), {})
    assert link.http3.buffered == 0
