"""The `pallas` implementation: kernels written in JAX, to read and to change. It needs neither torch nor Triton.

On a GPU Pallas' Triton backend compiles them (jax 0.10 has it; it is deprecated since 0.11). On a CPU Pallas' interpreter runs them, which
is for tests and notebooks. They serve the contents "packed" and "flash". Without a name, a call never comes here.

With PUREPAGE_PALLAS_HOPPER=1, prompts in pages of 64 tokens and more go to `hopper.py` on Hopper, through Pallas' Mosaic GPU backend.
"""

import importlib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ...functional.cache import KVCache
from ...functional.calls import PagedAttentionCall, RopeUpdateCall, UpdateCacheCall
from ...functional.dispatch import Plan, Unsupported
from ...functional.features import Serves
from ...functional.fp8 import quantize
from ...functional.integers import INT32_MAX
from ...functional.intervals import token_sequences, visible_intervals
from ...functional.target import Target, variable_of
from ..archs import ARCHS, find_arch
from ..xla.attention import needs_missing_block
from .attention import attend
from .refs import Pool
from .writers import rope_and_write, write

__all__ = ["SERVES", "plan"]

_MODEL = frozenset(("float32", "float16", "bfloat16"))
_FP8 = frozenset(("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"))
_CACHE = frozenset(("quantized_cache", "scales_per_head", "mixed_scale_ranks", "mixed_dtypes"))
_ROWS = frozenset(("tokens_are_rows", "heads_are_adjacent", "sides_are_adjacent", "sides_are_apart"))
_GPUS = ("cuda", "rocm")
_GPU_FP8 = frozenset(("float8_e4m3fn", "float8_e5m2"))
"""The fp8 dtypes that Pallas' Triton backend has."""

SERVES: Mapping[str, Serves] = {
    "paged_attention": Serves(
        features=_CACHE
        | {
            "score_scale",
            "alibi_slopes",
            "sinks",
            "sliding_window",
            "traced_window",
            "key_range",
            "logits_soft_cap",
            "non_causal",
            "output_scale",
            "return_lse",
        },
        dtypes={"query": _MODEL, "cache": _MODEL | _FP8, "output_dtype": _MODEL | _FP8},
        layouts=_ROWS,
    ),
    "update_cache": Serves(features=_CACHE, dtypes={"cache": _MODEL | _FP8, "key": _MODEL, "value": _MODEL}, layouts=_ROWS),
    "rope_and_update_cache": Serves(
        features=_CACHE | {"partial_rotary", "gptj_rotary"},
        dtypes={"cache": _MODEL | _FP8, "key": _MODEL, "value": _MODEL, "query": _MODEL, "cos_sin_cache": _MODEL},
        layouts=_ROWS,
    ),
}


HOPPER = {64: (128, 4), 128: (128, 2), 256: (64, 2)}
"""Keys of a tile and tiles in shared memory of `hopper.py`, by head size."""


JAX = tuple(int(part) for part in jax.__version__.split(".")[:2])


def hopper_reasons(call: PagedAttentionCall, target: Target) -> tuple[str, ...]:
    """Why `hopper.py` does not serve a call, which then goes to the portable kernel; empty where it does."""
    spec, query = call.cache.local_spec, call.query
    size, dtype = query.shape[-1], query.dtype
    arch = find_arch(target.arch)
    if arch is None or arch.matrix != "wgmma":
        return (f"arch {target.arch}: it multiplies by asynchronous matrix instructions of warp groups (wgmma)",)
    if not target.settings.pallas_hopper:
        return (f"{variable_of('pallas_hopper')} is off",)
    if JAX != (0, 11):  # 0.10 has another interface, 0.12 refuses to store rows that are not swizzled
        return (f"jax {jax.__version__}: it was run with 0.11",)
    try:
        importlib.import_module(".hopper", __name__)
    except ImportError as error:  # Mosaic GPU imports absl, on which jax does not depend
        return (f"Pallas' Mosaic GPU backend cannot be imported ({error})",)
    block_n = HOPPER.get(size, (64, 0))[0]
    needs = {
        f"head size {size}: it serves {', '.join(map(str, HOPPER))}": size in HOPPER,
        f"query of {dtype}, cache of {spec.dtype}: it serves bfloat16 and float16, the same in both": dtype == spec.dtype
        and dtype in (jnp.bfloat16, jnp.float16),
        f"blocks of {spec.block_size}: it serves those that divide {block_n}, from 64, and multiples": spec.block_size % block_n == 0
        or spec.block_size == 64,
        "alibi_slopes": call.alibi_slopes is None,
        "output_scale": call.output_scale is None,
        f"{query.shape[0]} tokens, at most {call.metadata.max_query_len} of a sequence: it serves 64 and more": min(
            query.shape[0], call.metadata.max_query_len
        )
        >= 64,
    }
    return tuple(reason for reason, held in needs.items() if not held)


