"""`purepage.functional.testing.pytest_plugin` under its public name: `pytest_plugins = ["purepage.testing.pytest_plugin"]`."""

from ..functional.testing.pytest_plugin import *  # noqa: F403
from ..functional.testing.pytest_plugin import __all__ as __all__
