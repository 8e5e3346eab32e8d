"""The `triton` implementation: plans a call's launches from its shapes and the device's architecture, and runs them through a bridge."""

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

from jaxtyping import Array

from ..functional.cache import KVCache
from ..functional.calls import (
    EncoderAttentionCall,
    MergeCall,
    PagedAttentionCall,
    QkNormRopeUpdateCall,
    RopeUpdateCall,
    RotaryCall,
    UpdateCacheCall,
)
from ..functional.errors import UnsupportedError
from ..kernels.launch import Program
from .arch import Arch, default_arch
from .execute import run
from .triton_calls import OPERATIONS

INTERPRETER_VARIABLE = "TRITON_INTERPRET"
INTERPRETER_HINT = f"set {INTERPRETER_VARIABLE}=1 in the environment before the first call"


def refusals(operation: str, call: Any, explicit: bool) -> tuple[str, ...]:
    """Why Triton can't serve this call here; see `purepage.functional.dispatch`."""
    missing = [package for package in ("triton", "torch") if importlib.util.find_spec(package) is None]
    if missing:
        return (f"needs {' and '.join(missing)}, not installed here: pip install 'purepage[triton]'",)
    arch = default_arch()
    if arch.platform == "cpu":
        if not explicit:
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
    named = {name: arrays[name] for name, _ in program.inputs}
    return run(program, {name: array for name, array in named.items() if array is not None})


def paged_attention(call: PagedAttentionCall) -> tuple[Array, Array | None]:
    """(out [T, Hq, D], lse f32[T, Hq]); the lse is None unless the call asks for it."""
    out, *lse = _run("paged_attention", call)
    return out, (lse[0] if lse else None)


def update_cache(call: UpdateCacheCall) -> KVCache:
    (data,) = _run("update_cache", call)
    return replace(call.cache, data=data)


def encoder_attention(call: EncoderAttentionCall) -> Array:
    (out,) = _run("encoder_attention", call)
    return out


def rotary_embedding(call: RotaryCall) -> tuple[Array, Array]:
    query, key = _run("rotary_embedding", call)
    return query, key


def rope_and_update_cache(call: RopeUpdateCall) -> tuple[Array, Array, KVCache]:
    query, key, data = _run("rope_and_update_cache", call)
    return query, key, replace(call.cache, data=data)


def qk_norm_rope_and_update_cache(call: QkNormRopeUpdateCall) -> tuple[Array, Array, Array, KVCache]:
    """The value is a slice of qkv, which XLA makes only where somebody reads it."""
    query, key, data = _run("qk_norm_rope_and_update_cache", call)
    value = call.qkv[:, -key.shape[1] * key.shape[2] :].reshape(key.shape)
    return query, key, value, replace(call.cache, data=data)


qk_norm_mrope_and_update_cache = qk_norm_rope_and_update_cache


def merge_attention_states(call: MergeCall) -> tuple[Array, Array]:
    out, lse = _run("merge_attention_states", call)
    return out, lse