def _paged_attention(call: PagedAttentionCall, *, interpret: bool, hopper: bool = False) -> tuple[Array, Float[Array, "T Hq"]]:
    spec, metadata = call.cache.local_spec, call.metadata
    starts, seq_lens, table = (getattr(metadata, name).astype(jnp.int32) for name in ("query_start_loc", "seq_lens", "block_table"))
    num_tokens, num_heads, _ = call.query.shape
    out_dtype = jnp.dtype(jnp.float32) if spec.is_quantized or call.output_scale is not None else call.output_dtype
    if 0 in (num_tokens, *table.shape):  # no row sees a key
        out, lse = jnp.zeros(call.query.shape, out_dtype), jnp.full((num_tokens, num_heads), -jnp.inf, jnp.float32)
        if call.sinks is not None and table.shape[0]:
            lse = jnp.where((jnp.arange(num_tokens) < starts[-1])[:, None], call.sinks, lse)
    else:
        out, lse = _attend(call, starts, seq_lens, table, out_dtype, interpret=interpret, hopper=hopper)
    if call.output_scale is not None:
        return quantize(out, call.output_scale, call.output_dtype), lse
    return out.astype(call.output_dtype), lse


def _attend(
    call: PagedAttentionCall, starts: Array, seq_lens: Array, table: Array, out_dtype: jnp.dtype, *, interpret: bool, hopper: bool
) -> tuple[Array, Array]:
    spec, metadata = call.cache.local_spec, call.metadata
    num_tokens, heads = call.query.shape[0], spec.num_kv_heads
    contexts = seq_lens - (starts[1:] - starts[:-1])
    lengths = jnp.minimum(seq_lens, min(table.shape[1] * spec.block_size, INT32_MAX))
    masks = {"causal": metadata.causal, "window": call.sliding_window if call.traced_window is None else call.traced_window}
    everything = (jnp.zeros(num_tokens, jnp.int32), jnp.full(num_tokens, INT32_MAX, jnp.int32))
    visible = visible_intervals(starts, contexts, lengths, call.key_range or everything, **masks)
    missing = needs_missing_block(
        starts,
        contexts,
        lengths,
        table,
        num_blocks=spec.num_blocks,
        block_size=spec.block_size,
        sliding_window=None,
        causal=False,
        intervals=visible,
    )
    sequence, inside = token_sequences(starts, num_tokens)
    factor = jnp.broadcast_to(jnp.float32(call.scale) if call.score_scale is None else call.scale * call.score_scale, (heads,))
    if spec.is_quantized:
        factor = factor * call.cache.k_scale[call.layer]
    portable = partial(
        attend,
        call.query,
        call.cache.data,
        Pool.of(spec),
        heads,
        starts=starts,
        table=table,
        visible=visible,
        position=contexts[sequence] + inside,
        layer=call.layer,
        factor=factor,
        slopes=call.alibi_slopes,
        sinks=call.sinks,
        cap=call.logits_soft_cap or None,
        max_query_len=metadata.max_query_len,
        max_seq_len=metadata.max_seq_len or table.shape[1] * spec.block_size,
        out_dtype=out_dtype,
        interpret=interpret,
    )
    out, lse = _attend_on_hopper(call, starts, table, visible, factor, portable) if hopper else portable()
    if spec.is_quantized:
        v_scale = jnp.broadcast_to(call.cache.v_scale[call.layer], (heads,))
        out = out * jnp.repeat(v_scale, call.query.shape[1] // heads)[None, :, None]
    is_token, missing = jnp.arange(num_tokens) < starts[-1], missing[sequence][:, None]
    out = jnp.where(is_token[:, None, None], jnp.where(missing[:, :, None], jnp.nan, out), 0)
    return out, jnp.where(is_token[:, None], jnp.where(missing, jnp.nan, lse), -jnp.inf)


def _attend_on_hopper(
    call: PagedAttentionCall,
    starts: Array,
    table: Array,
    visible: tuple[Array, Array],
    factor: Array,
    portable: Callable[[], tuple[Array, Array]],
) -> tuple[Array, Array]:
    """`hopper.attend`; where a result is not finite, the portable kernel decides which rows see what is not finite."""
    hopper = importlib.import_module(".hopper", __name__)
    spec, (_, num_heads, size) = call.cache.local_spec, call.query.shape
    group = num_heads // spec.num_kv_heads
    cap = call.logits_soft_cap or None
    pages = spec.axes, spec.num_blocks, spec.block_size, size, np.dtype(spec.dtype), np.dtype(call.cache.data.dtype)
    static = hopper.Spec(*pages, group, *HOPPER[size], cap, call.sinks is not None)
    out, lse, suspect = hopper.attend(
        call.query,
        call.cache.data,
        static,
        starts=starts,
        table=table,
        visible=visible,
        layer=call.layer,
        factor=jnp.repeat(factor, group),
        sinks=call.sinks,
    )
    return jax.lax.cond(suspect, portable, lambda: (out, lse))


def _scales(cache: KVCache) -> tuple[Array, ...]:
    return (cache.k_scale, cache.v_scale) if cache.local_spec.is_quantized else ()


def _update_cache(call: UpdateCacheCall, *, interpret: bool) -> KVCache:
    cache = call.cache
    pool, scales = Pool.of(cache.local_spec), _scales(cache)
    data = write(cache.data, pool, call.key, call.value, call.slot_mapping, call.layer, scales, interpret=interpret)
    return KVCache(data, cache.k_scale, cache.v_scale, cache.spec)


def _rope_and_update_cache(call: RopeUpdateCall, *, interpret: bool) -> tuple[Array, Array, KVCache]:
    cache = call.cache
    query, key, data = rope_and_write(
        cache.data,
        Pool.of(cache.local_spec),
        call.query,
        call.key,
        call.value,
        call.positions,
        call.cos_sin_cache,
        call.slot_mapping,
        call.layer,
        _scales(cache),
        is_neox=call.is_neox,
        interpret=interpret,
    )
    return query, key, KVCache(data, cache.k_scale, cache.v_scale, cache.spec)


_RUN: Mapping[str, Callable[..., Any]] = {
    "paged_attention": jax.jit(_paged_attention, static_argnames=("interpret", "hopper")),
    "update_cache": jax.jit(_update_cache, static_argnames="interpret"),
    "rope_and_update_cache": jax.jit(_rope_and_update_cache, static_argnames="interpret"),
}


def plan(operation: str, call: Any, target: Target, *, explicit: bool) -> Plan | Unsupported:
    """The kernel of the operation, interpreted on a CPU."""
    if not explicit:
        return Unsupported(("is taken only where it is asked for by name",))
    if target.platform not in ("cpu", *_GPUS):
        return Unsupported((f"platform {target.platform}: it serves cpu, {', '.join(_GPUS)}",))
    if find_arch(target.arch) is None:
        return Unsupported((f"arch {target.arch}: it serves {', '.join(ARCHS)}",))
    on_cpu, stored = target.platform == "cpu", call.dtypes()["cache"]
    if not on_cpu and stored in _FP8 - _GPU_FP8:
        return Unsupported((f"cache is {stored}: Pallas' Triton backend serves {', '.join(sorted(_GPU_FP8))}",))
    if operation == "paged_attention" and not hopper_reasons(call, target):
        return Plan(partial(_RUN[operation], interpret=False, hopper=True))
    return Plan(partial(_RUN[operation], interpret=on_cpu))
