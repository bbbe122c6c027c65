"""What the read-only paths answer, whether the admin port or HTTP/3 asks (contracts 4 and 5).

The rules here:

- A page is made in the packet loop: it waits for nothing, and even the largest region's table takes
  some hundred microseconds. No Python loop walks buckets, and slots only in C's.
- Nothing that lies in the region is trusted: a state word is copied once, and one that cannot be is
  shown as UNKNOWN.
- Errors are problem documents (RFC 9457) that say what to do.
"""

import logging
import time
from collections.abc import Callable, Mapping
from itertools import repeat
from typing import NamedTuple, Protocol
from urllib.parse import parse_qs

import msgspec
import numpy as np
import numpy.typing as npt

from dataplane import http_names, metrics
from dataplane._native import ffi, lib
from dataplane.errors import Status
from dataplane.latency import WINDOWS_S, Series
from dataplane.manifest import Manifest
from dataplane.region import Region
from dataplane.slots import State
from dataplane.stats import Stats

_log = logging.getLogger("dataplane.pages")

JSON = http_names.JSON.decode()
TEXT = "text/plain; charset=utf-8"
PROBLEM = http_names.PROBLEM.decode()

_UNKNOWN = len(State)
_STATE_NAMES = [*(state.name for state in State), "UNKNOWN"]
_WINDOWS = tuple(str(seconds) for seconds in WINDOWS_S)
_OF_A_PARTITION = frozenset(("/slots", "/props", "/tokenizer.json"))
_SERIES = tuple(series.name.lower() for series in Series)

Query = Mapping[str, list[str]]
Names = tuple[str, ...]
"""Of partitions."""
Words = npt.NDArray[np.uint64]


class Page(NamedTuple):
    """An answer to a GET."""

    status: int
    content_type: str
    body: bytes


class Runtime(Protocol):
    """What the pages show of the attached runtime."""

    @property
    def manifest(self) -> Manifest: ...
    @property
    def region(self) -> Region: ...
    @property
    def tokenizer(self) -> bytes | None: ...


class Runtimes(Protocol):
    """Where a partition's runtime of now is found: a `Place`, or a `Resident`."""

    @property
    def current(self) -> Runtime | None: ...
    def is_responsive(self) -> bool: ...


class _Standing(NamedTuple):
    manifest: Manifest
    region: Region
    tokenizer: bytes | None = None


class Resident:
    """The runtime that is no process: it never attaches and answers as long as the daemon does."""

    def __init__(self) -> None:
        self.current: Runtime | None = None

    def serve(self, manifest: Manifest, region: Region) -> None:
        """Show these slots from now on."""
        self.current = _Standing(manifest, region)

    def is_responsive(self) -> bool:
        """There is no heartbeat to miss."""
        return self.current is not None


class SlotRow(msgspec.Struct, gc=False):
    """A slot as `/slots` shows it."""

    slot: int
    partition: str
    state: str
    generation: int
    age_ms: int


def json_page(value: object, status: int = 200) -> Page:
    """Return a JSON document."""
    return Page(status, JSON, msgspec.json.encode(value))


def problem(status: int, detail: str, request_id: str | None = None) -> Page:
    """Return an error as contract 4 has it; `request_id` is left out when there is none."""
    document = {
        "type": "about:blank",
        "title": http_names.TITLES[status],
        "status": int(status),
        "detail": detail,
    }
    if request_id is not None:
        document["request_id"] = request_id
    return Page(int(status), PROBLEM, msgspec.json.encode(document))


