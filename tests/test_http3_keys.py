"""Plain requests that come whole, to a daemon with API keys: the shortcut through C reads the key,
and whatever comes, the outcome is the one that the framing leads to.
"""

import random
from collections.abc import Callable

import pytest
from http3_recorder import Pairs
from hypothesis import given, settings
from hypothesis import strategies as st
from whole_requests import IDS, PLAIN, SLOTS, Server, bare, message, same, section

from dataplane.http3_fields import decode_section, read_frame_header

KEYED = Server(False, keyed=True)
OTHERS: Pairs = [
    (b"user-agent", b"test"), (b"x-max-tokens", b"8"), (b"x-request-id", b"mine"),
    (b"accept", b"*/*"), (b"x-temperature", b"0.5"), (b"cookie", b"a=1"),
]  # fmt: skip

KEYED_SHORT = {
    "bearer": ([(b"authorization", b"Bearer alpha")], "a"),
    "bearer of another": ([(b"authorization", b"Bearer beta")], "b"),
    "the scheme in any case": ([(b"authorization", b"bEARER beta")], "b"),
    "spaces before the token": ([(b"authorization", b"Bearer   beta")], "b"),
    "spaces within the token": ([(b"authorization", b"Bearer two words")], "b"),
    "own name": ([(b"x-api-key", b"beta")], "b"),
    "own name, long": ([(b"x-api-key", b"k" * 480)], "a"),
    "bearer first": ([(b"authorization", b"Bearer alpha"), (b"x-api-key", b"beta")], "a"),
    "bearer first, behind": ([(b"x-api-key", b"beta"), (b"authorization", b"Bearer alpha")], "a"),
    "another scheme": ([(b"authorization", b"Basic alpha"), (b"x-api-key", b"beta")], "b"),
    "no token": ([(b"x-api-key", b"beta"), (b"authorization", b"Bearer")], "b"),
}
KEYED_LONG = {
    "no key": [],
    "unknown": [(b"authorization", b"Bearer gamma")],
    "unknown before a known one": [(b"authorization", b"Bearer gamma"), (b"x-api-key", b"beta")],
    "nearly": [(b"x-api-key", b"alph")],
    "another case": [(b"x-api-key", b"Alpha")],
    "another scheme alone": [(b"authorization", b"Basic alpha")],
    "no space": [(b"authorization", b"Beareralpha")],
    "bearer twice": [(b"authorization", b"Bearer alpha"), (b"authorization", b"Bearer alpha")],
    "own name twice": [(b"x-api-key", b"alpha"), (b"x-api-key", b"beta")],
    "both halves of a known one": [(b"x-api-key", b"joined"), (b"x-api-key", b"key")],
    "empty": [(b"x-api-key", b"")],
    "space behind": [(b"authorization", b"Bearer alpha ")],
    "high": [(b"x-api-key", b"alph\xe9")],
    "too long": [(b"x-api-key", b"k" * 600)],
    "known, too much output": [(b"x-api-key", b"alpha"), (b"x-max-tokens", b"33")],
}
KEY_FIELD = st.sampled_from(
    sorted({pair for pairs, _ in KEYED_SHORT.values() for pair in pairs}
           | {pair for pairs in KEYED_LONG.values() for pair in pairs})
)  # fmt: skip


@pytest.mark.parametrize("encode", [section, bare], ids=["compressed", "bare"])
@pytest.mark.parametrize(("key", "name"), KEYED_SHORT.values(), ids=KEYED_SHORT.keys())
def test_a_known_key_takes_the_shortcut_to_its_partition(
    key: Pairs, name: str, encode: Callable[[Pairs], bytes]
) -> None:
    data = message([*PLAIN, *key], encode=encode)
    assert same(KEYED, data)
    assert KEYED.ask(data, True)[1]
    (exchange,) = KEYED.live()
    assert exchange.ingress.name == name
    exchange.ingress.leave(exchange)


@pytest.mark.parametrize("encode", [section, bare], ids=["compressed", "bare"])
@pytest.mark.parametrize("key", KEYED_LONG.values(), ids=KEYED_LONG.keys())
def test_another_key_does_not(key: Pairs, encode: Callable[[Pairs], bytes]) -> None:
    assert not same(KEYED, message([*PLAIN, *key], encode=encode))


@settings(max_examples=300, deadline=None)
@given(
    keys=st.lists(KEY_FIELD, max_size=3),
    extra=st.lists(st.sampled_from(OTHERS), max_size=2),
    seed=st.integers(),
)
def test_any_mixture_of_keys_is_the_same(keys: Pairs, extra: Pairs, seed: int) -> None:
    pairs = [*keys, *extra]
    random.Random(seed).shuffle(pairs)
    same(KEYED, message([*PLAIN, *pairs], encode=section if seed % 2 else bare))


def test_mutated_requests_with_keys_are_the_same() -> None:
    chance = random.Random(8)
    cases = [
        message([*PLAIN, *key], encode=encode)
        for key, _ in KEYED_SHORT.values()
        for encode in (section, bare)
    ]
    taken = 0
    for _ in range(3000):
        data = bytearray(chance.choice(cases))
        at = chance.randrange(len(data) - len(IDS))
        data[at] = chance.choice((chance.randrange(256), data[at] ^ 1 << chance.randrange(8)))
        taken += same(KEYED, bytes(data))
    assert 30 < taken < 2500


def test_a_full_a_capped_and_a_lost_partition_leave_the_other_alone() -> None:
    keyed = Server(False, keyed=True)
    alpha, beta = (message([*PLAIN, (b"x-api-key", key)]) for key in (b"alpha", b"beta"))

    def answer(data: bytes) -> tuple[bytes, bool]:
        connection, short = keyed.ask(data, True)
        for ingress in keyed.ingresses:
            ingress.egress.flush()
        return dict(decode_section(sections_of(connection.told[0][1])))[b":status"], short

    for _ in range(SLOTS):
        assert answer(alpha) == (b"200", True)
    assert answer(alpha) == (b"429", True)
    assert answer(beta) == (b"200", True)
    keyed.ingresses[0].detach("it is gone")
    assert answer(alpha) == (b"503", False)
    assert answer(beta) == (b"200", True)
    assert [exchange.ingress.name for exchange in keyed.live()] == ["b", "b"]


def sections_of(data: bytes) -> bytes:
    """The field section of a HEADERS frame that an answer begins with."""
    _, length, at = read_frame_header(data, 0, len(data)) or (0, 0, 0)
    return data[at : at + length]
