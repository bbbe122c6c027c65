"""Tables in Markdown, which read as well in a terminal."""

from collections.abc import Sequence


def number(value: float | None, digits: int | None = None) -> str:
    """Return a figure for a table; a dash for none."""
    if value is None:
        return "-"
    if digits is None:
        digits = 0 if value >= 100 else 1
    return f"{value:,.{digits}f}"


def percent(value: float | None) -> str:
    """Return a share for a table; a dash for none."""
    return "-" if value is None else f"{value:.1%}"


def aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table; the first row is its head, the first column is text."""
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = []
    for place, row in enumerate(cells):
        padded = [row[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append(f"| {' | '.join(padded)} |")
        if not place:
            rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
            lines.append(f"| {' | '.join(rule)} |")
    return lines
