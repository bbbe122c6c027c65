"""The table and the picture of the "no queue" result: nothing that is not in it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.tables import aligned

Result = Mapping[str, Any]

_PLOT_SIZE = (8.0, 4.5)
_DPI = 120


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a table in Markdown."""
    return aligned([head, *rows])


def number(value: float | None, digits: int = 1) -> str:
    """Return a figure for a table; a dash for none."""
    return "-" if value is None else f"{value:,.{digits}f}"


def range_of(bounds: Result, name: str) -> str:
    """Return `lower to upper` in ms."""
    lower, upper = bounds["lower_ms"][name], bounds["upper_ms"][name]
    return f"{number(lower)} to {number(upper)}"


def _unsaid(bounds: Result | None) -> str:
    if bounds is None:
        return "-"
    return f"{number(bounds['lower'], 2)} to {number(bounds['upper'], 2)}"


def size(count: int | None) -> str:
    """Return bytes in a unit that suits."""
    return "-" if count is None else f"{count / 1024:,.0f} KiB"


def lines(result: Result) -> list[str]:
    """Return the result as text."""
    shape, engine = result["shape"], result["engine"]
    low, high = shape["gaps_ms"]
    head = (
        f"{shape['requests']} requests of {shape['prompt']} ids for {shape['max_output']} tokens, "
        f"gaps {low:g} to {high:g} ms: {result['load']:.2f} of what {engine['slots']} slots serve"
    )
    groups = result["groups"]
    text = [head, "", *_first_tokens(groups), "", *_waits(groups), "", *_costs(groups), ""]
    vllm = result["vllm"]
    if isinstance(vllm, str):
        return [*text, f"vllm serve: {vllm}"]
    first = vllm["first_token_ms"]
    said = ", ".join(f"{name} {value}" for name, value in vllm["server_says_mean_ms"].items())
    return [
        *text,
        f"vllm serve (its own engine, {vllm['offered_per_s']:.1f} requests a second): first token "
        f"p50 {number(first['p50'])} ms, p99 {number(first['p99'])} ms, mean "
        f"{number(vllm['first_token_mean_ms'])} ms; its own means: {said}",
    ]


def _first_tokens(groups: Sequence[Result]) -> list[str]:
    head = (
        "first token, ms", "p50", "p99", "p99 - p50", "decision p99", "answered", "refused",
        "generator late p99",
    )  # fmt: skip
    return table(
        head,
        [
            (
                group["group"],
                number(group["first_token_ms"]["p50"]),
                number(group["first_token_ms"]["p99"]),
                number(group["first_token_ms"]["p99_minus_p50"]),
                number(group["verdict_ms"]["p99"]),
                str(group["answered"]),
                str(group["refused"]),
                number(group["generator"]["late_ms"]["p99"]),
            )
            for group in groups
        ],
    )


def _waits(groups: Sequence[Result]) -> list[str]:
    head = (
        "wait for the engine, ms", "it says queue p99", "it says pickup p99", "client: p50",
        "client: p99", "mean it says", "mean it leaves out",
    )  # fmt: skip
    rows = []
    for group in groups:
        says, bounds = group["server_says"], group["client_bounds"]
        queue, pickup = says["queue_us"]["p99"], says["pickup_us"]["p99"]
        rows.append(
            (
                group["group"],
                number(queue and queue / 1e3, 2),
                number(pickup and pickup / 1e3, 2),
                range_of(bounds["wait"], "p50"),
                range_of(bounds["wait"], "p99"),
                number(bounds.get("said_mean_ms"), 2),
                _unsaid(bounds.get("unsaid_mean_ms")),
            )
        )
    return table(head, rows)


def _costs(groups: Sequence[Result]) -> list[str]:
    head = ("cost", "slots", "memory grown", "CPU a request, µs", "of it the engine's own process")
    rows = []
    for group in groups:
        spent = group["cpu"]["us_per_request"]
        memory = group["memory"]
        rows.append(
            (
                group["group"],
                size(memory["slots_bytes"]),
                size(memory["rss_growth_bytes"]),
                number(sum(spent.values()), 0),
                number(spent.get("engine"), 0),
            )
        )
    return table(head, rows)


def plot(result: Result, path: Path) -> None:
    """Draw which share of requests still had no first token after which time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    figure, axes = pyplot.subplots(figsize=_PLOT_SIZE)
    for group in result["groups"]:
        curve = [(ms, 1.0 - q) for q, ms in group["first_token_curve_ms"] if q < 1.0]
        label = f"{group['group']} ({group['answered']} of {group['requests']} answered)"
        axes.plot([ms for ms, _ in curve], [share for _, share in curve], label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.4g}"))
    axes.set_xlabel("ms after the request was due")
    axes.set_ylabel("share without a first token yet")
    axes.set_title(
        f"The same engine behind each front end, load {result['load']:.2f}, {result['form']} form"
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)
