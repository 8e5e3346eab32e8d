"""The bookkeeping of the Hopper kernel: which block attends which rows and keys. `tests/bridges/test_gpu.py` compares its results."""

import importlib
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from purepage.functional.attention import paged_attention_call
from purepage.functional.target import Settings, Target
from purepage.kernels import pallas
from purepage.testing import random_batch

H200 = Target("cuda", "sm_90", 132, 32, settings=Settings(pallas_hopper=True))
BF16 = ml_dtypes.bfloat16


def visible_of(query_lens, seq_lens, window, num_tokens):
    """First key and one past the last of each row, by a loop."""
    start, stop, row = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32), 0
    for new, total in zip(query_lens, seq_lens, strict=True):
        for position in range(total - new, total):
            start[row], stop[row], row = max(0, position - window + 1), position + 1, row + 1
    return start, stop


@pytest.mark.parametrize("window", [10**6, 100, 1])
@pytest.mark.parametrize("block_n", [64, 128])
def test_every_row_meets_every_key_that_it_sees_and_whole_tiles_need_no_mask(block_n, window):
    hopper = importlib.import_module("purepage.kernels.pallas.hopper")
    query_lens, seq_lens = [200, 70, 0, 1, 129, 64], [500, 70, 30, 300, 129, 1000]
    num_tokens = sum(query_lens) + 9  # the last rows belong to no sequence
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    start, stop = visible_of(query_lens, seq_lens, window, num_tokens)
    tiles = hopper.query_tiles(jnp.asarray(starts), 128, num_tokens // 128 + len(query_lens))
    plans, bounds, order = hopper.warp_group_tiles(tiles, (jnp.asarray(start), jnp.asarray(stop)), block_n)
    plans, bounds, tiles = np.asarray(plans), np.asarray(bounds), np.asarray(tiles)
    work = plans[:, 0, hopper.END] - plans[:, 0, hopper.BEGIN]
    assert (np.diff(work) <= 0).all()
    attended = np.zeros(num_tokens, int)
    for block, tile in enumerate(np.asarray(order)):
        for plan, (lower, upper) in zip(plans[block], bounds[block], strict=True):
            token, row, count, first, full, partly, last, begin, end, oldest, newest, sequence = plan
            assert 0 <= token <= num_tokens - 64 and sequence == tiles[tile, 0]
            assert begin <= first <= full <= partly <= last <= end
            np.testing.assert_array_equal(lower, start[token : token + 64])
            np.testing.assert_array_equal(upper, stop[token : token + 64])
            for at in range(row, row + count):
                begins, ends = start[token + at], stop[token + at]
                attended[token + at] += 1
                assert begins >= first * block_n and ends <= last * block_n and oldest <= begins and ends <= newest
                assert partly <= full or (begins <= full * block_n and ends >= partly * block_n)
    np.testing.assert_array_equal(attended, np.arange(num_tokens) < sum(query_lens))


def call_of(options=(), **made):
    made = {"kind": "prefill", "query_lens": [100, 70], "seq_lens": [100, 90], "head_size": 128, "block_size": 64, "dtype": BF16} | made
    batch = random_batch(1, **made)
    return paged_attention_call(jnp.asarray(batch.query), batch.cache(), batch.metadata, layer=0, **dict(options))


@pytest.mark.parametrize(
    ("reason", "made", "options"),
    [
        ("head size 80", {"head_size": 80}, {}),
        ("query of float32", {"dtype": np.float32}, {}),
        ("cache of float8_e4m3fn", {"cache_dtype": ml_dtypes.float8_e4m3fn}, {}),
        ("blocks of 48", {"block_size": 48}, {}),
        ("blocks of 192", {"block_size": 192}, {}),
        ("alibi_slopes", {}, {"alibi_slopes": np.ones(4, np.float32)}),
        ("output_scale", {}, {"output_scale": 0.5, "output_dtype": ml_dtypes.float8_e4m3fn}),
        ("at most 20 of a sequence", {"query_lens": [20, 20, 20, 20]}, {}),
    ],
)
def test_what_the_hopper_kernel_does_not_serve_is_said_by_name(monkeypatch, reason, made, options):
    monkeypatch.setattr(pallas, "JAX", (0, 11))
    if "query_lens" in made:
        made = {**made, "seq_lens": [90] * 4}
    assert reason in " ".join(pallas.hopper_reasons(call_of(options, **made), H200))
    assert pallas.hopper_reasons(call_of(), H200) == ()


def test_it_is_taken_only_where_it_is_switched_on_for_the_release_that_ran_it(monkeypatch):
    assert pallas.hopper_reasons(call_of(), replace(H200, settings=Settings())) == ("PUREPAGE_PALLAS_HOPPER is off",)
    assert "sm_80" in pallas.hopper_reasons(call_of(), replace(H200, arch="sm_80"))[0]
    monkeypatch.setattr(pallas, "JAX", (0, 12))
    assert jax.__version__ in pallas.hopper_reasons(call_of(), H200)[0]


def test_a_machine_without_what_mosaic_gpu_imports_is_served_by_the_portable_kernel(monkeypatch):
    monkeypatch.setattr(pallas, "JAX", (0, 11))
    monkeypatch.setitem(sys.modules, "purepage.kernels.pallas.hopper", None)
    assert "cannot be imported" in pallas.hopper_reasons(call_of(), H200)[0]
