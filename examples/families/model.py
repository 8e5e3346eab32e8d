"""Ten families of transformers as one block over a paged cache: what differs between them is data.

`Config` has a model's static choices and `Weights` its arrays. A weight that a family lacks is None, and its step is left out. What differs
from layer to layer (window, chunk, rope table) is an array that one `lax.scan` walks together with the weights of the layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

import purepage as pp

CacheT = TypeVar("CacheT", pp.KVCache, None)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Static choices; hashable.

    Attributes:
      num_layers, num_heads, num_kv_heads, head_size: of the decoder, or of an encoder that stands alone.
      norm_eps: added inside the root of every norm.
      layer_norm: LayerNorm; False is RMS norm.
      activation: a name in `ACTIVATIONS`.
      scale: factor on the scores; None is head_size ** -0.5.
      soft_cap, final_soft_cap: of the scores and of the logits; None is off.
      embedding_scale: factor on the embedding of a token.
      is_neox: rope turns pairs (d, d + D/2); False: pairs (2j, 2j + 1).
      l2_norm: layers that rotate divide queries and keys by their root mean square (Llama 4).
      temperature: (floor, factor): layers that do not rotate multiply the query of position p by 1 + factor log(1 + (p + 1) // floor)
        (Llama 4).
      experts_per_token: experts that a token is sent to.
      experts_scale_input: sigmoids of the router scale what experts read (Llama 4); False: its softmax weighs what they write (gpt-oss).
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    norm_eps: float
    layer_norm: bool = False
    activation: str = "silu"
    scale: float | None = None
    soft_cap: float | None = None
    final_soft_cap: float | None = None
    embedding_scale: float = 1.0
    is_neox: bool = True
    l2_norm: bool = False
    temperature: tuple[int, float] | None = None
    experts_per_token: int = 0
    experts_scale_input: bool = False


class Linear(NamedTuple):
    """Matrices are `[in, out]`; of experts, `[experts, in, out]`."""

    weight: Float[Array, "*E I O"]
    bias: Float[Array, "*E O"] | None = None


class Norm(NamedTuple):
    scale: Float[Array, " E"]
    bias: Float[Array, " E"] | None = None


class Mlp(NamedTuple):
    up: Linear
    down: Linear
    gate: Linear | None = None


class Attention(NamedTuple):
    query: Linear
    key: Linear
    value: Linear
    out: Linear


class Cross(NamedTuple):
    """Attention over the encoder's tokens."""

    norm: Norm
    attention: Attention


class Layer(NamedTuple):
    """One block; in `Weights` every array has a leading axis of layers.

    Attributes:
      attention_norm, mlp_norm: of what attention and feed-forward read.
      attention_post, mlp_post: of what they return, before it is added (Gemma 2 and 3).
      attention_sum, mlp_sum: of the sum (BERT).
      query_norm, key_norm: weights of the norm of each head, before rope.
      mlp: for every token. router, experts: for those that the router sends.
      sinks: a logit for each query head.
      window: keys that a query sees, itself included; 0 is all. chunk: tokens of a chunk.
      rope: row of `Weights.rope`. rotates: see `Config`; a layer that does not has a table of no rotation.
    """

    attention: Attention
    mlp: Mlp | None = None
    router: Linear | None = None
    experts: Mlp | None = None
    attention_norm: Norm | None = None
    attention_post: Norm | None = None
    attention_sum: Norm | None = None
    mlp_norm: Norm | None = None
    mlp_post: Norm | None = None
    mlp_sum: Norm | None = None
    query_norm: Float[Array, " D"] | None = None
    key_norm: Float[Array, " D"] | None = None
    sinks: Float[Array, " Hq"] | None = None
    cross: Cross | None = None
    window: Int[Array, ""] | None = None
    chunk: Int[Array, ""] | None = None
    rope: Int[Array, ""] | None = None
    rotates: Bool[Array, ""] | None = None


class Convolution(NamedTuple):
    """Over three frames."""

    weight: Float[Array, "O I 3"]
    bias: Float[Array, " O"]


class AudioEncoder(NamedTuple):
    """Whisper's: two convolutions over time, the second of stride 2, then blocks."""

    first: Convolution
    second: Convolution
    positions: Float[Array, "P E"]
    layers: Layer
    norm: Norm


class Weights(NamedTuple):
    """A model. `head_in`: a layer and its norm before the head (BERT). `positions`: learned. `rope`: cos || sin of each kind of layer."""

    embedding: Float[Array, "V E"]
    layers: Layer
    head: Linear
    final_norm: Norm | None = None
    embedding_norm: Norm | None = None
    head_in: tuple[Linear, Norm] | None = None
    positions: Float[Array, "P E"] | None = None
    rope: Float[Array, "K P R"] | None = None
    alibi_slopes: Float[Array, " Hq"] | None = None
    audio: AudioEncoder | None = None


