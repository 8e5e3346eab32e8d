"""The contenders of an attention case: purepage's implementations and the other libraries that are installed, one function each.

A contender gets the inputs and returns a `JaxCall` or a `TorchCall`. `Unavailable` says that a package is missing, or that it does not
serve such a case; anything else that is raised is that contender's failure and goes into the report.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import purepage as pp
from benchmarks.inputs import Inputs
from benchmarks.timing import on_gpu
from purepage.bridges.execute import using_bridge


class Unavailable(Exception):
    """The reason why a contender is not timed."""


@dataclass(frozen=True)
class JaxCall:
    """`call(query, seq_lens, operands)` gives out [T, Hq, D]."""

    call: Callable[[Any, Any, Any], Any]
    operands: Any
    note: str = ""


@dataclass(frozen=True)
class TorchCall:
    """`call()` gives a tensor of T * Hq * D elements, in that order."""

    call: Callable[[], Any]
    note: str = ""


def _need(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        raise Unavailable(f"{package} is not installed")


def _need_uniform(inputs: Inputs) -> tuple[int, int, int]:
    """(sequences, new tokens, context) of a batch of equal lengths without a window."""
    case = inputs.case
    if not case.is_uniform or case.window:
        raise Unavailable("dense kernels are timed on batches of equal lengths without a window")
    return len(case.lengths), *case.lengths[0]


# --- purepage --------------------------------------------------------------------------------------------------------------------------


def ours(implementation: str, bridge: str = "callback") -> Callable[[Inputs], JaxCall]:
    def build(inputs: Inputs) -> JaxCall:
        metadata = inputs.metadata
        arrays = (inputs.cache, metadata)

        def call(query: Any, seq_lens: Any, arrays: Any) -> Any:
            cache, metadata = arrays
            with using_bridge(bridge):
                return pp.paged_attention(
                    query,
                    cache,
                    replace(metadata, seq_lens=seq_lens),
                    sliding_window=inputs.case.window,
                    implementation=implementation,
                )

        try:
            jax.eval_shape(call, inputs.query, metadata.seq_lens, arrays)
        except NotImplementedError as error:  # UnsupportedError: not installed, or not for this call
            raise Unavailable(str(error)) from error
        return JaxCall(call, arrays)

    return build


# --- other JAX packages -------------------------------------------------------------------------------------------------------------------


def cudnn_paged(inputs: Inputs) -> JaxCall:
    """cuDNN's paged attention as jax wraps it. Its causal mask is aligned to the first key, so it is right only without a context."""
    if not on_gpu():
        raise Unavailable("cuDNN runs on NVIDIA GPUs")
    case, metadata = inputs.case, inputs.metadata
    seqs, new, _ = _need_uniform(inputs)
    if inputs.cache.spec.is_quantized:
        raise Unavailable("jax's cuDNN paged attention has no fp8 cache")
    from jax._src.cudnn.fused_attention_stablehlo import MaskType, paged_attention

    table = metadata.block_table.reshape(seqs, 1, -1, 1)
    mask = MaskType.PADDING if case.is_decode else MaskType.PADDING_CAUSAL

    def call(query: Any, seq_lens: Any, operands: Any) -> Any:
        key, value, table = operands
        out = paged_attention(
            query.reshape(seqs, new, case.num_heads, case.head_size),
            key,
            value,
            jnp.full((seqs,), new, jnp.int32),
            seq_lens,
            table,
            table,
            scale=case.head_size**-0.5,
            mask_type=mask,
        )
        out = out[0] if isinstance(out, list | tuple) else out
        return out.reshape(query.shape)

    return JaxCall(call, (inputs.key, inputs.value, table))


def cudnn_dense(inputs: Inputs) -> JaxCall:
    """cuDNN's attention over dense keys and values: no paging, the gather is not timed."""
    if not on_gpu():
        raise Unavailable("cuDNN runs on NVIDIA GPUs")
    case = inputs.case
    seqs, new, context = _need_uniform(inputs)
    if inputs.cache.spec.is_quantized or (new > 1 and new != context):
        raise Unavailable("no fp8 keys; its causal mask is aligned to the first key")
    key, value = dense(inputs)

    def call(query: Any, seq_lens: Any, operands: Any) -> Any:
        key, value = operands
        out = jax.nn.dot_product_attention(
            query.reshape(seqs, new, case.num_heads, case.head_size), key, value, is_causal=new > 1, implementation="cudnn"
        )
        return out.reshape(query.shape)

    return JaxCall(call, (key, value), "dense keys, gather not timed")


