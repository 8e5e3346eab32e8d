"""The two ways a call can be wrong: a bad argument (`ValueError`, `TypeError`) and a good one that nothing serves."""

from typing import Any, NoReturn

DOCUMENTATION = "https://purepage.readthedocs.io"
"""Where the documentation is: messages lead there, since a wheel has no `docs` folder. `project.urls` of `pyproject.toml` begins alike."""


class UnsupportedError(NotImplementedError):
    """A valid call that the chosen implementation, or every implementation, can't serve.

    The message lists each implementation with the argument that it can't serve; nothing is computed another way in silence.
    """


def describe(value: Any) -> str:
    """A short text of a value for an error: dtype and shape of an array, `repr` of all else."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if isinstance(shape, tuple) and dtype is not None and shape != ():
        return f"{dtype}[{','.join(map(str, shape))}]"
    return repr(value)


def bad_value(argument: str, value: Any, rule: str) -> NoReturn:
    """Raises `ValueError`: which argument, what it was, what it must be."""
    raise ValueError(f"{argument} is {describe(value)}: it must be {rule}")


def bad_type(argument: str, value: Any, rule: str) -> NoReturn:
    """Raises `TypeError`: which argument, what it was, what it must be."""
    raise TypeError(f"{argument} is {describe(value)} ({type(value).__name__}): it must be {rule}")
