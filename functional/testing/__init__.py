"""For people who test an attention kernel, ours or their own.

    batch = random_batch(seed=0, dtype="bfloat16", sliding_window=8)  # ragged, shuffled, NaN where no query looks
    mine = my_kernel(batch.query, batch.cache(content="flash"), batch.metadata, **batch.options)
    batch.check(mine)                                                 # against float64, token by token

    assert check_attention(lambda batch: my_kernel(...)).ok           # lengths, heads, dtypes, masks, scores: what fails

The oracle takes plain NumPy arrays and logical caches `[B, N, H, D]`, and shares no code with the library.
"""

from .batch_options import BatchOptions, Dtypes, Lengths, Masks, Pool, Scores, Shape
from .batches import BIASES, KINDS, SCALES, Batch, random_batch
from .checking import FEATURES, Failure, Report, check_attention
from .reference_attention import reference_attention, reference_encoder_attention, reference_merge, round_to, to_float64
from .reference_cache import mrope_rows, quantize, reference_address, reference_qk_norm_rope, reference_rope, reference_update_cache
from .tolerances import TOLERANCES, Tolerance, assert_close, tolerance

__all__ = [
    "BIASES",
    "FEATURES",
    "KINDS",
    "SCALES",
    "TOLERANCES",
    "Batch",
    "BatchOptions",
    "Dtypes",
    "Failure",
    "Lengths",
    "Masks",
    "Pool",
    "Report",
    "Scores",
    "Shape",
    "Tolerance",
    "assert_close",
    "check_attention",
    "mrope_rows",
    "quantize",
    "random_batch",
    "reference_address",
    "reference_attention",
    "reference_encoder_attention",
    "reference_merge",
    "reference_qk_norm_rope",
    "reference_rope",
    "reference_update_cache",
    "round_to",
    "to_float64",
    "tolerance",
]
