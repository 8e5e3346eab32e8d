"""Runs every Triton kernel's AMD assembly on the CPU for one architecture: `python amd_emulation.py gfx942 FOLDER_OF_AMDEMU even`.

It runs in a process of its own, because Triton compiles nothing in one with TRITON_INTERPRET. It prints one line of JSON for each case: the
name, and what was wrong or null.
"""

import json
import sys
import traceback

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import purepage as pp
from purepage.bridges.launcher import pointer_dtype
from purepage.bridges.triton_calls import OPERATIONS
from purepage.functional.attention import paged_attention_call
from purepage.functional.calls import EncoderAttentionCall, MergeCall, QkNormRopeUpdateCall, RopeUpdateCall, RotaryCall, UpdateCacheCall
from purepage.kernels.archs import arch_facts
from purepage.kernels.triton.run import kernel_of
from purepage.testing import (
    assert_close,
    random_batch,
    reference_encoder_attention,
    reference_merge,
    reference_qk_norm_rope,
    reference_rope,
    reference_update_cache,
)

BF16, F32 = ml_dtypes.bfloat16, np.float32
CASES = {}
LAYER = jnp.int32(1)


def case(check):
    CASES[check.__name__.replace("_", " ")] = check
    return check


def native_fp8(arch):
    return ml_dtypes.float8_e4m3fnuz if "float8_e4m3fnuz" in arch_facts(arch).hardware_fp8 else ml_dtypes.float8_e4m3fn


def foreign_fp8(arch):
    return ml_dtypes.float8_e4m3fn if "float8_e4m3fnuz" in arch_facts(arch).hardware_fp8 else ml_dtypes.float8_e4m3fnuz


def emulate(operation, call, arch, *, num_cus=2, **rows):
    """Plans the call for `arch` and executes its launches; returns the outputs and updated inputs by name. `rows` are the plan's own."""
    described = OPERATIONS[operation]
    program = described.plan(described.shape(call), arch, num_cus=num_cus, **rows)
    arrays = described.arrays(call)
    buffers = dict((*program.inputs, *program.outputs, *program.scratch))
    memory = {name: np.array(arrays[name]) for name, _ in program.inputs}
    for name, buffer in (*program.outputs, *program.scratch):
        blank = np.full(int(np.prod(buffer.shape)) * np.dtype(buffer.dtype).itemsize, 0xFF, np.uint8)  # NaN in every float dtype
        memory[name] = blank.view(buffer.dtype).reshape(buffer.shape)
    before = {name: array.copy() for name, array in memory.items()}
    execute(program, memory, arch)
    written = {name for launch in program.launches for name in launch.writes}
    for name in set(buffers) - written:
        np.testing.assert_array_equal(memory[name].view(np.uint8), before[name].view(np.uint8), err_msg=f"{name} was written")
    return {name: memory[name] for name in (*(name for name, _ in program.outputs), *program.updates)}


def compile_and_emulate(program, memory, arch):
    """Compiles each launch without a launcher and executes its assembly on the named arrays, in place."""
    import amdemu

    for launch in program.launches:
        args = [memory[arg] if isinstance(arg, str) else arg for arg in launch.args]
        args = [a.view(pointer_dtype(a.dtype.name)) if isinstance(a, np.ndarray) else a for a in args]
        options = {"enable_fp_fusion": True, **dict(launch.options)}
        compiled = amdemu.compile(
            kernel_of(launch),
            arch,
            args,
            dict(launch.constants),
            pointer_range=True,
            num_warps=launch.num_warps,
            num_stages=launch.num_stages,
            **options,
        )
        amdemu.launch(compiled, launch.grid, args)


execute = compile_and_emulate
"""How the launches of a program are executed on named arrays. The test of Triton's launcher puts its own way here."""


def execute_assembly(text, grid, values, *, num_warps, lds_bytes):
    """Executes a kernel's assembly on the CPU; `values` has an array for each pointer and the bits of any other argument, in order."""
    from amdemu import gcnemu

    kernel = gcnemu.Kernel(text, shared=lds_bytes, num_warps=num_warps)
    assert not kernel.cg.unsupported, f"instructions not emulated: {kernel.cg.unsupported}"
    kernel.launch(grid, values)


