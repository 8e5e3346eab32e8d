"""A pytest plugin for people who test attention. It needs pytest (`purepage[testing]`); a project asks for it in its top `conftest.py`:

    pytest_plugins = ["purepage.testing.pytest_plugin"]

Nothing is registered by installing purepage: importing it imports jax, whose settings a `conftest.py` may have to make first.

`--purepage-implementation xla --purepage-implementation triton` runs each test that takes `purepage_implementation`, or a fixture that
follows it, once for each; without the option once with the best implementation.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, get_args

try:
    import pytest
except ImportError as error:
    raise ImportError("purepage.testing.pytest_plugin needs pytest: pip install 'purepage[testing]'") from error

from ..attention import paged_attention
from ..debug import debug_checks
from ..errors import UnsupportedError
from ..literals import Implementation
from .batches import KINDS, Batch, random_batch
from .checking import Report, check_attention

__all__ = [
    "purepage_attention",
    "purepage_batch",
    "purepage_check",
    "purepage_checks",
    "purepage_implementation",
    "pytest_addoption",
    "pytest_generate_tests",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("purepage").addoption(
        "--purepage-implementation",
        action="append",
        choices=get_args(Implementation),
        help="the implementation of purepage that tests run; may be given several times (default: the best one that serves the call)",
    )


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "purepage_implementation" in metafunc.fixturenames:
        given = metafunc.config.getoption("--purepage-implementation") or [None]
        metafunc.parametrize("purepage_implementation", given, indirect=True, ids=[name or "best" for name in given])


@pytest.fixture
def purepage_implementation(request: pytest.FixtureRequest) -> str | None:
    """The implementation to test; None is the best one."""
    return getattr(request, "param", None)


@pytest.fixture
def purepage_attention(purepage_implementation: Implementation | None) -> Callable[..., Any]:
    """`paged_attention` with the implementation to test. A call that it does not serve skips the test, with its reason."""

    def attend(*args: Any, **options: Any) -> Any:
        try:
            return partial(paged_attention, implementation=purepage_implementation)(*args, **options)
        except UnsupportedError as error:
            pytest.skip(str(error))

    return attend


@pytest.fixture(params=KINDS)
def purepage_batch(request: pytest.FixtureRequest) -> Batch:
    """A random batch of every kind: "mixed", "decode", "prefill", "chunked" and "cross"."""
    return random_batch(0, kind=request.param)


@pytest.fixture
def purepage_check() -> Callable[..., Report]:
    """`check_attention` that fails the test with the report where the kernel is wrong."""

    def check(kernel: Callable[[Batch], Any], **options: Any) -> Report:
        report = check_attention(kernel, **{"verbose": False, **options})
        if not report.ok:
            pytest.fail(str(report), pytrace=False)
        return report

    return check


@pytest.fixture
def purepage_checks() -> Iterator[None]:
    """Debug checks of metadata and slots for the whole test, see `purepage.debug_checks`."""
    with debug_checks():
        yield
