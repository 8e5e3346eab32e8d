"""Adapters of AITER's cache writers. The rotary one is Triton; the others are HIP, which this project has never run: their calls are
checked against the sources of the installed release, argument by argument, where it has them.

HIP writers read slots and positions as int64, whatever they are given, and scales of the qk-norm writers on the host. JAX has no int64
without x64, so both are made on the torch side.
"""

from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ...functional.cache import KVCache
from ...functional.calls import QkNormRopeUpdateCall, RopeUpdateCall, RotaryCall, UpdateCacheCall
from ...functional.layout import layout_of
from ...functional.target import Target
from ..callback import call_torch
from . import package as package
from .views import Blocks, Pages, pages, sides


def _struct(array: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@dataclass(frozen=True)
class RopeAndCache:
    """`fused_qk_rope_reshape_and_cache`: query, key, value, slots, positions, cos, sin, cache to query, key, cache."""

    view: Pages | Blocks
    cache_dtype: str
    is_neox: bool

    def arguments(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> dict[str, Any]:
        import torch

        query, key, value, slots, positions, cos, sin = inputs[:7]
        key_cache, value_cache = self.view.views(outputs[2], getattr(torch, self.cache_dtype))
        return {
            "q": query,
            "k": key,
            "v": value,
            "key_cache": key_cache,
            "value_cache": value_cache,
            "slot_mapping": slots,
            "pos": positions,
            "cos": cos,
            "sin": sin,
            "k_scale": None,
            "v_scale": None,
            "is_neox": self.is_neox,
            "flash_layout": isinstance(self.view, Pages),
            "apply_scale": False,
            "q_out": outputs[0],
            "k_out": outputs[1],
            "output_zeros": False,
        }

    def __call__(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        package.load("fused_qk_rope_reshape_and_cache")(**self.arguments(inputs, outputs))


def rope_and_update_cache(target: Target, call: RopeUpdateCall) -> tuple[Array, Array, KVCache]:
    """The rotation's table is gathered to the tokens in float32, so that AITER computes in float32 and rounds once, and a position without
    a row gives NaN. Keys of tokens without a slot, which AITER leaves out, are rotated by XLA.
    """
    from ...kernels import xla

    spec, half = call.cache.local_spec, call.cos_sin_cache.shape[1] // 2
    rows_of_table = call.cos_sin_cache.shape[0]
    row = jnp.where(call.positions < 0, rows_of_table, call.positions)
    table = jnp.take(call.cos_sin_cache, row, axis=0, mode="fill", fill_value=jnp.nan).astype(jnp.float32)
    view, slots = sides(spec, call.slot_mapping, call.layer)
    positions = jnp.arange(table.shape[0], dtype=jnp.int32)
    inputs = [call.query, call.key, call.value, slots, positions, table[:, :half], table[:, half:], call.cache.data]
    operator = RopeAndCache(view, spec.dtype.name, call.is_neox)
    results = [_struct(x) for x in (call.query, call.key, call.cache.data)]
    query, key, data = call_torch(
        operator,
        inputs,
        results,
        aliases={7: 2},
        command_buffer=target.settings.aiter_command_buffer,
        name="aiter fused_qk_rope_reshape_and_cache",
    )
    _, unwritten = xla.rotary_embedding(
        RotaryCall(positions=call.positions, query=call.key, key=call.key, cos_sin_cache=call.cos_sin_cache, is_neox=call.is_neox)
    )
    key = jnp.where((slots >= 0)[:, None, None], key, unwritten)
    return query, key, replace(call.cache, data=data)


@dataclass(frozen=True)
class ReshapeAndCache:
    """`reshape_and_cache` and `reshape_and_cache_flash`: key, value, slots, cache to cache."""

    operator: str
    view: Pages | Blocks
    asm_layout: bool
    cache_dtype: str

    def arguments(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> dict[str, Any]:
        import torch

        key, value, slots = inputs[:3]
        key_cache, value_cache = self.view.views(outputs[0], getattr(torch, self.cache_dtype))
        given = {"key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slots.to(torch.int64)}
        if isinstance(self.view, Pages):
            one = torch.ones(1, dtype=torch.float32, device=key.device)
            return {**given, "kv_cache_dtype": "auto", "k_scale": one, "v_scale": one}
        return {**given, "kv_cache_dtype": "auto", "k_scale": None, "v_scale": None, "asm_layout": self.asm_layout}

    def __call__(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        package.load(self.operator)(**self.arguments(inputs, outputs))


def plan_update_cache(call: UpdateCacheCall) -> tuple[ReshapeAndCache, Array]:
    """(operator, its slots)."""
    spec = call.cache.local_spec
    view, slots = sides(spec, call.slot_mapping, call.layer)
    name = "reshape_and_cache_flash" if isinstance(view, Pages) else "reshape_and_cache"
    return ReshapeAndCache(name, view, layout_of(spec.content).value_has_vectors_of_tokens, spec.dtype.name), slots


def update_cache(call: UpdateCacheCall) -> KVCache:
    operator, slots = plan_update_cache(call)
    inputs = [call.key, call.value, slots, call.cache.data]
    (data,) = call_torch(operator, inputs, [_struct(call.cache.data)], aliases={3: 0}, name=f"aiter {operator.operator}")
    return replace(call.cache, data=data)


@dataclass(frozen=True)
class QkNormRopeAndCache:
    """Both qk-norm writers: qkv, q_weight, k_weight, cos_sin, positions, slots, cache to query, key, cache."""

    operator: str
    pages: Pages
    cache_dtype: str
    num_heads: int
    is_neox: bool
    eps: float
    mrope_section: tuple[int, int, int] | None
    is_interleaved: bool
    rotary_dim: int
    parameters: tuple[str, ...]

    def arguments(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> dict[str, Any]:
        """By name; the operators' own names, of which some changed between releases."""
        import torch

        qkv, q_weight, k_weight, cos_sin, positions, slots = inputs[:6]
        query, key, cache = outputs
        key_cache, value_cache = self.pages.views(cache, getattr(torch, self.cache_dtype))
        one = torch.ones(1, dtype=torch.float32, device="cpu")  # read on the host
        tokens, heads = qkv.shape[0], self.pages.heads
        slots = slots.to(torch.int64)
        given = {
            "qkv": qkv,
            "qw": q_weight,
            "kw": k_weight,
            "cos_sin": cos_sin,
            "positions": positions.to(torch.int64),
            "num_tokens": tokens,
            "num_heads_q": self.num_heads,
            "num_heads_k": heads,
            "num_heads_v": heads,
            "head_size": self.pages.head_size,
            "is_neox_style": self.is_neox,
            "eps": self.eps,
            "q_out": query,
            "q": query,
            "k_cache": key_cache,
            "v_cache": value_cache,
            "slot_mapping": slots,
            "kv_loc": slots,
            "per_tensor_k_scale": one,
            "per_tensor_v_scale": one,
            "k_scale": one,
            "v_scale": one,
            "k_out": key,
            "v_out": torch.empty_like(key),
            "return_kv": True,
            "use_shuffle_layout": False,
            "block_size": self.pages.page,
            "x": 16 // key_cache.element_size(),
            "rotary_dim": 0 if self.rotary_dim == self.pages.head_size else self.rotary_dim,
            "gemma_norm": False,
            "mrope_section_": list(self.mrope_section or ()),
            "mrope_section": list(self.mrope_section or ()),
            "is_interleaved": self.is_interleaved,
        }
        unknown = [name for name in self.parameters if name not in given]
        if unknown:
            raise TypeError(f"{self.operator} of this release takes {unknown}, which the adapter does not know")
        return {name: given[name] for name in self.parameters}

    def __call__(self, inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
        package.load(self.operator)(**self.arguments(inputs, outputs))


def qk_norm_rope_and_update_cache(call: QkNormRopeUpdateCall) -> tuple[Array, Array, Array, KVCache]:
    """Keys of tokens without a slot, which AITER leaves out, are made by XLA; so is the value, a slice of qkv."""
    from ...kernels import xla

    spec, tokens = call.cache.local_spec, call.qkv.shape[0]
    name = package.QK_NORM_OPERATORS[call.mrope_section is not None]
    view = pages(spec, 1)
    operator = QkNormRopeAndCache(
        operator=name,
        pages=view,
        cache_dtype=spec.dtype.name,
        num_heads=call.num_heads,
        is_neox=call.is_neox,
        eps=call.eps,
        mrope_section=call.mrope_section,
        is_interleaved=call.is_interleaved,
        rotary_dim=call.cos_sin_cache.shape[1],
        parameters=package.parameters(name),
    )
    _, slots = sides(spec, call.slot_mapping, call.layer)
    in_table = (call.positions >= 0) & (call.positions < call.cos_sin_cache.shape[0])
    positions = jnp.where(in_table, call.positions, 0).astype(jnp.int32)
    shapes = [(tokens, call.num_heads, spec.head_size), (tokens, spec.num_kv_heads, spec.head_size)]
    results = [*(jax.ShapeDtypeStruct(shape, call.qkv.dtype) for shape in shapes), _struct(call.cache.data)]
    inputs = [call.qkv, call.q_weight, call.k_weight, call.cos_sin_cache, positions, slots, call.cache.data]
    query, key, data = call_torch(operator, inputs, results, aliases={6: 2}, name=f"aiter {operator.operator}")
    _, other, value, _ = xla.qk_norm_rope_and_update_cache(replace(call, slot_mapping=jnp.full_like(call.slot_mapping, -1)))
    key = jnp.where((slots >= 0)[:, None, None], key, other)
    return query, key, value, replace(call.cache, data=data)
