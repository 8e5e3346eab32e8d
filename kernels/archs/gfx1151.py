"""RDNA 3.5: Ryzen AI Max. It has gfx1100's instructions and limits, and nothing was chosen for it alone."""

from dataclasses import replace

from .gfx1100 import ARCH as GFX1100

ARCH = replace(GFX1100, name="gfx1151", follows="gfx1100", products={"Ryzen AI Max+ 395": 20, "Radeon 8060S": 20}, num_cus=20)
