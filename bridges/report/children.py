"""Work in a child process with limits: whatever happens to the child, the caller gets what it had found, and how it ended.

A child is `python -m purepage.bridges.report TASK JSON`. It prints one JSON object a line: `{"begin": name}` before it starts something
that may kill it, anything else as a row. What libraries print goes to its standard error.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

ENDED, RAISED, CRASHED, OUT_OF_TIME, QUIET = "ended", "raised", "crashed", "out of time", "quiet"
"""How a child ends: by itself, by an exception or another exit status, by a signal, killed at its limit, killed since it said nothing."""

_LONGEST_LINE = 1 << 20
_TAIL = 16 << 10


@dataclass(frozen=True)
class Limits:
    """Seconds that a child may take.

    Attributes:
      total_s: all in all.
      quiet_s: without a line.
    """

    total_s: float = 1200.0
    quiet_s: float = 300.0


@dataclass
class Ending:
    """How a child ended, and what it found.

    Attributes:
      task: the child's task.
      status: one of `ENDED`, `RAISED`, `CRASHED`, `OUT_OF_TIME`, `QUIET`.
      detail: name of the signal, exit status, or limit; empty where it ended by itself.
      said: the last line of its standard error, where it did not end by itself.
      where: the innermost Python lines at a crash.
      unfinished: what it had begun when it ended.
      rows: what it printed, in order.
      rubbish: lines on its output that were no JSON object.
      seconds: how long it ran.
    """

    task: str
    status: str = ENDED
    detail: str = ""
    said: str = ""
    where: list[str] = field(default_factory=list)
    unfinished: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    rubbish: int = 0
    seconds: float = 0.0

    @property
    def why(self) -> str:
        """One line; empty where it ended by itself."""
        return ": ".join(filter(None, (self.detail, self.said, f"at {self.where[0]}" if self.where else "")))


def command_of(task: str, options: Mapping[str, Any]) -> list[str]:
    """The child's command."""
    return [sys.executable, "-m", __name__.rpartition(".")[0], task, json.dumps(dict(options))]


def run_child(
    task: str,
    options: Mapping[str, Any],
    limits: Limits,
    *,
    command: Sequence[str] | None = None,
    environment: Mapping[str, str] | None = None,
    on_row: Callable[[dict[str, Any]], None] = lambda row: None,
) -> Ending:
    """Runs a task in a child, until it ends or a limit is reached. An exception, `KeyboardInterrupt` among them, kills the child.

    Args:
      task, options: what the child does.
      limits: seconds.
      command: default: `command_of(task, options)`.
      environment: all of the child's variables; default: this process's.
      on_row: called with each row as it comes.

    Returns:
      An `Ending`. Nothing that a child does raises here.
    """
    ending, begin = Ending(task), time.monotonic()
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "stderr").open("w+b") as errors:
        trace = Path(folder) / "trace"
        command = command or [*command_of(task, options), str(trace)]
        try:
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, env=environment, start_new_session=True
            )
        except OSError as error:
            ending.status, ending.detail = RAISED, f"{type(error).__name__}: {error}"
            return ending
        try:
            killed = _follow(child, ending, limits, begin, on_row)
        finally:
            _end(child)
        ending.seconds = round(time.monotonic() - begin, 3)
        code = child.returncode
        if killed:
            ending.status, limit = killed
            ending.detail = f"killed after {limit:g} s" + (" without a line" if killed[0] == QUIET else "")
        elif code < 0:
            ending.status, ending.detail = CRASHED, signal_name(-code)
        elif code:
            ending.status, ending.detail = RAISED, f"exit status {code}"
        if ending.status != ENDED:
            ending.said = _last_line(errors)
            ending.where = _frames(trace)
    return ending


def signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _follow(
    child: subprocess.Popen[bytes], ending: Ending, limits: Limits, begin: float, on_row: Callable[[dict[str, Any]], None]
) -> tuple[str, float] | None:
    """Takes the child's lines until it ends; (status, limit) where a limit comes first."""
    lines: SimpleQueue[bytes | None] = SimpleQueue()
    output = child.stdout
    assert output is not None

    def read() -> None:
        try:
            while line := output.readline(_LONGEST_LINE):
                lines.put(line)
        except (OSError, ValueError):  # closed
            pass
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    heard, exited = time.monotonic(), 0.0
    while True:
        now = time.monotonic()
        if now - begin > limits.total_s:
            return OUT_OF_TIME, limits.total_s
        if now - heard > limits.quiet_s:
            return QUIET, limits.quiet_s
        if exited and now - exited > 2.0:  # a grandchild holds the pipe open
            return None
        try:
            line = lines.get(timeout=0.1)
        except Empty:
            exited = exited or (now if child.poll() is not None else 0.0)
            continue
        if line is None:
            left = min(begin + limits.total_s, heard + limits.quiet_s) - time.monotonic()
            try:
                child.wait(max(left, 0.01))
            except subprocess.TimeoutExpired:
                return QUIET, limits.quiet_s
            return None
        heard = time.monotonic()
        row = _row(line)
        if row is None:
            ending.rubbish += 1
        elif set(row) == {"begin"}:
            ending.unfinished = str(row["begin"])
        elif set(row) == {"done"}:
            ending.unfinished = None
        else:
            ending.rows.append(row)
            on_row(row)


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kills the child and what it started, where anything is left, and closes its pipe."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        pass
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:  # in the kernel, in a driver's call that does not return
        child.returncode = -signal.SIGKILL


def _last_line(errors: Any) -> str:
    errors.seek(0, os.SEEK_END)
    errors.seek(max(0, errors.tell() - _TAIL))
    lines = errors.read().decode(errors="replace").splitlines()
    return next((line.strip()[:400] for line in reversed(lines) if line.strip()), "")


def _frames(trace: Path) -> list[str]:
    """The innermost lines that `faulthandler` wrote, the innermost first."""
    try:
        lines = trace.read_text(errors="replace").splitlines()
    except OSError:
        return []
    start = next((i for i, line in enumerate(lines) if line.startswith(("Current thread", "Thread"))), len(lines))
    return [
        line.strip().replace('File "', "").replace('", line ', ":") for line in lines[start + 1 : start + 7] if line.startswith("  File")
    ]


class Stream:
    """A child's side: rows go to the caller, and everything else that is printed to standard error."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.fdopen(os.dup(1), "w")  # not inherited by what the child starts
        os.dup2(2, 1)

    def begin(self, name: str) -> None:
        """Says what is about to be done, which is blamed if the child ends."""
        self._put({"begin": name})

    def done(self) -> None:
        """Takes back what `begin` said."""
        self._put({"done": True})

    def row(self, row: Mapping[str, Any]) -> None:
        self._put(dict(row))

    def _put(self, row: dict[str, Any]) -> None:
        print(json.dumps(row, default=str), file=self._out, flush=True)