def attend(arch, batch, *, content="packed", layer=0, oracle=None, **options):
    call = paged_attention_call(
        batch.query, batch.cache(content=content), batch.metadata, layer=layer, q_scale=batch.q_scale, return_lse=True, **options
    )
    out = emulate("paged_attention", call, arch)
    wanted, wanted_lse = batch.reference(layer=layer, **options)
    assert_close(out["out"], wanted, dtype=out["out"].dtype, what="out")
    assert_close(out["lse"], wanted_lse, dtype=F32, compute_dtype=out["out"].dtype, what="lse")


SMALL = {"num_seqs": 3, "max_query_len": 10, "max_seq_len": 40, "num_layers": 2, "padding_tokens": 1}


@case
def tiled_and_split_and_reduce_in_bf16_with_every_feature(arch):
    batch = random_batch(1, head_size=64, dtype=BF16, **SMALL)
    features = {"sliding_window": 21, "logits_soft_cap": 3.0, "alibi_slopes": [0.5, 0.25, 0.1, 1.0], "sinks": [0.3, -1.0, 5.0, 2.0]}
    attend(arch, batch, layer=1, **features)


@case
def decode_of_an_xpacked_fp8_cache(arch):
    batch = random_batch(
        2, kind="decode", head_size=64, dtype=BF16, cache_dtype=native_fp8(arch), scales="head", **{**SMALL, "max_seq_len": 90}
    )
    attend(arch, batch, content="xpacked")


@case
def wide_heads_that_some_archs_reload_with_every_tile(arch):
    batch = random_batch(3, head_size=256, num_heads=2, num_kv_heads=1, dtype=BF16, **{**SMALL, "num_seqs": 2})
    attend(arch, batch, layer=1, sinks=[0.3, -1.0])


@case
def wide_heads_in_float32_some_channels_at_a_time(arch):
    batch = random_batch(4, kind="decode", head_size=256, num_heads=2, num_kv_heads=1, **{**SMALL, "num_seqs": 2})
    attend(arch, batch, layer=1, sliding_window=21)


