"""The tuner's loop: asks a worker about one shape after another, and writes the record after each."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from ...functional import record
from ...functional.record import Device, Row, sorted_key
from . import table
from .candidates import Effort
from .cases import Case
from .jobs import OK
from .problem import COLD_BYTES
from .progress import Progress
from .roofline import Peak, part_of
from .timing import DEFAULT as SHORT
from .timing import Budget
from .worker import Worker

FINALISTS = 3
"""Candidates that are timed again, longer, before one is chosen."""
FINAL_ROUNDS = 15
LEAST_GAIN = 0.02
"""A candidate takes the place of the table's row where it is so much faster in the final: less is noise."""
OTHERS = ("aiter", "xla")
"""Implementations that are timed beside `triton`."""
INTERRUPTED = 130
"""Exit status after Ctrl-C."""

NOTHING_TO_TUNE = "nothing to tune: JAX computes on {platform} here, where plain JAX serves every call and XLA chooses how"


@dataclass(frozen=True)
class Options:
    """How the tuner goes about it.

    Attributes:
      effort: see `candidates.EFFORTS`.
      again: shapes that the record has are tuned anew.
      most: most candidates of a shape.
      budget: how long is measured.
      cold_bytes: see `problem.COLD_BYTES`.
      peak: sizes that `roofline.measure` takes; None measures no roofline.
      interpreted: tunes Triton's interpreter on a CPU: for tests.
    """

    effort: Effort = "normal"
    again: bool = False
    most: int = 1000
    budget: Budget = SHORT
    cold_bytes: int = COLD_BYTES
    peak: Mapping[str, Any] | None = field(default_factory=dict)
    interpreted: bool = False


DEFAULT = Options()


@dataclass
class _Tally:
    """What has happened so far, for the summary."""

    tuned: int = 0
    known: int = 0
    failures: list[str] = field(default_factory=list)
    gains: list[float] = field(default_factory=list)

    def lines(self, total: int, path: Path | None) -> list[str]:
        better = [gain for gain in self.gains if gain > 0]
        best = f", the most {100 * max(better):.0f} %" if better else ""
        left = total - self.tuned - self.known
        said = [
            f"{self.tuned} shapes tuned, {len(better)} faster than the table's row{best}; {self.known} were in the record, {left} are left"
        ]
        said += [f"failed: {text}" for text in self.failures]
        return [*said, *([f"record: {path}"] if path is not None else [])]


def tune(
    cases: Sequence[Case],
    worker: Worker,
    *,
    options: Options = DEFAULT,
    write: Callable[[str], Any] = print,
    progress: Callable[[int], Progress] = Progress,
) -> int:
    """Tunes shapes and writes the record after each, so that it may be stopped at any time and started again.

    Args:
      cases: the shapes.
      worker: does what touches the device.
      options: see `Options`.
      write: prints a line of the table.
      progress: makes the progress bar of so many units.

    Returns:
      The exit status: 0, 1 where a shape failed or the device can't be asked, 130 after Ctrl-C.
    """
    tally, path = _Tally(), None
    try:
        found = worker.ask({"job": "device"})
        if "device" not in found:
            write(f"the device can't be asked: {found['why']}")
            return 1
        device, folder, versions = Device(**found["device"]), Path(found["folder"]), tuple(sorted(found["versions"].items()))
        if device.platform == "cpu" and not options.interpreted:
            write(NOTHING_TO_TUNE.format(platform=device.platform))
            return 0
        path = record.path_of(folder, device, versions)
        write(f"{device.product}, {device.arch}, {device.compute_units} compute units; record {path}")
        peak = _peak(worker, options, write)
        bar, facts, done = progress(len(cases)), "", set()
        for case in cases:
            if case.facts != facts:
                facts = case.facts
                write(f"\n{facts}\n{table.head()}")
            _Shape(case, worker, options, peak, bar, write, tally).tune(folder, device, versions, done)
        bar.clear()
        return int(bool(tally.failures))
    except KeyboardInterrupt:
        write("\nstopped; what is finished is in the record, and the next start goes on from there")
        return INTERRUPTED
    finally:
        worker.restart()
        if path is not None:
            for text in tally.lines(len(cases), path):
                write(text)


def _peak(worker: Worker, options: Options, write: Callable[[str], Any]) -> Peak | None:
    if options.peak is None:
        return None
    found = worker.ask({"job": "peak", **options.peak})
    if "copy" not in found:
        write(f"no roofline: {found['why']}")
        return None
    peak = Peak(**found)
    write(f"measured: {peak}")
    return peak


