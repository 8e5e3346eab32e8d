"""The paged-attention kernels through Triton's interpreter, against the float64 oracle: every layout with every feature, pairwise."""

import os
from types import SimpleNamespace

os.environ.setdefault("TRITON_INTERPRET", "1")

import ml_dtypes
import numpy as np
import pytest

from purepage.functional.testing import assert_close, random_batch
from purepage.kernels.archs.configs import DecodeConfig, PrefillConfig
from purepage.kernels.plans.attention import plan_paged_attention
from purepage.kernels.plans.shapes import PagedAttentionShape

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
decode = pytest.importorskip("purepage.kernels.triton.decode")
run = pytest.importorskip("purepage.kernels.triton.run")

BF16, F16, F32 = ml_dtypes.bfloat16, np.float16, np.float32
E4M3, E4M3Z, E5M2, E5M2Z = (getattr(ml_dtypes, f"float8_{kind}") for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))


def to_torch(array):
    """A NumPy or JAX array as a torch tensor with the same bits."""
    array = np.ascontiguousarray(np.asarray(array))
    name = array.dtype.name
    if array.dtype.kind in "iu" or name in ("float32", "float16"):
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array.view(f"u{array.dtype.itemsize}").copy()).view(getattr(torch, name))


def from_torch(tensor):
    name = str(tensor.dtype).removeprefix("torch.")
    if name in ("bfloat16",) or name.startswith("float8"):
        bits = tensor.view(torch.uint16 if tensor.dtype.itemsize == 2 else torch.uint8).numpy()
        return bits.view(getattr(ml_dtypes, name))
    return tensor.numpy()


def nothing(program):
    """Looks at no program."""


def ranges_of(batch, window, key_range):
    """First key and one past the last of each sequence and of each token, as the kernels read them."""
    rows = np.zeros((len(batch.query), 2), np.int32)
    hulls = np.zeros((len(batch.seq_lens), 2), np.int32)
    starts = np.asarray(batch.metadata.query_start_loc)
    for s, length in enumerate(map(int, batch.seq_lens)):
        key = np.arange(length)
        for row in range(starts[s], starts[s + 1]):
            position = length - starts[s + 1] + row
            sees = (key >= key_range[0][row]) & (key < key_range[1][row])
            sees &= key <= position if batch.metadata.causal else (window is None) | (key - position < (window or 0))
            sees &= (window is None) | (position - key < (window or 0))
            if sees.any():
                rows[row] = np.flatnonzero(sees)[[0, -1]] + [0, 1]
        live = rows[starts[s] : starts[s + 1]]
        live = live[live[:, 1] > 0]
        if len(live):
            hulls[s] = live[:, 0].min(), live[:, 1].max()
    return np.concatenate([hulls.ravel(), rows.ravel()])


