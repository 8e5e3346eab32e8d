"""A worker: a child process that answers one job after another, and is replaced when it dies or says nothing."""

import json
import os
import select
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

LONGEST_S = 900.0
"""Longest wait for an answer: compilation of a kernel takes seconds, and a hang does not end."""


def child_environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child: this process's, with this package first, and without a claim to all of the device's memory.

    Args:
      more: variables besides.
    """
    package = Path(str(sys.modules["purepage"].__file__)).parents[1]
    path = os.pathsep.join(filter(None, (str(package), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, "XLA_PYTHON_CLIENT_PREALLOCATE": "false", **(more or {})}


class Worker(Protocol):
    """What the runner asks: see `Jobs` for the jobs."""

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer, {"verdict": "failed", "why": ...} where there is none."""
        ...

    def restart(self) -> None:
        """Ends the process, if there is one; the next job starts another."""
        ...


class Child:
    """The worker of a real device."""

    def __init__(self, environment: Mapping[str, str] | None = None, longest_s: float = LONGEST_S) -> None:
        """Nothing is started.

        Args:
          environment: variables of the child besides those of this process.
          longest_s: see `LONGEST_S`.
        """
        self._process: subprocess.Popen[str] | None = None
        self._environment = child_environment(environment)
        self._longest_s = longest_s
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # kept as long as the worker

    def ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None:
            # A session of its own: an interrupt of the terminal goes to the parent alone, which then ends the child.
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", __name__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
                env=self._environment,
                start_new_session=True,
            )
        assert process.stdin is not None and process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._ended()
        ready, _, _ = select.select([process.stdout], [], [], self._longest_s)
        if not ready:
            self.restart()
            return {"verdict": "failed", "why": f"no answer in {self._longest_s:.0f} s", "died": True}
        line = process.stdout.readline()
        return json.loads(line) if line else self._ended()

    def _ended(self) -> dict[str, Any]:
        process = self._process
        self._process = None
        status = process.wait() if process is not None else None
        self._said.seek(0)
        last = [line.strip() for line in self._said.read()[-4000:].splitlines() if line.strip()][-1:]
        return {"verdict": "failed", "why": ": ".join([f"the process died with status {status}", *last])[:400], "died": True}

    def restart(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()


def answer_once(job: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of a child that is started for this job alone."""
    child = Child()
    try:
        return child.ask(job)
    finally:
        child.restart()


def serve() -> None:
    """Answers the jobs on stdin, a line each, until it ends. What a library prints must not be taken for an answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from .jobs import Jobs

    jobs = Jobs()
    for line in sys.stdin:
        try:
            answer = jobs.answer(json.loads(line))
        except Exception as error:
            traceback.print_exc()
            answer = {"verdict": "failed", "why": f"{type(error).__name__}: {str(error)[:500]}".replace("\n", " ")}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    serve()
