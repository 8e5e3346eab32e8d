"""`purepage.functional.testing` under its public name: oracle, random batches, tolerances."""

from .functional.testing import *  # noqa: F403
from .functional.testing import __all__, __doc__  # noqa: F401
