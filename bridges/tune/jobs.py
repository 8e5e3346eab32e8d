"""What a worker does for the runner: one answer, a JSON object, for each job, another one. Runs in a process of its own: see `worker`."""

import gc
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

import jax

from ...functional import dispatch, record
from ...functional.record import Record, Row
from ...functional.target import Target, current_target
from ...kernels.archs import find_arch
from ...kernels.plans import tuned
from ..triton import plan_launches, shape_key_of, shape_of
from .candidates import around, refused_by_compiler, within_limits
from .cases import Case, case_of
from .probe import probe
from .problem import COLD_BYTES, Problem, problem_of, relative_error, tolerance_of
from .roofline import measure
from .timing import Budget, Run, chained, interleaved, rough_seconds

OK, WRONG, FAILED, REFUSED = "ok", "wrong", "failed", "refused"
"""Verdicts of a candidate. A worker that dies or does not answer has failed, too."""


def with_rows(target: Target, *rows: Row) -> Target:
    """The target with these rows in its record and no others; probes stay."""
    probes, found = (target.record.probes, target.record) if target.record is not None else ({}, None)
    digest = hashlib.sha256(repr((found.digest if found else "", rows)).encode()).hexdigest()[:16]
    date = found.date if found is not None else ""
    path = found.path if found is not None else record.Path()
    return replace(target, record=Record(digest, path, date, probes, {(row.operation, row.key): row for row in rows}))


