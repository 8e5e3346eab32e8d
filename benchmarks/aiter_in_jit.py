"""AITER's own Triton operators inside `jax.jit` on a GPU: right over NaN, recorded in a command buffer, timed beside ours.

    python -m benchmarks.aiter_in_jit --json benchmarks/results/h200_aiter_in_jit.json      # about a minute of an H200
    python -m benchmarks.aiter_in_jit --cpu     # tiny shapes through Triton's interpreter, to see that the script works

Each case is one jitted program of `implementation="aiter"`, under the switches of docs/rocm.md that its row names. Its result is compared
with float32 attention of the dense keys and values at some tokens, and as a whole with ours, over a cache with NaN in every slot that
belongs to no sequence (finite ones where a switch promises so). Then calls are chained in one program and timed as in
`benchmarks`, and the calls of XLA into Python meanwhile are counted: none where it replays its command buffer. "AITER from torch" is the
operator in a CUDA graph without JAX.

AITER compiles a kernel when it is first called, which a recording does not survive: rows without the switch come first and leave the
kernels compiled. The exit status is 1 where a row is wrong, failed, or recordable and yet not recorded, or where AITER served nothing.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# Both libraries hold memory of one GPU: XLA must not take three quarters of it first.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

from benchmarks import summary
from benchmarks.cases import Case, WriterCase

FINITE, RECORD, DECODE = "PUREPAGE_AITER_FINITE_CACHE", "PUREPAGE_AITER_COMMAND_BUFFER", "PUREPAGE_AITER_PAGED_DECODE"
SHOWN: Mapping[tuple[str, ...], str] = {
    (): "none",
    (RECORD,): "command buffer",
    (FINITE,): "finite",
    (FINITE, RECORD): "finite, command buffer",
    (DECODE,): "paged decode",
}
"""Sets of switches, as the table names them. What allocates nothing comes without the recording first."""
PREFILL = tuple(SHOWN)[:4]
WRONG = ("wrong", "failed", "not recorded")
Row = dict[str, Any]


@dataclass(frozen=True)
class Workload:
    """An attention case, and the switches under which AITER runs it."""

    case: Case
    switches: tuple[tuple[str, ...], ...] = tuple(SHOWN)


def _decode(count: int, context: int) -> tuple[tuple[int, int], ...]:
    """Lengths that leave some slots of each last block unowned."""
    return tuple((1, context - 1 - i % 5) for i in range(count))


GPU = (
    Workload(Case("decode 64 x 8192", _decode(64, 8192))),
    Workload(Case("decode 8 x 4096", _decode(8, 4096))),
    Workload(Case("chunked 16 x (512 of 2048)", tuple((512, n) for _, n in _decode(16, 2048))), PREFILL),
    Workload(Case("mixed 2048 + 63 x 4096", ((2048, 2048), *_decode(63, 4096))), PREFILL),
    Workload(Case("decode 256 x 2048", _decode(256, 2048))),
    Workload(Case("decode 64 x 8192, fp8 cache", _decode(64, 8192), cache_dtype="float8_e4m3fn")),
    Workload(Case("decode 64 x 8192, flash", _decode(64, 8192), content="flash"), ((), (FINITE, RECORD))),
    Workload(Case("decode 8 x 4096, shuffled", _decode(8, 4096), content="shuffled"), ((),)),
)
WRITERS = (
    WriterCase("rope + update_cache, 8192 tokens", "rope"),
    WriterCase("rope + update_cache, 64 tokens", "rope", num_tokens=64),
)
_TINY: Row = {"num_heads": 4, "num_kv_heads": 2, "head_size": 32, "block_size": 16, "dtype": "float16", "cache_dtype": "float16"}
TINY = (
    Workload(Case("decode 2 x 32", _decode(2, 32), **_TINY), ((), (FINITE, RECORD), (DECODE,))),
    Workload(Case("mixed 9 + 2 x 32", ((9, 20), *_decode(2, 32)), **_TINY), ((), (RECORD,))),
    Workload(Case("decode 2 x 48, shuffled", _decode(2, 48), **_TINY | {"content": "shuffled"}), ((),)),
)
TINY_WRITERS = (WriterCase("rope, 4 tokens", "rope", 4, 2, 1, 32, 16, 8, dtype="float16", cache_dtype="float16"),)


@contextmanager
def switched_on(names: tuple[str, ...]) -> Iterator[None]:
    """Inside, exactly these of AITER's switches are on; they are part of the key of `jax.jit`."""
    from purepage.functional.target import using_settings, variable_of

    switches = ("aiter_finite_cache", "aiter_command_buffer", "aiter_paged_decode")
    with using_settings(**{switch: variable_of(switch) in names for switch in switches}):
        yield


