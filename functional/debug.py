"""Debug checks: the values of metadata and slots looked at in every call, inside `jit` too."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from .cache import CacheSpec
from .errors import bad_value
from .integers import INT32_MAX
from .metadata import AttentionMetadata
from .validation import check_query_starts, check_values

_ENABLED = jax.make_user_context(False)


@contextmanager
def debug_checks() -> Iterator[None]:
    """Inside, attention and the cache writers check the values that they get, as `validate_metadata` does.

    An eager call waits for its metadata and raises `ValueError`. A jitted one checks through a host callback when it runs: waiting for its
    results raises `jax.errors.JaxRuntimeError`, which holds the same message; JAX prints it once more at the process's end. The setting is
    part of the key of `jax.jit`: a function that was traced without the checks is traced again with them, and the trace without them has no
    callback.

    Attention checks the step's starts, lengths, table and slots, its window and the rows of the query. Writers, which get slots alone, find
    a slot that two tokens have and one past the cache.

        with pp.debug_checks():
            out = step(params, cache, metadata)

    Returns:
      A context manager.

    Raises:
      ValueError: inside, what an eager call finds: the sequence or token, what it was and the rule.
    """
    with _ENABLED(True):
        yield


@contextmanager
def without_checks() -> Iterator[None]:
    """Inside, nothing is checked: for functions that checked their arguments and call others with parts of them."""
    with _ENABLED(False):
        yield


def check_step(
    metadata: AttentionMetadata, spec: CacheSpec | None, num_rows: int, sliding_window: Any = None, key_range: Any = None
) -> AttentionMetadata:
    """Checks a step where debug checks are on; returns the metadata that the step must use.

    Args:
      metadata: of the step, past `check_metadata`.
      spec: the cache's; None for attention without a cache, which reads the query starts alone.
      num_rows: rows of the query.
      sliding_window: a checked window, None where there is none; it may be traced.
      key_range: a checked one, or None: blocks before the first key that a row of a sequence may see are not needed.
    """
    if not _ENABLED.value:
        return metadata
    check = partial(_check_step, spec=spec, num_rows=num_rows)
    return replace(metadata, query_start_loc=_checked(metadata.query_start_loc, check, metadata, sliding_window, key_range))


def check_written_slots(slots: Any, spec: CacheSpec) -> Any:
    """Checks a writer's slots, as the caller gave them, where debug checks are on; returns those that the writer must use."""
    return _checked(slots, partial(_check_slots, spec=spec), slots) if _ENABLED.value else slots


def _checked(array: Any, check: Any, *operands: Any) -> Any:
    """`array`, after `check(*operands)` with NumPy arrays: now where they are concrete, else when the traced function runs.

    There the array depends on the callback, so the error is that of the function's results.
    """
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(operands)):
        check(*jax.tree.map(np.asarray, operands))
        return array

    def on_host(*values: Any) -> np.ndarray:
        check(*jax.tree.map(np.asarray, values))
        return np.zeros((), array.dtype)

    return array + jax.pure_callback(on_host, jax.ShapeDtypeStruct((), array.dtype), *operands, vmap_method="sequential")


def _check_step(metadata: AttentionMetadata, window: Any, key_range: Any, *, spec: CacheSpec | None, num_rows: int) -> None:
    if int(metadata.query_start_loc[-1]) > num_rows:
        bad_value("query", f"{num_rows} rows", f"of at least query_start_loc[-1] = {int(metadata.query_start_loc[-1])} rows")
    if spec is None:
        check_query_starts(metadata)
        return
    window = None if window is None or not 0 < int(window) <= INT32_MAX else int(window)
    begin = None
    if key_range is not None:
        rows = zip(metadata.query_start_loc[:-1], metadata.query_start_loc[1:], strict=True)
        begin = np.array([key_range[0][a:b].min(initial=INT32_MAX if b > a else 0) for a, b in rows], np.int64)
    check_values(metadata, spec, writes=bool(len(metadata.slot_mapping)), window=window, begin=begin)


def _check_slots(slots: np.ndarray, *, spec: CacheSpec) -> None:
    past = np.flatnonzero(slots >= spec.num_slots)
    if len(past):
        rule = f"below num_blocks * block_size = {spec.num_slots}, or negative to skip the token"
        bad_value(f"slot_mapping[{past[0]}]", int(slots[past[0]]), rule)
    live, counts = np.unique(slots[slots >= 0], return_counts=True)
    if np.any(counts > 1):
        twice = live[np.argmax(counts > 1)]
        bad_value("slot_mapping", f"{int(twice)} for tokens {np.flatnonzero(slots == twice).tolist()}", "one slot for each token")
