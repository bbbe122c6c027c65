"""Everything that is measured, in one go: `python -m bench.run`, which is what `make bench` calls.

The comparison's rows first (`bench/systems.py` in the cases of `bench/cases.py`), then the
sections: modules with a `run(form, progress)` that returns a dictionary. What fails is said and
left out, the rest is still measured and written; the exit status then is 1. The rules that hold
here:

- Nothing else runs meanwhile: one system at a time, its server on one core, the generator on
  another; no thread of this process draws progress.
- The result is written once, at the end, to `bench/results`. Ctrl-C writes nothing and leaves no
  process behind.
"""

import argparse
import contextlib
import functools
import importlib
import os
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from bench import targets
from bench.cases import CEILING_LIMITS, LIMITS, OPEN, PROBE, Case, Limits, parse_case, select
from bench.cells import Ceiling, measure_ceiling, measure_row
from bench.clients import WrongAnswerError
from bench.launch import LaunchError
from bench.measure import CLIENT_CORE, pin
from bench.progress import Line
from bench.results import ROOT, Form, Row, Section, document, write
from bench.systems import LARGE, SMALL, SYSTEMS, Files, System, command_of, running, shape_of
from dataplane.errors import DataplaneError
from dataplane.identity import load_identity

SECTIONS = {
    "latency": "bench.latency",
    "refusals": "bench.refusals",
    "goodput": "bench.goodput",
    "contention": "bench.contention",
    "memory": "bench.memory",
    "noqueue": "bench.noqueue",
    "overload": "bench.overload",
    "interference": "bench.interference",
    "growth": "bench.growth",
}
_NO_PORT = 65_535
_RATED_LAST = ("hypercorn h3",)
_PROBE_LIMITS = Limits(0.5, 10_000)
_FAILURES = (LaunchError, WrongAnswerError, DataplaneError, OSError)


class Rows:
    """The comparison.

    Args:
        short: Measure those that are not main systems in two cases only.

    Attributes:
        rows, ceilings, failures: What came of it.
        commands: What started each system, with its certificates' names in place of their paths.
    """

    def __init__(self, form: Form, short: bool, files: Files, progress: Line) -> None:
        self.rows: list[Row] = []
        self.ceilings: list[Ceiling] = []
        self.failures: list[str] = []
        self.commands: dict[str, str] = {}
        self._short = short
        self._form = form
        self._limits = LIMITS[form]
        self._files = files
        self._progress = progress
        self._reached: dict[tuple[str, ...], float] = {}

    def run(self, cases: Sequence[Case], systems: Sequence[System]) -> None:
        """Measure every system in every case."""
        if self._form is Form.FULL:
            for case in cases:
                for system in systems:
                    if system.module is not None and self._takes_part(system, case):
                        self._ceiling(system, case)
        rates: dict[str, float] = {}
        rated = [case for case in cases if case.rated]
        for system in systems:
            for group in self._groups(system, cases):
                self._system(system, group, None)
            if any(self._takes_part(system, case) for case in rated):
                rates |= self._probe(system)
        if rates:
            # Half of what the slowest can; at the rate of one that is several times slower than the
            # rest, nobody else would be loaded.
            for apart in _RATED_LAST:
                if len(rates) > 1:
                    rates.pop(apart, None)
            for name in rates:
                self._system(SYSTEMS[name], rated, min(rates.values()) / 2)
        order = [case.name for case in cases]
        self.rows.sort(key=lambda row: (order.index(row.case), list(SYSTEMS).index(row.system)))

    def _takes_part(self, system: System, case: Case) -> bool:
        for_all = case.name in (SMALL, LARGE)
        return system.takes_part(case) and (system.main or for_all or not self._short)

    def _groups(self, system: System, cases: Sequence[Case]) -> list[list[Case]]:
        """Return the closed-loop cases that a system is started once for."""
        closed = [case for case in cases if not case.rated and self._takes_part(system, case)]
        if system.module is not None:
            return [closed] if closed else []
        # The daemon has another runtime where an output is asked for.
        groups = [[case for case in closed if bool(case.output) == wanted] for wanted in (0, 1)]
        return [group for group in groups if group]

    def _ceiling(self, system: System, case: Case) -> None:
        """Measure a generator once for all systems that it loads."""
        key = _generator_key(system, case)
        if key in self._reached:
            return
        self._progress(f"ceiling of the generator: {' '.join(key)}")
        with self._complaining(f"the ceiling for {system.name}", case):
            ceiling = measure_ceiling(system, case, CEILING_LIMITS, self._files)
            self.ceilings.append(ceiling)
            self._reached[key] = ceiling.rate_per_s

    def _system(self, system: System, cases: Sequence[Case], rate: float | None) -> None:
        """Start a system and measure it in cases that it is started for in the same way."""
        names = ", ".join(case.name for case in cases)
        with self._complaining(system.name, *cases), running(system, cases[0], self._files) as run:
            self._note_command(system, cases[0])
            for case in cases:
                self._progress(f"{system.name}: {case.name} (of {names})")
                with self._complaining(system.name, case):
                    ceiling = self._reached.get(_generator_key(system, case))
                    self.rows.append(measure_row(run, case, self._limits, ceiling, rate))

    def _probe(self, system: System) -> dict[str, float]:
        """Return how many requests a second a system answers when as many as it can are asked."""
        for row in self.rows:
            if (row.system, row.case) == (system.name, PROBE):
                return {system.name: row.rate_per_s}
        case = parse_case(PROBE)
        assert case is not None
        self._progress(f"{system.name}: how fast it is, for {OPEN}")
        with self._complaining(system.name, case), running(system, case, self._files) as run:
            row = measure_row(run, case, _PROBE_LIMITS, None)
            return {system.name: row.rate_per_s}
        return {}

    def _note_command(self, system: System, case: Case) -> None:
        own_output = system.module is None and case.output
        name = f"{system.name} ({case.name})" if own_output else system.name
        words = " ".join(command_of(system, case, self._files, _NO_PORT))
        named = words.replace(str(_NO_PORT), "PORT").replace(str(self._files.directory), "DIR")
        self.commands[name] = named

    @contextlib.contextmanager
    def _complaining(self, what: str, *cases: Case) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            names = ", ".join(case.name for case in cases)
            self.failures.append(f"{what}, {names}: {error}")
            self._progress.keep(f"failed: {self.failures[-1]}")


