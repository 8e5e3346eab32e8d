"""`python -m purepage.selfcheck`: is every installed implementation right on this machine?

Prints a line for each check that passed or failed, and for each reason of a refusal a line with the number of checks that it refused.
Exits with 1 where a result is wrong. Give names of implementations to check these only.
"""

import argparse
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    from .bridges.selfcheck import check
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
    given = parser.parse_args(arguments)
    chosen = given.implementations
    unknown = [name for name in chosen if name not in IMPLEMENTATIONS]
    if unknown:
        parser.error(f"unknown implementation {unknown[0]!r}: choose from {', '.join(IMPLEMENTATIONS)}")
    return check(implementations=chosen or None, only=given.cases)


if __name__ == "__main__":
    sys.exit(main())
