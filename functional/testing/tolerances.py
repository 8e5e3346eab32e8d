"""How far a right answer may lie from the float64 one: one table, one comparison."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Tolerance:
    """An element may differ by `ulp * |expected| + row * max|expected row| + floor`; a row is the last axis (the channels of one head).

    Where the log-sum-exp of the rows is known, `row` grows by the error that "lse" allows it: a score in float32 has an absolute error in
    proportion to its size, which is the relative error of its key's weight.

    Attributes:
      ulp: spacing of the result's dtype, relative: one code, so that a tie may fall either way.
      row: error of the arithmetic before the last rounding. It follows the size of the terms, not of their sum, hence the row: sums cancel.
      floor: absolute, spacing of the dtype's smallest numbers.

    A row that is not all 0 may also be off by `FLUSHED`. A row whose expected values are all 0 (padding, no visible key) must be 0, but for
    `floor`.
    """

    ulp: float
    row: float
    floor: float = 0.0


def _of(dtype: Any, row: float) -> tuple[str, Tolerance]:
    info = ml_dtypes.finfo(dtype)
    return np.dtype(dtype).name, Tolerance(ulp=float(info.eps), row=row, floor=float(info.smallest_subnormal))


FLUSHED = 4 * float(np.finfo(np.float32).tiny)
"""Absolute: a few float32 terms below the smallest normal number, which compilers for CPUs and GPUs may take as 0."""

TOLERANCES: Mapping[str, Tolerance] = {
    **dict(
        (
            # dtype, row term: what products in this dtype's matrix unit cost (the softmax weights are rounded to it)
            _of(np.float32, 2**-17),  # order of a float32 sum over some thousand keys
            _of(np.float16, 2**-10),
            _of(ml_dtypes.bfloat16, 2**-7),
            _of(ml_dtypes.float8_e4m3fn, 2**-4),
            _of(ml_dtypes.float8_e4m3fnuz, 2**-4),
            _of(ml_dtypes.float8_e5m2, 2**-3),
            _of(ml_dtypes.float8_e5m2fnuz, 2**-3),
        )
    ),
    # A logarithm: its error is that of the scores, absolute. Float32 whatever the query is.
    "lse": Tolerance(ulp=2e-6, row=0.0, floor=1e-5),
}
"""By dtype name, plus "lse" for the log-sum-exp (float32 arrays)."""


def tolerance(dtype: Any, compute_dtype: Any = None) -> Tolerance:
    """The tolerance of results of `dtype` whose products were taken in `compute_dtype`.

    Args:
      dtype: a dtype, or "lse".
      compute_dtype: the dtype of the matrix products; default `dtype` itself, bfloat16 for an fp8 output (its products are its query's,
        in 16 or 32 bits). Name the fp8 dtype where an implementation multiplies in fp8, and the query's dtype where it is coarser than
        the output's.
    """
    if isinstance(dtype, str) and dtype == "lse":
        return TOLERANCES["lse"]
    name = np.dtype(dtype).name
    own = TOLERANCES[name]
    if compute_dtype is None:
        compute_dtype = ml_dtypes.bfloat16 if name.startswith("float8") else dtype
    return Tolerance(own.ulp, TOLERANCES[np.dtype(compute_dtype).name].row, own.floor)


def assert_close(
    actual: Any,
    expected: Any,
    *,
    dtype: Any,
    what: str = "",
    compute_dtype: Any = None,
    lse: Any = None,
    scores: Any = None,
    equal_nan: bool = False,
) -> None:
    """Asserts that `actual` is `expected` within the one tolerance of its dtype.

    Args:
      actual: an array of exactly `dtype` (float32 for "lse"); JAX, NumPy, or anything `np.asarray` takes.
      expected: the oracle's array, of the same shape: float64, or of the dtype itself.
      dtype: the result's dtype, or "lse".
      what: names the comparison in the message.
      compute_dtype: see `tolerance`.
      lse: the oracle's log-sum-exp, of the shape of `expected` without its last axis: scores of hundreds allow the output the error that
        float32 scores have. By default scores are taken to be small.
      scores: in place of `lse`, a bound of the terms that the scores of each row sum (`Batch.score_size`), of the same shape; with "lse" of
        the shape of `expected`. It also covers scores whose large terms cancel.
      equal_nan: NaN passes where both sides have it. By default no NaN passes, not even an expected one.

    Raises:
      AssertionError: how many elements are off, the largest error with its bound, where it is, and both values. Infinities must be equal.
    """
    found, wanted = np.asarray(actual), np.asarray(expected)
    bounds = tolerance(dtype, compute_dtype)
    label = f"{what}: " if what else ""
    needed = np.dtype(np.float32 if isinstance(dtype, str) and dtype == "lse" else dtype)
    if found.dtype != needed:
        raise AssertionError(f"{label}dtype is {found.dtype.name}, not {needed.name}")
    if wanted.dtype not in (needed, np.dtype(np.float64)):
        raise AssertionError(f"{label}the expected array is {wanted.dtype.name}, neither float64 nor {needed.name}")
    if found.shape != wanted.shape:
        raise AssertionError(f"{label}shape is {found.shape}, not {wanted.shape}")
    if found.size == 0:
        return
    found, wanted = found.astype(np.float64), wanted.astype(np.float64)
    magnitude = np.where(np.isfinite(wanted), np.abs(wanted), 0.0)
    row = np.max(magnitude, axis=-1, keepdims=True) if wanted.ndim else magnitude
    if isinstance(dtype, str) and dtype == "lse":
        bound = bounds.ulp * magnitude + bounds.floor + (0.0 if scores is None else _score_error(scores)[..., 0])
    else:
        bound = bounds.ulp * magnitude + (bounds.row + _score_error(lse if scores is None else scores)) * row + bounds.floor
        bound = bound + np.where(row > 0, FLUSHED, 0.0)
    finite = np.isfinite(found) & np.isfinite(wanted)
    error = np.where(finite, np.abs(np.where(finite, found, 0.0) - np.where(finite, wanted, 0.0)), np.inf)
    error[~finite & (found == wanted)] = 0.0
    if equal_nan:
        error[np.isnan(found) & np.isnan(wanted)] = 0.0
    bad = error > bound
    if not np.any(bad):
        return
    worst = np.unravel_index(np.argmax(np.where(bad, error / np.maximum(bound, np.finfo(np.float64).tiny), -1)), error.shape)
    lines = [f"{label}{int(bad.sum())} of {bad.size} elements of {needed.name}{list(found.shape)} are off"]
    where = tuple(map(int, worst))
    lines.append(f"worst at {where}: {found[worst]:.9g}, not {wanted[worst]:.9g} (off by {error[worst]:.4g}, allowed {bound[worst]:.4g})")
    nans = int(np.isnan(found).sum())
    if nans:
        lines.append(f"{nans} elements are NaN, {int(np.isnan(wanted).sum())} were expected to be")
    others = [tuple(map(int, index)) for index in np.argwhere(bad)[:4]]
    lines.append("first: " + "; ".join(f"{index} {found[index]:.6g} for {wanted[index]:.6g}" for index in others))
    raise AssertionError("\n  ".join(lines))


def _score_error(scores: Any) -> np.ndarray:
    """The relative error [..., 1] of softmax weights whose scores are of this size, for each row; 0 for small scores."""
    size = np.abs(np.asarray(0.0 if scores is None else scores, np.float64))[..., None]
    return TOLERANCES["lse"].ulp * np.where(np.isfinite(size), size, 0.0)
