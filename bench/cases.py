"""The cases of the comparison, what of them each form measures, and what ONLY picks.

`<ids>-s<n>`: prompts of so many ids, n requests in flight on one connection. `<ids>-c<n>`: n
connections, one request in flight on each. HTTP/1.1 has one request a connection, so for it `-s`
means as many connections, and the row says so. Two cases have names of their own: `echo-16` streams
16 ids back at a model's pace, `128-open` asks at a fixed rate instead of waiting for answers.
"""

import re
from collections.abc import Collection, Iterable
from typing import NamedTuple

from bench.results import Form

ECHO = "echo-16"
OPEN = "128-open"
PROBE = "128-s32"
"""The case whose rates the open loop's is worked out from."""
ECHO_IDS = 16
TOKEN_DELAY_MS = 2
"""What a token takes in `echo-16`: a model of 500 tokens a second, the same behind every system."""

_NAME = re.compile(r"([1-9]\d{0,6})-([sc])([1-9]\d{0,2})")
_QUICK = ("128-c1", "128-s32", "128-c32", "2048-c1", "2048-s32", "131072-c1", ECHO, OPEN)
# fmt: off
_FULL = (
    "1-c1", "128-c1", "128-c8", "128-c32", "128-c128", "128-s8", "128-s32", "128-s128",
    "2048-c1", "2048-c32", "2048-s32", "16384-c1", "131072-c1", "131072-c4", "131072-s4",
    ECHO, OPEN,
)
# fmt: on


class Case(NamedTuple):
    """What is sent: prompts of `ids`, `streams` in flight on each of `connections`.

    `output` ids come back, 0 for a verdict alone; `rated`: at a fixed rate.
    """

    name: str
    ids: int
    connections: int
    streams: int
    output: int = 0
    rated: bool = False

    @property
    def in_flight(self) -> int:
        return self.connections * self.streams


class Limits(NamedTuple):
    """How long a round of a cell is measured, whichever comes first, and how many rounds are."""

    seconds: float
    requests: int
    rounds: int = 1


LIMITS = {Form.QUICK: Limits(0.3, 100_000, 3), Form.FULL: Limits(4.0, 1_000_000, 5)}
CEILING_LIMITS = Limits(5.0, 200_000)


def parse_case(name: str) -> Case | None:
    """Read a case's name; None if it is no case."""
    if name == ECHO:
        return Case(name, 128, 1, 32, output=ECHO_IDS)
    if name == OPEN:
        return Case(name, 128, 1, 32, rated=True)
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    ids, kind, count = int(match[1]), match[2], int(match[3])
    if ids > 131_072 or (kind == "s" and count > 128):
        return None
    return Case(name, ids, 1, count) if kind == "s" else Case(name, ids, count, 1)


def cases_of(form: Form) -> list[Case]:
    """Return a form's cases in the order in which they are measured."""
    found = [parse_case(name) for name in (_QUICK if form is Form.QUICK else _FULL)]
    return [case for case in found if case is not None]


class Selection(NamedTuple):
    """What is measured of all."""

    cases: list[Case]
    systems: list[str]
    sections: list[str]


def select(
    only: Iterable[str], form: Form, systems: Collection[str], sections: Collection[str]
) -> Selection:
    """Choose what ONLY names: cases, sections, and systems by words that their names hold.

    Systems alone mean all their cases; cases without systems mean all systems. A well-formed case
    is taken even if the form would not measure it. With neither, a named section is all there is.

    Raises:
        ValueError: A name is none of them.
    """
    words = [word.strip() for word in only if word.strip()]
    if not words:
        return Selection(cases_of(form), list(systems), list(sections))
    cases: list[Case] = []
    picked_systems: list[str] = []
    picked_sections: list[str] = []
    for word in words:
        case = parse_case(word)
        holding = [name for name in systems if word in name]
        if case is not None:
            cases.append(case)
        elif word in sections:
            picked_sections.append(word)
        elif holding:
            picked_systems += [name for name in holding if name not in picked_systems]
        else:
            known = ", ".join([*(case.name for case in cases_of(form)), *systems, *sections])
            raise ValueError(f"nothing is called {word!r}; there are {known}")
    if cases or picked_systems:
        cases = cases or cases_of(form)
        picked_systems = [name for name in systems if not picked_systems or name in picked_systems]
    return Selection(list(dict.fromkeys(cases)), picked_systems, picked_sections)
