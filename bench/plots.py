"""The pictures of a run: `python -m bench.plots` draws them from `bench/results/latest.json`.

One panel a case, one row a system, the same order and colours everywhere; times on a logarithmic
axis, marked 1, 2, 5, since they differ by more than a hundred times.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from bench import contention, goodput, noqueue, overload
from bench.readme import OWN
from bench.results import RESULTS, read_latest

_COLOURS = {"own": "#1b6e53", "binary": "#3b76af", "json": "#d08a3e"}
_WORDS = {"own": "dataplane", "binary": "peer, binary ids", "json": "peer, JSON"}
_PANEL_WIDTH, _ROW_HEIGHT, _COLUMNS = 5.0, 0.27, 3

Row = dict[str, Any]


def draw(result: dict[str, Any], directory: Path = RESULTS) -> list[Path]:
    """Draw a run's pictures; their files."""
    return _draw_rows(result, directory) + _draw_sections(result, directory)


def _draw_sections(result: dict[str, Any], directory: Path) -> list[Path]:
    """Have the sections that can be drawn draw themselves."""
    written = []
    plots = {
        "noqueue": noqueue.plot,
        "overload": overload.plot,
        "goodput": goodput.plot,
        "contention": contention.plot,
    }
    for name, plot in plots.items():
        section = result["sections"].get(name)
        if section and "error" not in section:
            path = directory / f"{name}.png"
            plot(section, path)
            written.append(path)
    return written


def _draw_rows(result: dict[str, Any], directory: Path) -> list[Path]:
    rows = result["rows"]
    if not rows:
        return []
    written = []
    for name, title, fill in (
        ("cpu.png", "Server CPU a request, µs (log)", _fill_cpu),
        ("latency.png", "From request to whole answer, µs (log)", _fill_latency),
    ):
        figure = _figure(rows, f"{title}\n{_source(result)}", fill)
        path = directory / name
        figure.savefig(path, dpi=80)
        plt.close(figure)
        written.append(path)
    return written


def _source(result: dict[str, Any]) -> str:
    machine = result["machine"]
    return f"{result['command']}, {result['date'][:10]}, {machine['cpu']}"


def _kind(row: Row) -> str:
    return "own" if OWN in row["system"] else str(row["encoding"])


def _figure(rows: list[Row], title: str, fill: Any) -> Any:
    cases = list(dict.fromkeys(row["case"] for row in rows))
    own_first = sorted(rows, key=lambda row: OWN not in row["system"])
    systems = list(dict.fromkeys(row["system"] for row in own_first))
    columns = min(_COLUMNS, len(cases))
    lines = -(-len(cases) // columns)
    height = lines * (len(systems) * _ROW_HEIGHT + 0.9) + 1.3
    figure, panels = plt.subplots(
        lines,
        columns,
        figsize=(columns * _PANEL_WIDTH, height),
        sharey=True,
        squeeze=False,
        layout="constrained",
    )
    for number, panel in enumerate(panels.flat):
        if number >= len(cases):
            panel.set_axis_off()
            continue
        panel.set_title(cases[number], fontsize=10, loc="left")
        _mark_logarithmic(panel)
        panel.set_yticks(range(len(systems)), systems, fontsize=8)
        panel.tick_params(axis="x", labelsize=8)
        panel.grid(axis="x", which="major", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
        here = [row for row in rows if row["case"] == cases[number]]
        fill(panel, [(systems.index(row["system"]), row) for row in here])
    # All panels share the axis: the first system stands on top of each.
    panels[0][0].set_ylim(len(systems) - 0.4, -0.6)
    figure.suptitle(title, fontsize=11)
    figure.legend(handles=_legend(fill), loc="outside lower center", ncols=6, fontsize=8)
    return figure


def _mark_logarithmic(panel: Any) -> None:
    panel.set_xscale("log")
    panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=12))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    panel.xaxis.set_minor_formatter(NullFormatter())


def _legend(fill: Any) -> list[Any]:
    def mark(marker: str, label: str, **style: Any) -> Any:
        return Line2D([], [], color="#555555", marker=marker, linestyle="", label=label, **style)

    handles: list[Any] = [Patch(color=_COLOURS[kind], label=_WORDS[kind]) for kind in _COLOURS]
    if fill is _fill_cpu:
        handles += [mark("o", "encrypted"), mark("o", "plain", markerfacecolor="white")]
    else:
        handles += [mark("o", "p50"), mark("|", "p99"), mark("x", "p99.9")]
        handles.append(mark("o", "the generator's own latency", markerfacecolor="white"))
    return handles


def _fill_cpu(panel: Any, rows: list[tuple[int, Row]]) -> None:
    for place, row in rows:
        colour = _COLOURS[_kind(row)]
        value = row["server_cpu_us"]
        face = colour if row["tls"] else "white"
        panel.axhline(place, color="#eeeeee", linewidth=0.8, zorder=0)
        panel.plot(value, place, "o", color=colour, markerfacecolor=face, markersize=6)
        words = f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
        panel.annotate(
            words, (value, place), (7, 0), textcoords="offset points", va="center", fontsize=7
        )
    values = [row["server_cpu_us"] for _, row in rows]
    panel.set_xlim(min(values) / 1.3, max(values) * 2)


def _fill_latency(panel: Any, rows: list[tuple[int, Row]]) -> None:
    for place, row in rows:
        colour = _COLOURS[_kind(row)]
        p50, p99, p999 = row["p50_us"], row["p99_us"], row["p999_us"]
        face = "white" if row["client_bound"] else colour
        panel.plot([p50, p999], [place, place], color=colour, linewidth=1.2)
        panel.plot(p50, place, "o", color=colour, markerfacecolor=face, markersize=5)
        panel.plot(p99, place, "|", color=colour, markersize=9, markeredgewidth=2)
        panel.plot(p999, place, "x", color=colour, markersize=5)


def main() -> int:
    """Draw the newest run."""
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description=__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    for path in draw(read_latest(options.results), options.results):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
