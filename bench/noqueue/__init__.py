"""The published method of the "no queue" claim; see `bench.noqueue.section`.

The servers are modules of this package too, and must not carry the generator in their memory: so
nothing is imported here before it is called.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bench.results import Form, Progress


def run(form: "Form", progress: "Progress") -> dict[str, Any]:
    """Measure every group, one after the other."""
    from bench.noqueue import section

    return section.run(form, progress)


def lines(result: dict[str, Any]) -> list[str]:
    """Return the result as text."""
    from bench.noqueue import report

    return report.lines(result)


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the result."""
    from bench.noqueue import report

    report.plot(result, path)
