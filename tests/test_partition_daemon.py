"""A daemon with two partitions: each tenant's requests reach its own runtime, and nothing that
happens in one is felt in the other."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from conftest import StartDaemon
from daemon_process import DaemonProcess, command, first_line, run, until, wait_until
from h3_client import h3_client, words
from raw_runtime import MANIFEST, Puppet, manifest_line, raw_runtime, refusal
from two_partitions import KEYS, TWO, ask, client, is_ready, tenants_file

from dataplane.client import ResetError, connect
from dataplane.errors import ResetCode
from dataplane.prompt1 import Request, encode_request
from dataplane.runtime import Finish, Manifest, attach

SLOTS = 2


@pytest.fixture
def bare(daemon: StartDaemon, tmp_path: Path) -> DaemonProcess:
    """Two partitions, and no runtime in either."""
    return daemon("--runtime=none", *TWO, tenants_file(tmp_path, {"a": "a", "b": "b"}))


@pytest.fixture
def echoes(daemon: StartDaemon, tmp_path: Path) -> DaemonProcess:
    """Two partitions, and an echo in each."""
    return daemon(
        "--runtime=echo", f"--slots={SLOTS}", *TWO, tenants_file(tmp_path, {"a": "a", "b": "b"})
    )


@contextlib.contextmanager
def runtime_in(daemon: DaemonProcess, partition: str) -> Iterator[Puppet]:
    """Attach to a partition until the end of the block; the daemon serves it meanwhile."""
    fields = {name: MANIFEST[name] for name in ("context", "max_output", "vocab_size")}
    manifest = Manifest(model=f"m-{partition}", partition=partition, slots=SLOTS, **fields)
    with attach(daemon.socket, manifest) as runtime:
        runtime.ready()
        wait_until(f"{partition} is served", lambda: is_ready(daemon, partition))
        yield Puppet(runtime)
    wait_until(f"{partition} is not served", lambda: not is_ready(daemon, partition))


def states(daemon: DaemonProcess, partition: str) -> list[str]:
    return [row["state"] for row in daemon.slots() if row["partition"] == partition]


# Whose requests go where.


def test_a_key_decides_which_runtime_gets_a_request(bare: DaemonProcess) -> None:
    async def main(puppets: dict[str, Puppet]) -> None:
        async with client(bare) as raw, h3_client(bare) as h3:
            for name, puppet in puppets.items():
                asked = asyncio.create_task(raw.submit([1, 2, 3], api_key=KEYS[name]))
                (taken,) = await asyncio.to_thread(puppet.take)
                taken.emit([7])
                taken.finish(Finish.STOP)
                assert (await (await asked).result()).token_ids == [7]
                for more in (
                    {"authorization": f"Bearer {KEYS[name]}"},
                    {"authorization": f"bearer  {KEYS[name]}"},
                    {"x-api-key": KEYS[name]},
                    {"authorization": "Basic eA==", "x-api-key": KEYS[name]},
                ):
                    stream = h3.post(words([4, 5]), more=more)
                    (taken,) = await asyncio.to_thread(puppet.take)
                    assert taken.tokens.tolist() == [4, 5]
                    taken.finish(Finish.STOP)
                    assert (await stream.answer()).status == 200

    with runtime_in(bare, "a") as a, runtime_in(bare, "b") as b:
        run(main({"a": a, "b": b}))
    bare.wait_idle()


@pytest.mark.parametrize("key", [None, "gamma", sha256(b"alpha").hexdigest()])
def test_without_a_known_key_it_is_401(echoes: DaemonProcess, key: str | None) -> None:
    why = "an API key is needed" if key is None else "the API key is none of this daemon's"

    async def main() -> None:
        async with client(echoes) as raw, h3_client(echoes) as h3:
            answer = await raw.submit([1], api_key=key)
            assert (answer.status, answer.slot) == (401, None)
            assert why in answer.reason
            more = {} if key is None else {"x-api-key": key}
            for stream in (h3.post(words([1]), more=more), h3.post_json({"prompt": "x"}, more)):
                refused = await stream.answer()
                assert refused.status == 401
                assert why in refused.problem()["detail"]
                fields = refused.fields
                assert fields["www-authenticate"] == "Bearer"
                assert (fields["x-ratelimit-limit"], fields["x-ratelimit-remaining"]) == ("0", "0")
            good = await raw.submit([1], api_key="alpha")
            assert (await good.result()).token_ids == [1]

    run(main())
    assert echoes.health()["requests"] == {"200": 1, "401": 3}


def test_a_header_that_is_wrong_is_told_before_its_key(echoes: DaemonProcess) -> None:
    async def main() -> None:
        async with h3_client(echoes) as h3:
            assert (await h3.post(b"").answer()).status == 400
            assert (await h3.post(b"xx", b"text/plain").answer()).status == 415
            assert (await h3.get("/v1/generate").answer()).status == 405
            long = {"x-api-key": "alpha"}
            assert (await h3.post(words([1] * 1025), more=long).answer()).status == 400

    run(main())


def test_one_partition_with_keys_admits_their_owners_alone(
    daemon: StartDaemon, tmp_path: Path
) -> None:
    only = daemon("--runtime=echo", tenants_file(tmp_path, {"a": None}))

    async def main() -> None:
        async with client(only) as raw:
            assert (await raw.submit([1])).status == 401
            assert (await (await raw.submit([1], api_key="alpha")).result()).token_ids == [1]

    run(main())
    assert {row["partition"] for row in only.slots()} == {"default"}


# Nothing is shared.


def test_a_full_partition_takes_nothing_from_the_other(bare: DaemonProcess) -> None:
    async def main() -> None:
        async with client(bare) as raw:
            held = [await raw.submit([n], api_key="alpha") for n in range(SLOTS)]
            refused = await raw.submit([9], api_key="alpha")
            assert (refused.status, refused.reason) == (429, "every slot is taken")
            others = [await raw.submit([n], api_key="beta") for n in range(SLOTS)]
            assert [other.status for other in others] == [200] * SLOTS
            assert (await raw.submit([9], api_key="beta")).status == 429
            for answer in (*held, *others):
                answer.cancel()
            await until("all is cancelled", lambda: bare.health()["in_flight"] == 0)

    with runtime_in(bare, "a"), runtime_in(bare, "b"):
        run(main())


def test_unfinished_prompts_in_one_count_against_nothing_in_the_other(
    bare: DaemonProcess,
) -> None:
    def begun(key: str) -> bytes:
        return encode_request(Request(4, api_key=key.encode())) + words([1])

    async def main() -> None:
        async with client(bare) as raw:
            held = [await raw.raw(begun("alpha"), fin=False)]
            await until("it is held", lambda: "WRITING" in states(bare, "a"))
            other = await raw.submit([1], api_key="beta")
            assert other.status == 200
            more = await raw.raw(begun("alpha"), fin=False)
            await more.opened()
            assert (more.status, more.reason) == (
                429,
                "this connection already holds 1 slots whose prompts are not complete, which is"
                " its cap: finish those first",
            )
            for answer in (*held, other):
                answer.cancel()
            await until("all is cancelled", lambda: bare.health()["in_flight"] == 0)

    with runtime_in(bare, "a"), runtime_in(bare, "b"):
        run(main())


def test_a_runtime_that_dies_ends_its_own_requests_alone(echoes: DaemonProcess) -> None:
    """Killed, it is started again; the other one has not noticed."""
    pids = {
        name: int(line.split("process ")[1].split(")")[0])
        for line in echoes.stderr.splitlines()
        for name in KEYS
        if f"attached in partition {name} " in line
    }
    assert set(pids) == set(KEYS)

    async def main() -> None:
        async with client(echoes) as raw:
            assert [await ask(raw, name) for name in KEYS] == [200, 200]
            os.kill(pids["a"], signal.SIGKILL)
            await until("a is gone", lambda: not is_ready(echoes, "a"))
            for _ in range(5):
                assert await ask(raw, "b") == 200
            assert echoes.get("/readyz")[0] == 200
            assert echoes.health()["status"] == "ok"
            await until("a is back", lambda: is_ready(echoes, "a"))
            assert await ask(raw, "a") == 200

    run(main())
    assert "attachment" in echoes.stderr
    assert "in partition b ended" not in echoes.stderr


def test_what_runs_in_one_survives_the_end_of_the_other(bare: DaemonProcess) -> None:
    async def main(b: Puppet, ending: contextlib.ExitStack) -> None:
        async with client(bare) as raw:
            lost = await raw.submit([1], api_key="alpha")
            kept = await raw.submit([2], api_key="beta")
            (taken,) = await asyncio.to_thread(b.take)
            taken.emit([5])
            await asyncio.to_thread(ending.close)
            with pytest.raises(ResetError) as caught:
                await lost.result()
            assert caught.value.code == ResetCode.RUNTIME_LOST
            gone = await raw.submit([1], api_key="alpha")
            assert (gone.status, gone.reason) == (
                503, "the runtime is gone; another one is expected",
            )  # fmt: skip
            taken.emit([6])
            taken.finish(Finish.STOP)
            assert (await kept.result()).token_ids == [5, 6]

    with runtime_in(bare, "b") as b, contextlib.ExitStack() as ending:
        ending.enter_context(runtime_in(bare, "a"))
        run(main(b, ending))


def test_a_rule_that_one_breaks_drops_it_alone(bare: DaemonProcess) -> None:
    async def main(a: Puppet) -> None:
        async with client(bare) as raw:
            broken = await raw.submit([1], api_key="alpha")
            (taken,) = await asyncio.to_thread(a.take)
            a.set_progress(taken, 10_000)
            a.ring()
            with pytest.raises(ResetError):
                await broken.result()
            await until("a is dropped", lambda: not is_ready(bare, "a"))
            assert is_ready(bare, "b")

    with runtime_in(bare, "b"), runtime_in(bare, "a") as a:
        run(main(a))
    rule = "slot 0: 10000 output ids, 16 allowed"
    assert bare.stderr.count(f"the runtime in partition a broke a rule: {rule}") == 1
    assert f"ended: it broke a rule: {rule}" in bare.stderr


# Attaching.


def test_each_partition_has_one_place(bare: DaemonProcess) -> None:
    with runtime_in(bare, "a"):
        told = refusal(bare.socket, manifest_line(partition="a"))
        assert "partition 'a' has a runtime already" in told
        with raw_runtime(bare.socket) as other:
            other.say(manifest_line(partition="b"))
            assert "attachment" in other.answer()
    for name in ("default", "c"):
        told = refusal(bare.socket, manifest_line(partition=name))
        assert told == f"there is no partition {name!r}, only 'a' and 'b'"


def test_each_runtime_can_have_a_geometry_of_its_own(bare: DaemonProcess) -> None:
    small = Manifest(model="s", partition="a", slots=1, context=4, max_output=2, vocab_size=10)
    with attach(bare.socket, small) as runtime, runtime_in(bare, "b"):
        runtime.ready()
        wait_until("a is served", lambda: is_ready(bare, "a"))

        async def main() -> None:
            async with client(bare) as raw:
                assert "the context is 4" in (await raw.submit([1] * 5, api_key="alpha")).reason
                assert "the vocabulary has 10" in (await raw.submit([10], api_key="alpha")).reason
                assert (await raw.submit([10] * 5, api_key="beta")).status == 200

        run(main())
        assert len(bare.slots()) == 1 + SLOTS


# The pages.


def test_the_admin_port_shows_every_partition(bare: DaemonProcess) -> None:
    with runtime_in(bare, "a"), runtime_in(bare, "b"):
        assert [(row["partition"], row["slot"]) for row in bare.slots()] == [
            ("a", 0), ("a", 1), ("b", 0), ("b", 1),
        ]  # fmt: skip
        _, page = bare.get("/slots?partition=b")
        assert {row["partition"] for row in json.loads(page)["slots"]} == {"b"}
        assert json.loads(bare.get("/props?partition=b")[1])["model"] == "m-b"
        status, page = bare.get("/props")
        assert (status, json.loads(page)["detail"]) == (400, "say which: ?partition= one of a, b")
        status, page = bare.get("/slots?partition=c")
        assert (status, json.loads(page)["detail"]) == (404, "no partition 'c'; there are: a, b")
        metrics = bare.get("/metrics")[1].splitlines()
        assert f'dataplane_slots{{partition="b",state="FREE"}} {SLOTS}' in metrics
        assert 'vllm:num_requests_running{partition="a",model_name="m-a"} 0' in metrics
        assert 'dataplane_runtime_ready{partition="a"} 1' in metrics
    assert 'dataplane_runtime_ready{partition="a"} 0' in bare.get("/metrics")[1].splitlines()


def test_a_tenant_sees_its_own_partition_alone(bare: DaemonProcess) -> None:
    async def main() -> None:
        async with h3_client(bare) as h3:

            async def get(path: str, key: str | None) -> tuple[int, object]:
                more = {} if key is None else {"x-api-key": key}
                answer = await h3.get(path, more=more).answer()
                return answer.status, json.loads(answer.body)

            status, page = await get("/slots", "alpha")
            assert status == 200
            assert {row["partition"] for row in page["slots"]} == {"a"}  # type: ignore[index]
            assert (await get("/props", "beta"))[1]["model"] == "m-b"  # type: ignore[index]
            assert (await get("/props?partition=b", "beta"))[0] == 200
            for name in ("a", "nowhere"):
                assert (await get(f"/slots?partition={name}", "beta"))[0] == 403
            for path in ("/slots", "/props", "/tokenizer.json", "/slots?partition=a"):
                assert (await get(path, None))[0] == 401
                assert (await get(path, "gamma"))[0] == 401
            for query in ("", "?partition=b", "?partition=nowhere"):
                status, page = await get(f"/health{query}", None)
                assert (status, page["status"]) == (200, "ok")  # type: ignore[index]

    with runtime_in(bare, "a"), runtime_in(bare, "b"):
        run(main())


# Start and end.


def test_what_is_in_flight_in_each_is_waited_for_at_the_end(echoes: DaemonProcess) -> None:
    assert (echoes.slots_count, echoes.context) == (2 * SLOTS, 1024)
    assert len(echoes.children()) == 2
    assert echoes.stop() == 0


@pytest.mark.skipif(shutil.which("nvidia-smi") is not None, reason="there is a GPU here")
def test_a_runtime_that_cannot_start_holds_nobody_up(tmp_path: Path) -> None:
    """Both of its own fail here, for want of a device; one that attaches by hand is served."""
    arguments = ("--runtime=cuda-echo", *TWO, tenants_file(tmp_path, {"a": "a", "b": "b"}))
    log = tmp_path / "log"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command(tmp_path, *arguments), stdout=subprocess.PIPE, stderr=stderr, text=True
        ) as process,
    ):
        try:
            for name in KEYS:
                words_ = f"cuda-echo in partition {name} ended with status 1; it starts again"
                wait_until("it failed", lambda w=words_: w in log.read_text())  # type: ignore[misc]
            assert process.stdout is not None
            small = Manifest(
                model="s", partition="a", slots=1, context=4, max_output=2, vocab_size=10
            )
            with attach(tmp_path / "runtime.sock", small) as runtime:
                runtime.ready()
                ready = dict(
                    pair.split("=", 1) for pair in first_line(process.stdout, 20).split()[1:]
                )
                assert (ready["slots"], ready["context"]) == ("1", "4")
                run(_one_serves(ready["quic"], ready["ca"]))
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
    told = log.read_text()
    assert "pip install -e '.[cuda13]'" in told or "driver" in told


async def _one_serves(address: str, ca: str) -> None:
    async with connect(address, ca) as raw:
        assert (await raw.submit([1], api_key="alpha")).status == 200
        refused = await raw.submit([1], api_key="beta")
        assert refused.status == 503
        assert refused.reason == (
            "the runtime cuda-echo in partition b ended with status 1 before it was ready;"
            " it is started again, and the log says why"
        )
