"""One loop that masks every tile, whole sequences for each program, and heads in phases, through Triton's interpreter."""

import os
from dataclasses import replace

os.environ.setdefault("TRITON_INTERPRET", "1")

import ml_dtypes
import numpy as np
import pytest

from purepage.functional.testing import random_batch
from purepage.kernels.archs.configs import DecodeConfig, PrefillConfig

pytest.importorskip("torch")
pytest.importorskip("triton")
attention = pytest.importorskip("test_triton_attention")

BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
FEATURES = {
    "plain": {},
    "window": {"sliding_window": 9},
    "cap-alibi-sinks": {"logits_soft_cap": 3.0, "alibi_slopes": [0.5, 0.25, 0.1, 1.0], "sinks": [0.3, -1.0, 5.0, -np.inf]},
}


def config(whole, **changes):
    return {"split": DecodeConfig(16, 1, 2, 2, 16, one_loop=True, whole_tiles=64 if whole else 0, **changes)}


def expects(whole, one_loop=True):
    """Fails where a plan does not decode in the way that is tested."""

    def look(program):
        spec = dict(program.launches[-1 if whole else -2].constants)["S"]
        assert (spec.whole_sequences, spec.one_loop) == (whole, one_loop)

    return look


@pytest.mark.sampled(5)
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("kind", ["mixed", "decode"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("content", ["packed", "xpacked"])
def test_one_loop_and_whole_sequences(options, kind, whole, content):
    window = options.get("sliding_window")
    batch = random_batch(31, kind=kind, dtype=BF16, max_query_len=20, max_seq_len=60, sliding_window=window)
    # Where prompts are there too, the group's rows hold several tokens of a sequence, which see different keys.
    look = expects(whole, one_loop=kind == "decode")
    check = attention.check
    check(batch, content=content, rows=config(whole, partial_sums=0 if whole else 8), num_cus=2, look=look, **options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("whole", [False, True])
def test_fp8_caches_in_one_loop(whole):
    batch = random_batch(32, kind="decode", dtype=BF16, cache_dtype=E4M3, scales="head", max_seq_len=60)
    attention.check(batch, rows=config(whole), num_cus=2, look=expects(whole))


@pytest.mark.parametrize("whole", [False, True])
def test_a_lost_block_spoils_its_sequence_only(whole):
    batch = random_batch(33, kind="decode", dtype=BF16, padding_seqs=0, share_prefixes=False, max_seq_len=60)
    table = np.asarray(batch.metadata.block_table).copy()
    expected, _ = batch.reference()
    table[0, 0] = batch.cache().spec.num_blocks + 3
    batch = replace(batch, metadata=replace(batch.metadata, block_table=table))
    out, lse = attention.attend(batch, rows=config(whole), num_cus=2)
    assert np.isnan(out[0].astype(np.float32)).all() and np.isnan(lse[0]).all()
    np.testing.assert_allclose(out[1:].astype(np.float32), expected[1:], rtol=2e-2, atol=2e-2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("kind", ["mixed", "chunked", "cross"])
@pytest.mark.parametrize("content", ["packed", "xpacked"])
def test_prefill_in_one_loop_with_heads_in_phases(options, kind, content):
    """The pages of a descriptor, or not; prompts whose keys one loop attends, some KV heads after the others."""
    row = PrefillConfig(
        16, 16, 1, 2, optimistic=True, frozen_max=True, partial_sums=4, kv_descriptor=True, one_loop_tiles=64, phase_bytes=1
    )

    def look(program):
        spec = dict(program.launches[0].constants)["S"]
        assert program.launches[0].kernel.endswith("prefill") and spec.one_loop and spec.in_phases and not spec.frozen_max

    window = options.get("sliding_window")
    batch = random_batch(34, kind=kind, dtype=BF16, max_query_len=20, max_seq_len=60, head_size=32, block_size=16, sliding_window=window)
    attention.check(batch, content=content, rows={"tiled": row, "split": DecodeConfig(16, 1, 1, 2, 16)}, look=look, **options)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_one_loop_finds_a_key_that_only_some_rows_see(poison):
    row = PrefillConfig(16, 16, 1, 2, optimistic=True, partial_sums=4, one_loop_tiles=64)
    attention.check_a_spoilt_key(poison, rows={"tiled": row})
