"""Runs tiny models of ten families beside transformers' own: `python -m examples.families [FAMILY ...]`; needs torch and transformers."""

import argparse

from .compare import TINY, compare


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.families", description=__doc__)
    parser.add_argument("families", nargs="*", metavar="FAMILY", help=f"of {', '.join(TINY)}; without any: all")
    families = parser.parse_args().families or list(TINY)
    if unknown := set(families) - set(TINY):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; the families are {', '.join(TINY)}")
    print(f"{'family':10} {'tokens':>6} {'equal':>6} {'greatest difference of a logit':>31}")
    for family in families:
        found = compare(family)
        equal = sum(int((one.tokens == one.greedy).sum()) for one in found)
        print(f"{family:10} {sum(len(one.tokens) for one in found):6} {equal:6} {max(one.difference for one in found):31.1e}")


if __name__ == "__main__":
    main()
