"""A live picture of the cache in a terminal: who owns which block."""

import sys
from typing import TextIO

from .engine import Engine
from .scheduler import Sequence

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
WIDTH = 64
PRINT_EVERY = 16
"""Steps between two pictures where the output is no terminal."""


def cache_lines(engine: Engine, sequences: list[Sequence]) -> list[str]:
    """The pool as rows of one character a block, and totals, each line below 80 characters; of each device of a `data` axis.

    A letter is the sequence that owns the block, `#` a block of several, `+` a free block whose contents can still be found, `.` a free
    block without.

    Args:
      engine: its schedulers and their pools are read.
      sequences: all sequences, in the order of their letters.
    """
    lines = []
    for scheduler in engine.schedulers:
        pool = scheduler.pool
        marks = ["+" if pool.holds_content(block) else "." for block in range(pool.num_blocks)]
        for index, sequence in enumerate(sequences):
            if sequence in scheduler.running:
                for block in sequence.blocks:
                    marks[block] = "#" if pool.references[block] > 1 else LETTERS[index % len(LETTERS)]
        lines += ["".join(marks[start : start + WIDTH]) for start in range(0, len(marks), WIDTH)]
        lines += [
            f"{pool.num_used} of {pool.num_blocks} blocks used, {len(scheduler.running)} sequences run, {len(scheduler.waiting)} wait",
            f"{scheduler.shared_tokens} tokens found in shared blocks, {scheduler.preemptions} preempted",
        ]
    return lines


class CacheMap:
    """Draws `cache_lines` in place on a terminal; elsewhere it prints them every `PRINT_EVERY` steps.

    Args:
      engine, sequences: see `cache_lines`.
      output: where to draw; None is the standard output.
    """

    def __init__(self, engine: Engine, sequences: list[Sequence], output: TextIO | None = None) -> None:
        self.engine, self.sequences, self.output = engine, sequences, output or sys.stdout
        self._drawn, self._steps = 0, 0

    def clear(self) -> None:
        """Removes the picture from the terminal, so that text can be printed."""
        if self._drawn:
            self.output.write(f"\033[{self._drawn}F\033[J")
            self._drawn = 0

    def draw(self) -> None:
        """Draws the state after a step."""
        self._steps += 1
        if not self.output.isatty() and (self._steps - 1) % PRINT_EVERY:
            return
        self.clear()
        lines = [f"step {self._steps}", *cache_lines(self.engine, self.sequences)]
        self.output.write("\n".join(lines) + "\n")
        self.output.flush()
        self._drawn = len(lines) if self.output.isatty() else 0
