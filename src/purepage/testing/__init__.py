"""`purepage.functional.testing` under its public name: oracle, random batches, tolerances, `check_attention`.

`purepage.testing.strategies` and `purepage.testing.pytest_plugin` need the extra `testing` (hypothesis and pytest).
"""

from ..functional.testing import *  # noqa: F403
from ..functional.testing import __all__ as __all__
