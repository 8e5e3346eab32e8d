"""`purepage.functional.key_ranges` under its public name."""

from .functional.key_ranges import *  # noqa: F403
from .functional.key_ranges import __all__, __doc__  # noqa: F401
