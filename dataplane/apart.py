"""Run a part of a measurement in a process of its own, with a time limit.

What a device does to one process stays there: an error of CUDA that no later call gets past, a
kernel that hangs and with it the thread that waits for it, a crash in the driver. The rules that
hold here:

- The part says what it found through `report`, as often as it likes; the last word counts, also
  when the process then crashes or is killed.
- At the time limit the part's threads are printed, and then it ends, with all that it started.
- A process that the driver does not let go of is left to the system after a while.
"""

import contextlib
import faulthandler
import json
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# No settings of a daemon's, which whoever starts one may take out of its environment.
_REPORT, _LIMIT, _MARK = "APART_REPORT", "APART_LIMIT", "APART_MARK"
_SAY_BEFORE_S = 1.0
_END_WITHIN_S = 10.0
_SHOWN_BYTES = 16_384
# Kept, so that nothing waits for them or warns of them.
_left: list["subprocess.Popen[bytes]"] = []


class Ended(NamedTuple):
    """What became of a part.

    Attributes:
        found: What it reported last; None: nothing.
        why: What ended it early; None where it came to its end.
        output: The last of what it printed.
    """

    found: Any
    why: str | None
    output: str
    seconds: float


def report(found: object) -> None:
    """Say what was found so far; nothing where no other process asked."""
    path = os.environ.get(_REPORT)
    if path is None:
        return
    part = Path(f"{path}.part")
    part.write_text(json.dumps(found), encoding="utf-8")
    part.replace(path)


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Print where the threads are when the time limit is near, and when the process crashes."""
    limit = os.environ.get(_LIMIT)
    if limit is None:
        yield
        return
    faulthandler.enable()
    faulthandler.dump_traceback_later(float(limit))
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


def run_apart(
    command: Sequence[str], within_s: float, environ: Mapping[str, str] | None = None
) -> Ended:
    """Run a command that measures one part.

    Args:
        command: The program; it calls `report`, within `limited`.
        within_s: How long it may take.
        environ: More of its environment.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory("", "dataplane-apart-", ignore_cleanup_errors=True) as folder:
        path, mark = Path(folder) / "report", uuid.uuid4().hex
        said = {_REPORT: str(path), _MARK: mark, _LIMIT: f"{max(0.1, within_s - _SAY_BEFORE_S):g}"}
        said["TMPDIR"] = folder  # what it would leave behind goes with this
        with (Path(folder) / "output").open("w+b") as output:
            process = subprocess.Popen(
                [*command], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                env={**os.environ, **(environ or {}), **said}, start_new_session=True,
            )  # fmt: skip
            try:
                why = _wait(process, within_s)
            finally:
                left = _end(process, mark)
            output.seek(max(0, output.seek(0, os.SEEK_END) - _SHOWN_BYTES))
            text = output.read().decode(errors="replace")
        ends = "; ".join(filter(None, (why, left))) or None
        return Ended(_found(path), ends, text, time.monotonic() - start)


def _wait(process: "subprocess.Popen[bytes]", within_s: float) -> str | None:
    try:
        status = process.wait(within_s)
    except subprocess.TimeoutExpired:
        return f"it was not done within {within_s:.0f} s"
    if status < 0:
        return f"it was ended by {signal.Signals(-status).name}"
    return f"it ended with status {status}" if status else None


def _end(process: "subprocess.Popen[bytes]", mark: str) -> str | None:
    """End it and what it started; what is left, or None."""
    for pid in (process.pid, *_marked(mark)):
        if pid != process.pid or process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    try:
        process.wait(_END_WITHIN_S)
    except subprocess.TimeoutExpired:
        _left.append(process)
        return f"process {process.pid} does not end, killed or not: the driver holds it"
    return None


def _marked(mark: str) -> Iterator[int]:
    wanted = f"{_MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "environ").read_bytes().split(b"\0"):
                    yield int(entry.name)


def _found(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
