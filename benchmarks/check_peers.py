"""Other libraries' paged attention under `purepage.testing.check_attention`: `python -m benchmarks.check_peers NAME ...`.

Each adapter hands a batch over as its library wants it, and refuses what the library has no argument for. Kernels run through their
interpreters; `ejkernel` and `amd-aiter` must be installed (without their dependencies where there is no GPU).
"""

import importlib
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax.numpy as jnp
import numpy as np

from purepage.testing import Batch, check_attention


def _need(condition: bool, why: str) -> None:
    if not condition:
        raise NotImplementedError(why)


def _decode_only(batch: Batch) -> tuple[Any, Any, Any, dict[str, Any]]:
    """(scaled query of each sequence, keys and values [H, B, N, D], options) of a batch for jax's decode kernels."""
    _need(batch.metadata.causal and batch.metadata.max_query_len == 1 and bool(np.all(batch.query_lens[: batch.num_tokens])), "decode only")
    _need(batch.key_cache.dtype.itemsize > 1, "no fp8 cache with scales")
    options = batch.pick("logits_soft_cap", "scale")
    seqs = len(batch.seq_lens)
    scale = options.pop("scale", batch.query.shape[-1] ** -0.5)
    query = np.zeros((seqs, *batch.query.shape[1:]), batch.query.dtype)
    rows = min(seqs, batch.num_tokens)
    query[:rows] = batch.query[:rows] * np.asarray(scale, batch.query.dtype)
    key, value = (jnp.transpose(jnp.asarray(side[0]), (2, 0, 1, 3)) for side in (batch.key_cache, batch.value_cache))
    return jnp.asarray(query), (key, value), batch.metadata, {"attn_logits_soft_cap": options.get("logits_soft_cap")}


def _rows(batch: Batch, out: Any) -> np.ndarray:
    """The rows of a batch, padding 0, of an output for each sequence."""
    full = np.zeros((len(batch.query), *out.shape[1:]), out.dtype)
    full[: batch.num_tokens] = np.asarray(out)[: batch.num_tokens]
    return full


def jax_tpu(batch: Batch) -> Any:
    from jax.experimental.pallas import tpu
    from jax.experimental.pallas.ops.tpu.paged_attention import paged_attention

    query, sides, metadata, options = _decode_only(batch)
    with tpu.force_tpu_interpret_mode():
        return _rows(batch, paged_attention(query, *sides, metadata.seq_lens, metadata.block_table, pages_per_compute_block=1, **options))


def jax_gpu(batch: Batch) -> Any:
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    query, sides, metadata, options = _decode_only(batch)
    width = metadata.block_table.shape[1]
    how = {"interpret": True, "k_splits": 1, "pages_per_compute_block": width}
    return _rows(batch, paged_attention(query, *sides, metadata.block_table, metadata.seq_lens, **how, **options))


def ejkernel(batch: Batch) -> Any:
    attention = importlib.import_module("ejkernel.kernels._xla.unified_attention").unified_attention
    _need(batch.metadata.causal, "causal only")
    _need(batch.key_cache.dtype.itemsize > 1, "no fp8 cache with scales")
    options = batch.pick("logits_soft_cap", "scale", "sliding_window", "sinks", "alibi_slopes", "qq_bias")
    _need(batch.qq_bias is None or batch.qq_bias.ndim == 2, "one bias for all sequences")
    names = {"scale": "softmax_scale", "sinks": "softmax_aux"}
    given = {names.get(name, name): jnp.asarray(value) if isinstance(value, np.ndarray) else value for name, value in options.items()}
    metadata, sides = batch.metadata, (jnp.asarray(side[0]) for side in (batch.key_cache, batch.value_cache))
    places = (metadata.seq_lens, metadata.block_table, metadata.query_start_loc)
    return np.asarray(attention(jnp.asarray(batch.query), *sides, *places, **{"softmax_scale": batch.query.shape[-1] ** -0.5, **given}))


def aiter(batch: Batch) -> Any:
    import torch

    from purepage.bridges.aiter import package

    attention = package.load("unified_attention")
    options = batch.pick("logits_soft_cap", "scale", "sliding_window", "sinks", "alibi_slopes", "qq_bias")
    _need(batch.metadata.causal, "causal only")
    _need(batch.query.dtype.name != "bfloat16", "not judged in bfloat16: this adapter's tensors are NumPy's")
    _need(batch.k_scale.ndim == 1, "one scale for all heads")
    _need(batch.qq_bias is None or batch.qq_bias.ndim == 2, "one bias for all sequences")

    def tensor(array: Any) -> Any:
        found = np.array(array)
        if found.itemsize > 1:
            return torch.from_numpy(found)
        return torch.from_numpy(found.view(np.uint8)).view(getattr(torch, found.dtype.name))

    query, key, value = (tensor(array) for array in (batch.query, batch.key_cache[0], batch.value_cache[0]))
    out, metadata, window = torch.zeros_like(query), batch.metadata, batch.sliding_window
    scales = [torch.full((len(batch.seq_lens), key.shape[2]), float(scale[0])) for scale in (batch.k_scale, batch.v_scale)]
    k_descale, v_descale = scales if batch.key_cache.dtype.itemsize == 1 else (None, None)
    attention(
        q=query,
        k=key,
        v=value,
        out=out,
        cu_seqlens_q=tensor(metadata.query_start_loc),
        max_seqlen_q=metadata.max_query_len,
        seqused_k=tensor(metadata.seq_lens),
        max_seqlen_k=metadata.max_seq_len,
        softmax_scale=options.get("scale", batch.query.shape[-1] ** -0.5),
        causal=True,
        window_size=(window - 1, 0) if window else (-1, -1),
        block_table=tensor(metadata.block_table),
        softcap=options.get("logits_soft_cap", 0.0),
        q_descale=None,
        k_descale=k_descale,
        v_descale=v_descale,
        **{name: tensor(options[name]) for name in ("sinks", "alibi_slopes", "qq_bias") if name in options},
    )
    return out.numpy()


PEERS: Mapping[str, tuple[Callable[[Batch], Any], dict[str, Any]]] = {
    "jax_tpu": (jax_tpu, {"features": {"dtype": ["bfloat16"], "head size": ["128"]}, "compute_dtype": jnp.bfloat16, "pairs": False}),
    "jax_gpu": (jax_gpu, {"features": {"dtype": ["float32", "bfloat16"], "head size": ["128"], "block size": ["16"]}, "pairs": False}),
    "ejkernel": (ejkernel, {"features": {"dtype": ["float32", "bfloat16"], "head size": ["128"], "block size": ["16"]}}),
    "aiter": (aiter, {"features": {"dtype": ["float32", "float16"], "head size": ["64", "80"], "block size": ["32", "16", "48"]}}),
}


def main(names: list[str]) -> None:
    for name in names or PEERS:
        kernel, options = PEERS[name]
        print(f"\n== {name}")
        check_attention(kernel, **options)


if __name__ == "__main__":
    main(sys.argv[1:])