def over_nan(inputs: Any) -> Any:
    """The same inputs over a cache with NaN in every slot at or past its sequence's end; `key` and `value` stay finite."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import purepage as pp

    case, spec = inputs.case, inputs.cache.spec
    unseen = np.zeros((case.num_blocks, case.block_size), bool)
    for row, (_, length) in zip(inputs.table, case.lengths, strict=True):
        if length % case.block_size:
            unseen[row[length // case.block_size], length % case.block_size :] = True
    if not unseen.any():
        raise ValueError(f"{case.name} leaves no unowned slot")

    @jax.jit
    def build(key: Any, value: Any, unseen: Any) -> Any:
        key, value = (jnp.where(unseen[:, :, None, None], jnp.array(jnp.nan, x.dtype), x)[None] for x in (key, value))
        return pp.cache_from_logical(spec, key, value, k_scale=inputs.scales[0], v_scale=inputs.scales[1])

    return replace(inputs, cache=build(inputs.key, inputs.value, jnp.asarray(unseen)))


def recordable(call: Any, *arguments: Any) -> bool:
    """Whether every callback of a function lets XLA record it into a command buffer."""
    import jax

    def callbacks(jaxpr: Any) -> Iterator[Any]:
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if equation.primitive.name == "buffer_callback":
                yield equation
            for inner in equation.params.values():
                if hasattr(inner, "eqns"):
                    yield from callbacks(inner)

    found = [e.params["command_buffer_compatible"] for e in callbacks(jax.make_jaxpr(call)(*arguments))]
    return bool(found) and all(found)


def torch_allocations() -> int:
    """How often torch has allocated on the GPU in this process: what is recorded must not."""
    import torch

    return int(torch.cuda.memory_stats().get("allocation.all.allocated", 0)) if torch.cuda.is_available() else 0


def _recorded(row: Row, expected: bool) -> Row:
    """`row` with what its count of Python calls says of the command buffer."""
    from benchmarks.timing import on_gpu

    calls, total = row["python_calls"], row["calls"]
    row |= {"recordable": expected, "recorded": "yes" if calls == 0 else "no" if calls >= total else "in part"}
    if expected and calls and on_gpu() and row["status"] == "ok":
        row |= {"status": "not recorded", "reason": f"XLA called into Python {calls} times in {total} calls"}
    return row


def _relative(actual: Any, expected: Any) -> Any:
    """As `relative_error`, of whole outputs and on the device, in float32."""
    import jax.numpy as jnp

    actual, expected = (x.astype(jnp.float32) for x in (actual, expected))
    return jnp.linalg.norm((actual - expected).ravel()) / jnp.linalg.norm(expected.ravel())


def attention_row(inputs: Any, expected: Any, whole: Any, build: Any) -> Row:
    """Checks one contender at `expected` rows and against the `whole` result of another, then times it.

    Raises:
      Unavailable: the contender does not serve the case.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from benchmarks.inputs import relative_error
    from benchmarks.measure import TOLERANCE, _chained, timed_row
    from benchmarks.timing import rough_seconds, time_jax

    prepared, (rows, wanted) = build(inputs), expected
    arguments = inputs.query, inputs.metadata.seq_lens, prepared.operands
    once = jax.jit(prepared.call)
    out = once(*arguments)
    errors = [relative_error(np.asarray(out[np.asarray(rows)].astype(jnp.float32)), wanted)]
    if whole is not None:
        errors.append(float(_relative(out, whole)))
    row: Row = {"relative_error": errors[0], "checked_rows": len(rows)} | ({"error_to_ours": errors[1]} if errors[1:] else {})
    limit = TOLERANCE[inputs.case.dtype]
    if not all(error <= limit for error in errors):
        return {**row, "status": "wrong", "reason": f"relative errors {', '.join(f'{e:.1e}' for e in errors)} > {limit:.0e}: not timed"}
    may_record, before = recordable(prepared.call, *arguments), torch_allocations()
    timed = time_jax(*_chained(prepared, inputs), about=rough_seconds(lambda: once(*arguments)))
    row |= {"status": "ok", **timed_row(timed, flops=inputs.case.flops, nbytes=inputs.case.min_bytes)}
    row["torch_allocations"] = torch_allocations() - before
    if may_record and row["torch_allocations"]:
        row |= {"status": "failed", "reason": f"allocates through torch ({row['torch_allocations']} times) where it may be recorded"}
    return _recorded({**row, "out": out}, may_record)


def attention_rows(workload: Workload, *, verbose: bool) -> Iterator[Row]:
    """Ours, AITER under each of the switches, AITER from torch."""
    from benchmarks import peers
    from benchmarks.inputs import expected_rows, make_inputs
    from benchmarks.measure import _one_attention, describe, guarded, release_memory

    case = workload.case
    finite = make_inputs(case)
    expected, nan = expected_rows(finite), over_nan(finite)
    base = {"case": case.name, "kind": "attention", "setup": describe(case), "flops": case.flops, "min_bytes": case.min_bytes}
    ours: Row = guarded(
        {**base, "contender": "purepage triton", "switches": ""},
        lambda: attention_row(nan, expected, None, peers.ours("triton")),
        verbose=verbose,
    )
    whole = ours.pop("out", None)
    yield ours
    for switches in workload.switches:
        with switched_on(switches):
            row = guarded(
                {**base, "contender": "purepage aiter", "switches": SHOWN[switches]},
                lambda inputs=finite if FINITE in switches else nan: attention_row(inputs, expected, whole, peers.ours("aiter")),
                verbose=verbose,
            )
        row.pop("out", None)
        yield _beside(row, ours)
        release_memory()
    if case.content == "packed":
        row = {**base, "contender": "AITER from torch", "switches": ""}
        yield _beside(guarded(row, lambda: _one_attention(finite, expected, peers.aiter(contiguous=False)), verbose=verbose), ours)