def attend(
    batch,
    *,
    content="packed",
    order="LBHNC",
    layer=0,
    num_cus=None,
    output_dtype=None,
    rows=None,
    look=nothing,
    arch="cpu",
    traced=False,
    **options,
):
    """Runs the planned program on the batch, after a look at it; returns (out, lse) as NumPy. `traced`: the window is data."""
    window, key_range = options.get("sliding_window"), options.get("key_range")
    data = [layer, window] if traced else [layer]
    if key_range is not None:
        data = [layer, *ranges_of(batch, window, key_range)]
    cache = batch.cache(content=content, order=order)
    meta = batch.metadata
    tokens, heads, size = batch.query.shape
    arrays = {name: options.get(name) for name in ("alibi_slopes", "sinks", "qq_bias", "output_scale")}
    if batch.q_scale is not None:
        arrays["score_scale"] = np.array([batch.q_scale], np.float32)
    arrays = {name: np.asarray(value, np.float32) for name, value in arrays.items() if value is not None}
    query_dtype = batch.query.dtype.name
    shape = PagedAttentionShape(
        num_tokens=tokens,
        num_seqs=len(batch.seq_lens),
        num_heads=heads,
        table_width=meta.block_table.shape[1],
        cache=cache.spec,
        query_dtype=query_dtype,
        output_dtype=output_dtype or ("bfloat16" if query_dtype.startswith("float8") else query_dtype),
        max_query_len=meta.max_query_len,
        max_seq_len=meta.max_seq_len,
        causal=meta.causal,
        sliding_window=None if traced else window,
        traced_window=traced,
        ranged=key_range is not None,
        logits_soft_cap=options.get("logits_soft_cap"),
        has_alibi="alibi_slopes" in arrays,
        has_sinks="sinks" in arrays,
        qq_bias=arrays["qq_bias"].shape if "qq_bias" in arrays else None,
        has_score_scale="score_scale" in arrays,
        scale=options.get("scale") or size**-0.5,
        scales_per_head=batch.k_scale.ndim == 2,
        has_output_scale="output_scale" in arrays,
        return_lse=True,
    )
    program = plan_paged_attention(shape, arch, num_cus=num_cus, **(rows or {}))
    look(program)
    tensors = {
        "query": to_torch(batch.query),
        "cache": to_torch(cache.data),
        "k_scale": to_torch(batch.k_scale),
        "v_scale": to_torch(batch.v_scale),
        "query_start_loc": to_torch(meta.query_start_loc),
        "seq_lens": to_torch(meta.seq_lens),
        "block_table": to_torch(meta.block_table),
        "layer": torch.tensor(data, dtype=torch.int32),
        **{name: to_torch(value.reshape(-1) if name.endswith("_scale") else value) for name, value in arrays.items()},
    }
    result = run.run_program_torch(program, tensors)
    return from_torch(result["out"]), from_torch(result["lse"])


def check(
    batch, *, layer=0, content="packed", order="LBHNC", num_cus=None, output_dtype=None, rows=None, look=nothing, traced=False, **options
):
    planned = {"content": content, "order": order, "num_cus": num_cus, "output_dtype": output_dtype, "rows": rows, "look": look}
    planned["traced"] = traced
    out, lse = attend(batch, layer=layer, **planned, **options)
    expected, expected_lse = batch.reference(layer=layer, **options)
    assert_close(out, expected, dtype=out.dtype, what="out")
    assert_close(lse, expected_lse, dtype=np.float32, compute_dtype=out.dtype, what="lse")


