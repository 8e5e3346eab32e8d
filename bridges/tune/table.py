"""The table that a tuner prints: a line a shape."""

from collections.abc import Mapping, Sequence
from typing import Any

HEAD = ("shape", "table, us", "tuned, us", "gain", "roofline", "aiter, us", "xla, us", "configuration")
WIDTHS = (38, 10, 10, 6, 8, 10, 10, 0)


def line(cells: Sequence[str]) -> str:
    """Cells beside each other: the first and the last to the left, numbers to the right."""
    padded = [cell.ljust(width) if place == 0 else cell.rjust(width) for place, (cell, width) in enumerate(zip(cells, WIDTHS, strict=True))]
    return "  ".join(padded).rstrip()


def head() -> str:
    return line(HEAD)


def microseconds(us: float | None) -> str:
    return "" if us is None else f"{us:.1f}" if us < 1000 else f"{us:.0f}"


def changes(incumbent: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """The fields in which a configuration differs from the table's."""
    found = [f"{name} {value}" for name, value in config.items() if value != incumbent.get(name)]
    return ", ".join(found) or "as the table has it"


def row(name: str, found: Mapping[str, Any], *, roofline: float, us_of: Mapping[str, float], what: str) -> str:
    """A shape's line.

    Args:
      name: of the shape.
      found: "us" and "untuned_us".
      roofline: the part of the roofline that "us" reaches; 0 where no roofline was measured.
      us_of: microseconds of each implementation.
      what: the configuration.
    """
    gain = found["untuned_us"] / found["us"] - 1
    return line(
        (
            name,
            microseconds(found["untuned_us"]),
            microseconds(found["us"]),
            f"{100 * gain:.0f} %",
            f"{100 * roofline:.0f} %" if roofline else "",
            microseconds(us_of.get("aiter")),
            microseconds(us_of.get("xla")),
            what,
        )
    )
