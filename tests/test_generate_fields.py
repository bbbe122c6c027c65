"""Over HTTP/3, against a real daemon: the fields of every answer, and the read-only pages."""

import json
import re
from collections.abc import Iterator

import pytest
from daemon_process import DaemonProcess, daemon_process, run
from generate_checks import COMMON, HELD, IDS, RETRY, check_common, check_retry, finish, take
from h3_client import h3_client, words
from raw_runtime import Puppet, puppet

CONTEXT = 64


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One echo daemon for the file."""
    with daemon_process(
        tmp_path_factory.mktemp("echo"), "--runtime=echo", "--slots=4", f"--context={CONTEXT}"
    ) as daemon:
        yield daemon


# ---------------------------------------------------------------- fields


@pytest.mark.parametrize(
    ("given", "echoed"),
    [
        ("a", True),
        ("req-1/2:3;=~", True),
        ("x" * 64, True),
        ("x" * 65, False),
        ("", False),
        ("two words", False),
        ("caf\u00e9", False),
    ],
)
def test_a_request_id_is_repeated_if_it_can_be(
    echo: DaemonProcess, given: str, echoed: bool
) -> None:
    async def session() -> None:
        async with h3_client(echo) as client:
            fields = {"x-request-id": given}
            streams = [
                client.post(words(IDS), more=fields),
                client.post_json({"token_ids": IDS}, fields),
                client.post_json({"token_ids": [-1]}, fields),
                client.post(b"1", more=fields),
                client.get("/health", more=fields),
                client.get("/nowhere", more=fields),
                client.get("/v1/generate", more=fields),
            ]
            seen = set()
            for stream in streams:
                answer = await stream.answer()
                name = answer.fields["x-request-id"]
                assert name == answer.fields["request-id"]
                assert (name == given) is echoed
                assert echoed or re.fullmatch("[0-9a-f]{16}", name)
                if answer.status >= 400:
                    assert answer.problem()["request_id"] == name
                seen.add(name)
            assert len(seen) == (1 if echoed else len(streams))

    run(session())


def test_remaining_goes_down_and_up_again(bare_daemon: DaemonProcess) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            streams, taken = [], []
            for remaining in (2, 1, 0):
                streams.append(client.post(words(IDS)))
                check_common(await streams[-1].header(), limit=3, remaining=remaining)
                bad = await client.post(b"1").answer()
                assert bad.status == 400
                check_common(bad, limit=3, remaining=remaining)
                taken += await take(runtime)
            refused = await client.post(words(IDS)).answer()
            assert refused.status == 429
            check_common(refused, limit=3, remaining=0)
            for each in taken[1:]:
                finish(each, [1])
            for stream in streams[1:]:
                await stream.answer()
            # One that is refused over its body held a slot, and says what was left besides it.
            check_common(await client.post_json({"token_ids": [-1]}).answer(), 3, remaining=1)
            finish(taken[0], [1])
            await streams[0].answer()
            check_common(await client.get("/health").answer(), limit=3, remaining=3)

    with puppet(bare_daemon, slots=3) as runtime:
        run(session(runtime))


def test_the_fields_of_every_refusal(bare_daemon: DaemonProcess) -> None:
    async def session(runtime: Puppet) -> None:
        async with h3_client(bare_daemon) as client:
            before = await client.post(b"1").answer()
            assert set(before.fields) == COMMON | {"content-length"}
            held = await client.post_json({"token_ids": [-1]}).answer()
            assert set(held.fields) == COMMON | HELD | {"content-length"}
            assert held.fields["server-timing"] == (
                f"queue;dur={held.fields['x-queue-time'].removesuffix('ms')}"
            )
            wrong = await client.get("/v1/generate").answer()
            assert set(wrong.fields) == COMMON | {"content-length", "allow"}
            full = client.post(words(IDS))
            taken = await take(runtime)
            busy = await client.post(words(IDS)).answer()
            assert set(busy.fields) == COMMON | RETRY | {"content-length"}
            check_retry(busy, 429, "Too Many Requests", "every slot is taken")
            finish(taken[0], [1])
            await full.answer()

    with puppet(bare_daemon, slots=1) as runtime:
        run(session(runtime))


def test_without_a_runtime_it_is_503(bare_daemon: DaemonProcess) -> None:
    async def session() -> None:
        async with h3_client(bare_daemon) as client:
            for stream in (client.post(words(IDS)), client.post_json({"prompt": "a"})):
                answer = await stream.answer()
                assert set(answer.fields) == COMMON | RETRY | {"content-length"}
                check_retry(answer, 503, "Service Unavailable", "runtime")
                check_common(answer, limit=0, remaining=0)
            page = await client.get("/props").answer()
            check_retry(page, 503, "Service Unavailable", "no runtime is attached")

    bare_daemon.wait_for_status("no runtime")
    run(session())


# ---------------------------------------------------------------- pages


def test_the_pages_are_those_of_the_admin_port(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with h3_client(echo) as client:
            for path in ("/slots", "/props", "/health", "/health?latency99&window=10"):
                answer = await client.get(path).answer()
                assert answer.status == 200
                assert answer.fields["content-type"] == "application/json"
                assert set(answer.fields) == COMMON | {"content-length"}
                assert answer.fields["content-length"] == str(len(answer.body))
                status, text = echo.get(path)
                assert status == 200
                assert list(answer.json()) == list(json.loads(text))
            props = (await client.get("/props").answer()).json()
            assert (props["model"], props["slots"], props["context"]) == ("echo", 4, CONTEXT)
            histogram = await client.get("/health?latency99&format=hdr&series=queue").answer()
            assert histogram.fields["content-type"].startswith("text/plain")

    echo.wait_idle()
    run(session())


def test_what_is_no_page_is_a_problem(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with h3_client(echo) as client:
            for path, status, detail in (
                ("/tokenizer.json", 404, "the runtime has no tokeniser"),
                ("/", 404, "no such path"),
                ("/metrics", 404, "no such path"),
                ("/health?latency99&window=7", 400, "window must be"),
            ):
                answer = await client.get(path).answer()
                assert answer.status == status
                assert detail in answer.problem()["detail"]

    run(session())


def test_head_has_the_fields_alone(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with h3_client(echo) as client:
            for path, status in (("/props", 200), ("/nowhere", 404), ("/v1/generate", 405)):
                answer = await client.get(path, b"HEAD").answer()
                assert (answer.status, answer.body) == (status, b"")
                assert int(answer.fields["content-length"]) > 0

    run(session())


def test_settings_come_first_and_use_no_dynamic_table(echo: DaemonProcess) -> None:
    async def session() -> None:
        async with h3_client(echo) as client:
            await client.get("/health").answer()
            kind, payload = client.control_frames()[0]
            assert kind == 4
            # QPACK_MAX_TABLE_CAPACITY 0, MAX_FIELD_SECTION_SIZE 16384, QPACK_BLOCKED_STREAMS 0.
            assert payload.startswith(bytes.fromhex("0100 06 80004000 0700"))

    run(session())
