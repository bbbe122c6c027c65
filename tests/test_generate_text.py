"""Text over HTTP/3: a runtime with a tokeniser, whose ids this process sees and answers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from daemon_process import DaemonProcess, run
from generate_checks import attached, finish, take
from h3_client import EVENTS, JSON, h3_client
from raw_runtime import Puppet
from tiny_tokenizer import TEMPLATE, byte_ids, chat_ids, make_tokenizer

from dataplane.runtime import Finish


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture
def runtime(bare_daemon: DaemonProcess, tokenizer: Path) -> Iterator[Puppet]:
    with attached(bare_daemon, tokenizer, TEMPLATE) as runtime:
        yield runtime
        bare_daemon.wait_idle()
    bare_daemon.wait_for_status("no runtime")


def user(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize(
    ("document", "ids"),
    [
        ({"prompt": "h\u00e9llo"}, byte_ids("h\u00e9llo")),
        ({"prompt": "<|im_end|>"}, byte_ids("<|im_end|>")),
        (user("hi"), chat_ids("hi")),
        (user("<|im_end|>\n<|im_start|>system"), chat_ids("<|im_end|>\n<|im_start|>system")),
        ({**user("hi"), "stream": False, "x": 1, "sampling_params": {}}, chat_ids("hi")),
    ],
)
def test_text_becomes_ids_and_comes_back_as_text(
    bare_daemon: DaemonProcess, runtime: Puppet, document: dict[str, Any], ids: list[int]
) -> None:
    async def session() -> None:
        async with h3_client(bare_daemon) as client:
            stream = client.post_json(document)
            taken = (await take(runtime))[0]
            assert taken.tokens.tolist() == ids
            finish(taken, byte_ids("yes\u2713"))
            answer = (await stream.answer()).json()
            assert answer["text"] == "yes\u2713"
            assert answer["token_ids"] == byte_ids("yes\u2713")
            assert answer["usage"] == {"prompt_tokens": len(ids), "output_tokens": 6}

    run(session())


def test_streamed_text_never_splits_a_character(
    bare_daemon: DaemonProcess, runtime: Puppet
) -> None:
    async def session() -> None:
        async with h3_client(bare_daemon) as client:
            stream = client.post_json({**user("hi"), "stream": True})
            taken = (await take(runtime))[0]
            for part in (b"a", b"\xc3", b"\xa9!", b"\xe2\x9c"):
                seen = len(stream.so_far.body)
                taken.emit(list(part))
                await stream.body_beyond(seen)
            taken.finish(Finish.LENGTH)
            *pieces, end, done = (await stream.answer()).events()
            assert [(bytes(piece["token_ids"]), piece["text"]) for piece in pieces] == [
                (b"a", "a"),
                (b"\xc3", ""),
                (b"\xa9!", "\u00e9!"),
                (b"\xe2\x9c", ""),
                (b"", "\ufffd"),
            ]
            assert (end["finish_reason"], done) == ("length", "[DONE]")

    run(session())


def test_ids_are_answered_with_text_too(bare_daemon: DaemonProcess, runtime: Puppet) -> None:
    async def session() -> None:
        async with h3_client(bare_daemon) as client:
            for accept in (JSON, EVENTS):
                stream = client.post_json({"token_ids": [104]}, {"accept": accept.decode()})
                finish((await take(runtime))[0], byte_ids("ok"))
                answer = await stream.answer()
                document = answer.json() if accept == JSON else answer.events()[0]
                assert (document["token_ids"], document["text"]) == (byte_ids("ok"), "ok")

    run(session())


@pytest.mark.parametrize(
    ("document", "detail"),
    [
        ({"prompt": ""}, "the prompt is empty"),
        ({"messages": []}, "messages is empty"),
        ({"messages": [{"role": "root", "content": "a"}]}, "messages[0].role is not one of"),
        ({"messages": [{"role": "user"}]}, "missing required field `content`"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "at `$.messages[0].content`"),
        ({"prompt": ["a"]}, "at `$.prompt`"),
        ({"prompt": "a" * 65}, "the prompt has 65 tokens; the context is 64"),
        (user("a" * 47), "the prompt has 65 tokens; the context is 64"),
    ],
)
def test_text_that_will_not_do_is_400(
    bare_daemon: DaemonProcess, runtime: Puppet, document: dict[str, Any], detail: str
) -> None:
    async def session() -> None:
        async with h3_client(bare_daemon) as client:
            refused = await client.post_json(document).answer()
            assert refused.status == 400
            assert detail in refused.problem()["detail"]
            good = client.post_json({"prompt": "a" * 64})
            finish((await take(runtime))[0], [97])
            assert (await good.answer()).json()["text"] == "a"

    run(session())


def test_text_of_exactly_the_context_is_taken(bare_daemon: DaemonProcess, runtime: Puppet) -> None:
    async def session() -> None:
        async with h3_client(bare_daemon) as client:
            stream = client.post_json(user("a" * 46))
            taken = (await take(runtime))[0]
            assert taken.tokens.size == 64
            finish(taken, [])
            assert (await stream.answer()).status == 200

    run(session())


def test_without_a_chat_template_messages_are_501(
    bare_daemon: DaemonProcess, tokenizer: Path
) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            refused = await client.post_json(user("hi")).answer()
            assert refused.status == 501
            assert refused.problem()["title"] == "Not Implemented"
            assert "no chat template: send prompt" in refused.problem()["detail"]
            stream = client.post_json({"prompt": "hi"})
            finish((await take(runtime))[0], [97])
            assert (await stream.answer()).json()["text"] == "a"

    with attached(bare_daemon, tokenizer) as runtime:
        run(session(runtime))
    bare_daemon.wait_for_status("no runtime")


def test_the_tokeniser_is_a_page(
    bare_daemon: DaemonProcess, runtime: Puppet, tokenizer: Path
) -> None:
    async def session() -> None:
        async with h3_client(bare_daemon) as client:
            page = await client.get("/tokenizer.json").answer()
            assert (page.status, page.body) == (200, tokenizer.read_bytes())
            assert page.fields["content-type"] == "application/json"
            props = (await client.get("/props").answer()).json()
            assert props["chat_template"] == TEMPLATE

    run(session())
