"""The token writers against NumPy: any split, both widths, ids outside the vocabulary anywhere."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from native_region import DONE, READY, RUNNING, WRITING, Slot, open_region, snapshot

from dataplane._native import ffi, lib
from dataplane.region import Region

OK, ILLEGAL, STALE, FULL, OVERFLOW, BAD_TOKEN, SHORT = 0, -1, -2, -3, -4, -5, -6
VOCAB = 50_000
CONTEXT = 64
SLOT = 1
CANARY = 0x5A5A5A5A

WIDTHS = pytest.mark.parametrize("width", [2, 4])
Ids = npt.NDArray[np.uint32]

good_ids = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=CONTEXT)
cuts = st.lists(st.integers(0, CONTEXT * 4), max_size=12)


@pytest.fixture(scope="module")
def region() -> Iterator[Region]:
    with open_region(slots=3, context=CONTEXT, vocab_size=VOCAB) as region:
        yield region


def prompts(region: Region) -> Ids:
    """Every slot's prompt buffer with its padding, as one array that lies in the region."""
    size = region.slots * region.native.layout.prompt_stride
    return np.frombuffer(ffi.buffer(lib.dp_prompt(region.native, 0), size), "<u4")


def begin(region: Region, n_tokens: int, width: int) -> None:
    prompts(region)[:] = CANARY
    lib.dp_write_begin(region.native, SLOT, n_tokens, width)


def write(region: Region, body: bytes, at: list[int]) -> int:
    """Write a body in parts: the status of the first that fails, or OK."""
    edges = [0, *sorted(cut % (len(body) + 1) for cut in at), len(body)]
    for start, stop in itertools.pairwise(edges):
        status: int = lib.dp_write(region.native, SLOT, body, start, stop - start)
        if status != OK:
            return status
    return OK


def check_only_written(region: Region, ids: Ids) -> None:
    """The slot begins with these ids, and nothing around them was touched."""
    expected = np.full_like(prompts(region), CANARY)
    start = SLOT * region.native.layout.prompt_stride // 4
    expected[start : start + len(ids)] = ids
    np.testing.assert_array_equal(prompts(region), expected)


def encode(ids: list[int], width: int) -> bytes:
    return np.array(ids, f"<u{width}").tobytes()


def writer(region: Region) -> Any:
    return region.native.writers[SLOT]


@WIDTHS
@given(ids=good_ids, at=cuts)
def test_any_split_gives_the_same_ids(
    region: Region, width: int, ids: list[int], at: list[int]
) -> None:
    body = encode(ids, width)
    begin(region, len(ids), width)
    assert write(region, body, at) == OK
    assert lib.dp_write_complete(region.native, SLOT) == 1
    check_only_written(region, np.frombuffer(body, f"<u{width}").astype(np.uint32))


@WIDTHS
def test_byte_by_byte(region: Region, width: int) -> None:
    ids = [0, 1, 255, 256, VOCAB - 1]
    body = encode(ids, width)
    begin(region, len(ids), width)
    for i in range(len(body)):
        assert lib.dp_write_complete(region.native, SLOT) == 0
        assert (writer(region).written, writer(region).partial_bytes) == divmod(i, width)
        assert lib.dp_write(region.native, SLOT, body, i, 1) == OK
    assert lib.dp_write_complete(region.native, SLOT) == 1
    check_only_written(region, np.array(ids, np.uint32))


@WIDTHS
@given(ids=good_ids, at=cuts, data=st.data())
def test_the_first_bad_id_is_named(
    region: Region, width: int, ids: list[int], at: list[int], data: st.DataObject
) -> None:
    outside = st.integers(VOCAB, (1 << 8 * width) - 1)
    places = data.draw(st.lists(st.integers(0, len(ids) - 1), min_size=1, max_size=3))
    for place in places:
        ids[place] = data.draw(outside)
    begin(region, len(ids), width)
    assert write(region, encode(ids, width), at) == BAD_TOKEN
    assert writer(region).bad_index == min(places)
    assert writer(region).bad_id == ids[min(places)]
    assert lib.dp_write_complete(region.native, SLOT) == 0


@WIDTHS
@pytest.mark.parametrize("bad", [VOCAB, 65535])
def test_the_vocabulary_ends_where_it_ends(region: Region, width: int, bad: int) -> None:
    begin(region, 1, width)
    assert write(region, encode([VOCAB - 1], width), []) == OK
    begin(region, 1, width)
    assert write(region, encode([bad], width), []) == BAD_TOKEN


@pytest.mark.parametrize("bad", [65536, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF])
def test_an_id_is_never_taken_as_negative_or_cut(region: Region, bad: int) -> None:
    begin(region, 1, 4)
    assert write(region, encode([bad], 4), [1, 2, 3]) == BAD_TOKEN
    assert writer(region).bad_id == bad


@WIDTHS
@given(ids=good_ids, excess=st.integers(1, 9), at=cuts)
def test_more_than_was_declared_is_refused_and_not_written(
    region: Region, width: int, ids: list[int], excess: int, at: list[int]
) -> None:
    body = encode(ids, width)
    begin(region, len(ids), width)
    assert write(region, body + bytes(excess), at) == OVERFLOW
    written = writer(region).written
    check_only_written(region, np.array(ids[:written], np.uint32))


