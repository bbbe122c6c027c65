"""What a long run says on the way: on a terminal one line that changes, elsewhere a line each.

No thread draws it: one would share the interpreter with the generator and be in every figure.
"""

import shutil
import sys
import time


class Line:
    """Progress on stderr, with the time since it began; call it with what is being done."""

    def __init__(self) -> None:
        self._start = time.monotonic()
        self._terminal = sys.stderr.isatty()

    def __call__(self, text: str) -> None:
        seconds = int(time.monotonic() - self._start)
        line = f"[{seconds // 60}:{seconds % 60:02}] {text}"
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{line[:width]}", end="", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def keep(self, text: str) -> None:
        """Say something that stays."""
        print(f"\r\x1b[K{text}" if self._terminal else text, file=sys.stderr, flush=True)
