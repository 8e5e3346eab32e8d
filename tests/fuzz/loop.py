"""The loop of the fuzzer: cases of a seed one after the other, failures made smaller, a summary."""

import argparse
import ast
import time
from collections import Counter
from collections.abc import Sequence

from purepage import UnsupportedError

from .cases import OPERATIONS, Case, draw, run, smaller


def outcome(case: Case, implementation: str) -> Exception | None:
    """None where the case passes or is refused by name, else what it raises."""
    try:
        run(case, implementation)
    except UnsupportedError:
        return None
    except Exception as failure:
        return failure
    return None


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns 1 where a case failed, else 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Random calls against the float64 oracle.")
    parser.add_argument("--minutes", type=float, default=1.0, help="begins no case after this time (default 1)")
    parser.add_argument("--seed", type=int, default=0, help="cases are a function of it (default 0)")
    parser.add_argument("--first", type=int, default=0, help="number of the first case (default 0)")
    parser.add_argument("--implementation", default="xla", choices=["xla", "triton"], help="default xla")
    parser.add_argument("--operation", choices=list(OPERATIONS), help="default all")
    parser.add_argument("--failures", type=int, default=10, help="ends after this many failures (default 10)")
    parser.add_argument("--case", type=ast.literal_eval, help="runs this one case, as a failure prints it")
    given = parser.parse_args(arguments)
    if given.case:
        run(given.case, given.implementation)
        print("passed")
        return 0
    operations = (given.operation,) if given.operation else tuple(OPERATIONS)
    end, number, failures, count = time.monotonic() + 60 * given.minutes, given.first, 0, Counter()
    while time.monotonic() < end and failures < given.failures:
        case = draw(given.seed, number, operations)
        failure = outcome(case, given.implementation)
        count[case["operation"]] += 1
        if failure is not None:
            failures += 1
            small = smaller(case, failure, given.implementation)
            print(f"FAILED seed {given.seed} case {number}: {type(failure).__name__}: {failure}", flush=True)
            print(f"  smallest: {small}", flush=True)
        number += 1
    print(f"{given.implementation}: {dict(count)}, {failures} failed; seed {given.seed}, cases {given.first} to {number - 1}")
    return int(failures > 0)
