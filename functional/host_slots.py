"""Python callbacks inside functions that `custom_partitioning` lowers apart from their program.

A program keeps the Python functions that it calls in a list, and a callback is a place in that list. What `custom_partitioning` lowers
when XLA partitions the program comes too late for the list. So the program gets some empty places beforehand, and what is lowered later
fills them.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

COUNT = 8
"""Places of a call. A call needs one for each different program or function that it runs: one or two."""


class _Place:
    body: Callable[..., Any] | None = None

    def __call__(self, *arguments: Any) -> Any:
        assert self.body is not None
        return self.body(*arguments)


class HostSlots:
    """Places in the list of a program that is being lowered.

    Args:
      module_context: JAX's, of that program.
    """

    def __init__(self, module_context: Any) -> None:
        self._first = len(module_context.host_callbacks)
        self._places = [_Place() for _ in range(COUNT)]
        for place in self._places:
            module_context.add_host_callback(place)

    def index_of(self, body: Callable[..., Any]) -> int:
        """The place of `body` in the program's list. Equal bodies share one.

        Raises:
          RuntimeError: no place is left.
        """
        for number, place in enumerate(self._places):
            if place.body is None:
                place.body = body
            if place.body == body:
                return self._first + number
        raise RuntimeError(f"a partitioned call runs more than {COUNT} different Python functions: wrap it in jax.shard_map")


CURRENT: ContextVar[HostSlots | None] = ContextVar("purepage_host_slots", default=None)
"""The places for callbacks of what is being traced; None where JAX's own way of keeping them works."""


@contextmanager
def using(slots: HostSlots | None) -> Iterator[None]:
    """What is traced inside takes its places from `slots`."""
    token = CURRENT.set(slots)
    try:
        yield
    finally:
        CURRENT.reset(token)