class Pages:
    """What the read-only paths answer.

    Args:
        stats: The daemon's counters.
        runtimes: Where each partition's runtime is found, by its name.
        status: Says what `/health` says: ok, draining or no runtime.
        clock: Monotonic seconds, for the ages of slots.
    """

    def __init__(
        self,
        stats: Stats,
        runtimes: Mapping[str, Runtimes],
        status: Callable[[], str],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stats = stats
        self._runtimes = runtimes
        self._status = status
        self._clock = clock
        self._ages = {name: _Ages() for name in runtimes}
        self._shared: dict[str, Callable[[Query, Names], Page]] = {
            "/health": self._health,
            "/slots": self._slots,
            "/props": self._props,
            "/tokenizer.json": self._tokenizer,
        }
        self._admin: dict[str, Callable[[Query, Names], Page]] = {
            **self._shared,
            "/livez": self._alive,
            "/readyz": self._ready,
            "/metrics": self._metrics,
        }

    def has(self, target: str, probes: bool) -> bool:
        """Whether there is such a path; see `get`."""
        return _split(target)[0] in (self._admin if probes else self._shared)

    def is_about_a_partition(self, target: str) -> bool:
        """Whether what a path shows is one tenant's business, or another's."""
        return _split(target)[0] in _OF_A_PARTITION

    def get(
        self,
        target: str,
        probes: bool,
        request_id: str | None = None,
        partition: str | None = None,
    ) -> Page:
        """Answer a GET.

        Args:
            target: A path with its query.
            probes: Whether `/livez`, `/readyz` and `/metrics` are there (on the admin port only).
            request_id: What a problem document names the request by.
            partition: The only one that may be shown; None: each.
        """
        paths = self._admin if probes else self._shared
        path, query = _split(target)
        page = paths.get(path)
        if page is None:
            return problem(
                Status.NOT_FOUND, f"no such path; there are {', '.join(paths)}", request_id
            )
        try:
            asked = parse_qs(query, keep_blank_values=True) if query else {}
            # What is nobody's alone does not tell which partitions there are.
            names = () if path == "/health" else self._named(asked, partition)
            return page(asked, names)
        except _ProblemError as error:
            return problem(error.status, str(error), request_id)
        except Exception:
            _log.exception("the page %s failed", path)
            return problem(500, "the page could not be made; the daemon's log says why", request_id)

    def _named(self, query: Query, only: str | None) -> Names:
        """Return the partitions that a request asks for: by `partition=`, else all it may see."""
        if "partition" not in query:
            return tuple(self._runtimes) if only is None else (only,)
        (name, *others) = query["partition"]
        if others:
            raise _twice("partition", 1 + len(others))
        if only is not None and name != only:
            raise _ProblemError(Status.FORBIDDEN, "that is another tenant's partition, or none")
        if name not in self._runtimes:
            known = ", ".join(self._runtimes)
            raise _ProblemError(Status.NOT_FOUND, f"no partition {name!r}; there are: {known}")
        return (name,)

    def look(self) -> None:
        """Note which slots changed: ages are as exact as this is called often."""
        for name in self._runtimes:
            self._seen(name)

    def _seen(self, name: str) -> Words:
        """Return a partition's state words of now; none without a runtime."""
        current, ages = self._runtimes[name].current, self._ages[name]
        if current is None:
            return ages.look(0, _no_words, self._clock())
        words = copy_words(current.region)
        return ages.look(current.region.attachment, words, self._clock())

    def _alive(self, query: Query, names: Names) -> Page:
        return Page(200, TEXT, b"ok\n")

    def _ready(self, query: Query, names: Names) -> Page:
        """Green while requests would be taken if there were room: full slots do not count.

        Of several partitions one is enough: an orchestrator that looks here would take all away.
        """
        status = self._status()
        if status == "ok" and any(self._runtimes[name].is_responsive() for name in names):
            return Page(200, TEXT, b"ok\n")
        detail = {
            "ok": "the runtime's heartbeat is late: it may be stuck",
            "draining": "the daemon is shutting down: send requests to another one",
            "no runtime": "no runtime is attached and ready",
        }.get(status, status)
        raise _ProblemError(Status.UNAVAILABLE, detail)

    def _health(self, query: Query, names: Names) -> Page:
        if "latency99" not in query:
            return json_page(self._stats.health(self._status()))
        window_s = int(_choice(query, "window", _WINDOWS, "60"))
        if _choice(query, "format", ("json", "hdr"), "json") == "json":
            return json_page(self._stats.latency.snapshot(window_s))
        series = Series[_choice(query, "series", _SERIES, "ingress").upper()]
        return Page(200, TEXT, self._stats.latency.encoded(series, window_s))

    def _slots(self, query: Query, names: Names) -> Page:
        rows: list[SlotRow] = []
        for name in names:
            words = self._seen(name)
            states = map(_STATE_NAMES.__getitem__, _states(words).tolist())
            generations = (words >> np.uint64(lib.DP_GENERATION_SHIFT)).tolist()
            ages = self._ages[name].milliseconds(self._clock())
            rows += map(SlotRow, range(len(words)), repeat(name), states, generations, ages)
        return json_page({"slots": rows})

    def _metrics(self, query: Query, names: Names) -> Page:
        found = [self._measure(name) for name in names]
        return Page(200, metrics.CONTENT_TYPE, metrics.render(self._stats, found))

    def _measure(self, name: str) -> metrics.Partition:
        slots = np.bincount(_states(self._seen(name)), minlength=_UNKNOWN + 1).tolist()
        runtimes = self._runtimes[name]
        current = runtimes.current
        model = current.manifest.model if current is not None else None
        return metrics.Partition(name, slots, model, runtimes.is_responsive())

    def _one(self, names: Names) -> Runtime | None:
        """Return the runtime of the only partition that is asked for."""
        if len(names) > 1:
            raise _ProblemError(
                Status.BAD_REQUEST, f"say which: ?partition= one of {', '.join(names)}"
            )
        return self._runtimes[names[0]].current

    def _props(self, query: Query, names: Names) -> Page:
        current = self._one(names)
        if current is None:
            raise _ProblemError(
                Status.UNAVAILABLE, "no runtime is attached, and the properties are the runtime's"
            )
        return json_page(current.manifest)

    def _tokenizer(self, query: Query, names: Names) -> Page:
        current = self._one(names)
        if current is None:
            raise _ProblemError(
                Status.NOT_FOUND, "no runtime is attached, and the tokeniser is the runtime's"
            )
        if current.tokenizer is None:
            raise _ProblemError(
                Status.NOT_FOUND, "the runtime has no tokeniser: it takes token ids only"
            )
        return Page(200, JSON, current.tokenizer)


class _ProblemError(Exception):
    """Ends a page with a problem document."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class _Ages:
    """How long each slot has been in its state: since when its word was seen as it is.

    A word that is seen twice did not change in between, since each claim changes the generation. So
    an age is too young by at most the time between two looks, and never too old.
    """

    def __init__(self) -> None:
        self._attachment = 0
        self._words = _no_words
        self._since = np.empty(0)

    def look(self, attachment: int, words: Words, now: float) -> Words:
        """Take the words of now."""
        if attachment != self._attachment or words.size != self._words.size:
            self._since = np.full(words.size, now)
        else:
            self._since[words != self._words] = now
        self._attachment, self._words = attachment, words
        return words

    def milliseconds(self, now: float) -> list[int]:
        """Return the ages as of now."""
        ages: list[int] = ((now - self._since) * 1000).astype(np.int64).tolist()
        return ages


_no_words: Words = np.empty(0, dtype=np.uint64)


def copy_words(region: Region) -> Words:
    """Copy a region's state words, each at one moment, not all at the same."""
    words = np.empty(region.slots, dtype=np.uint64)
    lib.dp_copy_words(region.native, ffi.from_buffer("uint64_t[]", words))
    return words


def _states(words: Words) -> npt.NDArray[np.int64]:
    """Return each word's state; `_UNKNOWN` for what is none."""
    states = (words & np.uint64(lib.DP_STATE_MASK)).astype(np.int64)
    return np.minimum(states, _UNKNOWN)


def _split(target: str) -> tuple[str, str]:
    """Return path and query of a request target; its absolute form is a proxy's (RFC 9112)."""
    if not target.startswith("/"):
        _, _, rest = target.partition("://")
        target = rest[rest.find("/") :] if "/" in rest else ""
    path, _, query = target.partition("?")
    return path, query


def _choice(query: Query, name: str, choices: tuple[str, ...], default: str) -> str:
    """Return a parameter of the query, which is one of `choices` or not there.

    Raises:
        _ProblemError: It is something else, or there twice.
    """
    values = query.get(name, [default])
    if len(values) > 1:
        raise _twice(name, len(values))
    if values[0] not in choices:
        allowed = f"{', '.join(choices[:-1])} or {choices[-1]}"
        raise _ProblemError(Status.BAD_REQUEST, f"{name} must be {allowed}, not {values[0]!r}")
    return values[0]


def _twice(name: str, times: int) -> _ProblemError:
    return _ProblemError(Status.BAD_REQUEST, f"{name} is there {times} times: give one")
