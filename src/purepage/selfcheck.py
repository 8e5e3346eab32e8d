"""`python -m purepage.selfcheck`: is every installed implementation right on this machine?

Prints what the installation lacks for a GPU, a line for each check that passed or failed, and for each reason of a refusal a line with the
number of checks that it refused. Exits with 1 where a result is wrong. Give names of implementations to check these only. `--report FILE`
writes all of a machine that a bug report needs to one JSON file; see `purepage.bridges.report`.
"""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    from .functional.dispatch import IMPLEMENTATIONS

    parser = argparse.ArgumentParser(
        prog="python -m purepage.selfcheck", description="Checks every installed implementation on this machine."
    )
    parser.add_argument(
        "implementations",
        nargs="*",
        metavar="implementation",
        help=f"of {', '.join(IMPLEMENTATIONS)}; default all, without the interpreter of pallas",
    )
    parser.add_argument("--cases", default="", metavar="TEXT", help="only cases with this in their name")
    parser.add_argument("--report", metavar="FILE", help="write a JSON report of the machine, its probes, cases and speeds")
    parser.add_argument(
        "--quiet-s", type=_seconds, metavar="SECONDS", help="end a child of the report that is silent for so long; default 300"
    )
    parser.add_argument("--limit-s", type=_seconds, metavar="SECONDS", help="end a child of the report after so long; default 1200")
    given = parser.parse_args(arguments)
    chosen = given.implementations
    unknown = [name for name in chosen if name not in IMPLEMENTATIONS]
    if unknown:
        parser.error(f"unknown implementation {unknown[0]!r}: choose from {', '.join(IMPLEMENTATIONS)}")
    if given.report:
        from .bridges.report import Limits, write_report

        default = Limits()
        limits = Limits(given.limit_s or default.total_s, given.quiet_s or default.quiet_s)
        try:
            return write_report(given.report, implementations=chosen or None, only=given.cases, limits=limits)
        except OSError as error:
            parser.error(f"the report can't be written: {error}")
    from .bridges.report.missing import of_this_process
    from .bridges.selfcheck import check
    from .functional.target import current_target

    for line in of_this_process(current_target().platform):
        print(f"missing: {line}")
    return check(implementations=chosen or None, only=given.cases)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not seconds > 0:
        raise argparse.ArgumentTypeError(f"{text} is no positive number of seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
