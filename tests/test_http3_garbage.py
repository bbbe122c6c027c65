"""HTTP/3 framing under mutated streams: reported, never raised, never piled up."""

from __future__ import annotations

import random

import pytest
from http3_frames import LIMIT, Event, Log, wide
from http3_vectors import GOOD, RESPONSES, VECTORS

from dataplane.http3 import Http3


def mutated(rng: random.Random, stream: bytes) -> bytes:
    out = bytearray(stream)
    for _ in range(rng.randrange(3)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(6):
            case 0:
                out[at : at + 1] = bytes((rng.randrange(256),))
            case 1:
                out[at:at] = rng.randbytes(rng.randrange(1, 9))
            case 2:
                del out[at : at + rng.randrange(1, 9)]
            case 3:
                out[at:at] = wide(rng.getrandbits(rng.choice((5, 13, 29, 61))), 8)
            case 4:
                out[at:at] = rng.choice(VECTORS).stream[:2000]
            case _:
                if at < len(out):
                    out[at] ^= 1 << rng.randrange(8)
    return bytes(out)


@pytest.mark.parametrize("seed", range(8))
def test_garbage_is_reported_and_never_raised_nor_piled_up(seed: int) -> None:
    rng = random.Random(seed)
    heard: set[str] = set()
    for _ in range(1000):
        is_client, limit = rng.random() < 0.3, rng.choice((300, LIMIT))
        h3, log = Http3(is_client, limit), Log()
        bound = 5 * limit + 2048
        pool = [RESPONSES if is_client else GOOD, VECTORS]
        for index in range(rng.randrange(1, 5)):
            vector = rng.choice(pool[rng.random() < 0.3])
            stream_id = vector.stream_id + 4 * index
            stream = mutated(rng, vector.stream)
            while stream:
                take = rng.choice((1, 3, 20, 1 << 20))
                h3.receive(stream_id, stream[:take], False, log)
                stream = stream[take:]
                assert h3.buffered == held(h3) <= bound
            if rng.random() < 0.7:
                h3.receive(stream_id, b"", True, log)
            elif rng.random() < 0.5:
                h3.reset(stream_id, log)
        check_order(log.events)
        heard.update(event[0] for event in log.events)
    assert heard >= {"headers", "data", "end", "message_error", "connection_error", "trailers"}


def held(h3: Http3) -> int:
    requests = sum(len(stream.held) for stream in h3.streams.values())
    return requests + sum(len(stream.held) for stream in h3.peer._streams.values())


def check_order(events: list[Event]) -> None:
    """Whatever came in, a sink sees the calls in an order that makes sense."""
    seen: dict[int, str] = {}
    allowed = {
        "headers": {"", "interim"},
        "interim": {"", "interim"},
        "data": {"headers", "data"},
        "trailers": {"headers", "data"},
        "end": {"headers", "data", "trailers"},
        "message_error": {"", "interim", "headers", "data", "trailers"},
    }
    for index, event in enumerate(events):
        if event[0] == "connection_error":
            assert index == len(events) - 1
        elif event[0] != "goaway":
            assert seen.get(event[1], "") in allowed[event[0]], events
            seen[event[1]] = event[0]
