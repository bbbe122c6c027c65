"""A core for a thread that spins: given to it alone where there are two, and said either way."""

import contextlib
import logging
import os

_log = logging.getLogger("dataplane")


def give_core(thread: int) -> int | None:
    """Keep a thread of this process on a core of its own, and the others and the children off it.

    Args:
        thread: The kernel's number of it.

    Returns:
        The core; None where there is but one, which it has to share.
    """
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        _log.warning(
            "busy-polling shares core %d with everything else here, which costs more than it"
            " brings: give the daemon two cores, or leave out --busy-poll",
            min(cores),
        )
        return None
    core = max(cores)
    others = cores - {core}
    # Children are started by these threads and stay where they are.
    for entry in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(entry), {core} if int(entry) == thread else others)
    _log.info(
        "the packet loop spins on core %d, which it has to itself of this daemon's %d; the runtime"
        " and the rest run on the others",
        core, len(cores),
    )  # fmt: skip
    return core