def _generator_key(system: System, case: Case) -> tuple[str, ...]:
    """Return what makes a peer's generator another one."""
    tls = "TLS" if system.tls else "plain"
    connections, streams = shape_of(system, case)
    shape = f"{case.ids} ids, {connections} x {streams} in flight, {case.output} out"
    return str(system.protocol), system.encoding, tls, shape


def measure_rows(
    form: Form, short: bool, cases: Sequence[Case], systems: Sequence[System], progress: Line
) -> Rows:
    """Measure the comparison on two cores of their own."""
    allowed = os.sched_getaffinity(0)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        identity = load_identity(Path(directory), "localhost")
        assert identity.ca is not None
        files = Files(Path(directory), identity.cert, identity.key, identity.ca)
        rows = Rows(form, short, files, progress)
        present = [system for system in systems if system.installed()]
        rows.failures += [
            f"{system.name}: not installed (pip install -e '.[bench]')"
            for system in systems
            if system not in present
        ]
        pin(CLIENT_CORE)
        try:
            rows.run(cases, present)
        finally:
            os.sched_setaffinity(0, allowed)
    return rows


def _say_of(progress: Line, section: str, text: str) -> None:
    progress(f"{section}: {text}")


def run_sections(
    form: Form, names: Sequence[str], progress: Line
) -> tuple[dict[str, Any], list[str]]:
    """Run sections; what they returned, and what failed."""
    found: dict[str, Any] = {}
    failures = []
    for name in names:
        progress(f"{name} ...")
        try:
            section: Section = importlib.import_module(SECTIONS[name]).run
            found[name] = section(form, functools.partial(_say_of, progress, name))
        except Exception as error:
            progress.keep(traceback.format_exc())
            failures.append(f"{name}: {error!r}")
            found[name] = {"error": repr(error)}
    return found, failures


class Options(NamedTuple):
    """What to do."""

    form: Form
    only: list[str]
    results: Path


def options_of(arguments: Sequence[str]) -> Options:
    """Read the command line; `BENCH` and `ONLY` of the environment are its defaults."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__)
    parser.add_argument(
        "--form", choices=[str(form) for form in Form], default=os.environ.get("BENCH") or "quick"
    )
    parser.add_argument(
        "--only",
        default=os.environ.get("ONLY", ""),
        help="cases, sections, and words of systems' names, with commas between",
    )
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results")
    read = parser.parse_args(arguments)
    if read.form not in list(Form):
        parser.error(f"BENCH is quick or full, not {read.form}")
    only = [word.strip() for word in read.only.split(",") if word.strip()]
    return Options(Form(read.form), only, read.results)


def _end_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and write; 1 when something could not be measured."""
    options = options_of(sys.argv[1:] if arguments is None else arguments)
    try:
        chosen = select(options.only, options.form, list(SYSTEMS), SECTIONS)
    except ValueError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_on_signal)
    progress = Line()
    short = options.form is Form.QUICK and not options.only
    systems = [SYSTEMS[name] for name in chosen.systems]
    rows = measure_rows(options.form, short, chosen.cases, systems, progress)
    sections, failures = run_sections(options.form, chosen.sections, progress)
    failures = rows.failures + failures
    result = document(
        options.form,
        options.only,
        rows.commands,
        rows.rows,
        [ceiling._asdict() for ceiling in rows.ceilings],
        sections,
        failures,
    )
    result["targets"] = targets.judged(result)
    path = write(result, options.results)
    _show(result, path, progress)
    return 1 if failures else 0


def _show(result: dict[str, Any], path: Path, progress: Line) -> None:
    from bench.readme import section_tables, table_lines

    progress.keep("")
    for line in [*table_lines(result), *section_tables(result), *targets.lines(result["targets"])]:
        print(line)
    for failure in result["failures"]:
        progress.keep(f"failed: {failure}")
    progress("drawing")
    try:
        from bench.plots import draw
    except ImportError:
        progress.keep("no pictures: matplotlib is not installed (pip install -e '.[bench]')")
    else:
        draw(result, path.parent)
    progress.keep(f"written: {path} and {path.parent / 'latest.json'}")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
