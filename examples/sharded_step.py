"""Compiles a decode step of a large model over a mesh and lists what it moves: `python -m examples.sharded_step --mesh model=8`.

Nothing is allocated or run: weights and cache are shapes. Devices that are missing are CPU devices that only the compiler sees.
"""

import argparse
import math

import jax
import jax.numpy as jnp

import purepage as pp

from .smollm2.model import Attention, Batch, step
from .smollm2.parallel import abstract_weights, divide_config, parse_mesh, weight_shardings
from .smollm2.weights import ModelConfig

_SIZES = ("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_size", "vocab_size")
SHAPES = {
    "llama-8b": ((32, 4096, 32, 8, 128, 128256), 14336),
    "llama-70b": ((80, 8192, 64, 8, 128, 128256), 28672),
    "small": ((2, 256, 8, 4, 32, 512), 512),
}
"""Sizes of a model in the order of `_SIZES`, and channels of its feed-forward layer."""


def model_config(name: str) -> tuple[ModelConfig, int]:
    sizes, hidden = SHAPES[name]
    return ModelConfig(**dict(zip(_SIZES, sizes, strict=True)), context_length=131072, rope_theta=5e5, norm_eps=1e-5), hidden


def compile_step(name: str, s: pp.sharding.Shardings, *, seqs: int, tokens: int, dtype: str = "bfloat16", implementation: str = "xla"):
    """A compiled decode step.

    Args:
      name: one of `SHAPES`.
      s: of the mesh.
      seqs: sequences of the whole batch, one new token each.
      tokens: most tokens of a sequence.
      dtype: of weights and cache.
      implementation: of attention and writers.

    Returns:
      The compiled step, and the cache's shape and place.
    """
    config, hidden = model_config(name)
    config = divide_config(config, s)
    block = 16
    width = -(-tokens // block)
    spec = s.cache_spec(
        pp.CacheSpec(
            num_blocks=seqs * width,
            block_size=block,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            num_layers=config.num_layers,
            dtype=jnp.dtype(dtype),
        )
    )

    def array(shape: tuple[int, ...], kind: str, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.dtype(kind), sharding=sharding)

    cache = jax.tree.map(
        lambda leaf, place: array(leaf.shape, leaf.dtype.name, place), jax.eval_shape(lambda: pp.init_cache(spec)), s.cache(spec)
    )
    shapes = pp.AttentionMetadata(
        *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((seqs + 1,), (seqs,), (seqs, width), (seqs,))),  # type: ignore[arg-type]
        max_query_len=1,
        max_seq_len=width * block,
        block_size=block,
    )
    metadata = jax.tree.map(lambda leaf, place: array(leaf.shape, "int32", place), shapes, s.metadata(shapes))
    weights = abstract_weights(config, hidden, jnp.dtype(dtype))
    weights = jax.tree.map(lambda leaf, place: array(leaf.shape, dtype, place), weights, weight_shardings(weights, s))
    row = {"tokens": "int32", "positions": "int32", "temperature": "float32", "top_p": "float32", "seed": "int32"}
    batch = Batch(metadata=metadata, **{field: array((seqs,), kind, s.rows) for field, kind in row.items()})  # type: ignore[arg-type]
    rope = array((config.context_length, config.head_size), "float32", s.replicated)
    attention = Attention(backend=pp.rocm_aiter_unified_attn, implementation=implementation)
    return step.lower(weights, rope, cache, batch, config=config, attention=attention).compile(), cache


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.sharded_step", description=__doc__)
    parser.add_argument("--model", choices=SHAPES, default="llama-70b")
    parser.add_argument("--mesh", default="model=8", help="devices of each axis (data, context, model)")
    parser.add_argument("--seqs", type=int, default=64, help="sequences of the batch")
    parser.add_argument("--tokens", type=int, default=8192, help="most tokens of a sequence")
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    count = math.prod(int(part.partition("=")[2] or 1) for part in options.mesh.split(","))
    jax.config.update("jax_num_cpu_devices", max(count, 1))
    s = parse_mesh(options.mesh)
    if s is None:
        parser.error("--mesh names no axis")
    compiled, cache = compile_step(options.model, s, seqs=options.seqs, tokens=options.tokens, dtype=options.dtype)
    part = cache.data.sharding.shard_shape(cache.data.shape)
    size = math.prod(part) * cache.data.dtype.itemsize
    layers = model_config(options.model)[0].num_layers
    print(f"{options.model}, {options.seqs} sequences of up to {options.tokens} tokens over {options.mesh}")
    print(f"cache: {cache.data.shape} in all, {part} a device ({size / 2**30:.2f} GiB), updated in place: ", end="")
    memory = compiled.memory_analysis()
    print("yes" if memory is not None and memory.alias_size_in_bytes >= size else "no")
    total = 0.0
    for each in pp.sharding.collectives(compiled.as_text() or ""):
        times = layers if each.in_loop else 1
        total += times * each.sent
        print(f"{times:4} x {each.kind} of {', '.join(each.arrays)} over {each.devices} devices: {each.sent:,.0f} bytes sent by each")
    print(f"a device sends {total:,.0f} bytes a step")


if __name__ == "__main__":
    main()
