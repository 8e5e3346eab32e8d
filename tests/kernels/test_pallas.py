"""The Pallas kernels in Pallas' interpreter against the oracle, and their lowering for GPUs on a machine that has none."""

import itertools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from pairwise import case_id, pairwise
from pool import bits, expected_pool, random_cache
from processes import run, run_python

import purepage as pp
from purepage.functional.attention import paged_attention_call
from purepage.functional.calls import RopeUpdateCall, UpdateCacheCall
from purepage.functional.dispatch import Unsupported, plan_with
from purepage.functional.target import Target
from purepage.testing import assert_close, random_batch, reference_rope

F32, F16, BF16 = np.dtype("float32"), np.dtype("float16"), np.dtype(ml_dtypes.bfloat16)
FP8 = tuple(np.dtype(getattr(ml_dtypes, f"float8_{kind}")) for kind in ("e4m3fn", "e4m3fnuz", "e5m2", "e5m2fnuz"))
LAYOUTS = tuple(itertools.product(("packed", "flash"), ("LBHNC", "LHBNC")))
JAX = tuple(map(int, re.findall(r"\d+", jax.__version__)[:2]))
GPUS = [Target("cuda", "sm_90", 132, 32), Target("rocm", "gfx942", 304, 64)]

ATTENTION = {
    "kind": ("mixed", "decode", "chunked", "cross", "prefill"),
    "layout": LAYOUTS,
    "dtypes": ((F32, None), (BF16, None), (F16, None), (BF16, F32), *((BF16, fp8) for fp8 in FP8)),
    "heads": ((4, 2), (6, 1), (10, 2), (71, 1), (3, 3)),
    "head_size": (64, 80, 32),
    "block_size": (16, 24, 64),
    "window": (None, 1, 17),
    "options": ({}, {"logits_soft_cap": 3.0}, {"sinks": True}, {"alibi": True}, {"sinks": True, "alibi": True, "logits_soft_cap": 1e5}),
    "masks": ({}, {"key_range": True}, {"poison_newest": True}),
    "scales": ("one", "layer", "head"),
}


def vectors(options, heads):
    options = dict(options)
    if options.pop("sinks", False):
        options["sinks"] = np.linspace(-2, 2, heads).astype(np.float32)
    if options.pop("alibi", False):
        options["alibi_slopes"] = np.linspace(0.5, -0.1, heads).astype(np.float32)
    return options


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", pairwise(ATTENTION), ids=case_id)
def test_attention_is_the_oracles(case):
    (dtype, cache_dtype), (heads, kv_heads) = case["dtypes"], case["heads"]
    block = case["block_size"]
    batch = random_batch(
        heads + case["head_size"],
        kind=case["kind"],
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=case["head_size"],
        block_size=block,
        num_layers=2,
        max_seq_len=150,
        max_query_len=None if case["kind"] == "decode" else 20,
        sliding_window=case["window"],
        scales=case["scales"],
        **case["masks"],
    )
    content, order = case["layout"]
    options = {**batch.masks, **vectors(case["options"], heads)}
    out, lse = jax.jit(lambda *arrays: pp.paged_attention(*arrays, layer=1, return_lse=True, implementation="pallas", **options))(
        batch.query, batch.cache(content=content, order=order), batch.metadata
    )
    expected, expected_lse = batch.reference(layer=1, **options)
    poisoned = {"equal_nan": case["masks"].get("poison_newest", False)}
    assert_close(lse, expected_lse, dtype="lse", compute_dtype=dtype, **poisoned)
    assert_close(out, np.asarray(expected, np.float64), dtype=dtype, lse=expected_lse, **poisoned)


def test_a_window_and_a_scale_may_be_data_and_the_output_fp8():
    batch = random_batch(5, num_heads=8, num_kv_heads=2, sliding_window=7)

    @jax.jit
    def attend(window, scale, query, cache, metadata):
        given = {"sliding_window": window, "scale": scale, "output_scale": 0.02, "output_dtype": FP8[0]}
        return pp.paged_attention(query, cache, metadata, implementation="pallas", **given)

    out = attend(7, 0.3, batch.query, batch.cache(), batch.metadata)
    expected, _ = batch.reference(sliding_window=7, scale=0.3, output_scale=0.02, output_dtype=FP8[0])
    assert out.dtype == FP8[0]
    assert_close(out, np.asarray(expected, np.float64), dtype=FP8[0], compute_dtype=F32)