@WIDTHS
def test_a_whole_prompt_takes_no_more(region: Region, width: int) -> None:
    begin(region, 2, width)
    assert write(region, encode([1, 2], width), []) == OK
    assert lib.dp_write(region.native, SLOT, b"", 0, 0) == OK
    assert lib.dp_write(region.native, SLOT, b"\0", 0, 1) == OVERFLOW
    assert lib.dp_write_complete(region.native, SLOT) == 1


@WIDTHS
def test_a_prompt_that_ends_inside_an_id_is_not_complete(region: Region, width: int) -> None:
    begin(region, 2, width)
    assert write(region, encode([1, 2], width)[:-1], []) == OK
    assert lib.dp_write_complete(region.native, SLOT) == 0


def test_beginning_again_forgets_what_was_there(region: Region) -> None:
    begin(region, 3, 4)
    assert write(region, encode([1, 2], 4) + b"\x07\x07", []) == OK
    lib.dp_write_begin(region.native, SLOT, 2, 2)
    assert (writer(region).written, writer(region).partial_bytes) == (0, 0)
    assert write(region, encode([8, 9], 2), [1]) == OK
    assert region.prompt(SLOT, 2).tolist() == [8, 9]


# Claim to publish in two calls.


@pytest.fixture
def own_region() -> Iterator[Region]:
    with open_region(slots=1, context=CONTEXT, vocab_size=VOCAB) as region:
        yield region


def admit(region: Region, n_tokens: int, width: int) -> tuple[int, Any]:
    claimed = ffi.new("struct dp_claimed *")
    status: int = lib.dp_admit(
        region.native, 1, 0, 1, 0, 1, 77, n_tokens, width, 9, 0.5, 0.25, 40, 3, claimed
    )
    return status, claimed


def submit(region: Region, generation: int, body: bytes) -> int:
    status: int = lib.dp_submit(region.native, 0, generation, body, 0, len(body))
    return status


def state(region: Region) -> int:
    return int(region.native.states[0] & 0xFF)


@WIDTHS
def test_admit_and_submit_are_claim_to_publish(own_region: Region, width: int) -> None:
    status, claimed = admit(own_region, 3, width)
    assert (status, claimed.slot, claimed.free_left) == (OK, 0, 0)
    assert own_region.native.states[0] == claimed.generation << 24 | 1 << 8 | WRITING
    request = own_region.native.requests[0]
    assert (request.request_id, request.n_tokens, request.max_output) == (77, 3, 9)
    assert (request.temperature, request.top_p, request.top_k, request.seed) == (0.5, 0.25, 40, 3)
    before = time.time_ns()
    at_ns = submit(own_region, claimed.generation, encode([4, 5, 6], width))
    assert before <= at_ns == request.published_ns <= time.time_ns()
    assert state(own_region) == READY
    assert own_region.prompt(0, 3).tolist() == [4, 5, 6]


def test_admit_says_full_and_changes_nothing(own_region: Region) -> None:
    assert admit(own_region, 3, 4)[0] == OK
    before = snapshot(own_region), bytes(ffi.buffer(own_region.native.writers, 24))
    assert admit(own_region, 1, 2)[0] == FULL
    assert (snapshot(own_region), bytes(ffi.buffer(own_region.native.writers, 24))) == before


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", SHORT),
        (encode([4, 5], 4), SHORT),
        (encode([4, 5, 6], 4)[:-1], SHORT),
        (encode([4, 5, 6, 7], 4), OVERFLOW),
        (encode([4, 5, VOCAB], 4), BAD_TOKEN),
    ],
)
def test_submit_leaves_what_is_not_whole_in_writing(
    own_region: Region, body: bytes, status: int
) -> None:
    _, claimed = admit(own_region, 3, 4)
    assert submit(own_region, claimed.generation, body) == status
    assert state(own_region) == WRITING
    assert own_region.native.requests[0].published_ns == 0


def test_a_body_may_be_short_until_its_last_part_comes(own_region: Region) -> None:
    _, claimed = admit(own_region, 3, 4)
    body = encode([4, 5, 6], 4)
    assert submit(own_region, claimed.generation, body[:5]) == SHORT
    assert submit(own_region, claimed.generation, body[5:]) > 0
    assert own_region.prompt(0, 3).tolist() == [4, 5, 6]


@pytest.mark.parametrize(
    ("held", "away", "status"),
    [(WRITING, 1, STALE), (READY, -1, STALE), (READY, 0, ILLEGAL), (RUNNING, 0, ILLEGAL),
     (DONE, 0, ILLEGAL)],
)  # fmt: skip
def test_submit_without_the_slot_writes_nothing(
    own_region: Region, held: int, away: int, status: int
) -> None:
    slot = Slot(own_region, held)
    lib.dp_write_begin(own_region.native, 0, 3, 4)
    before = snapshot(own_region)
    generation = (slot.generation + away) % (1 << 40)
    assert submit(own_region, generation, encode([4, 5, 6], 4)) == status
    assert snapshot(own_region) == before
    assert own_region.native.writers[0].written == 0
