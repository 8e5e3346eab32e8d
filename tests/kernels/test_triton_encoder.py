"""Encoder attention in Triton, interpreted inside `jax.jit`, against the oracle: packed sequences with every feature, pairwise."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from pairwise import case_id, pairwise

import purepage as pp
from purepage.functional.testing import reference_encoder_attention
from purepage.kernels.archs import ARCHS
from purepage.kernels.archs.configs import ANY
from purepage.kernels.plans.encoder import EncoderShape, plan_encoder_attention
from purepage.testing import assert_close

pytest.importorskip("torch")
pytest.importorskip("triton")

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
PADDING = 3


def packed_metadata(lengths, max_query_len=None):
    starts = np.concatenate([[0], np.cumsum(lengths)])
    return pp.AttentionMetadata(
        jnp.asarray(starts, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.zeros((len(lengths), 0), jnp.int32),
        jnp.full((int(starts[-1]) + PADDING,), -1, jnp.int32),
        max_query_len=max_query_len or max(lengths),
        causal=False,
    )


def encode(query, key, value, metadata, **options):
    """Arrays among the options are traced."""
    arrays = {name: jnp.asarray(value) for name, value in options.items() if isinstance(value, np.ndarray | np.generic)}
    static = {name: value for name, value in options.items() if name not in arrays}
    attend = jax.jit(lambda q, k, v, arrays: pp.encoder_attention(q, k, v, metadata, implementation="triton", **static, **arrays))
    return attend(query, key, value, arrays)


@pytest.mark.sampled(10)
@pytest.mark.parametrize(
    "case",
    pairwise(
        {
            "dtype": (F32, F16, BF16),
            "heads": ((4, 2), (3, 1), (2, 2), (20, 1)),
            "head_size": (32, 40, 24),
            "causal": (False, True),
            "window": (None, 1, 5, 30),
            "cap": (None, 2.0),
            "sinks": (False, True),
            "scale": ("default", "static", "traced"),
            "lengths": ((21, 1, 0, 18), (35,), (3, 17, 2, 1, 1)),
        }
    ),
    ids=case_id,
)
def test_encoder_attention_is_the_oracles(case):
    (num_heads, num_kv_heads), size, dtype = case["heads"], case["head_size"], case["dtype"]
    rng, tokens = np.random.default_rng(0), sum(case["lengths"]) + PADDING
    query, key, value = (rng.standard_normal((tokens, heads, size)).astype(dtype) for heads in (num_heads, num_kv_heads, num_kv_heads))
    for array in (query, key, value):
        array[-PADDING:] = np.nan
    metadata = packed_metadata(case["lengths"])
    options = {"causal": case["causal"], "sliding_window": case["window"], "logits_soft_cap": case["cap"]}
    if case["sinks"]:
        options["sinks"] = rng.standard_normal(num_heads).astype(F32)
    number = -0.4 if case["scale"] == "static" else 0.3
    if case["scale"] != "default":
        options["scale"] = number if case["scale"] == "static" else np.float32(number)
    wanted, _ = reference_encoder_attention(query, key, value, metadata.query_start_loc, **options)
    out = encode(query, key, value, metadata, **options)
    assert_close(out, wanted, dtype=dtype)
    assert not np.any(np.asarray(out)[-PADDING:].astype(F32))


def test_a_key_that_is_nan_reaches_only_the_rows_that_see_it():
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((20 + PADDING, 2, 32)).astype(F32) for _ in range(3))
    key[11] = value[11] = np.nan
    out = np.asarray(encode(query, key, value, packed_metadata((20,)), causal=True))
    assert np.isfinite(out[:11]).all() and np.isnan(out[11:20]).all()
    wanted, _ = reference_encoder_attention(query[:11], key[:11], value[:11], np.array([0, 11]), causal=True)
    assert_close(out[:11], wanted, dtype=F32)


def test_no_sequences_or_no_tokens_give_zeros():
    query = jnp.full((4, 2, 32), jnp.nan, jnp.float32)
    metadata = pp.AttentionMetadata(
        jnp.zeros((3,), jnp.int32),
        jnp.zeros((2,), jnp.int32),
        jnp.zeros((2, 0), jnp.int32),
        jnp.full((4,), -1, jnp.int32),
        max_query_len=1,
        causal=False,
    )
    assert not np.any(np.asarray(pp.encoder_attention(query, query, query, metadata, implementation="triton")))
    none = query[:0]
    assert pp.encoder_attention(none, none, none, metadata, implementation="triton").shape == (0, 2, 32)


@pytest.mark.parametrize("arch", ARCHS)
def test_a_plan_keeps_the_limits_of_its_arch_for_every_head_size(arch):
    for dtype, largest in (("bfloat16", 512), ("float32", 256)):
        for head_size in (size for size in (32, 80, 128, 256, 512) if size <= min(largest, max(ARCHS[arch].prefill[ANY]))):
            shape = EncoderShape(
                num_tokens=100,
                num_seqs=3,
                num_heads=8,
                num_kv_heads=2,
                head_size=head_size,
                value_size=head_size,
                dtype=dtype,
                max_query_len=64,
                scale=0.1,
            )
            (launch,) = plan_encoder_attention(shape, arch).launches
            facts = launch.facts
            assert facts["block_tokens"] * facts["block_heads"] <= facts["block_m"]
            blocks = launch.grid[0] // 2  # KV heads
            assert blocks * facts["block_tokens"] >= 100 and launch.num_warps * ARCHS[arch].wave_size <= ARCHS[arch].max_threads
