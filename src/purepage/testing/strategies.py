"""`purepage.functional.testing.strategies` under its public name: hypothesis strategies for specs, batches and options."""

from ..functional.testing.strategies import *  # noqa: F403
from ..functional.testing.strategies import __all__ as __all__