def check_a_spoilt_key(poison, *, prepare=lambda batch: None, rows=None, look=nothing):
    """A value of `poison` at one key of a prompt reaches the queries from there on, and no other; `prepare` changes the batch first."""
    options = {"kind": "prefill", "dtype": BF16, "num_seqs": 2, "padding_seqs": 0, "share_prefixes": False, "max_query_len": 40}
    batch = random_batch(23, **options)
    prepare(batch)
    length = int(batch.seq_lens[0])
    first = length - length // 3
    table, size = np.asarray(batch.metadata.block_table), batch.value_cache.shape[2]
    batch.value_cache[:, table[0, first // size], first % size] = poison
    out, _ = attend(batch, rows=rows, look=look)
    expected, _ = random_batch(23, **options).reference()
    spoilt = np.zeros(len(out), bool)
    spoilt[first:length] = True
    assert 0 < spoilt.sum() < length
    assert not np.isfinite(out[spoilt].astype(np.float32)).any()
    assert_close(out[~spoilt], expected[~spoilt], dtype=BF16)


LAYOUTS = [(c, o) for c in ("packed", "xpacked", "xpacked_interleaved_v", "flash") for o in ("LBHNC", "LHBNC")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("content, order", LAYOUTS)
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_every_layout_reads_the_same_keys_and_values(content, order, kind):
    check(random_batch(1, kind=kind, dtype=BF16, num_layers=2), layer=1, content=content, order=order)


DTYPES = [
    (F32, F32),
    (F16, F16),
    (BF16, BF16),
    (BF16, E4M3),
    (BF16, E4M3Z),
    (F16, E5M2),
    (BF16, E5M2Z),
    (F32, E4M3),
    (E4M3, E4M3),
    (E5M2, BF16),
]


@pytest.mark.sampled(10)
@pytest.mark.parametrize("query, cache", DTYPES, ids=lambda d: np.dtype(d).name)
@pytest.mark.parametrize("kind", ["mixed", "decode"])
@pytest.mark.parametrize("content", ["packed", "xpacked"])
def test_every_dtype_of_query_and_cache(query, cache, kind, content):
    model = query if np.dtype(query).itemsize > 1 else BF16
    check(random_batch(2, kind=kind, dtype=model, query_dtype=query, cache_dtype=cache, scales="head"), content=content)


FEATURES = {
    "window": {"sliding_window": 9},
    "window-1": {"sliding_window": 1},
    "window-wide": {"sliding_window": 1000},
    "soft-cap": {"logits_soft_cap": 0.7},
    "alibi": {"alibi_slopes": [0.5, 0.25, -0.1, 1.0]},
    "sinks": {"sinks": [0.3, -1.0, 5.0, -np.inf]},
    "negative-scale": {"scale": -0.3},
    "alibi-sinks-window-cap": {
        "alibi_slopes": [0.5, 0.25, 0.1, 1.0],
        "sinks": [0.3, -1.0, 5.0, 20.0],
        "sliding_window": 20,
        "logits_soft_cap": 3.0,
    },
}


@pytest.mark.sampled(14)
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("kind", ["mixed", "decode", "chunked", "cross"])
def test_every_feature_in_prefill_decode_and_cross_attention(kind, options):
    batch = random_batch(3, kind=kind, dtype=F32, max_query_len=20, max_seq_len=90, sliding_window=options.get("sliding_window"))
    check(batch, content="xpacked" if kind == "chunked" else "packed", **options)


@pytest.mark.parametrize("rows, columns", [(12, 12), (4, 7)])
@pytest.mark.parametrize("window", [None, 8])
def test_tree_bias_reaches_this_steps_keys_only(rows, columns, window):
    bias = np.random.default_rng(0).standard_normal((rows, columns)).astype(np.float32)
    bias[np.triu_indices(rows, 1, columns)] = -np.inf
    batch = random_batch(4, kind="mixed", dtype=F32, sliding_window=window)
    check(batch, qq_bias=bias, sliding_window=window)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ["mixed", "decode"])
@pytest.mark.parametrize("output", [E4M3, E4M3Z, E5M2, E5M2Z], ids=lambda d: np.dtype(d).name)
def test_fp8_output_is_rounded_once_and_saturates(kind, output):
    batch = random_batch(5, kind=kind, dtype=F32)
    out, _ = attend(batch, output_scale=0.001, output_dtype=np.dtype(output).name)
    expected, _ = batch.reference(output_scale=0.001, output_dtype=output)
    differ = np.mean(out.view(np.uint8) != expected.view(np.uint8))
    assert differ < 0.002  # a float32 result may lie on the other side of a tie
    assert_close(out, expected.astype(np.float64), dtype=output)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("heads, kv_heads", [(10, 2), (12, 2), (7, 1), (3, 3), (71, 1)])
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_any_ratio_of_heads(heads, kv_heads, kind):
    check(random_batch(6, kind=kind, dtype=F32, num_heads=heads, num_kv_heads=kv_heads))


@pytest.mark.sampled(5)
@pytest.mark.parametrize("size", [32, 72, 80, 96, 192, 256, 512])
@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_any_head_size(size, kind):
    check(random_batch(7, kind=kind, dtype=BF16, head_size=size, num_seqs=3, max_seq_len=40), content="xpacked")


RELOADED = {"tiled": PrefillConfig(16, 16, 1, 1, reload_query=32), "split": DecodeConfig(16, 1, 1, 2, 16, reload_query=32)}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("content", ["packed", "xpacked", "xpacked_interleaved_v"])
@pytest.mark.parametrize("kind", ["mixed", "decode"])
@pytest.mark.parametrize("query, cache, size", [(F32, F32, 80), (BF16, E4M3, 128), (BF16, E4M3Z, 80), (E4M3, E4M3, 64)])
def test_wide_heads_may_meet_some_channels_at_a_time(query, cache, size, kind, content):
    model = query if np.dtype(query).itemsize > 1 else BF16
    made = {"dtype": model, "query_dtype": query, "cache_dtype": cache, "head_size": size, "num_seqs": 3, "scales": "head"}
    check(random_batch(11, kind=kind, sliding_window=30, **made), content=content, rows=RELOADED, sliding_window=30, scale=-0.1)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("block", [8, 16, 32, 48, 112])
@pytest.mark.parametrize("content", ["packed", "xpacked", "xpacked_interleaved_v", "flash"])
def test_any_block_size(block, content):
    check(random_batch(8, dtype=BF16, block_size=block, max_seq_len=150, num_seqs=3), content=content)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("num_cus", [1, 3, 64])
def test_any_number_of_shares_gives_the_same_result(num_cus):
    check(random_batch(9, kind="decode", dtype=F32, num_seqs=7, max_seq_len=200), num_cus=num_cus, sinks=[0.0, 1.0, 2.0, -3.0])


@triton.jit
def count_tiles(
    out, data, query_len, kv_len, COUNT: triton.language.constexpr, WINDOW: triton.language.constexpr, S: triton.language.constexpr
):
    triton.language.store(out, COUNT(data, 0, query_len, kv_len, query_len >= 0, WINDOW(data, S), S))


@pytest.mark.parametrize("given", ["static", "traced", "ranged"])
@pytest.mark.parametrize("context_only", [False, True], ids=["whole", "context-only"])
@pytest.mark.parametrize("window", [0, 1, 18, 500])
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "not-causal"])
def test_decode_counts_the_tiles_that_hold_a_visible_key_and_no_other(causal, window, context_only, given):
    facts = {"causal": causal, "context_only": context_only, "window": window, "traced_window": False, "ranged": given == "ranged"}
    if given == "traced":
        facts |= {"window": 0, "traced_window": True}
    spec = SimpleNamespace(**facts, has_window=facts["window"] > 0 or given == "traced", split_tokens=4, block_n=16)
    key = np.arange(200)
    for query_len, kv_len in [(1, 1), (1, 16), (1, 17), (1, 33), (3, 3), (2, 34), (4, 100), (3, 18), (1, 0), (0, 40), (5, 80)]:
        seen = np.zeros(len(key), bool)
        for position in range(kv_len - query_len, kv_len):
            row = key < (kv_len - query_len if context_only else kv_len)
            row &= (key <= position) | (not causal)
            row &= (window == 0) | ((position - key < window) & ((key - position < window) | causal))
            seen |= row & (position >= 0)
        out = torch.zeros(1, dtype=torch.int32)
        hull = np.flatnonzero(seen)[[0, -1]] + [0, 1] if seen.any() else [0, 0]
        data = torch.tensor([window or 2**30] if given == "traced" else list(hull), dtype=torch.int32)
        count_tiles[(1,)](out, data, query_len, kv_len, decode.tiles_of, decode.window_of, spec)
        assert out.item() == (len(np.unique(key[seen] // 16)) if query_len <= 4 else 0), (query_len, kv_len)


def test_nan_of_a_key_that_only_later_queries_see_stays_with_them():
    batch = random_batch(10, kind="prefill", dtype=BF16, num_seqs=2, padding_seqs=0, share_prefixes=False)
    table, length = np.asarray(batch.metadata.block_table), int(batch.seq_lens[0])
    batch.value_cache[:, table[0, (length - 1) // 16], (length - 1) % 16] = np.nan
    batch.key_cache[:, table[0, (length - 1) // 16], (length - 1) % 16] = np.inf
    out, _ = attend(batch)
    expected, _ = batch.reference()
    last = length - 1
    assert np.isnan(out[last].astype(np.float32)).all()
    keep = np.arange(len(out)) != last
    assert_close(out[keep], expected[keep], dtype=BF16)
