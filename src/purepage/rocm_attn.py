"""`purepage.functional.backends.rocm_attn` under its public name."""

from .functional.backends.rocm_attn import *  # noqa: F403
from .functional.backends.rocm_attn import __all__, __doc__  # noqa: F401