class Audio(NamedTuple):
    """What a decoder attends across to.

    Attributes:
      features: spectrogram of each sequence.
      cache: a second paged cache, for the encoder's keys and values.
      prompt, decode: `pp.cross_metadata` of the prompts, which writes, and of one token a sequence, which does not.
    """

    features: Float[Array, "S M F"]
    cache: pp.KVCache
    prompt: pp.AttentionMetadata
    decode: pp.AttentionMetadata


def _clamped(gate: Array, up: Array) -> Array:
    """gpt-oss's: both sides clamped at 7, a sigmoid of slope 1.702, and 1 added to `up`."""
    gate = jnp.minimum(gate, 7.0)
    return gate * jax.nn.sigmoid(1.702 * gate) * (jnp.clip(up, -7.0, 7.0) + 1)


ACTIVATIONS: dict[str, Callable[[Array, Array], Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu": lambda gate, up: jax.nn.gelu(gate, approximate=False) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "clamped": _clamped,
}


def linear(x: Float[Array, "T I"], w: Linear) -> Float[Array, "T O"]:
    return x @ w.weight if w.bias is None else x @ w.weight + w.bias


def normalize(x: Float[Array, "... E"], eps: float) -> Float[Array, "... E"]:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)


def norm(x: Float[Array, "T E"], w: Norm | None, config: Config) -> Float[Array, "T E"]:
    if w is None:
        return x
    if config.layer_norm:
        x = x - jnp.mean(x, axis=-1, keepdims=True)
    x = normalize(x, config.norm_eps) * w.scale
    return x if w.bias is None else x + w.bias


def feed_forward(x: Float[Array, "T E"], w: Mlp, config: Config) -> Float[Array, "T E"]:
    up = linear(x, w.up)
    hidden = ACTIVATIONS[config.activation](*((up, jnp.ones_like(up)) if w.gate is None else (linear(x, w.gate), up)))
    return linear(hidden, w.down)


def mixture(x: Float[Array, "T E"], w: Layer, config: Config) -> Float[Array, "T E"]:
    """The feed-forward layer, or the experts that the router chooses; every expert computes every token here."""
    out = jnp.zeros_like(x) if w.mlp is None else feed_forward(x, w.mlp, config)
    if w.router is None or w.experts is None:
        return out
    best, chosen = jax.lax.top_k(linear(x, w.router), config.experts_per_token)
    best = jax.nn.sigmoid(best) if config.experts_scale_input else jax.nn.softmax(best)
    share = jnp.sum(jax.nn.one_hot(chosen, w.router.weight.shape[-1]) * best[..., None], axis=1).T[..., None]
    if config.experts_scale_input:
        return out + jnp.sum(jax.vmap(feed_forward, (0, 0, None))(share * x, w.experts, config), axis=0)
    return out + jnp.sum(share * jax.vmap(feed_forward, (None, 0, None))(x, w.experts, config), axis=0)


def block(
    x: Float[Array, "T E"],
    w: Layer,
    config: Config,
    attend: Callable[[Array], tuple[Array, CacheT]],
    across: tuple[pp.KVCache, pp.AttentionMetadata, Array] | None = None,
) -> tuple[Float[Array, "T E"], CacheT]:
    """One block, and the cache that `attend` returns beside [T, Hq, D] for the normed rows.

    Args:
      across: the encoder's cache, the metadata of the attention over it, and the layer.
    """
    tokens = x.shape[0]
    attended, cache = attend(norm(x, w.attention_norm, config))
    attended = linear(attended.reshape(tokens, -1), w.attention.out)
    x = norm(x + norm(attended, w.attention_post, config), w.attention_sum, config)
    if w.cross is not None and across is not None:
        encoded, metadata, layer = across
        query = split_heads(norm(x, w.cross.norm, config), w.cross.attention.query, config.num_heads)
        attended = pp.paged_attention(query, encoded, metadata, layer=layer)
        x = x + linear(attended.reshape(tokens, -1), w.cross.attention.out)
    out = mixture(norm(x, w.mlp_norm, config), w, config)
    return norm(x + norm(out, w.mlp_post, config), w.mlp_sum, config), cache


def split_heads(x: Float[Array, "T I"], w: Linear, heads: int) -> Float[Array, "T H D"]:
    return linear(x, w).reshape(x.shape[0], heads, -1)