def test_the_keys_of_a_long_decode_are_split_and_merged():
    """One sequence, so that the splits outnumber it; others see a single key, or none."""
    batch = random_batch(1, kind="decode", seq_lens=[1000, 1, 130], max_seq_len=1000, num_heads=4, num_kv_heads=1)
    sinks = np.array([-1e4, 0.0, 5.0, 20.0], np.float32)

    def attend(query, cache, metadata):
        return pp.paged_attention(query, cache, metadata, return_lse=True, sinks=sinks, implementation="pallas")

    text = str(jax.make_jaxpr(attend)(batch.query, batch.cache(), batch.metadata))
    assert "paged_attention_reduce" in text
    out, lse = attend(batch.query, batch.cache(), batch.metadata)
    expected, expected_lse = batch.reference(sinks=sinks)
    assert_close(out, expected, dtype=F32)
    assert_close(lse, expected_lse, dtype="lse")


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_reaches_the_rows_that_see_it_and_no_other(value):
    batch = random_batch(2, kind="prefill", query_lens=[40, 9], seq_lens=[40, 9])
    values = np.array(batch.value_cache)
    block = np.asarray(batch.metadata.block_table)[0, 1]
    values[0, block, 4, 1, 3] = value  # position 20 of the first sequence
    batch = replace(batch, value_cache=values)
    out = np.asarray(pp.paged_attention(batch.query, batch.cache(), batch.metadata, implementation="pallas"))
    assert_close(out, batch.reference()[0], dtype=F32, equal_nan=True)
    assert np.isfinite(out[:20]).all() and not np.isfinite(out[20:40, 2:, 3]).any() and np.isfinite(out[40:49]).all()


@pytest.mark.parametrize("block", [-1, 10**6, -(2**31)])
def test_a_needed_block_outside_the_pool_makes_its_sequence_nan_and_no_other(block):
    batch = random_batch(3, seq_lens=[40, 40], query_lens=[3, 1])
    table = np.array(batch.metadata.block_table)
    table[0, 1] = block
    metadata = replace(batch.metadata, block_table=table)
    out, lse = pp.paged_attention(batch.query, batch.cache(), metadata, return_lse=True, implementation="pallas")
    assert np.isnan(out[:3]).all() and np.isnan(lse[:3]).all()
    assert_close(out[3:], batch.reference()[0][3:], dtype=F32)


@pytest.mark.parametrize("shape", ["no tokens", "no sequences", "no width"])
def test_nothing_to_attend_to_is_an_answer(shape):
    batch = random_batch(4)
    tokens = 0 if shape == "no tokens" else 8
    seqs, width = (0 if shape == "no sequences" else 3), (0 if shape == "no width" else 4)
    metadata = pp.make_metadata(
        [2] * seqs if tokens else [0] * seqs, [2] * seqs, np.zeros((seqs, width), np.int32), block_size=16, num_tokens=tokens or None
    )
    query = batch.query[: metadata.slot_mapping.shape[0]]
    given = {"return_lse": True, "sinks": np.ones(4, np.float32)}
    results = [pp.paged_attention(query, batch.cache(), metadata, implementation=name, **given) for name in ("pallas", "xla")]
    for found, expected in zip(*results, strict=True):
        np.testing.assert_array_equal(found, expected)


