"""Many rows of the oracle at once: the same float64 arithmetic as row by row, as matrix products over tiles of rows, for long sequences."""

from collections.abc import Sequence

import numpy as np

ROWS = 64
"""Rows of a tile."""
SCORES_FROM = 2**15
"""Rows times keys of a sequence from which tiles are used."""


def attend_rows(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    first: int,
    spans: Sequence[tuple[int, int]],
    context: int,
    factor: float,
    cap: float | None,
    slopes: np.ndarray,
    sinks: np.ndarray | None,
    bias: np.ndarray | None,
    out: np.ndarray,
    lse: np.ndarray,
) -> list[int]:
    """Writes rows of one sequence into `out` and `lse`; the arguments are those of the oracle's `_attend_sequence`.

    Returns:
      The rows that are left, in tiles where a row sees a key or a value that is not finite.
    """
    left: list[int] = []
    for begin in range(0, len(spans), ROWS):
        rows = slice(begin, min(begin + ROWS, len(spans)))
        bounds = np.array(spans[rows])
        low, high = int(bounds[:, 0].min()), int(bounds[:, 1].max())
        k, i = np.arange(low, high), np.arange(rows.start, rows.stop)[:, None]
        keep = (bounds[:, :1] <= k) & (k < bounds[:, 1:])
        extra = None
        if bias is not None:
            extra = np.zeros(keep.shape)
            biased, columns = np.flatnonzero(i[:, 0] < bias.shape[0]), np.flatnonzero((k >= context) & (k - context < bias.shape[1]))
            extra[np.ix_(biased, columns)] = bias[np.ix_(i[biased, 0], k[columns] - context)]
            keep &= extra != -np.inf
            extra[~keep] = 0.0
        inside = slice(low - first, high - first)
        found = attend_tile(
            query[rows], keys[inside], values[inside], keep, extra, k - context - i, factor=factor, cap=cap, slopes=slopes, sinks=sinks
        )
        if found is None:
            left.extend(range(rows.start, rows.stop))
        else:
            out[rows], lse[rows] = found
    return left


def attend_tile(
    query: np.ndarray,
    keys: np.ndarray,
    values: np.ndarray,
    keep: np.ndarray,
    bias: np.ndarray | None,
    distance: np.ndarray,
    *,
    factor: float,
    cap: float | None,
    slopes: np.ndarray,
    sinks: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray] | None:
    """The rows of one tile.

    Args:
      query: float64 [r, Hq, D].
      keys, values: float64 [n, H, D] and [n, H, Dv].
      keep: bool [r, n], which keys each row sees.
      bias: [r, n], added after the cap, or None.
      distance: [r, n], position of the key less that of the query.
      factor, cap: on the scores.
      slopes, sinks: [Hq].

    Returns:
      (out [r, Hq, Dv], lse [r, Hq]); None where a row sees a key or a value that is not finite, which must stay with its own rows.
    """
    rows, heads, _ = query.shape
    group = heads // keys.shape[1]
    seen = np.any(keep, axis=0)
    keys, values = (side if seen.all() else np.where(seen[:, None, None], side, 0.0) for side in (keys, values))
    if not (np.isfinite(keys).all() and np.isfinite(values).all()):
        return None
    hidden = np.where(keep, 0.0, -np.inf)
    if bias is not None:
        hidden = hidden + bias
    out, lse = np.zeros((rows, heads, values.shape[-1])), np.full((rows, heads), -np.inf)
    for h in range(keys.shape[1]):
        of_head = slice(h * group, (h + 1) * group)
        packed = np.ascontiguousarray(query[:, of_head].transpose(1, 0, 2)).reshape(group * rows, -1)
        scores = (factor * packed @ keys[:, h].T).reshape(group, rows, -1)
        if cap:
            scores = cap * np.tanh(scores / cap)
        for g in range(group):
            slope, sink = slopes[h * group + g], None if sinks is None else float(sinks[h * group + g])
            logits = scores[g]
            logits += hidden if slope == 0 else hidden + slope * distance
            top = np.max(logits, axis=1, initial=-np.inf if sink is None else sink)
            shift = np.where(top == -np.inf, 0.0, top)
            np.exp(np.subtract(logits, shift[:, None], out=logits), out=logits)
            total = logits.sum(1) + (0.0 if sink is None else np.exp(sink - shift))
            weighted = logits @ values[:, h]
            some = total > 0
            out[some, h * group + g] = weighted[some] / total[some, None]
            lse[some, h * group + g] = shift[some] + np.log(total[some])
    return out, lse
