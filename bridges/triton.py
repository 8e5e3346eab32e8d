"""The `triton` implementation: plans a call's launches from its shapes and the device's architecture, and runs them through a bridge."""

import importlib.util
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from ..functional.cache import KVCache
from ..functional.calls import PagedAttentionCall, UpdateCacheCall
from ..functional.errors import UnsupportedError
from ..kernels.launch import Program
from ..kernels.triton.attention_plan import PagedAttentionShape, plan_paged_attention
from ..kernels.triton.writers_plan import CacheShape, UpdateShape, plan_update_cache
from .arch import Arch, default_arch
from .run import run

INTERPRETER_VARIABLE = "TRITON_INTERPRET"
INTERPRETER_HINT = f"set {INTERPRETER_VARIABLE}=1 in the environment before the first call"


@dataclass(frozen=True)
class Operation:
    """How one operation is planned: what of a call is static, the plan of that, and the arrays that the program's inputs may name."""

    shape: Callable[[Any], Any]
    plan: Callable[..., Program]
    arrays: Callable[[Any], Mapping[str, Array | None]]


def _cache_shape(cache: KVCache) -> CacheShape:
    return CacheShape(
        spec=cache.local_spec,
        dtype=jnp.dtype(cache.data.dtype).name,
        k_scale_per_head=cache.k_scale.ndim == 2,
        v_scale_per_head=cache.v_scale.ndim == 2,
    )


def _cache_arrays(cache: KVCache, layer: Array) -> dict[str, Array]:
    return {"cache": cache.data, "k_scale": cache.k_scale, "v_scale": cache.v_scale, "layer": _vector(layer)}


def _vector(scalar: Array | None) -> Array | None:
    """A scalar as an array of one element: a kernel reads it from memory."""
    return None if scalar is None else jnp.reshape(scalar, (1,))


def _paged_attention_shape(call: PagedAttentionCall) -> PagedAttentionShape:
    metadata, cache = call.metadata, call.cache
    return PagedAttentionShape(
        num_tokens=call.query.shape[0],
        num_seqs=metadata.seq_lens.shape[0],
        num_heads=call.query.shape[1],
        table_width=metadata.block_table.shape[1],
        cache=cache.local_spec,
        cache_dtype=jnp.dtype(cache.data.dtype).name,
        query_dtype=jnp.dtype(call.query.dtype).name,
        output_dtype=jnp.dtype(call.output_dtype).name,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len,
        causal=metadata.causal,
        sliding_window=call.sliding_window,
        logits_soft_cap=call.logits_soft_cap,
        has_alibi=call.alibi_slopes is not None,
        has_sinks=call.sinks is not None,
        qq_bias=None if call.qq_bias is None else tuple(call.qq_bias.shape),
        has_score_scale=call.score_scale is not None,
        scale=call.scale,
        scales_per_head=cache.k_scale.ndim == 2 or cache.v_scale.ndim == 2,
        has_output_scale=call.output_scale is not None,
        return_lse=call.return_lse,
    )


def _paged_attention_arrays(call: PagedAttentionCall) -> dict[str, Array | None]:
    metadata, arrays = call.metadata, _cache_arrays(call.cache, call.layer)
    if call.cache.k_scale.ndim != call.cache.v_scale.ndim:  # the kernel reads both alike
        heads = call.cache.local_spec.num_kv_heads
        for name in ("k_scale", "v_scale"):
            scale = arrays[name]
            arrays[name] = scale if scale.ndim == 2 else jnp.broadcast_to(scale[:, None], (scale.shape[0], heads))
    return {
        **arrays,
        "query": call.query,
        "query_start_loc": _int32(metadata.query_start_loc),
        "seq_lens": _int32(metadata.seq_lens),
        "block_table": _int32(metadata.block_table),
        "alibi_slopes": call.alibi_slopes,
        "sinks": call.sinks,
        "qq_bias": call.qq_bias,
        "score_scale": _vector(call.score_scale),
        "output_scale": _vector(call.output_scale),
    }


def _int32(array: Array) -> Array:
    return array.astype(jnp.int32)


def _update_shape(call: UpdateCacheCall) -> UpdateShape:
    return UpdateShape(
        num_tokens=call.key.shape[0],
        cache=_cache_shape(call.cache),
        key_dtype=jnp.dtype(call.key.dtype).name,
        value_dtype=jnp.dtype(call.value.dtype).name,
    )


def _update_arrays(call: UpdateCacheCall) -> dict[str, Array]:
    return {
        **_cache_arrays(call.cache, call.layer),
        "key": call.key,
        "value": call.value,
        "slot_mapping": _int32(call.slot_mapping),
    }


OPERATIONS: Mapping[str, Operation] = {
    "paged_attention": Operation(_paged_attention_shape, plan_paged_attention, _paged_attention_arrays),
    "update_cache": Operation(_update_shape, plan_update_cache, _update_arrays),
}


def refusals(operation: str, call: Any, by_name: bool) -> tuple[str, ...]:
    """Why Triton can't serve this call here; see `purepage.functional.dispatch`."""
    missing = [package for package in ("triton", "torch") if importlib.util.find_spec(package) is None]
    if missing:
        return (f"needs {' and '.join(missing)}, not installed here: pip install 'purepage[triton]'",)
    arch = default_arch()
    if arch.platform == "cpu":
        if not by_name:
            return ("runs on a CPU only through Triton's interpreter, which is for tests: ask for it by name",)
        if os.environ.get(INTERPRETER_VARIABLE) != "1":
            return (f"runs on a CPU only through Triton's interpreter: {INTERPRETER_HINT}",)
    return plan_refusals(operation, call, arch.name)


def plan_refusals(operation: str, call: Any, arch: str) -> tuple[str, ...]:
    """Why the kernels can't serve this call on an architecture, wherever it is asked."""
    described = OPERATIONS[operation]
    try:
        _planned(described.plan, described.shape(call), arch, None)
    except UnsupportedError as error:
        return (str(error).removeprefix("triton: "),)
    return ()


def program_of(operation: str, call: Any, arch: Arch | None = None) -> Program:
    """The launches that serve a call on `arch`; default: the device that JAX computes on."""
    arch = default_arch() if arch is None else arch
    described = OPERATIONS[operation]
    units = arch.compute_units if arch.platform != "cpu" else None
    return _planned(described.plan, described.shape(call), arch.name, units or None)


@cache
def _planned(plan: Callable[..., Program], shape: Any, arch: str, num_cus: int | None) -> Program:
    return plan(shape, arch, num_cus=num_cus)


def _run(operation: str, call: Any) -> tuple[Array, ...]:
    program, arrays = program_of(operation, call), OPERATIONS[operation].arrays(call)
    return run(program, {name: arrays[name] for name, _ in program.inputs})


def paged_attention(call: PagedAttentionCall) -> tuple[Array, Array | None]:
    """(out [T, Hq, D], lse f32[T, Hq]); the lse is None unless the call asks for it."""
    out, *lse = _run("paged_attention", call)
    return out, (lse[0] if lse else None)


def update_cache(call: UpdateCacheCall) -> KVCache:
    (data,) = _run("update_cache", call)
    return replace(call.cache, data=data)
