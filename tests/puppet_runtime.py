"""A runtime as a process of its own, which a test leads by the hand and may kill at any moment.

Started as a program it attaches, says `ready`, and obeys one command a line: `take`, `emit ID...`,
`finish`; each is answered with a line once it is done. It holds one request at a time.
"""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from daemon_process import WITHIN_S, DaemonProcess, first_line

from dataplane.errors import DetachedError
from dataplane.runtime import Finish, Manifest, Runtime, Taken, attach

DETACHED = 9
"""What it exits with when the daemon is gone."""


class RuntimeProcess:
    """The test's end of a puppet."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        assert process.stdin is not None
        assert process.stdout is not None
        self._stdin, self._stdout = process.stdin, process.stdout
        self.pid = process.pid

    def tell(self, *words: object) -> None:
        """Say a command without waiting for it."""
        self._stdin.write(" ".join(map(str, words)) + "\n")
        self._stdin.flush()

    def obey(self, *words: object) -> None:
        """Say a command, and wait until it is done."""
        self.tell(*words)
        self.expect(str(words[0]))

    def expect(self, word: str) -> None:
        assert first_line(self._stdout, WITHIN_S) == word + "\n"

    def wait(self) -> int:
        """Wait for its end; the exit status."""
        return self._process.wait(WITHIN_S)

    def kill(self) -> None:
        """SIGKILL: it has no last word."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait(WITHIN_S)


@contextlib.contextmanager
def runtime_process(daemon: DaemonProcess, slots: int = 2) -> Iterator[RuntimeProcess]:
    """Attach a puppet that the daemon serves; it is gone at the end."""
    process = subprocess.Popen(
        [sys.executable, __file__, str(daemon.socket), str(slots)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            runtime = RuntimeProcess(process)
            runtime.expect("ready")
            daemon.wait_for_status("ok")
            yield runtime
        finally:
            process.kill()


def _obey(runtime: Runtime, held: list[Taken], command: str, *arguments: str) -> None:
    if command == "take":
        while not held:
            held += runtime.take(WITHIN_S)
    elif command == "emit":
        held[0].emit([int(number) for number in arguments])
    else:
        held.pop().finish(Finish.STOP)


def main(socket_path: str, slots: str) -> None:
    """Attach, and obey."""
    manifest = Manifest(
        model="puppet", slots=int(slots), context=64, max_output=16, vocab_size=50_000
    )
    held: list[Taken] = []
    with attach(Path(socket_path), manifest) as runtime:
        runtime.ready()
        print("ready", flush=True)
        for line in sys.stdin:
            _obey(runtime, held, *line.split())
            print(line.split()[0], flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except DetachedError:
        sys.exit(DETACHED)