WRITE = {
    "layout": LAYOUTS,
    "dtypes": ((F32, F32), (BF16, BF16), (F16, F16), (BF16, F32), *((BF16, fp8) for fp8 in FP8)),
    "kv_heads": (1, 3),
    "head_size": (32, 80),
    "block_size": (16, 24),
    "rotary": (None, ("whole", True), ("whole", False), ("half", True), ("half", False)),
    "scales": ("one", "layer", "head"),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", pairwise(WRITE), ids=case_id)
def test_a_write_changes_its_slots_to_the_right_bits_and_nothing_else(case):
    (dtype, cache_dtype), size, kv_heads = case["dtypes"], case["head_size"], case["kv_heads"]
    content, order = case["layout"]
    batch = random_batch(
        size,
        dtype=dtype,
        cache_dtype=cache_dtype,
        num_heads=2 * kv_heads,
        num_kv_heads=kv_heads,
        head_size=size,
        block_size=case["block_size"],
        num_layers=2,
        scales=case["scales"],
    )
    cache = random_cache(batch.spec(content=content, order=order), 1, k_scale=batch.k_scale, v_scale=batch.v_scale)
    slots = np.array(batch.metadata.slot_mapping)
    slots[slots < 0] = np.resize([-1, -(2**31), cache.spec.num_slots, 2**31 - 1], np.sum(slots < 0))
    rng = np.random.default_rng(2)
    query, key, value = (rng.standard_normal((len(slots), heads, size)).astype(dtype) for heads in (2 * kv_heads, kv_heads, kv_heads))
    given = {"layer": 1, "implementation": "pallas"}
    if case["rotary"] is None:
        after = jax.jit(lambda *arrays: pp.update_cache(*arrays, **given))(cache, key, value, slots)
    else:
        part, is_neox = case["rotary"]
        table = rng.uniform(-1, 1, (64, size if part == "whole" else size // 2)).astype(np.float32)
        write = jax.jit(lambda *arrays: pp.rope_and_update_cache(*arrays, is_neox=is_neox, **given))
        rotated, turned, after = write(query, key, value, batch.positions, table, cache, slots)
        for found, x in ((rotated, query), (turned, key)):
            expected = reference_rope(batch.positions, x.astype(np.float64), table, is_neox=is_neox)
            assert_close(found, expected, dtype=dtype, compute_dtype=F32)
        key = np.asarray(turned)
    np.testing.assert_array_equal(bits(after.data), expected_pool(cache, key, value, slots, 1))


def test_a_donated_write_is_in_place():
    spec = pp.CacheSpec(num_blocks=512, block_size=16, num_kv_heads=2, head_size=64, dtype=jnp.bfloat16)
    cache = jax.eval_shape(lambda: pp.init_cache(spec))
    rows = jax.ShapeDtypeStruct((8, 2, 64), jnp.bfloat16)
    slots = jax.ShapeDtypeStruct((8,), jnp.int32)
    write = jax.jit(lambda c, k, v, s: pp.update_cache(c, k, v, s, implementation="pallas"), donate_argnums=0)
    assert write.lower(cache, rows, rows, slots).compile().memory_analysis().alias_size_in_bytes >= spec.nbytes


def call_of(operation, content="packed", cache_dtype=BF16):
    spec = pp.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_size=80, dtype=cache_dtype, content=content)
    cache = pp.init_cache(spec)
    query, key = (jnp.ones((20, heads, 80), jnp.bfloat16) for heads in (8, 2))
    slots = jnp.arange(20, dtype=jnp.int32)
    written = {"cache": cache, "key": key, "value": key, "slot_mapping": slots, "layer": jnp.int32(0)}
    if operation == "update_cache":
        return UpdateCacheCall(**written)
    if operation == "rope_and_update_cache":
        return RopeUpdateCall(query=query, positions=slots, cos_sin_cache=jnp.ones((64, 40)), is_neox=True, **written)
    lengths = [20] if operation == "prefill" else [1] * 20
    metadata = pp.make_metadata(lengths, [100] * len(lengths), np.zeros((len(lengths), 7), np.int32), block_size=16)
    options = {"sliding_window": 9, "logits_soft_cap": 3.0, "sinks": jnp.ones(8), "alibi_slopes": jnp.ones(8), "return_lse": True}
    return paged_attention_call(query, cache, metadata, layer=0, **options)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("cache_dtype", [BF16, *FP8], ids=str)
@pytest.mark.parametrize("target", GPUS, ids=lambda target: target.platform)
@pytest.mark.parametrize("operation", ["prefill", "decode", "update_cache", "rope_and_update_cache"])
def test_every_kernel_lowers_for_a_gpu_or_says_which_dtype_stops_it(operation, target, cache_dtype):
    """Lowered, not compiled and not run: jax 0.10 does so for a GPU that is not there."""
    if JAX >= (0, 11):
        pytest.skip("since jax 0.11 Pallas' Triton backend asks the device itself")
    call = call_of(operation, cache_dtype=cache_dtype)
    name = operation if operation.endswith("cache") else "paged_attention"
    planned = plan_with("pallas", name, call, target, explicit=True)
    if isinstance(planned, Unsupported):
        assert str(cache_dtype) in planned.reasons[0] and "fnuz" in str(cache_dtype)
        return
    text = jax.jit(planned.run).trace(call).lower(lowering_platforms=(target.platform,)).as_text()
    names = {"prefill": ["paged_attention"], "decode": ["paged_attention", "paged_attention_reduce"]}.get(operation, [operation])
    assert all(f'"{kernel}"' in text or f"{kernel}" in text for kernel in names) and "__gpu$xla.gpu.triton" in text


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "gfx950", "gfx90a"])
def test_every_kernel_compiles_for_amd_within_the_registers(arch):
    """Compiled by Triton's AMD backend from what jax lowers for ROCm; not run."""
    pytest.importorskip("triton")
    if JAX >= (0, 11):
        pytest.skip("since jax 0.11 Pallas' Triton backend asks the device itself")
    command = [sys.executable, str(Path(__file__).with_name("pallas_amd.py")), arch]
    done = run(command, environment={"TRITON_INTERPRET": None, "JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row[1] for row in rows] == ["paged_attention"] * 2 + ["paged_attention_reduce", "update_cache", "rope_and_update_cache"]
    for operation, name, vgprs, spilled, lds in rows:
        assert vgprs <= 512 and spilled == 0 and lds <= 65536, (operation, name, vgprs, spilled, lds)


def test_it_is_taken_by_name_alone_and_refuses_by_name_what_it_does_not_serve():
    batch = random_batch(1)
    assert "asked for by name" in str(plan_with("pallas", "update_cache", call_of("update_cache"), GPUS[0], explicit=False).reasons)
    for options, why in (
        ({"qq_bias": np.zeros((4, 4), np.float32)}, "does not serve qq_bias"),
        ({"cache": batch.cache(content="xpacked")}, "xpacked"),
    ):
        cache = options.pop("cache", batch.cache())
        with pytest.raises(pp.UnsupportedError, match=f"pallas can't serve this paged_attention: .*{why}.*xla can"):
            pp.paged_attention(batch.query, cache, batch.metadata, implementation="pallas", **options)
    with pytest.raises(pp.UnsupportedError, match="pallas can't serve this merge_attention_states: has no kernel for"):
        pp.merge_attention_states(batch.query, batch.query[..., 0], batch.query, batch.query[..., 0], implementation="pallas")


def test_neither_torch_nor_triton_is_imported():
    run_python(
        """
        import sys
        sys.modules.update(torch=None, triton=None, aiter=None)
        import purepage as pp
        from purepage.testing import assert_close, random_batch
        batch = random_batch(0)
        out = pp.paged_attention(batch.query, batch.cache(), batch.metadata, implementation="pallas")
        assert_close(out, batch.reference()[0], dtype="float32")
        """.replace("\n        ", "\n")
    )


def test_explain_lists_the_kernels_and_their_grids():
    batch = random_batch(1, kind="decode", max_seq_len=600)
    text = str(pp.explain(pp.paged_attention, batch.query, batch.cache(), batch.metadata, implementation="pallas"))
    assert "paged_attention: pallas" in text and "1. paged_attention: grid 6x2x8" in text and "2. paged_attention_reduce: grid 8x4" in text
    text = str(pp.explain(pp.update_cache, batch.cache(), batch.key, batch.value, batch.metadata.slot_mapping, implementation="pallas"))
    assert "1. update_cache: grid 1x2" in text


def test_the_self_check_runs_the_interpreter_only_where_it_is_asked_for():
    from purepage.bridges.selfcheck import cases, check, default_implementations
    from purepage.functional.target import current_target

    target, lines = current_target(), []
    assert "pallas" not in default_implementations(target) and "pallas" in default_implementations(GPUS[0])
    assert check(implementations=["pallas"], only="attention, decode, 600", write=lines.append) == 0
    assert "1 passed, 0 failed, 0 refused" in lines[-1] and len(cases(target)) > 30