def write_and_attend(
    h: Float[Array, "T E"],
    w: Layer,
    layer: Int[Array, ""],
    cache: pp.KVCache,
    weights: Weights,
    metadata: pp.AttentionMetadata,
    prefix: Int[Array, " T"] | None,
    config: Config,
) -> tuple[Float[Array, "T Hq D"], pp.KVCache]:
    """Self attention through the cache, which gets this step's keys and values first."""
    position, _ = pp.key_ranges.rows(metadata, h.shape[0])
    query = split_heads(h, w.attention.query, config.num_heads)
    key, value = (split_heads(h, side, config.num_kv_heads) for side in w.attention[1:3])
    slots = metadata.slot_mapping
    if weights.rope is None:
        cache = pp.update_cache(cache, key, value, slots, layer=layer)
    elif w.query_norm is not None and w.key_norm is not None:
        query, key, value, cache = pp.qk_norm_rope_and_update_cache(
            jnp.concatenate([side.reshape(h.shape[0], -1) for side in (query, key, value)], axis=1),
            w.query_norm,
            w.key_norm,
            position,
            weights.rope[w.rope],
            cache,
            slots,
            num_heads=config.num_heads,
            eps=config.norm_eps,
            is_neox=config.is_neox,
            layer=layer,
        )
    else:
        if config.l2_norm and w.rotates is not None:
            query, key = (jnp.where(w.rotates, normalize(side, config.norm_eps), side) for side in (query, key))
        query, key, cache = pp.rope_and_update_cache(
            query, key, value, position, weights.rope[w.rope], cache, slots, is_neox=config.is_neox, layer=layer
        )
    if config.temperature is not None and w.rotates is not None:
        floor, factor = config.temperature
        warmed = 1 + factor * jnp.log1p(((position + 1) // floor).astype(jnp.float32))
        query = query * jnp.where(w.rotates, 1.0, warmed)[:, None, None]
    ranges = [] if w.chunk is None else [pp.key_ranges.chunked(position, w.chunk)]
    if prefix is not None:
        ranges.append(pp.key_ranges.prefix(position, prefix))
        metadata = replace(metadata, causal=False)  # the range says by itself what a row sees
    attended = pp.paged_attention(
        query,
        cache,
        metadata,
        layer=layer,
        scale=config.scale,
        sliding_window=w.window,
        key_range=pp.key_ranges.intersection(*ranges) if ranges else None,
        logits_soft_cap=config.soft_cap,
        alibi_slopes=weights.alibi_slopes,
        sinks=w.sinks,
    )
    return attended, cache


def embed(weights: Weights, tokens: Int[Array, " T"], metadata: pp.AttentionMetadata, config: Config) -> Float[Array, "T E"]:
    x = weights.embedding[tokens] * config.embedding_scale
    if weights.positions is not None:
        x = x + weights.positions[pp.key_ranges.rows(metadata, tokens.shape[0])[0]]
    return norm(x, weights.embedding_norm, config)


def unembed(x: Float[Array, "T E"], weights: Weights, config: Config) -> Float[Array, "T V"]:
    x = norm(x, weights.final_norm, config)
    if weights.head_in is not None:
        h = linear(x, weights.head_in[0])
        x = norm(ACTIVATIONS[config.activation](h, jnp.ones_like(h)), weights.head_in[1], config)
    logits, cap = linear(x, weights.head), config.final_soft_cap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def decoder(
    weights: Weights,
    tokens: Int[Array, " T"],
    cache: pp.KVCache,
    metadata: pp.AttentionMetadata,
    *,
    config: Config,
    prefix: Int[Array, " T"] | None = None,
    across: tuple[pp.KVCache, pp.AttentionMetadata] | None = None,
) -> tuple[Float[Array, "T V"], pp.KVCache]:
    """Logits of every token of a ragged batch, and the cache with its keys and values.

    Args:
      prefix: tokens of each row's sequence that all of its rows see; None is a causal model.
      across: the encoder's cache, written, and the metadata of its attention.
    """

    def layer(carry: tuple[Array, pp.KVCache], inputs: tuple[Array, Layer]) -> tuple[tuple[Array, pp.KVCache], None]:
        x, cache = carry
        index, w = inputs

        def attend(h: Array) -> tuple[Array, pp.KVCache]:
            return write_and_attend(h, w, index, cache, weights, metadata, prefix, config)

        return block(x, w, config, attend, None if across is None else (*across, index)), None

    x = embed(weights, tokens, metadata, config)
    (x, cache), _ = jax.lax.scan(layer, (x, cache), (jnp.arange(config.num_layers), weights.layers))
    return unembed(x, weights, config), cache


def encoder(x: Float[Array, "T E"], layers: Layer, metadata: pp.AttentionMetadata, config: Config) -> Float[Array, "T E"]:
    """Blocks over packed sequences in which every token sees all of its sequence; nothing is cached."""

    def layer(x: Array, w: Layer) -> tuple[Array, None]:
        def attend(h: Array) -> tuple[Array, None]:
            query, key, value = (split_heads(h, side, config.num_heads) for side in w.attention[:3])
            return pp.encoder_attention(query, key, value, metadata), None

        return block(x, w, config, attend)

    return jax.lax.scan(layer, x, layers)[0]


def encode_audio(weights: Weights, audio: Audio, config: Config) -> pp.KVCache:
    """Encodes the audio, and writes the keys and values that each decoder layer attends across to."""
    frontend, cross = weights.audio, weights.layers.cross
    if frontend is None or cross is None:
        raise ValueError("audio is given, but the model has no audio encoder: audio must be None")
    x = audio.features
    for conv, stride in ((frontend.first, 1), (frontend.second, 2)):
        x = jax.lax.conv_general_dilated(x, conv.weight, (stride,), [(1, 1)]) + conv.bias[:, None]
        x = jax.nn.gelu(x, approximate=False)
    sequences, width, frames = x.shape
    x = (x.transpose(0, 2, 1) + frontend.positions).reshape(-1, width)
    lengths = np.full(sequences, frames)
    packed = pp.make_metadata(lengths, lengths, np.zeros((sequences, 0), np.int32), block_size=1, causal=False)
    x = norm(encoder(x, frontend.layers, packed, config), frontend.norm, config)

    def write(cache: pp.KVCache, inputs: tuple[Array, Cross]) -> tuple[pp.KVCache, None]:
        index, w = inputs
        key, value = (split_heads(x, side, config.num_heads) for side in w.attention[1:3])
        return pp.update_cache(cache, key, value, audio.prompt.slot_mapping, layer=index), None

    return jax.lax.scan(write, audio.cache, (jnp.arange(config.num_layers), cross))[0]


class Generated(NamedTuple):
    """`prompt_logits` of every prompt token, `logits` of every decode step, and the `tokens`, the first of which the prompt gives."""

    prompt_logits: Float[Array, "T V"]
    tokens: Int[Array, "S 1+N"]
    logits: Float[Array, "S N V"]
    cache: pp.KVCache


@partial(jax.jit, static_argnames=("config", "steps"), donate_argnames="cache")
def generate(
    weights: Weights,
    tokens: Int[Array, " T"],
    cache: pp.KVCache,
    metadata: pp.AttentionMetadata,
    *,
    config: Config,
    steps: int,
    prefix: Int[Array, " T"] | None = None,
    audio: Audio | None = None,
) -> Generated:
    """Reads the prompts of a ragged batch, then decodes greedily: prefill and all steps are one program.

    Args:
      tokens: of all prompts, sequence after sequence.
      cache: has blocks for each prompt and `steps` tokens more; donated.
      metadata: of the prompts.
      steps: tokens to decode, static.
      prefix: see `decoder`.
      audio: of each sequence (Whisper).
    """
    encoded = None if audio is None else encode_audio(weights, audio, config)

    def across(step: str) -> tuple[pp.KVCache, pp.AttentionMetadata] | None:
        return None if audio is None or encoded is None else (encoded, getattr(audio, step))

    prompt_logits, cache = decoder(weights, tokens, cache, metadata, config=config, prefix=prefix, across=across("prompt"))
    first = jnp.argmax(prompt_logits[metadata.query_start_loc[1:] - 1], axis=-1)

    def step(carry: tuple[Array, Array, pp.KVCache], _: None) -> tuple[tuple[Array, Array, pp.KVCache], tuple[Array, Array]]:
        tokens, lengths, cache = carry
        one = pp.decode_metadata(lengths, metadata.block_table, block_size=cache.spec.block_size)
        logits, cache = decoder(weights, tokens, cache, one, config=config, across=across("decode"))
        following = jnp.argmax(logits, axis=-1)
        return (following, lengths + 1, cache), (following, logits)

    (_, _, cache), (rest, logits) = jax.lax.scan(step, (first, metadata.seq_lens + 1, cache), None, length=steps)
    return Generated(prompt_logits, jnp.concatenate([first[:, None], rest.T], axis=1), logits.swapaxes(0, 1), cache)


@partial(jax.jit, static_argnames="config")
def encode(weights: Weights, tokens: Int[Array, " T"], metadata: pp.AttentionMetadata, *, config: Config) -> Float[Array, "T V"]:
    """Logits of every token of packed texts, through an encoder that stands alone (BERT)."""
    return unembed(encoder(embed(weights, tokens, metadata, config), weights.layers, metadata, config), weights, config)
