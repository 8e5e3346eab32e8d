"""The Llama model as one pure step function: it takes a ragged batch of tokens and returns the next token of every sequence and the cache.

The step mixes prompts and decoding sequences as they come. One `lax.scan` walks the layers with one cache buffer in its carry, which is
donated and so updated in place.
"""

from dataclasses import dataclass
from functools import partial
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import purepage as pp

from .weights import LayerWeights, ModelConfig, Weights


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["tokens", "positions", "metadata", "temperature", "top_p", "seed"],
    meta_fields=[],
)
@dataclass(frozen=True)
class Batch:
    """One step's T tokens of S sequences, padding included; everything but the shapes is data.

    Attributes:
      tokens, positions: each token's id, and its place in its sequence.
      metadata: where sequences, keys and values lie.
      temperature, top_p, seed: how each sequence samples; temperature 0 is greedy.
    """

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    metadata: pp.AttentionMetadata
    temperature: Float[Array, " S"]
    top_p: Float[Array, " S"]
    seed: Int[Array, " S"]


@dataclass(frozen=True, kw_only=True)
class Attention:
    """Which backend attends, and with which implementation; static, and equal where it is the same.

    Attributes:
      backend: the module `purepage.rocm_attn` or `purepage.rocm_aiter_unified_attn`.
      cache_dtype: vLLM's `kv_cache_dtype`.
      implementation: "xla", "pallas", "triton", "aiter", or None for the best that can serve the call.
    """

    backend: ModuleType
    cache_dtype: str = "auto"
    implementation: str | None = None


def rope_table(config: ModelConfig) -> Float[Array, "P D"]:
    """cos || sin of every position and frequency, computed in float64."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size)
    angles = np.arange(config.context_length, dtype=np.float64)[:, None] * frequencies
    return jnp.asarray(np.concatenate([np.cos(angles), np.sin(angles)], axis=1), jnp.float32)


def rms_norm(x: Float[Array, "T E"], weight: Float[Array, " E"], eps: float) -> Float[Array, "T E"]:
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return scaled.astype(x.dtype) * weight


def forward(
    weights: Weights, rope: Float[Array, "P D"], cache: pp.KVCache, batch: Batch, *, config: ModelConfig, attention: Attention
) -> tuple[Float[Array, "S V"], pp.KVCache]:
    """Logits (float32) after the last token of each sequence, and the cache with this step's keys and values in it.

    The row of a sequence without tokens in this step means nothing.
    """
    backend, heads, kv_heads, size = attention.backend, config.num_heads, config.num_kv_heads, config.head_size
    slots = batch.metadata.slot_mapping
    layer_config = pp.AttentionConfig(num_heads=heads, num_kv_heads=kv_heads, head_size=size, kv_cache_dtype=attention.cache_dtype)

    def layer(carry: tuple[Array, pp.KVCache], inputs: tuple[Array, LayerWeights]) -> tuple[tuple[Array, pp.KVCache], None]:
        x, cache = carry
        index, w = inputs
        h = rms_norm(x, w.attention_norm, config.norm_eps)
        query = (h @ w.query).reshape(-1, heads, size)
        key, value = ((h @ weight).reshape(-1, kv_heads, size) for weight in (w.key, w.value))
        query, key, cache = backend.rope_and_kv_cache_update(
            query, key, value, batch.positions, rope, cache, slots, layer_config, layer=index, implementation=attention.implementation
        )
        attended = backend.forward(
            query, key, value, cache, batch.metadata, layer_config, layer=index, implementation=attention.implementation
        )
        x = x + attended.reshape(-1, heads * size) @ w.attention_out
        h = rms_norm(x, w.mlp_norm, config.norm_eps)
        return (x + (jax.nn.silu(h @ w.gate) * (h @ w.up)) @ w.down, cache), None

    x = weights.embedding[batch.tokens]
    (x, cache), _ = jax.lax.scan(layer, (x, cache), (jnp.arange(config.num_layers), weights.layers))
    last = jnp.maximum(batch.metadata.query_start_loc[1:] - 1, 0)
    x = rms_norm(x[last], weights.final_norm, config.norm_eps)
    return jnp.matmul(x, weights.embedding.T, preferred_element_type=jnp.float32), cache


def sample(logits: Float[Array, "S V"], batch: Batch) -> Int[Array, " S"]:
    """The next token of each sequence: the likeliest where its temperature is 0, else drawn from the smallest set of tokens that has
    `top_p` of the probability.

    The draw depends on the sequence's seed and length alone, so a reply does not change with its neighbours in the batch.
    """
    greedy = jnp.argmax(logits, axis=-1)

    def draw(logits: Array, temperature: Array, top_p: Array, seed: Array, length: Array) -> Array:
        scaled = logits / jnp.where(temperature > 0, temperature, 1)
        kept = jnp.where(nucleus(scaled, top_p), scaled, -jnp.inf)
        return jax.random.categorical(jax.random.fold_in(jax.random.key(seed), length), kept)

    def drawn() -> Array:
        sampled = jax.vmap(draw)(logits, batch.temperature, batch.top_p, batch.seed, batch.metadata.seq_lens)
        return jnp.where(batch.temperature > 0, sampled, greedy)

    return jax.lax.cond(jnp.any(batch.temperature > 0), drawn, lambda: greedy)


def nucleus(logits: Float[Array, " V"], top_p: Float[Array, ""]) -> Bool[Array, " V"]:
    """The smallest set of likeliest tokens that has `top_p` of the probability; ties at its edge are all in it.

    Bisects the least probability of the set instead of sorting the vocabulary, which would take as long as the model: floats from 0 up are
    in the order of their bits, so 31 halvings are exact.
    """
    probability = jax.nn.softmax(logits)
    bits = jax.lax.bitcast_convert_type(probability, jnp.int32)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        enough, short = bounds
        middle = enough + (short - enough) // 2
        has_enough = jnp.sum(jnp.where(bits >= middle, probability, 0)) >= top_p
        return jnp.where(has_enough, middle, enough), jnp.where(has_enough, short, middle)

    edge, _ = jax.lax.fori_loop(0, 31, halve, (jnp.int32(0), jnp.max(bits) + 1))
    return (bits >= edge) | (top_p >= 1)


@partial(jax.jit, static_argnames=("config", "attention"), donate_argnames="cache")
def step(
    weights: Weights, rope: Float[Array, "P D"], cache: pp.KVCache, batch: Batch, *, config: ModelConfig, attention: Attention
) -> tuple[Int[Array, " S"], pp.KVCache]:
    """One step of the model: the next token of every sequence, and the cache, updated in place."""
    logits, cache = forward(weights, rope, cache, batch, config=config, attention=attention)
    return sample(logits, batch), cache
