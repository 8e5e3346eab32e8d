"""`paged_attention` in plain JAX against the float64 oracle: every feature with every layout, and the batches that break kernels."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.testing import assert_close, random_batch, reference_attention

F32, BF16, F16 = np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), np.dtype("float16")
E4M3, E4M3Z, E5M2, E5M2Z = (np.dtype(getattr(ml_dtypes, f"float8_{kind}")) for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))


def attend(batch, *, content="packed", order="LBHNC", layer=0, **options):
    if batch.q_scale is not None:
        options.setdefault("q_scale", batch.q_scale)
    return pp.paged_attention(
        jnp.asarray(batch.query), batch.cache(content=content, order=order), batch.metadata, layer=layer, implementation="xla", **options
    )


def check(batch, *, content="packed", order="LBHNC", layer=0, **options):
    out, lse = attend(batch, content=content, order=order, layer=layer, return_lse=True, **options)
    expected, expected_lse = batch.reference(layer, **options)
    dtype = out.dtype
    assert_close(out, expected, dtype=dtype, what="out")
    assert_close(lse, expected_lse, dtype="lse", what="lse")
    padding = slice(batch.num_tokens, None)
    assert np.all(np.asarray(out[padding], np.float32) == 0) and np.all(np.isneginf(np.asarray(lse[padding])))


ROWS = [
    # content, order, kind, dtype, cache dtype, heads, kv heads, head size, block size, features
    ("packed", "LBHNC", "mixed", F32, F32, 4, 2, 64, 16, {}),
    ("packed", "LHBNC", "mixed", BF16, BF16, 10, 2, 80, 48, {"sliding_window": 5}),
    ("xpacked", "LHBNC", "mixed", F32, F32, 7, 1, 96, 16, {"logits_soft_cap": 3.0}),
    ("xpacked", "LBHNC", "decode", F16, F16, 8, 2, 32, 32, {"sliding_window": 1}),
    ("xpacked_interleaved_v", "LHBNC", "mixed", BF16, E4M3, 4, 4, 64, 16, {"logits_soft_cap": 2.0, "sliding_window": 9}),
    ("xpacked_interleaved_v", "LBHNC", "prefill", F32, E5M2, 6, 2, 32, 16, {}),
    ("shuffled", "LBHNC", "mixed", F32, F32, 12, 2, 128, 16, {"sinks": True}),
    ("shuffled", "LHBNC", "mixed", F32, E4M3Z, 4, 2, 160, 32, {"alibi": True}),
    ("flash", "LBHNC", "mixed", F32, F32, 3, 3, 192, 16, {"alibi": True, "sinks": True, "sliding_window": 7}),
    ("flash", "LHBNC", "mixed", F32, E5M2Z, 14, 2, 72, 64, {"qq_bias": True}),
    ("packed", "LBHNC", "mixed", E4M3, E4M3, 8, 2, 64, 16, {"sinks": True}),
    ("packed", "LBHNC", "cross", F32, F32, 4, 2, 64, 16, {}),
    ("packed", "LBHNC", "cross", F32, F32, 4, 2, 64, 16, {"sliding_window": 4}),
    ("packed", "LBHNC", "mixed", F32, F32, 71, 1, 32, 16, {"qq_bias": True, "logits_soft_cap": 5.0}),
    ("packed", "LBHNC", "mixed", F32, F32, 2, 1, 256, 544, {"sliding_window": 20}),
    ("flash", "LBHNC", "decode", BF16, E4M3, 2, 1, 512, 784, {}),
    ("xpacked", "LHBNC", "decode", F32, F32, 2, 2, 112, 1056, {"sinks": True}),
]


@pytest.mark.parametrize("row", ROWS, ids=["-".join(map(str, (*r[:9], *r[9]))).replace(" ", "") for r in ROWS])
def test_every_feature_meets_every_layout(row):
    content, order, kind, dtype, cache_dtype, heads, kv_heads, head_size, block_size, features = row
    rng = np.random.default_rng(len(content) + heads + block_size)
    batch = random_batch(
        heads * block_size,
        kind=kind,
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=head_size,
        block_size=block_size,
    )
    options = dict(features)
    if options.pop("sinks", False):
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if options.pop("alibi", False):
        options["alibi_slopes"] = rng.uniform(0.05, 0.5, heads).astype(np.float32)
    if options.pop("qq_bias", False):
        options["qq_bias"] = rng.standard_normal((6, 5)).astype(np.float32)
    check(batch, content=content, order=order, **options)