class Jobs:
    """Answers jobs about one case after another; what a case needs is kept until another comes."""

    def __init__(self, target: Target | None = None) -> None:
        self._target = target
        self._case: Case | None = None

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to a job: {"job": one of the methods' names, ...}."""
        methods: dict[str, Callable[..., dict[str, Any]]] = {
            "device": self._device,
            "record": self._record,
            "probe": self._probe,
            "peak": self._peak,
            "key": self._key_of,
            "plan": self._plan,
            "candidate": self._candidate,
            "implementation": self._implementation,
        }
        given = {name: value for name, value in job.items() if name != "job"}
        return methods[job["job"]](**given)

    @property
    def target(self) -> Target:
        return current_target() if self._target is None else self._target

    def _device(self) -> dict[str, Any]:
        folder, device, versions = record.place(self.target)
        return {"folder": str(folder), "device": asdict(device), "versions": dict(versions)}

    def _record(self) -> dict[str, Any]:
        found = self.target.record
        return {"said": record.described(self.target), "path": str(found.path) if found is not None else ""}

    def _probe(self) -> dict[str, Any]:
        """Tries the probe `recording` in a process of its own, and notes what came of it."""
        if self.target.platform == "cpu":
            return {"verdict": REFUSED, "why": "not tried: JAX computes on a CPU here, where nothing is recorded"}
        passed, why = probe()
        path = record.note_probe(self.target, record.RECORDING, passed, why)
        return {"verdict": OK if passed else FAILED, "why": f"recording {'passed' if passed else f'failed: {why}'}; noted in {path}"}

    def _peak(self, **sizes: Any) -> dict[str, Any]:
        return asdict(measure(**sizes))

    def _key_of(self, case: Mapping[str, Any]) -> dict[str, Any]:
        """The key of a case's row. No array is made."""
        case_ = case_of(case)

        def call() -> Any:
            problem = problem_of(case_)
            return problem.call(problem.state, problem.operands, 0)

        return {"key": dict(shape_key_of(case_.operation, jax.eval_shape(call)))}

    def _plan(self, case: Mapping[str, Any], effort: Any, budget: Mapping[str, Any] = {}, cold_bytes: int = COLD_BYTES) -> dict[str, Any]:
        """Makes the arrays, runs the reference, and lists the candidates."""
        self._case, self._problem, self._reference, self._incumbent = None, None, None, None
        gc.collect()
        case_, target = case_of(case), with_rows(self.target)
        self._budget = Budget(**budget)
        self._problem = problem = problem_of(case_, finite=target.settings.aiter_finite_cache, cold_bytes=cold_bytes)
        call = jax.eval_shape(lambda state, operands: problem.call(state, operands, 0), problem.state, problem.operands)
        shape = shape_of(case_.operation, call)
        self._call, self._key, self._cus = call, tuned.shape_key(shape), _units(target)
        self._reference = problem.results(self._once(dispatch.plan_with("xla", case_.operation, call, target, explicit=True)))
        untuned = tuned.untuned(shape, target.arch, self._cus)
        kind = next((kind for kind in (case_.kernel, "write", "decode", "prefill") if kind in untuned), "")
        self._case, self._kind, self._untuned, self._table = case_, kind, untuned.get(kind), with_rows(target)
        served = plan_launches(case_.operation, call, self._table)
        if not kind or isinstance(served, dispatch.Unsupported):
            return {
                "key": dict(self._key),
                "kind": "",
                "why": "; ".join(getattr(served, "reasons", ("nothing to tune",))),
                "candidates": [],
            }
        arch = find_arch(target.arch)
        assert arch is not None
        self._arch = arch

        def program(config: Any) -> Any:
            return self._program_of(shape, config)

        found, refused = within_limits(
            around(kind, untuned[kind], arch, effort), served.program, program, single_head=case_.kernel == "update"
        )
        _, self._spills = refused_by_compiler(served.program, arch) if target.platform != "cpu" else (None, 0)
        return {
            "key": dict(self._key),
            "kind": kind,
            "incumbent": dict(tuned.values_of(untuned[kind])),
            "candidates": [dict(tuned.values_of(config)) for config in found],
            "refused": refused,
        }

    def _program_of(self, shape: Any, config: Any) -> Any:
        from ..triton_calls import OPERATIONS

        case = self._case
        assert case is not None
        return OPERATIONS[case.operation].plan(shape, self.target.arch, num_cus=self._cus, **{tuned.KINDS[self._kind][0]: config})

    def _planned(self, config: Mapping[str, Any] | None) -> dispatch.Plan | dispatch.Unsupported:
        """The plan with a configuration, as a row of the record makes it; None: as the tables do."""
        case = self._case
        assert case is not None
        target = self._table
        if config:
            values = tuple((name, _tuples(value)) for name, value in config.items())
            row = Row(case.operation, self._key, ((self._kind, values),), 1.0, 1.0, 0.0, (), "")
            target = with_rows(target, row)
        return plan_launches(case.operation, self._call, target)

    def _once(self, planned: dispatch.Plan | dispatch.Unsupported) -> Any:
        problem = self._problem
        assert isinstance(planned, dispatch.Plan) and problem is not None, planned
        return jax.block_until_ready(
            jax.jit(lambda state, operands: planned.run(problem.call(state, operands, 0)))(problem.state, problem.operands)
        )

    def _wrong(self, planned: dispatch.Plan) -> str | None:
        case, problem = self._case, self._problem
        assert case is not None and problem is not None
        error = relative_error(problem.results(self._once(planned)), self._reference or [])
        limit = tolerance_of(case)
        return None if error <= limit else f"relative error {error:.1e} beside xla, at most {limit:.0e}"

    def _runs(self, planned: dispatch.Plan, chain: int) -> Run:
        problem = self._problem
        assert isinstance(problem, Problem)

        def step(state: Any, operands: Any, i: int) -> Any:
            return problem.advance(state, planned.run(problem.call(state, operands, i)))

        return chained(step, problem.state, problem.operands, chain=chain, donated=problem.donated)

    def _chain(self) -> int:
        """Calls of a program, by the rough time of the table's."""
        if self._incumbent is None:
            planned = self._planned(None)
            about = rough_seconds(lambda: self._once_compiled(planned), calls=self._budget.shortest)
            chain = self._budget.chain(about)
            assert isinstance(planned, dispatch.Plan)
            self._incumbent = chain, self._runs(planned, chain)
        return self._incumbent[0]

    def _once_compiled(self, planned: Any) -> Any:
        problem = self._problem
        assert problem is not None
        if not hasattr(self, "_compiled") or self._compiled[0] is not planned:
            self._compiled = planned, jax.jit(lambda state, operands: planned.run(problem.call(state, operands, 0)))
        return self._compiled[1](problem.state, problem.operands)

    def _beside(self, planned: dispatch.Plan, other: Run | None, rounds: int | None) -> dict[str, Any]:
        chain = self._chain()
        assert self._incumbent is not None
        budget = self._budget if rounds is None else replace(self._budget, rounds=rounds)
        base = self._incumbent[1] if other is None else other
        first, second = interleaved([base, self._runs(planned, chain)], budget)
        return {"verdict": OK, "us": second / chain * 1e6, "beside_us": first / chain * 1e6}

    def _candidate(self, config: Mapping[str, Any], rounds: int | None = None) -> dict[str, Any]:
        """Checks a configuration of this case, and times it in turn with the table's."""
        planned = self._planned(config)
        if isinstance(planned, dispatch.Unsupported):
            return {"verdict": REFUSED, "why": "; ".join(planned.reasons)}
        if not planned.configurations()[0].startswith(f"{self._kind}: configuration from the record"):
            return {"verdict": REFUSED, "why": planned.configurations()[0]}
        if self.target.platform != "cpu":
            why, _ = refused_by_compiler(planned.program, self._arch, spills_allowed=self._spills)
            if why:
                return {"verdict": REFUSED, "why": why}
        if why := self._wrong(planned):
            return {"verdict": WRONG, "why": why}
        return self._beside(planned, None, rounds)

    def _implementation(self, name: str, config: Mapping[str, Any] | None, rounds: int | None = None) -> dict[str, Any]:
        """Checks another implementation, and times it in turn with `triton` under a configuration; None: the table's."""
        case, ours = self._case, self._planned(config)
        assert case is not None
        planned = dispatch.plan_with(name, case.operation, self._call, self._table, explicit=True)
        if isinstance(planned, dispatch.Unsupported):
            return {"verdict": REFUSED, "why": "; ".join(planned.reasons)}
        if why := self._wrong(planned):
            return {"verdict": WRONG, "why": why}
        if isinstance(ours, dispatch.Unsupported):
            return {"verdict": REFUSED, "why": f"triton: {'; '.join(ours.reasons)}"}
        return self._beside(planned, self._runs(ours, self._chain()) if config else None, rounds)


def _units(target: Target) -> int | None:
    return (target.compute_units if target.platform != "cpu" else None) or None


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
