"""The commands that build, show and serve a bundle."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
from bundles import order, quiet
from conftest import StartDaemon
from daemon_process import command, run
from fatbins import MACHINE, entry, fatbin

from dataplane.bundle import read
from dataplane.client import connect
from dataplane.pack import build


def dataplane(*arguments: str) -> "subprocess.CompletedProcess[str]":
    line = [sys.executable, "-m", "dataplane", *arguments]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)


def test_a_bundle_is_built_shown_and_served(tmp_path: Path, daemon: StartDaemon) -> None:
    out = tmp_path / "b"
    built = dataplane("bundle", "build", "--runtime=echo", f"--out={out}", "--slots=3")
    assert (built.returncode, built.stderr) == (0, "")
    shown = dataplane("bundle", "show", str(out))
    assert shown.stdout == built.stdout
    rows = dict(line.split(maxsplit=1) for line in shown.stdout.splitlines())
    assert rows["slots"] == "3 of 1024 + 512 ids"
    assert rows["targets"] == "cpu"
    assert rows["files"] == "as they were built"
    stated = json.loads(dataplane("bundle", "show", str(out), "--json").stdout)
    assert stated["sha256"] == rows["sha256"] == read(out).sha256
    assert stated["slots"] == 3

    served = daemon(f"--bundle={out}")
    assert (served.runtime, served.slots_count, served.context) == ("echo", 3, 1024)
    assert f"the bundle {out} ({rows['sha256'][:16]}) is as it was built" in served.stderr

    async def ask() -> list[int]:
        async with connect(served.address, str(served.ca)) as client:
            answer = await client.submit([5, 6, 7])
            return [number async for ids in answer for number in ids]

    assert run(ask()) == [5, 6, 7]


def test_show_names_a_changed_file_and_fails(tmp_path: Path, tiny_runtime: str) -> None:
    made = build(order(runtime=tiny_runtime), tmp_path / "b", quiet)
    (made.directory / "tokenizer.json").write_bytes(b"{}")
    shown = dataplane("bundle", "show", str(made.directory))
    assert shown.returncode == 1
    assert "tokenizer.json has changed: it has 2 bytes, not 18" in shown.stdout
    assert "tokenizer.json has changed" in shown.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "why"),
    [
        (("--slots=9",), 2, "--slots 9 contradicts the bundle"),
        (("--runtime=null",), 2, "--runtime null contradicts the bundle"),
    ],
)
def test_serve_refuses_a_flag_that_contradicts(
    tmp_path: Path, arguments: tuple[str, ...], status: int, why: str
) -> None:
    made = build(order(), tmp_path / "b", quiet)
    line = command(tmp_path, f"--bundle={made.directory}", *arguments)
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == status
    assert why in done.stderr
    assert done.stdout == ""


def test_serve_refuses_a_bundle_that_does_not_fit_before_it_makes_anything(tmp_path: Path) -> None:
    image = tmp_path / "k.fatbin"
    image.write_bytes(fatbin(entry(MACHINE, 20)))  # of no device that there still is
    made = build(order(runtime="cuda-echo", kernels=image), tmp_path / "b", quiet)
    line = command(tmp_path / "state", f"--bundle={made.directory}")
    done = subprocess.run(line, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "was built for sm_20" in done.stderr
    assert not (tmp_path / "state").exists()


@pytest.mark.model
@pytest.mark.usefixtures("model_files")
def test_the_small_model_answers_from_a_bundle_alone(tmp_path: Path, daemon: StartDaemon) -> None:
    out = tmp_path / "b"
    made = build(order(runtime="smollm2", copy_weights=True), out, quiet)
    served = daemon(f"--bundle={out}")
    assert (served.runtime, served.slots_count) == ("smollm2", 2)
    assert not list(tmp_path.glob("*.tokenizer.json")), "a tokeniser was made at the start"
    child = served.children()[0]
    assert str(made.weights) in Path(f"/proc/{child}/maps").read_text()

    async def ask() -> list[int]:
        async with connect(served.address, str(served.ca)) as client:
            answer = await client.submit([504, 3575, 282, 4649, 314], max_output=1)
            return [number async for ids in answer for number in ids]

    assert run(ask()) == [7042]
    status, tokenizer = served.get("/tokenizer.json")
    assert status == 200
    assert made.contents.tokenizer is not None
    assert hashlib.sha256(tokenizer.encode()).hexdigest() == made.contents.tokenizer.sha256
