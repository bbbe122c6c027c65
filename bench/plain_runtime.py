"""A runtime without a model: `python -m bench.plain_runtime` ends each request at once.

With `--hold` it ends none, so that every slot stays taken. With a tokenizer.json the daemon takes
text. What is measured with it is the daemon, and the way of a request to a runtime and back.
"""

import argparse
from pathlib import Path

from bench import work
from dataplane.errors import DetachedError
from dataplane.runtime import Finish, Manifest, Runtime, attach

_IDLE_S = 0.25
"""Longest time between two steps; below the manifest's `max_step_ms`."""


def run(runtime: Runtime, hold: bool) -> None:
    """Serve until the daemon is gone."""
    while True:
        try:
            taken = runtime.take(_IDLE_S)
        except DetachedError:
            return
        for request in taken:
            if not hold:
                request.finish(Finish.STOP)
        runtime.step()


def main() -> None:
    """Attach and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--hold", action="store_true")
    options = parser.parse_args()
    manifest = Manifest(
        model="plain",
        slots=options.slots,
        context=options.context,
        max_output=1,
        vocab_size=work.VOCAB,
    )
    with attach(options.socket, manifest, options.tokenizer) as runtime:
        runtime.ready()
        print("ready", flush=True)
        run(runtime, options.hold)


if __name__ == "__main__":
    main()