@dataclass
class _Shape:
    """One shape's turn."""

    case: Case
    worker: Worker
    options: Options
    peak: Peak | None
    bar: Progress
    write: Callable[[str], Any]
    tally: _Tally
    plan: dict[str, Any] = field(default_factory=dict)

    def tune(self, folder: Path, device: Device, versions: tuple[tuple[str, str], ...], done: set[tuple[str, record.Key]]) -> None:
        """Tunes the shape, unless the record has it (of an earlier run, where it is tuned again)."""
        self.bar.step(self.case.name, 0)
        found = self.worker.ask({"job": "key", "case": self.case.to_json()})
        if "key" not in found:
            self._fail(found["why"])
            return
        key = sorted_key(found["key"])
        path, place = record.path_of(folder, device, versions), (self.case.operation, key)
        known = record.read(path, device, versions)
        if known is not None and place in known.rows and (place in done or not self.options.again):
            self.tally.known += 1
            self._finish(self._line(known.rows[place], f"in the record of {known.rows[place].date}"))
            return
        row, what = self._best(key) if self._prepare() and self.plan["kind"] else (None, self.plan["why"])
        self.worker.restart()  # gives the shape's memory back
        if row is None:
            self._fail(what)
            return
        record.update(folder, device, versions, lambda contents: record.add_row(contents, row))
        done.add(place)
        self.tally.tuned += 1
        self.tally.gains.append(row.untuned_us / row.us - 1)
        self._finish(self._line(row, what))

    def _prepare(self) -> bool:
        """Has the worker make this shape's arrays; also after it died."""
        self.plan = self.worker.ask(
            {
                "job": "plan",
                "case": self.case.to_json(),
                "effort": self.options.effort,
                "budget": asdict(self.options.budget),
                "cold_bytes": self.options.cold_bytes,
            }
        )
        return "key" in self.plan

    def _fail(self, why: str) -> None:
        self.tally.failures.append(f"{self.case.name}: {why}")
        self._finish(f"{self.case.name}: {why}")

    def _finish(self, line: str) -> None:
        self.bar.step(self.case.name)
        self._write(line)

    def _write(self, line: str) -> None:
        self.bar.clear()
        self.write(line)

    def _ask(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """An answer about this shape. A worker that died is replaced by one that has the arrays again."""
        answer = self.worker.ask(job)
        if answer.get("died"):
            self._prepare()
        return answer

    def _best(self, key: record.Key) -> tuple[Row | None, str]:
        """(The row of the fastest right configuration, what to say of it). Without a time of the table's configuration there is none."""
        plan = self.plan
        base = self._ask({"job": "implementation", "name": "triton", "config": None})
        if base["verdict"] != OK:
            return None, f"the table's configuration: {base['verdict']}: {base['why']}"
        right, tried = self._sweep(plan["candidates"][: self.options.most])
        best = self._final(right[:FINALISTS])
        config = best[1] if best is not None else None
        us, untuned = (best[0]["us"], best[0]["beside_us"]) if best is not None else (base["us"], base["us"])
        us_of, notes = self._compare(config, us)
        row = Row(
            operation=self.case.operation,
            key=key,
            configurations=((plan["kind"], tuple(config.items())),) if config is not None else (),
            us=us,
            untuned_us=untuned,
            roofline=part_of(self.peak, self.case, us) if self.peak is not None else 0.0,
            us_of=tuple(us_of.items()),
            date=date.today().isoformat(),
        )
        return row, "; ".join([f"{table.changes(plan['incumbent'], config or plan['incumbent'])} ({tried})", *notes])

    def _sweep(self, candidates: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[float, Mapping[str, Any]]], str]:
        """(Time beside the table's and configuration of each right candidate, the fastest first; how many had which verdict)."""
        self.bar.grow(len(candidates))
        right, verdicts = [], {}
        for config in candidates:
            answer = self._ask({"job": "candidate", "config": config})
            verdict, said = answer["verdict"], table.changes(self.plan["incumbent"], config)
            verdicts[verdict] = verdicts.get(verdict, 0) + 1
            if verdict == OK:
                right.append((answer["us"] / answer["beside_us"], config))
            else:
                self._write(f"  {verdict}: {said}: {answer['why']}")
            self.bar.step(f"{self.case.name}: {said}")
        right.sort(key=lambda each: each[0])
        return right, ", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "no candidates"

    def _final(self, right: Sequence[tuple[float, Mapping[str, Any]]]) -> tuple[dict[str, Any], Mapping[str, Any]] | None:
        """(Times, configuration) of the fastest when timed longer; None where none is `LEAST_GAIN` faster than the table's."""
        finals = []
        for ratio, config in right:
            if ratio >= 1:
                continue
            answer = self._ask({"job": "candidate", "config": config, "rounds": FINAL_ROUNDS})
            if answer["verdict"] == OK:
                finals.append((answer["us"] / answer["beside_us"], answer, config))
        best = min(finals, key=lambda each: each[0], default=None)
        return (best[1], best[2]) if best is not None and best[0] < 1 - LEAST_GAIN else None

    def _compare(self, config: Mapping[str, Any] | None, us: float) -> tuple[dict[str, float], list[str]]:
        """(Microseconds of each implementation, beside the `us` of `triton` under `config`; why one has none)."""
        us_of, notes = {"triton": us}, []
        for name in OTHERS:
            answer = self._ask({"job": "implementation", "name": name, "config": config})
            if answer["verdict"] == OK:
                us_of[name] = answer["us"] / answer["beside_us"] * us
            else:
                notes.append(f"{name} {answer['verdict']}: {answer['why']}")
        return us_of, notes

    def _line(self, row: Row, what: str) -> str:
        times = {"us": row.us, "untuned_us": row.untuned_us}
        return table.row(self.case.name, times, roofline=row.roofline, us_of=dict(row.us_of), what=what)
