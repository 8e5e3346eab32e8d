"""What `rocm_attn.forward` reads: new tokens from `key` and `value` in sequences of more than one query token, the cache in all others."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np

import purepage as pp


def expected_of_rocm_attn(batch: Any, **options: Any) -> np.ndarray:
    """The oracle's output [T, Hq, D], row by row from one of its two sources of new tokens."""
    cached = batch.reference(**options)[0]
    dense = batch.reference(step_key=batch.key, step_value=batch.value, **options)[0]
    return np.where(_is_dense(batch)[:, None, None], dense, cached)


def cache_without_dense_tokens(batch: Any, **layout: Any) -> pp.KVCache:
    """The batch's cache with NaN where `rocm_attn` must not read: the slots of the new tokens that it takes from `key` and `value`."""
    slots = np.asarray(batch.metadata.slot_mapping)[_is_dense(batch)]
    sides = {}
    for name in ("key_cache", "value_cache"):
        side = getattr(batch, name).copy()
        side[:, slots // side.shape[2], slots % side.shape[2]] = np.nan
        sides[name] = side
    return replace(batch, **sides).cache(**layout)


def _is_dense(batch: Any) -> np.ndarray:
    """[T], whether a token is one of several query tokens of its sequence."""
    starts = np.asarray(batch.metadata.query_start_loc)
    dense = np.zeros(len(batch.query), bool)
    for begin, end in itertools.pairwise(starts):
        dense[begin:end] = end - begin > 1
    return dense
