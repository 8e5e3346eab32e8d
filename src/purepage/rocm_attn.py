"""`purepage.functional.rocm_attn` under its public name."""

from .functional.rocm_attn import *  # noqa: F403
from .functional.rocm_attn import __all__, __doc__  # noqa: F401
