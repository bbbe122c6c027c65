"""A sampling profiler that runs a command in its own process: `python -m dataplane.cli.sampler OUT
COMMAND...`.

The kernel's profiling timer (ITIMER_PROF) counts the process's CPU time and fires as often as the
kernel's own clock lets it, perhaps each 4 ms. The innermost known function on the stack says to
which stage the sample goes, for the share of that time that the interpreter's thread used; the
rest was the packet pump's. A C call is charged to the function that made it. At the command's end
the counts are written to OUT as JSON.
"""

import json
import os
import resource
import signal
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import FrameType

INTERVAL_S = 0.001

STAGES = (
    "pump", "kernel", "crypto", "transport", "parse", "claim", "write", "egress", "interpreter",
)  # fmt: skip

# (end of a file's path, function or "*"): stage. The first match on the way out of the stack
# decides.
_TABLE: dict[str, dict[str, str]] = {
    "selectors.py": {"select": "kernel"},
    "dataplane/listener.py": {"about_to_sleep": "egress"},
    "dataplane/socket_engine.py": {
        "flush": "kernel",
        "_readable": "kernel",  # what is left of it is the call that receives
    },
    "aioquic/_crypto.py": {"*": "crypto"},
    "aioquic/quic/crypto.py": {"*": "crypto"},
    "dataplane/prompt1.py": {"parse_request": "parse", "_parse_short": "parse"},
    "dataplane/http3.py": {"encode_headers": "egress", "*": "parse"},
    "dataplane/http3_control.py": {"*": "parse"},
    "dataplane/http3_fields.py": {"encode_section": "egress", "*": "parse"},
    "dataplane/fronts/parameters.py": {"*": "parse"},
    "dataplane/fronts/replies.py": {"*": "egress"},
    "dataplane/fronts/prompt1.py": {"answer": "egress", "_header": "claim", "_body": "write"},
    "dataplane/fronts/generate.py": {"answer": "egress"},
    "dataplane/fronts/session.py": {
        "on_headers": "claim", "_generate": "claim", "on_data": "write", "take_whole": "write",
    },
    "dataplane/egress.py": {"*": "egress"},
    "dataplane/ingress.py": {"claim": "claim", "submit": "write", "write": "write"},
    "dataplane/table.py": {
        "admit": "claim", "write": "write", "submit": "write", "poll": "egress", "output": "egress",
    },
    "dataplane/connection.py": {"send": "egress"},
    "aioquic/": {"*": "transport"},
}  # fmt: skip


class Sampler:
    """Counts CPU time by stage while it runs."""

    def __init__(self) -> None:
        self.counts: dict[str, float] = defaultdict(float)
        self.since = resource.getrusage(resource.RUSAGE_SELF)
        self._stages: dict[object, str | None] = {}
        self._own_s, self._all_s = time.thread_time(), time.process_time()

    def start(self) -> None:
        signal.signal(signal.SIGPROF, self._sample)
        signal.setitimer(signal.ITIMER_PROF, INTERVAL_S, INTERVAL_S)

    def stop(self, number: int = 0, frame: FrameType | None = None) -> None:
        """End it (SIGUSR2): before the event loop closes, which a signal would disturb."""
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.signal(signal.SIGPROF, signal.SIG_IGN)

    def reset(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Forget what was counted: the load begins now (SIGUSR1)."""
        self.counts.clear()
        self.since = resource.getrusage(resource.RUSAGE_SELF)

    def _sample(self, number: int, frame: FrameType | None) -> None:
        own_s, all_s = time.thread_time(), time.process_time()
        used_s = all_s - self._all_s
        share = min(1.0, (own_s - self._own_s) / used_s) if used_s > 0 else 1.0
        self._own_s, self._all_s = own_s, all_s
        self.counts["pump"] += 1 - share
        self.counts[self._stage(frame)] += share

    def _stage(self, frame: FrameType | None) -> str:
        while frame is not None:
            code = frame.f_code
            stage = self._stages.get(code, "")
            if stage == "":
                stage = self._stages[code] = stage_of(code.co_filename, code.co_name)
            if stage is not None:
                return stage
            frame = frame.f_back
        return "interpreter"


def stage_of(filename: str, function: str) -> str | None:
    """Return the stage that a function's own time belongs to; None: its caller's."""
    for ending, functions in _TABLE.items():
        found = ending in filename if ending.endswith("/") else filename.endswith(ending)
        if found:
            stage = functions.get(function) or functions.get("*")
            if stage:
                return stage
    return None


def main(arguments: list[str]) -> int:
    """Run a command of the package under the sampler."""
    out, *command = arguments
    from dataplane.cli.main import main as run

    sampler = Sampler()
    sampler.start()
    signal.signal(signal.SIGUSR1, sampler.reset)
    signal.signal(signal.SIGUSR2, sampler.stop)
    try:
        return run(command)
    finally:
        sampler.stop()
        used = resource.getrusage(resource.RUSAGE_SELF)
        text = json.dumps(
            {
                "samples": sampler.counts,
                "user_s": used.ru_utime - sampler.since.ru_utime,
                "system_s": used.ru_stime - sampler.since.ru_stime,
            }
        )
        temporary = Path(out + ".part")
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, out)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
