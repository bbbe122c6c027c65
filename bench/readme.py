"""The README's part with the newest figures: `python -m bench.readme`.

It rewrites what stands between the two markers, from `bench/results/latest.json`; nothing there is
typed by hand, so nothing there can be older or better than what was measured. How many peers are
cheaper stands there for every case.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import contention, goodput, latency, memory, refusals, targets
from bench.results import RESULTS, ROOT, read_latest
from bench.tables import aligned

BEGIN = "<!-- bench:begin -->"
END = "<!-- bench:end -->"
OWN = "dataplane"
DEFAULTS = (targets.RAW, targets.H3)
"""The daemon as it is started by default."""
PICTURES = {
    "cpu.png": "Server CPU a request, by case and system",
    "latency.png": "p50, p99 and p99.9 of the answer, by case and system",
    "goodput.png": "Goodput and verdicts up to ten times what the slots can serve",
    "contention.png": "The load alone, and beside work for the daemon's interpreter",
}
SECTIONS = {
    "latency": latency.lines,
    "refusals": refusals.lines,
    "goodput": goodput.lines,
    "contention": contention.lines,
    "memory": memory.lines,
}
"""Those whose tables stand here."""

Row = dict[str, Any]


def _number(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def _cpu_cell(row: Row) -> str:
    return _number(row["server_cpu_us"]) + ("*" if row["client_bound"] else "")


def _latency_cell(row: Row) -> str:
    times = f"{row['p50_us']:,.0f} / {row['p99_us']:,.0f}"
    return times + ("*" if row["client_bound"] else "")


def _ceiling_cell(row: Row) -> str:
    ceiling = row["ceiling_rate"]
    return f"{row['rate_per_s']:,.0f} / " + ("?" if ceiling is None else f"{ceiling:,.0f}")


def _names(rows: Iterable[Row], key: str) -> list[str]:
    return list(dict.fromkeys(row[key] for row in rows))


def _table(rows: Sequence[Row], title: str, cell: Any) -> list[str]:
    cases = _names(rows, "case")
    found = {(row["system"], row["case"]): cell(row) for row in rows}
    cells = [[title, *cases]]
    for system in _names(sorted(rows, key=lambda row: OWN not in row["system"]), "system"):
        cells.append([system, *(found.get((system, case), "") for case in cases)])
    return aligned(cells)


def standings(rows: Sequence[Row]) -> list[str]:
    """Say case by case how many peers took less CPU than each of the daemon's protocols."""
    lines = []
    for case in _names(rows, "case"):
        here = [row for row in rows if row["case"] == case]
        peers = [row for row in here if OWN not in row["system"]]
        ranks = [_standing(row, peers) for row in here if row["system"] in DEFAULTS]
        if not peers or not ranks:
            continue
        best = min(peers, key=lambda row: float(row["server_cpu_us"]))
        cheapest = f"{best['system']}, {_number(best['server_cpu_us'])} µs"
        lines.append(f"- {case}: {'; '.join(ranks)}. The cheapest peer: {cheapest}.")
    return lines


def _standing(own: Row, peers: Sequence[Row]) -> str:
    def behind(among: Sequence[Row]) -> str:
        cheaper = sum(row["server_cpu_us"] < own["server_cpu_us"] for row in among)
        return f"{cheaper} of {len(among)}"

    encrypted = [row for row in peers if row["tls"]]
    return (
        f"{own['system']} ({_number(own['server_cpu_us'])} µs) is behind {behind(peers)} peers,"
        f" {behind(encrypted)} with encryption"
    )


def table_lines(result: dict[str, Any]) -> list[str]:
    """Return the tables of a run."""
    rows = result["rows"]
    if not rows:
        return []
    return [
        *_table(rows, "server CPU, µs a request", _cpu_cell),
        "",
        *_table(rows, "p50 / p99, µs", _latency_cell),
        "",
        *_table(rows, "answers a second / generator's ceiling", _ceiling_cell),
        "",
        "`*`: the generator was busier than the server, so these latencies are the generator's.",
        "",
    ]


def section_tables(result: dict[str, Any]) -> list[str]:
    """Return the tables of the sections that have one, each with an empty line behind it."""
    found = []
    for name, lines in SECTIONS.items():
        section = result["sections"].get(name)
        if section and "error" not in section:
            found += [*lines(section), ""]
    return found


def section_lines(result: dict[str, Any], directory: Path = RESULTS) -> list[str]:
    """Return what stands between the markers."""
    machine = result["machine"]
    where = f"{machine['cpu']}, {machine['cores']} cores"
    where += ", a virtual machine" if machine["virtual"] else ""
    lines = [
        f"`{result['command']}` on {result['date'][:10]}, commit {result['commit'][:8]}; {where},"
        f" Linux {result['kernel']}. Server on one core, generator on another.",
        "",
    ]
    if result.get("targets"):
        lines += [*targets.lines(result["targets"]), ""]
    lines += [*table_lines(result), *section_tables(result)]
    found = standings(result["rows"])
    if found:
        lines += ["Server CPU against the peers':", "", *found, ""]
    for name, text in PICTURES.items():
        if (directory / name).exists():
            lines += [f"![{text}](bench/results/{name})", ""]
    lines.append("`python -m bench.plots` draws the pictures, `python -m bench.readme` this part.")
    return lines


def rewrite(text: str, lines: Sequence[str]) -> str:
    """Return the README with other lines between its markers.

    Raises:
        ValueError: The markers are not there.
    """
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"there are no {BEGIN} and {END}")
    return "\n".join([before + BEGIN, "", *lines, "", END + after])


def main() -> int:
    """Rewrite the README; 1 when there is nothing to rewrite it with."""
    parser = argparse.ArgumentParser(prog="python -m bench.readme", description=__doc__)
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    try:
        lines = section_lines(read_latest(options.results), options.results)
        text = rewrite(options.readme.read_text(encoding="utf-8"), lines)
    except (OSError, ValueError) as error:
        print(f"bench: {options.readme}: {error}", file=sys.stderr)
        return 1
    options.readme.write_text(text, encoding="utf-8")
    print(f"{options.readme}: {len(lines)} lines")
    return 0


if __name__ == "__main__":
    sys.exit(main())