@case
def a_value_of_nan_that_only_later_queries_see(arch):
    options = {
        "kind": "prefill",
        "head_size": 64,
        "dtype": BF16,
        "num_seqs": 1,
        "max_query_len": 24,
        "num_layers": 1,
        "share_prefixes": False,
    }
    batch, clean = random_batch(23, **options), random_batch(23, **options)
    length = int(batch.seq_lens[0])
    first = length - length // 3
    table, size = np.asarray(batch.metadata.block_table), batch.value_cache.shape[2]
    batch.value_cache[:, table[0, first // size], first % size] = np.nan
    call = paged_attention_call(batch.query, batch.cache(), batch.metadata, layer=0, q_scale=batch.q_scale, return_lse=True)
    out = emulate("paged_attention", call, arch)["out"]
    spoilt = np.zeros(len(out), bool)
    spoilt[first:length] = True
    assert 0 < spoilt.sum() < length, (first, length)
    assert np.isnan(out[spoilt].astype(F32)).all()
    assert_close(out[~spoilt], clean.reference(layer=0)[0][~spoilt], dtype=BF16)


@case
def encoder(arch):
    lengths, rng = (9, 0, 20), np.random.default_rng(0)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    query, key, value = (rng.standard_normal((int(starts[-1]) + 2, heads, 32)).astype(BF16) for heads in (4, 2, 2))
    for array in (query, key, value):
        array[-2:] = np.nan
    metadata = pp.AttentionMetadata(
        jnp.asarray(starts),
        jnp.asarray(lengths, jnp.int32),
        jnp.zeros((3, 0), jnp.int32),
        jnp.full((len(query),), -1, jnp.int32),
        max_query_len=20,
        causal=False,
    )
    call = EncoderAttentionCall(
        query=query,
        key=key,
        value=value,
        metadata=metadata,
        score_scale=None,
        sinks=None,
        scale=0.2,
        sliding_window=6,
        logits_soft_cap=None,
        causal=False,
    )
    wanted, _ = reference_encoder_attention(query, key, value, starts, scale=0.2, sliding_window=6)
    assert_close(emulate("encoder_attention", call, arch)["out"], wanted, dtype=BF16)


def random_cache(dtype, content, head_size=32, heads=2):
    """A cache of random bits, so that a slot that is touched by mistake shows."""
    spec = pp.CacheSpec(num_blocks=3, block_size=16, num_kv_heads=heads, head_size=head_size, num_layers=2, dtype=dtype, content=content)
    rng = np.random.default_rng(0)
    scales = {n: rng.uniform(0.01, 0.1, (2, heads)).astype(F32) for n in ("k_scale", "v_scale")} if spec.is_quantized else {}
    bits = rng.integers(0, 256, spec.nbytes, np.uint8).view(np.dtype(spec.storage_dtype)).reshape(spec.shape)
    blank = pp.init_cache(spec, **scales)
    return pp.KVCache(jnp.asarray(bits), blank.k_scale, blank.v_scale, spec)


SLOTS = np.array([-1, 17, 18, 3, 47, 31, 48], np.int32)


def check_pool(data, cache, key, value):
    """The pool holds the oracle's bits in layer 1, and its old bits in layer 0."""
    sides = pp.cache_to_logical(cache, 1)
    scales = {name: np.asarray(getattr(cache, name))[1] for name in ("k_scale", "v_scale")}
    wanted = reference_update_cache(*map(np.asarray, sides), key, value, SLOTS, **scales)
    after = pp.KVCache(jnp.asarray(data), cache.k_scale, cache.v_scale, cache.spec)
    for layer, sides in ((0, pp.cache_to_logical(cache, 0)), (1, wanted)):
        for actual, expected in zip(pp.cache_to_logical(after, layer), sides, strict=True):
            np.testing.assert_array_equal(np.asarray(actual).view(np.uint8), np.asarray(expected).view(np.uint8))


def rows(heads, size, seed, dtype=BF16):
    return np.random.default_rng(seed).standard_normal((len(SLOTS), heads, size)).astype(dtype)


@case
def write_into_an_xpacked_fp8_cache(arch):
    cache = random_cache(native_fp8(arch), "xpacked")
    key, value = rows(2, 32, 1), rows(2, 32, 2)
    key[1, 0, :6] = [np.inf, -np.inf, -0.0, 6e4, np.nan, -np.nan]
    # From below the smallest code to past the largest one.
    value *= 2.0 ** np.random.default_rng(3).integers(-14, 14, value.shape).astype(BF16)
    call = UpdateCacheCall(cache=cache, key=key, value=value, slot_mapping=jnp.asarray(SLOTS), layer=LAYER)
    check_pool(emulate("update_cache", call, arch)["cache"], cache, key, value)


TABLE = np.random.default_rng(7).uniform(-1, 1, (40, 16)).astype(F32)
POSITIONS = np.array([3, 39, 0, 12, 30, 7, 8], np.int32)


@case
def rotary(arch):
    query, key = rows(4, 32, 1), rows(2, 32, 2)
    call = RotaryCall(positions=jnp.asarray(POSITIONS), query=query, key=key, cos_sin_cache=TABLE, is_neox=False)
    out = emulate("rotary_embedding", call, arch)
    for name, x in (("query_out", query), ("key_out", key)):
        assert_close(out[name], reference_rope(POSITIONS, x, TABLE, is_neox=False), dtype=BF16, what=name)


@case
def rope_and_write_into_a_packed_cache(arch):
    cache, query, key, value = random_cache(BF16, "packed"), rows(4, 32, 1), rows(2, 32, 2), rows(2, 32, 3)
    call = RopeUpdateCall(
        query=query,
        key=key,
        value=value,
        positions=jnp.asarray(POSITIONS),
        cos_sin_cache=TABLE,
        cache=cache,
        slot_mapping=jnp.asarray(SLOTS),
        layer=LAYER,
        is_neox=True,
    )
    out = emulate("rope_and_update_cache", call, arch)
    for name, x in (("query_out", query), ("key_out", key)):
        assert_close(out[name], reference_rope(POSITIONS, x, TABLE), dtype=BF16, what=name)
    check_pool(out["cache"], cache, out["key_out"], value)


def norm_rope_and_write(arch, operation, positions, dtype, content, **mrope):
    cache = random_cache(dtype, content)
    qkv = np.random.default_rng(5).standard_normal((len(SLOTS), 8 * 32)).astype(BF16)
    weights = [np.random.default_rng(seed).uniform(0.5, 1.5, 32).astype(F32) for seed in (8, 9)]
    options = {"num_heads": 4, "eps": 1e-3, "is_neox": True}
    mrope = {"mrope_section": None, "is_interleaved": False, **mrope}
    call = QkNormRopeUpdateCall(
        qkv=qkv,
        q_weight=jnp.asarray(weights[0]),
        k_weight=jnp.asarray(weights[1]),
        positions=jnp.asarray(positions),
        cos_sin_cache=TABLE,
        cache=cache,
        slot_mapping=jnp.asarray(SLOTS),
        layer=LAYER,
        **options,
        **mrope,
    )
    out = emulate(operation, call, arch)
    query, key, value = reference_qk_norm_rope(qkv, *weights, positions, TABLE, **options, **mrope)
    assert_close(out["query_out"], query, dtype=BF16, what="query")
    assert_close(out["key_out"], key, dtype=BF16, what="key")
    check_pool(out["cache"], cache, out["key_out"], value)


@case
def norm_rope_and_write_into_an_fp8_cache_that_is_decoded_in_software(arch):
    norm_rope_and_write(arch, "qk_norm_rope_and_update_cache", POSITIONS, foreign_fp8(arch), "xpacked_interleaved_v")


@case
def norm_mrope_and_write_into_a_flash_cache(arch):
    positions = np.stack([POSITIONS, POSITIONS[::-1], (POSITIONS + 5) % 40])
    norm_rope_and_write(arch, "qk_norm_mrope_and_update_cache", positions, BF16, "flash", mrope_section=(2, 3, 3), is_interleaved=True)


@case
def merge(arch):
    rng = np.random.default_rng(0)
    out_a, out_b = rows(3, 48, 1), rows(3, 48, 2)
    lse_a, lse_b = (rng.standard_normal((len(SLOTS), 3)).astype(F32) for _ in range(2))
    lse_a[0, 0], lse_b[1, 1], lse_a[2, 2], lse_b[2, 2] = -np.inf, -np.inf, -np.inf, -np.inf
    wanted, wanted_lse = reference_merge(out_a, lse_a, out_b, lse_b)
    out_a[0, 0] = out_b[1, 1] = np.nan
    out = emulate("merge_attention_states", MergeCall(out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b), arch)
    assert_close(out["out"], wanted, dtype=BF16)
    assert_close(out["lse"], wanted_lse, dtype="lse")


def teach(emulator):
    """Two instructions of RDNA that its table has for floats alone: max(min(a, b), c) and min(max(a, b), c) of integers."""
    for suffix, kind in (("i32", "i"), ("u32", "u")):
        emulator.CG.T.setdefault(f"minmax_{suffix}", (kind, kind * 3, "np.maximum(np.minimum({0},{1}),{2})"))
        emulator.CG.T.setdefault(f"maxmin_{suffix}", (kind, kind * 3, "np.minimum(np.maximum({0},{1}),{2})"))


def use_emulator(folder):
    """Makes the emulator importable from the folder that has it."""
    sys.path.insert(0, folder)
    from amdemu import gcnemu

    teach(gcnemu)


def main(arch, folder, half):
    """Runs the cases at even or odd places: `half` is "even" or "odd"."""
    use_emulator(folder)
    for name, check in list(CASES.items())[("even", "odd").index(half) :: 2]:
        try:
            check(arch)
        except Exception:
            print(json.dumps([name, traceback.format_exc(limit=-6)[-3000:]]), flush=True)
        else:
            print(json.dumps([name, None]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