def writer_rows(case: WriterCase, *, verbose: bool) -> Iterator[Row]:
    """The fused rotary writer: ours, then AITER's without and with a command buffer."""
    from benchmarks.measure import _one_writer, describe, guarded, release_memory

    base = {"case": case.name, "kind": "writer", "setup": describe(case), "flops": 0, "min_bytes": case.min_bytes}
    ours: Row = {}
    for implementation, switches in (("triton", ()), ("aiter", ()), ("aiter", (RECORD,))):
        row = {**base, "contender": f"purepage {implementation}", "switches": SHOWN[switches] if implementation == "aiter" else ""}
        with switched_on(switches):
            row = guarded(row, lambda implementation=implementation: _one_writer(case, implementation), verbose=verbose)
        if "python_calls" in row:
            row = _recorded(row, implementation == "triton" or bool(switches))
        ours = ours or row
        yield row if row is ours else _beside(row, ours)
        release_memory()


def _beside(row: Row, ours: Row) -> Row:
    return {**row, "times_ours": row["us"] / ours["us"]} if "us" in row and "us" in ours else row


def line(row: Row) -> str:
    """One row of the printed table."""
    head = f"{row['case']:34} {row['contender']:16} {row['switches']:22}"
    if "us" not in row:
        return f"{head} {row['status']}: {row.get('reason', '').splitlines()[0][:160] if row.get('reason') else ''}"
    recorded, ratio = row.get("recorded", "-"), f"{row['times_ours']:.2f} x ours" if "times_ours" in row else ""
    said = "" if row["status"] == "ok" else f"  {row['status'].upper()}: {row.get('reason', '')}"
    return f"{head} {row['us']:9.1f} us  error {row['relative_error']:.1e}  recorded: {recorded:7} {ratio}{said}"


def run(args: argparse.Namespace) -> list[Row]:
    from benchmarks import report

    begin, rows = time.monotonic(), []
    head = {
        "command": "python -m benchmarks.aiter_in_jit " + " ".join(Path(a).name if "/" in a else a for a in args.argv),
        "date": time.strftime("%Y-%m-%dT%H:%MZ", time.gmtime()),
        "machine": report.machine(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
    }
    print(json.dumps(head["machine"]), flush=True)

    def add(row: Row) -> None:
        rows.append(row)
        print(line(row), flush=True)
        if args.json:
            summary.write(args.json, {**head, "seconds": time.monotonic() - begin, "rows": rows}, raw=args.raw)

    # What matters most comes first: a spent budget cuts the end off.
    attention, writers = (TINY, TINY_WRITERS) if args.cpu else (GPU, WRITERS)
    parts: list[tuple[str, Any, Any]] = [(w.case.name, attention_rows, w) for w in attention]
    parts[3:3] = [(w.name, writer_rows, w) for w in writers]
    for name, make, what in parts:
        if args.only and not any(word in name for word in args.only):
            continue
        none: Row = {"case": name, "contender": "all", "switches": "", "kind": "none"}
        if time.monotonic() - begin > args.budget_s:
            add({**none, "status": "skipped", "reason": "the time budget was spent"})
            continue
        try:
            for row in make(what, verbose=args.verbose):
                add(row)
        except Exception as error:
            add({**none, "status": "failed", "reason": f"{type(error).__name__}: {str(error)[:600]}"})
    print(f"{len(rows)} rows, {time.monotonic() - begin:.0f} s: {_counts(rows)}", flush=True)
    return rows


def _counts(rows: list[Row]) -> Mapping[str, int]:
    return {status: sum(row["status"] == status for row in rows) for status in sorted({row["status"] for row in rows})}


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(prog="python -m benchmarks.aiter_in_jit", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="where to write the summary of the rows")
    parser.add_argument("--raw", type=Path, default=summary.RAW, help="folder of the full rows, which git ignores")
    parser.add_argument("--cpu", action="store_true", help="tiny shapes through Triton's interpreter; times mean nothing")
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cases with one of these words in their name")
    parser.add_argument("--budget-s", type=float, default=75.0, help="start no case after this many seconds (default 75)")
    parser.add_argument("--verbose", action="store_true", help="tracebacks of what failed")
    args = parser.parse_args(argv)
    args.argv = argv
    if args.cpu:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
        import jax

        jax.config.update("jax_platforms", "cpu")
    rows = run(args)
    served = any(row["status"] == "ok" and row["contender"] == "purepage aiter" for row in rows)
    return int(not served or any(row["status"] in WRONG for row in rows))


if __name__ == "__main__":
    sys.exit(main())
