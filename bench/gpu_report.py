"""What `bench.gpu` found: as text and a picture, against what it has to reach, and kept."""

import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.gpu_parts import Part
from bench.results import RESULTS
from bench.tables import aligned, number
from dataplane.runtime.cuda import Mode


class Target(NamedTuple):
    """A figure of a run that has to be at most the bound."""

    name: str
    figure: Callable[[Part], float]
    bound: float
    unit: str = ""


def _claim_p50(mode: Mode) -> Callable[[Part], float]:
    def find(parts: Part) -> float:
        rows = parts["claim"]["rows"]
        return next(
            float(row["p50_us"]) for row in rows if (row["mode"], row["host"]) == (mode, "awake")
        )

    return find


TARGETS = (
    Target("claim by the resident kernel, p50", _claim_p50("persistent"), 4.0, "µs"),
    Target("claim by tick, p50", _claim_p50("tick"), 20.0, "µs"),
    Target("first request over a later one", lambda of: of["first token"]["first_over_later"], 1.2),
    Target(
        "allocations on the device after ready",
        lambda of: of["first token"]["allocations"]["after_ready"],
        0,
    ),
    Target(
        "change of the device's free memory",
        lambda of: abs(of["first token"]["memory_change_bytes"]),
        0,
        "bytes",
    ),
)


def judge(result: Part) -> list[Part]:
    """Return each target with its figure; None, and neither met nor missed, where a part is
    waived or failed before it."""
    judged = []
    for target in TARGETS:
        try:
            figure: float | None = target.figure(result["parts"])
        except (KeyError, StopIteration):
            figure = None
        met = None if figure is None else figure <= target.bound
        judged.append(
            {"name": target.name, "figure": figure, "bound": target.bound, "unit": target.unit,
             "met": met}
        )  # fmt: skip
    return judged


def lines(result: Part) -> list[str]:
    """Return the result as text."""
    of_gpu = result["is_gpu"]
    found = [f"{result['device']['name']}, {result['date'][:10]}"]
    if not of_gpu:
        found.append("HOST THREADS: a smoke test of this bench; no time here is a GPU's")
    for name, part in result["parts"].items():
        found += ["", *_part_lines(name, part)]
    if of_gpu:
        found += ["", *target_lines(result["targets"])]
    return found


def _part_lines(name: str, part: Part) -> list[str]:
    """Return what a part found, and why it was waived or what ended it early."""
    whys = [f"{name}: {key}: {part[word]}" for key, word in _WHYS.items() if word in part]
    is_shown = not whys or "rows" in part
    return [*(_SHOW[name](part) if is_shown else ()), *whys]


_WHYS = {"waived": "waived", "FAILED": "failed"}


def _pong_lines(part: Part) -> list[str]:
    p50, p99 = number(part["p50_us"], 2), number(part["p99_us"], 2)
    return [f"ping-pong, 64 bytes each way: p50 {p50} µs, p99 {p99} µs"]


def _claim_lines(part: Part) -> list[str]:
    rows = [
        (f"{row['mode']}, {row['host']}", *(number(row[f"{name}_us"], 1) for name in _SHOWN))
        for row in part["rows"]
    ]
    return aligned([("claim, µs", *_SHOWN), *rows])


_SHOWN = ("p50", "p99", "max")


def _prompt_lines(part: Part) -> list[str]:
    head = ("prompt, ids", "mapped µs", "staged µs", "mapped GB/s", "staged GB/s", "wins")
    rows = [
        (
            f"{row['tokens']:,}", number(row["mapped_us"], 1), number(row["staged_us"], 1),
            number(row["mapped_gb_per_s"], 2), number(row["staged_gb_per_s"], 2), row["wins"],
        )
        for row in part["rows"]
    ]  # fmt: skip
    if "staged_wins_from" not in part:
        return aligned([head, *rows])
    start = part["staged_wins_from"]
    where = "at none of these lengths" if start is None else f"from {start:,} ids on"
    return [*aligned([head, *rows]), f"a copy into device memory first wins {where}"]


