"""A section run by itself: `--full`, `--json`, `--plot FILE`."""

import argparse
import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

from bench.launch import LaunchError
from bench.progress import Line
from bench.results import Form, Section
from dataplane.errors import DataplaneError

Lines = Callable[[dict[str, Any]], list[str]]
Plot = Callable[[dict[str, Any], Path], None]


def _end_on_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _module() -> str:
    """Return what stands behind `python -m`."""
    spec = sys.modules["__main__"].__spec__
    return spec.name.removesuffix(".__main__") if spec else "bench"


def main(section: Section, lines: Lines, plot: Plot | None = None) -> int:
    """Run a section and print what it came to."""
    parser = argparse.ArgumentParser(prog=f"python -m {_module()}")
    parser.add_argument("--full", action="store_true", help="the long form")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON line")
    if plot is not None:
        parser.add_argument("--plot", type=Path, help="draw the picture into this PNG file")
    options = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end_on_signal)
    form = Form.FULL if options.full else Form.QUICK
    progress = Line()
    try:
        result = section(form, progress)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except (LaunchError, DataplaneError, RuntimeError) as error:
        progress.keep(str(error))
        return 1
    progress.keep("")
    print(json.dumps(result) if options.json else "\n".join(lines(result)))
    if plot is not None and options.plot is not None:
        plot(result, options.plot)
    return 0
