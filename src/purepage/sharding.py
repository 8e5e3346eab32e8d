"""`purepage.functional.sharding` under its public name."""

from .functional.sharding import *  # noqa: F403
from .functional.sharding import __all__, __doc__  # noqa: F401