def _first_lines(part: Part) -> list[str]:
    made = part["allocations"]
    return [
        f"{part['tokens']} ids to the first id of the answer, through the daemon: first request"
        f" of a start {part['first_us']:,} µs, later ones {part['later_us']:,} µs (each on a"
        f" connection of its own), on one connection p50 {part['one_connection_p50_us']:,} µs",
        f"device memory: {made['bytes']:,} bytes in {made['before_ready']} allocations before"
        f" ready, {made['after_ready']} after; free memory changed by"
        f" {part['memory_change_bytes']} bytes",
    ]


_SHOW: dict[str, Callable[[Part], list[str]]] = {
    "ping-pong": _pong_lines,
    "claim": _claim_lines,
    "prompt": _prompt_lines,
    "first token": _first_lines,
}


def target_lines(judged: list[Part]) -> list[str]:
    """Return the targets as a table."""
    words = {True: "met", False: "MISSED", None: "waived"}
    rows = [
        (
            row["name"],
            "-" if row["figure"] is None else f"{row['figure']:,g} {row['unit']}".strip(),
            f"at most {row['bound']:g} {row['unit']}".strip(),
            words[row["met"]],
        )
        for row in judged
    ]
    return aligned([("target", "measured", "wanted", ""), *rows])


def place(directory: Path = RESULTS) -> Path:
    """Return where today's result goes: `gpu-<date>.json`, or `-2` where that is taken."""
    name = f"gpu-{datetime.datetime.now(datetime.UTC).date().isoformat()}"
    path = directory / f"{name}.json"
    count = 1
    while path.exists():
        count += 1
        path = directory / f"{name}-{count}.json"
    return path


def keep(result: Part, path: Path) -> None:
    """Write a result, whole or not at all.

    Raises:
        ValueError: The result is not a GPU's.
    """
    if not result["is_gpu"]:
        raise ValueError("only what a GPU did is kept")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    part.replace(path)


def plot(result: Part, path: Path) -> None:
    """Draw claims beside what they have to reach, and the two ways to read a prompt."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.6), layout="constrained")
    _plot_claims(left, result["parts"])
    _plot_prompts(right, result["parts"]["prompt"])
    for panel in (left, right):
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    device = result["device"]["name"]
    figure.suptitle(f"{result['command']}, {result['date'][:10]}, {device}", fontsize=11)
    figure.savefig(path, dpi=80)
    plt.close(figure)


def _plot_claims(panel: Any, parts: Part) -> None:
    rows = [(f"{row['mode']}, {row['host']}", row) for row in parts["claim"].get("rows", ())]
    if "p50_us" in parts["ping-pong"]:
        rows.insert(0, ("ping-pong", parts["ping-pong"]))
    if not rows:
        _say_waived(panel)
        return
    for place, (_, row) in enumerate(rows):
        panel.plot([row["p50_us"], row["p99_us"]], [place, place], color="#1b6e53", linewidth=1.2)
        panel.plot(row["p50_us"], place, "o", color="#1b6e53", label=None if place else "p50")
        panel.plot(
            row["p99_us"], place, "|", color="#1b6e53", markersize=9, markeredgewidth=2,
            label=None if place else "p99",
        )  # fmt: skip
    for bound, words in ((4, "resident: 4 µs"), (20, "tick: 20 µs")):
        panel.axvline(bound, color="#d08a3e", linewidth=1, linestyle="--")
        panel.annotate(words, (bound, len(rows) - 0.5), fontsize=7, color="#d08a3e")
    panel.set_xscale("log")
    panel.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    panel.set_ylim(len(rows) - 0.3, -0.6)
    panel.set_title("There and back, µs (log); dashed: what p50 has to reach", fontsize=10)
    panel.legend(fontsize=8, loc="upper right")


def _plot_prompts(panel: Any, part: Part) -> None:
    rows = part.get("rows", ())
    if not rows:
        _say_waived(panel)
        return
    for way, colour in (("mapped", "#1b6e53"), ("staged", "#3b76af")):
        panel.plot(
            [row["tokens"] for row in rows], [row[f"{way}_us"] for row in rows], "o-",
            color=colour, label=f"{way}", markersize=4,
        )  # fmt: skip
    panel.set_xscale("log", base=2)
    panel.set_yscale("log")
    panel.set_title("A prompt read, µs (log), by its ids", fontsize=10)
    panel.legend(fontsize=8)


def _say_waived(panel: Any) -> None:
    panel.set_axis_off()
    panel.text(0.5, 0.5, "waived", ha="center", color="#555555")
