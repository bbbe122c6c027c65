"""What goes on beside a load: `python -m bench.neighbours`, a client of the same daemon.

So many requests a second over HTTP/3 whose text the daemon has to tokenise (without `--text`: whose
100 KB of JSON it has to parse), and `/metrics` and `/health` fetched so often a second by another
thread. It prints `ready` once connected, and what it came to as one JSON line at its end.
"""

import argparse
import json
import random
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench import work
from bench.daemons import AUTHORITY, page
from dataplane.http3 import Http3, data_frame_header
from dataplane.kinds import Address, parse_address
from dataplane.load import Load, Server
from dataplane.load.tally import quantiles
from dataplane.load.wire import H3Dialogue

PAGES = ("/metrics", "/health")
STREAMS = 8
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "7 lazy dogs", "while", "1234 count")
_JSON_BYTES = 100_000


def text_of(count: int) -> str:
    """Return a text of about so many characters, the same in each run."""
    chosen = random.Random(count)
    words = []
    while count > 0:
        words.append(chosen.choice(_WORDS))
        count -= len(words[-1]) + 1
    return " ".join(words)


def text_body(characters: int) -> bytes:
    """Return a body whose prompt is text."""
    prompt = {"prompt": text_of(characters), "sampling_params": {"max_tokens": 1}}
    return json.dumps(prompt).encode("ascii")


def ids_body() -> bytes:
    """Return a body of 100 KB whose prompt is ids; each has three digits and a comma."""
    ids = [100 + number % 900 for number in range(_JSON_BYTES // 4)]
    return work.json_body(ids)


def request_of(body: bytes) -> bytes:
    """Return a whole HTTP/3 request with a JSON body and a binary answer."""
    fields = [
        (b":method", b"POST"),
        (b":scheme", b"https"),
        (b":authority", AUTHORITY.encode("ascii")),
        (b":path", b"/v1/generate"),
        (b"content-type", b"application/json"),
        (b"accept", b"application/octet-stream"),
        (b"content-length", b"%d" % len(body)),
    ]
    head = Http3(is_client=True).encode_headers(0, fields)
    return head + data_frame_header(len(body)) + body


class Scraper(threading.Thread):
    """Fetches the pages in turn until it is told to stop."""

    def __init__(self, admin: Address, per_second: float) -> None:
        super().__init__(daemon=True)
        self.times_us: list[float] = []
        self.failed = 0
        self._admin = admin
        self._pause_s = 1 / per_second
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(self._pause_s):
            for target in PAGES:
                began = time.perf_counter()
                try:
                    self.failed += page(self._admin, target)[0] != 200
                except OSError:
                    self.failed += 1
                self.times_us.append((time.perf_counter() - began) * 1e6)

    def stop(self) -> None:
        self._over.set()
        self.join()


def be_beside(options: argparse.Namespace) -> dict[str, Any]:
    """Send and fetch for as long as was asked for; what it came to."""
    body = text_body(options.text) if options.text else ids_body()
    request = request_of(body)
    target = Server(parse_address(options.quic), options.ca.read_bytes())
    scraper = Scraper(parse_address(options.admin), options.scrapes)
    with Load(target, "h3", lambda: H3Dialogue(request), 1) as made:
        made.connect()
        made.run(STREAMS, STREAMS)
        print("ready", flush=True)
        scraper.start()
        count = round(options.seconds * options.per_second)
        outcome = made.run(count, STREAMS, options.per_second)
        scraper.stop()
    return {
        "body_bytes": len(body),
        "by_status": outcome.by_status,
        "seconds": round(outcome.seconds, 3),
        "text_us": quantiles(outcome.verdicts_us),
        "scrapes": len(scraper.times_us),
        "scrapes_failed": scraper.failed,
        "scrape_us": quantiles(np.array(scraper.times_us)),
    }


def main() -> None:
    """Be a neighbour."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quic", required=True)
    parser.add_argument("--admin", required=True)
    parser.add_argument("--ca", type=Path, required=True)
    parser.add_argument("--text", type=int, default=0, help="characters of a prompt; 0: JSON ids")
    parser.add_argument("--per-second", type=float, required=True)
    parser.add_argument("--scrapes", type=float, required=True, help="of both pages, a second")
    parser.add_argument("--seconds", type=float, required=True)
    print(json.dumps(be_beside(parser.parse_args())), flush=True)


if __name__ == "__main__":
    main()
