"""The client's half of `prompt/1`: the same whole answer wherever it is split, or an error."""

import itertools
from typing import Any

import pytest
from fake_daemon import (
    refusal,
    verdict,
    whole_answer,
    words,
)

from dataplane.client.wire import AnswerReader, encode_ids, reset_words
from dataplane.errors import ResetCode, UsageError
from dataplane.prompt1 import ProtocolError, encode_end

IDS = [0, 7, 256, 65535, 70000, 2**32 - 2]
ANSWER = whole_answer(IDS)


def read_in_pieces(data: bytes, cuts: list[int]) -> tuple[list[int], AnswerReader]:
    reader = AnswerReader()
    ids = []
    edges = [0, *cuts, len(data)]
    for begin, end in itertools.pairwise(edges):
        ids += reader.feed(data[begin:end], end == len(data))
    return ids, reader


def test_an_answer_reads_the_same_wherever_it_is_split() -> None:
    splits = [[cut] for cut in range(1, len(ANSWER))]
    splits.append(list(range(1, len(ANSWER))))
    for cuts in splits:
        ids, reader = read_in_pieces(ANSWER, cuts)
        assert ids == IDS
        assert reader.whole
        assert reader.trailer == (1, 5, len(IDS))


def test_a_refusal_reads_the_same_wherever_it_is_split() -> None:
    data = refusal(429, "every slot is tåken")
    for cut in range(1, len(data)):
        ids, reader = read_in_pieces(data, [cut])
        assert (ids, reader.whole, reader.reason) == ([], True, "every slot is tåken")
        assert reader.verdict is not None
        assert (reader.verdict.status, reader.verdict.slot) == (429, None)


def test_an_answer_that_ends_early_is_no_answer() -> None:
    for length in range(len(ANSWER)):
        with pytest.raises(ProtocolError, match="ended"):
            AnswerReader().feed(ANSWER[:length], True)


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"HTTP" + bytes(28), "begins with 48545450"),
        (ANSWER + b"\0", "goes on behind its trailer"),
        (verdict() + words([1, 2]) + encode_end(1, 5, 3), "counts 3 ids, but 2 came"),
        (verdict() + encode_end(9, 5, 0), "finish reason 9 is unknown"),
        (refusal(400, "x" * 70000), "over 65536 bytes"),
    ],
)
def test_what_is_no_answer_is_said(data: bytes, says: str) -> None:
    with pytest.raises(ProtocolError, match=says):
        AnswerReader().feed(data, True)
    with pytest.raises(ProtocolError, match=says):
        read_in_pieces(data, list(range(1, len(data))))


@pytest.mark.parametrize(
    ("ids", "width", "says"),
    [
        ([1, -1], 4, "id 1 of the prompt is -1; it must be from 0 to 4294967295"),
        ([2**32], 4, "id 0 of the prompt is 4294967296"),
        ([1, 65536], 2, "id 1 of the prompt is 65536; it must be from 0 to 65535"),
        ([1, 2, "3"], 4, "id 2 of the prompt is '3'"),
        ([0.5], 4, "id 0 of the prompt is 0.5"),
        ([1], 3, "the id width is 3; it must be 2 or 4"),
    ],
)
def test_ids_that_do_not_fit_are_refused(ids: list[Any], width: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        encode_ids(ids, width)


def test_every_reset_code_has_its_words() -> None:
    known = {reset_words(code) for code in ResetCode}
    assert len(known) == len(ResetCode)
    assert reset_words(99) not in known
