"""The ends of every range, through Triton's interpreter: soft caps, windows, lost blocks and masked NaN against the float64 oracle."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from purepage.functional.testing import assert_close, random_batch
from purepage.kernels.archs.configs import DecodeConfig, PrefillConfig

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
attention = pytest.importorskip("test_triton_attention")
softmax = pytest.importorskip("purepage.kernels.triton.softmax")

BF16, F32 = ml_dtypes.bfloat16, np.float32
SMALL = {"num_seqs": 3, "max_query_len": 20, "max_seq_len": 60, "dtype": F32}
DECODE = DecodeConfig(16, 1, 1, 2, max_block_m=16)


@triton.jit
def tanh_kernel(out, t, TANH: triton.language.constexpr):
    index = triton.language.arange(0, 1024)
    triton.language.store(out + index, TANH(triton.language.load(t + index)))


def test_the_soft_cap_keeps_the_relative_error_of_tanh_at_every_magnitude():
    size = np.logspace(-30, 30, 511)
    x = np.concatenate([[0.0, np.inf], size, -size]).astype(F32)
    t = (x * F32(2 * np.log2(np.e))).astype(F32)
    out = torch.full((1024,), float("nan"))
    tanh_kernel[(1,)](out, torch.from_numpy(t), softmax.tanh_of_exponent)
    with np.errstate(over="ignore"):
        wanted = np.tanh(t.astype(np.float64) / (2 * np.log2(np.e)))
    np.testing.assert_allclose(out.numpy(), wanted, rtol=4e-7, atol=0)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("cap", [1e-3, 1.0, 30.0, 1e3, 1e5, 1e7, 1e9])
def test_soft_caps_of_every_decade(cap, kind):
    """Heads of one batch have scores of 12 decades, as far as float32 can hold a difference of 1e-5 between capped scores."""
    batch = random_batch(41, kind=kind, **SMALL)
    batch.query[:] *= np.array([1e-6, 1e-3, 1.0, 1e6 if cap <= 30 else 4.0], F32)[:, None]
    attention.check(batch, logits_soft_cap=cap)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("window", [2**30, 2**31 - 2, 2**31 - 1])
@pytest.mark.parametrize("kind", ["mixed", "decode", "cross"])
def test_a_window_wider_than_any_sequence_is_none(kind, window):
    batch = random_batch(42, kind=kind, **SMALL)
    wide, _ = attention.attend(batch, sliding_window=window)
    none, _ = attention.attend(batch)
    np.testing.assert_array_equal(wide, none)
    attention.check(batch, sliding_window=window)


def with_table(batch, changes):
    """The batch with other entries in its block table: {(sequence, place): block}."""
    table = np.array(batch.metadata.block_table)
    for (seq, place), block in changes.items():
        table[seq, place] = block
    return replace(batch, metadata=replace(batch.metadata, block_table=jnp.asarray(table)))


def check_lost(batch, seq, **options):
    """Sequence `seq` is NaN in all its rows, out and lse; the others are the oracle's."""
    rows = {name: options.pop(name) for name in ("rows", "num_cus", "content", "look") if name in options}
    out, lse = attention.attend(batch, **rows, **options)
    wanted, wanted_lse = batch.reference(**options)
    starts = np.asarray(batch.metadata.query_start_loc)
    lost = slice(starts[seq], starts[seq + 1])
    assert lost.stop > lost.start and np.isnan(wanted[lost]).all() and np.isnan(out[lost].astype(F32)).all() and np.isnan(lse[lost]).all()
    assert_close(out, wanted, dtype=out.dtype, equal_nan=True, what="out")
    assert_close(lse, wanted_lse, dtype=F32, compute_dtype=out.dtype, equal_nan=True, what="lse")


LOST = [-1, -(2**31), 2**31 - 1, "first past the pool"]
PREFILL = PrefillConfig(16, 16, 1, 1)
COPIED = PrefillConfig(16, 16, 1, 1, optimistic=True, partial_sums=4, kv_descriptor=True, page_copy_from=1)
PATHS = {
    "prefill": ({"kind": "prefill", "dtype": F32}, {"tiled": PREFILL, "split": DECODE}),
    "frozen maximum": ({"kind": "prefill", "dtype": BF16}, {"tiled": replace(COPIED, frozen_max=True), "split": DECODE}),
    "page copy": ({"kind": "prefill", "dtype": BF16, "content": "xpacked"}, {"tiled": COPIED, "split": DECODE}),
    "decode": ({"kind": "decode", "dtype": F32}, None),
    "tiles over blocks": ({"kind": "decode", "dtype": F32}, {"split": DecodeConfig(32, 1, 1, 2, 16)}),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("block", LOST)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("place", ["first", "last"])
def test_a_needed_block_outside_the_pool_makes_its_sequence_nan_and_no_other(path, block, place):
    options, configs = PATHS[path]
    options = dict(options)
    layout = {"content": options.pop("content", "packed")}
    batch = random_batch(43, **{**SMALL, "padding_seqs": 0, "share_prefixes": False, **options})
    seq = int(np.argmax(batch.seq_lens))
    last = (int(batch.seq_lens[seq]) - 1) // batch.key_cache.shape[2]
    assert last > 0
    lost = batch.key_cache.shape[1] if isinstance(block, str) else block
    changed = with_table(batch, {(seq, 0 if place == "first" else last): lost})
    check_lost(changed, seq, rows=configs, num_cus=64 if "decode" in path else None, **layout)


@pytest.mark.parametrize("path", PATHS)
def test_entries_that_no_row_needs_may_be_anything(path):
    options, configs = PATHS[path]
    options = dict(options)
    layout = {"content": options.pop("content", "packed")}
    batch = random_batch(44, sliding_window=5, **{**SMALL, "kind": "mixed", "padding_seqs": 0, "dtype": options["dtype"]})
    table, size = np.asarray(batch.metadata.block_table), batch.key_cache.shape[2]
    changes = {}
    for seq, (length, start, stop) in enumerate(
        zip(batch.seq_lens, *(np.asarray(batch.metadata.query_start_loc)[i:][: len(batch.seq_lens)] for i in (0, 1)), strict=True)
    ):
        needed = range(max(0, int(length - (stop - start) - 4)) // size, -(-int(length) // size) if stop > start else 0)
        changes |= {(seq, place): 2**31 - 1 for place in range(table.shape[1]) if place not in needed}
    assert changes
    attention.check(with_table(batch, changes), sliding_window=5, rows=configs, **layout)


@pytest.mark.parametrize("side", ["key", "value"])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_key_that_the_bias_masks_never_matters(kind, side, poison):
    batch = random_batch(45, kind="prefill", **{**SMALL, "max_query_len": 12, "padding_seqs": 0, "share_prefixes": False})
    if kind == "decode":
        rows = {"split": DecodeConfig(16, 1, 1, 2, max_block_m=64)}  # all query tokens fit one block of the decode kernel
    else:
        rows = {"tiled": PrefillConfig(16, 16, 1, 1, optimistic=True), "split": DecodeConfig(16, 1, 1, 2, 16)}
    cache = batch.key_cache if side == "key" else batch.value_cache
    table = np.asarray(batch.metadata.block_table)
    for seq, length in enumerate(batch.seq_lens):
        if length > 2:
            cache[:, table[seq, 0], 2] = poison
    bias = np.random.default_rng(0).standard_normal((12, 12)).astype(F32)
    bias[:, 2] = -np.inf
    attention.check(batch, qq_bias=bias, rows=rows)