def dense(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """[S, L, H, D] keys and values of a uniform batch, gathered."""
    case = inputs.case
    seqs, _, context = _need_uniform(inputs)

    @jax.jit
    def gather(pool: Any, table: Any) -> Any:
        return pool[table].reshape(seqs, -1, case.num_kv_heads, case.head_size)[:, :context]

    return gather(inputs.key, inputs.metadata.block_table), gather(inputs.value, inputs.metadata.block_table)


def jax_pallas_paged(inputs: Inputs) -> JaxCall:
    """jax's own example kernel: decode only, one sequence's pages split in equal parts."""
    if not on_gpu():
        raise Unavailable("jax's Pallas paged attention is for GPUs")
    case = inputs.case
    if not case.is_decode or case.window or inputs.cache.spec.is_quantized:
        raise Unavailable("decode without a window over an unquantized cache only")
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    splits = math.gcd(16, case.width)
    per_block = math.gcd(8, case.width // splits)
    pages = jax.jit(lambda x: jnp.transpose(x, (2, 0, 1, 3)))

    def call(query: Any, seq_lens: Any, operands: Any) -> Any:
        key, value, table = operands
        scaled = (query * case.head_size**-0.5).astype(query.dtype)
        return paged_attention(scaled, key, value, table, seq_lens, k_splits=splits, pages_per_compute_block=per_block)

    return JaxCall(call, (pages(inputs.key), pages(inputs.value), inputs.metadata.block_table), "its scaling of the query is timed with it")


def ejkernel(backend: str) -> Callable[[Inputs], JaxCall]:
    def build(inputs: Inputs) -> JaxCall:
        _need("ejkernel")
        if backend == "triton" and not on_gpu():
            raise Unavailable("its Triton kernels are for GPUs")
        if inputs.cache.spec.is_quantized:
            raise Unavailable("no fp8 cache with scales")
        case = inputs.case
        module = importlib.import_module(f"ejkernel.kernels._{backend}.unified_attention")
        starts, table = inputs.metadata.query_start_loc, inputs.metadata.block_table

        def call(query: Any, seq_lens: Any, operands: Any) -> Any:
            key, value, table, starts = operands
            return module.unified_attention(
                query, key, value, seq_lens, table, starts, softmax_scale=case.head_size**-0.5, sliding_window=case.window
            )

        return JaxCall(call, (inputs.key, inputs.value, table, starts))

    return build


# --- torch ------------------------------------------------------------------------------------------------------------------------------


def to_torch(array: jax.Array) -> Any:
    import torch

    if array.dtype.itemsize == 1:
        return torch.from_dlpack(jax.lax.bitcast_convert_type(array, jnp.uint8)).view(getattr(torch, array.dtype.name))
    return torch.from_dlpack(array)


def torch_sdpa(inputs: Inputs) -> TorchCall:
    """torch's scaled_dot_product_attention over dense keys and values: no paging, the gather is not timed."""
    _need("torch")
    import torch
    from torch.nn.attention.bias import causal_lower_right

    case = inputs.case
    seqs, new, context = _need_uniform(inputs)
    if inputs.cache.spec.is_quantized:
        raise Unavailable("no fp8 keys")
    key, value = (to_torch(x).transpose(1, 2).contiguous() for x in dense(inputs))
    query = to_torch(inputs.query).view(seqs, new, case.num_heads, case.head_size).transpose(1, 2)
    mask: dict[str, Any] = {}
    if new == context > 1:
        mask = {"is_causal": True}
    elif new > 1:
        mask = {"attn_mask": causal_lower_right(new, context)}

    def call() -> Any:
        with torch.no_grad():
            return torch.nn.functional.scaled_dot_product_attention(query, key, value, enable_gqa=True, **mask).transpose(1, 2)

    return TorchCall(call, "dense keys, gather not timed")


def torch_flex(inputs: Inputs) -> TorchCall:
    """torch's FlexAttention, compiled, over dense keys and values."""
    _need("torch")
    if not on_gpu():
        raise Unavailable("timed on GPUs only: compiling it for a CPU takes a C++ compiler and minutes")
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    case = inputs.case
    seqs, new, context = _need_uniform(inputs)
    if inputs.cache.spec.is_quantized:
        raise Unavailable("no fp8 keys")
    key, value = (to_torch(x).transpose(1, 2).contiguous() for x in dense(inputs))
    query = to_torch(inputs.query).view(seqs, new, case.num_heads, case.head_size).transpose(1, 2)
    mask = None
    if new > 1:
        mask = create_block_mask(lambda b, h, q, k: q + (context - new) >= k, None, None, new, context, device="cuda")
    compiled = torch.compile(flex_attention, dynamic=False)

    def call() -> Any:
        with torch.no_grad():
            return compiled(query, key, value, block_mask=mask, enable_gqa=True).transpose(1, 2)

    return TorchCall(call, "dense keys, gather not timed")


def aiter(contiguous: bool) -> Callable[[Inputs], TorchCall]:
    def build(inputs: Inputs) -> TorchCall:
        """AITER's Triton unified_attention on purepage's own packed buffer, or on keys and values that lie apart."""
        from purepage.bridges.aiter import package as aiter_package

        if aiter_package.root() is None:
            raise Unavailable("amd-aiter is not installed")
        if not on_gpu():
            raise Unavailable("on a CPU only Triton's interpreter runs it")
        import torch

        case, metadata = inputs.case, inputs.metadata
        attention = aiter_package.load("unified_attention")
        query = to_torch(inputs.query)
        if contiguous:
            key, value = to_torch(inputs.key), to_torch(inputs.value)
        else:
            data = to_torch(inputs.cache.data).view(getattr(torch, case.cache_dtype))[0]  # B H N 2D
            key, value = (data[..., i * case.head_size : (i + 1) * case.head_size].transpose(1, 2) for i in range(2))
        out = torch.empty_like(query)
        scales: list[Any] = [None, None]
        if inputs.cache.spec.is_quantized:
            scales = [torch.full((len(case.lengths), case.num_kv_heads), s, device="cuda") for s in inputs.scales]
        starts, lens, table = (to_torch(x) for x in (metadata.query_start_loc, metadata.seq_lens, metadata.block_table))

        def call() -> Any:
            attention(
                q=query,
                k=key,
                v=value,
                out=out,
                cu_seqlens_q=starts,
                max_seqlen_q=max(q for q, _ in case.lengths),
                seqused_k=lens,
                max_seqlen_k=max(n for _, n in case.lengths),
                softmax_scale=case.head_size**-0.5,
                causal=True,
                window_size=(case.window - 1, 0) if case.window else (-1, -1),
                block_table=table,
                softcap=0.0,
                q_descale=None,
                k_descale=scales[0],
                v_descale=scales[1],
            )
            return out

        return TorchCall(call)

    return build


CONTENDERS: dict[str, Callable[[Inputs], JaxCall | TorchCall]] = {
    "purepage triton": ours("triton"),
    "purepage triton, jax-triton bridge": ours("triton", "jax_triton"),
    "purepage pallas": ours("pallas"),
    "purepage xla": ours("xla"),
    "purepage aiter": ours("aiter"),
    "AITER Triton": aiter(contiguous=False),
    "AITER Triton, K and V apart": aiter(contiguous=True),
    "ejkernel Triton": ejkernel("triton"),
    "ejkernel XLA": ejkernel("xla"),
    "cuDNN paged (jax)": cudnn_paged,
    "jax Pallas paged": jax_pallas_paged,
    "cuDNN dense (jax)": cudnn_dense,
    "torch SDPA": torch_sdpa,
    "torch FlexAttention": torch_flex,
}
QUICK_ON_GPU = (
    "purepage triton",
    "purepage pallas",
    "AITER Triton",
    "ejkernel Triton",
    "cuDNN paged (jax)",
    "torch SDPA",
)
"""What `--quick` times on a GPU: the others take long to compile or run, or differ little from one of these."""
