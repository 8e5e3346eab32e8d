"""Axes to draw into, colors, and the package that draws."""

from typing import Any

import numpy as np

FREE = "#eeeeee"
PADDING = "#ffffff"
INK = "#333333"


def new_axes(ax: Any, size: tuple[float, float]) -> Any:
    """`ax`, or the axes of a new figure of this size in inches.

    Raises:
      ImportError: matplotlib is not installed.
    """
    if ax is not None:
        return ax
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("purepage.viz needs matplotlib: pip install 'purepage[viz]'") from error
    return pyplot.subplots(figsize=size, layout="constrained")[1]


def colors(count: int) -> list[Any]:
    """As many colors, one for each sequence or token."""
    from matplotlib import colormaps

    few = colormaps["tab10"].colors  # type: ignore[attr-defined]
    return [few[i % 10] for i in range(count)] if count <= 10 else [colormaps["turbo"](x) for x in np.linspace(0.05, 0.95, count)]


def blended(color: Any, share: float) -> Any:
    """The color over white, `share` of it."""
    from matplotlib.colors import to_rgb

    return tuple(1 - share * (1 - channel) for channel in to_rgb(color))


def text_color(color: Any) -> str:
    """Black or white, whichever can be read on the color."""
    from matplotlib.colors import to_rgb

    red, green, blue = to_rgb(color)
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.55 else "white"
