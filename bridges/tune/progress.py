"""A progress bar on one line of a terminal; on anything else a line now and then."""

import sys
import time
from collections.abc import Callable
from typing import TextIO


class Progress:
    """Shows how much of a known amount of work is done.

    Attributes:
      done, total: units of work.
    """

    def __init__(self, total: int, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic, width: int = 28) -> None:
        """Shows nothing yet.

        Args:
          total: units of work; `grow` adds to it.
          stream: default stderr.
          clock: seconds.
          width: characters of the bar.
        """
        self.done, self.total = 0, total
        self._stream = sys.stderr if stream is None else stream
        self._clock, self._width, self._began, self._last = clock, width, clock(), -60.0

    def grow(self, more: int) -> None:
        """Adds units of work that were not known before."""
        self.total += more

    def step(self, what: str, units: int = 1) -> None:
        """Adds done units and shows the bar beside what comes next."""
        self.done += units
        now, is_terminal = self._clock(), self._stream.isatty()
        if not is_terminal and now - self._last < 60 and self.done < self.total:
            return
        self._last = now
        part = min(1.0, self.done / max(1, self.total))
        filled = round(self._width * part)
        line = f"[{'#' * filled}{'.' * (self._width - filled)}] {self.done}/{self.total} {self._left(part, now)} {what}"
        print(f"\r\x1b[K{line[:150]}" if is_terminal else line, end="" if is_terminal else "\n", file=self._stream, flush=True)

    def clear(self) -> None:
        """Makes the terminal's line free for other output."""
        if self._stream.isatty():
            print("\r\x1b[K", end="", file=self._stream, flush=True)

    def _left(self, part: float, now: float) -> str:
        if not part or self.done < 2:
            return ""
        seconds = (now - self._began) * (1 - part) / part
        return f"{seconds / 60:.0f} min left" if seconds >= 90 else f"{seconds:.0f} s left"
