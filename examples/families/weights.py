"""Models of `transformers` as this example's `Config` and `Weights`, by the names of their arrays; needs neither torch nor transformers."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .model import Attention, AudioEncoder, Config, Convolution, Cross, Layer, Linear, Mlp, Norm, Weights

State = Mapping[str, np.ndarray]
"""Arrays by name, as `state_dict()` has them."""


def _linear(state: State, name: str) -> Linear:
    """torch's matrices are [out, in]."""
    bias = state.get(f"{name}.bias")
    return Linear(jnp.asarray(state[f"{name}.weight"].T), None if bias is None else jnp.asarray(bias))


def _norm(state: State, name: str, offset: float = 0.0) -> Norm:
    """`offset` is added to the weight: 1 in Gemma."""
    bias = state.get(f"{name}.bias")
    return Norm(jnp.asarray(state[f"{name}.weight"] + np.float32(offset)), None if bias is None else jnp.asarray(bias))


def _mlp(state: State, name: str) -> Mlp:
    up, down, gate = (_linear(state, f"{name}.{side}_proj") for side in ("up", "down", "gate"))
    return Mlp(up, down, gate)


def _attention(state: State, *names: str) -> Attention:
    return Attention(*(_linear(state, name) for name in names))


def _stack(layers: list[Layer]) -> Layer:
    return jax.tree.map(lambda *sides: jnp.stack(sides), *layers)


def rope_table(parameters: Mapping[str, Any], head_size: int, length: int) -> np.ndarray:
    """cos || sin of every position and frequency, [length, head_size], from `rope_parameters` of a configuration."""
    kind, base = parameters.get("rope_type", "default"), parameters["rope_theta"]
    frequencies, factor = base ** (-np.arange(0, head_size, 2) / head_size), 1.0
    if kind == "yarn":
        stretch = parameters["factor"]
        # The index of the frequency that turns so many times within the length of pretraining.
        turns = np.array([parameters.get("beta_fast", 32.0), parameters.get("beta_slow", 1.0)])
        bounds = head_size * np.log(parameters["original_max_position_embeddings"] / (2 * np.pi * turns)) / (2 * np.log(base))
        if parameters.get("truncate", True):
            bounds = np.array([np.floor(bounds[0]), np.ceil(bounds[1])])
        low, high = max(bounds[0], 0), min(bounds[1], head_size - 1)
        slow = np.clip((np.arange(head_size // 2) - low) / max(high - low, 1e-3), 0, 1)
        frequencies = frequencies * (1 - slow) + frequencies / stretch * slow
        factor = parameters.get("attention_factor") or 0.1 * np.log(stretch) + 1
    elif kind == "llama3":
        low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
        turns = parameters["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        slow = np.clip((high - turns) / (high - low), 0, 1)
        frequencies = frequencies * (1 - slow) + frequencies / parameters["factor"] * slow
    elif kind != "default":
        raise ValueError(f"rope_type is {kind!r}: must be 'default', 'llama3' or 'yarn'")
    angles = np.arange(length)[:, None] * frequencies
    return (factor * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)).astype(np.float32)


def alibi_slopes(heads: int) -> np.ndarray:
    """MPT's: 2 ** -(8 i / n) for head i of n, n a power of two; of the heads of the next power, every other one first."""
    power = 1 << (heads - 1).bit_length()
    slopes = 2.0 ** -(8 / power * np.arange(1, power + 1))
    return (slopes if power == heads else np.concatenate([slopes[1::2], slopes[::2]])[:heads]).astype(np.float32)


def _activation(config: Any) -> str:
    """Its name in `ACTIVATIONS`."""
    if config.model_type == "gpt_oss":
        slope, limit = getattr(config, "swiglu_alpha", 1.702), getattr(config, "swiglu_limit", 7.0)
        if (slope, limit) != (1.702, 7.0):
            raise ValueError(f"swiglu_alpha and swiglu_limit are {slope} and {limit}: must be 1.702 and 7.0")
        return "clamped"
    names = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh"}
    given = getattr(config, "hidden_activation", None) or config.hidden_act
    if given not in names:
        raise ValueError(f"hidden_act is {given!r}: must be one of {', '.join(names)}")
    return names[given]


def llama(config: Any, state: State) -> tuple[Config, Weights]:
    """Llama, Qwen3, Gemma, Gemma 2, Gemma 3, gpt-oss, Llama 4 and the text side of PaliGemma."""
    family = config.model_type
    root = "model.language_model." if family == "paligemma" else "model."
    config = config.get_text_config()
    gemma, mixed = "gemma" in family, family in ("gpt_oss", "llama4_text")
    layers = [_llama_layer(config, state, f"{root}layers.{i}.", i) for i in range(config.num_hidden_layers)]
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * len(layers)
    parameters = config.rope_parameters if family == "gemma3_text" else {"full_attention": config.rope_parameters}
    tables = [rope_table(parameters[kind], config.head_dim, config.max_position_embeddings) for kind in parameters]
    if family == "llama4_text":
        half = np.ones_like(tables[0][:, : config.head_dim // 2])
        tables.append(np.concatenate([half, 0 * half], axis=1))  # no rotation
        rows = [0 if rotates else 1 for rotates in config.no_rope_layers]
    else:
        rows = [list(parameters).index(kind) if kind in parameters else 0 for kind in kinds]
    data: dict[str, Any] = {"rope": rows}
    if "sliding_attention" in kinds:
        data["window"] = [config.sliding_window if kind == "sliding_attention" else 0 for kind in kinds]
    if "chunked_attention" in kinds:
        data["chunk"] = [config.attention_chunk_size if kind == "chunked_attention" else np.iinfo(np.int32).max for kind in kinds]
    if family == "llama4_text":
        data["rotates"] = [bool(rotates) for rotates in config.no_rope_layers]
    ours = Config(
        num_layers=len(layers),
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        norm_eps=config.rms_norm_eps,
        activation=_activation(config),
        scale=config.query_pre_attn_scalar**-0.5 if family in ("gemma2", "gemma3_text") else None,
        soft_cap=getattr(config, "attn_logit_softcapping", None),
        final_soft_cap=getattr(config, "final_logit_softcapping", None),
        embedding_scale=config.hidden_size**0.5 if gemma else 1.0,
        is_neox=family != "llama4_text",
        l2_norm=getattr(config, "use_qk_norm", False),
        temperature=(config.floor_scale, config.attn_scale) if getattr(config, "attn_temperature_tuning", False) else None,
        experts_per_token=config.num_experts_per_tok if mixed else 0,
        experts_scale_input=family == "llama4_text",
    )
    weights = Weights(
        embedding=jnp.asarray(state[f"{root}embed_tokens.weight"]),
        layers=_stack(layers)._replace(**{name: jnp.asarray(values) for name, values in data.items()}),
        head=_linear(state, "lm_head"),
        final_norm=_norm(state, f"{root}norm", gemma),
        rope=jnp.asarray(np.stack(tables)),
    )
    return ours, weights


def _llama_layer(config: Any, state: State, name: str, index: int) -> Layer:
    family = config.model_type
    gemma = "gemma" in family
    sandwich = family in ("gemma2", "gemma3_text")

    def normed(side: str) -> Norm:
        return _norm(state, name + side, gemma)

    layer = Layer(
        _attention(state, *(f"{name}self_attn.{side}_proj" for side in "qkvo")),
        attention_norm=normed("input_layernorm"),
        attention_post=normed("post_attention_layernorm") if sandwich else None,
        mlp_norm=normed("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
        mlp_post=normed("post_feedforward_layernorm") if sandwich else None,
    )
    if f"{name}self_attn.q_norm.weight" in state:
        layer = layer._replace(query_norm=normed("self_attn.q_norm").scale, key_norm=normed("self_attn.k_norm").scale)
    if family == "gpt_oss":
        # Columns of gate and up alternate.
        weight, bias = (state[f"{name}mlp.experts.gate_up_proj{end}"] for end in ("", "_bias"))
        up, gate = (Linear(jnp.asarray(weight[..., i::2]), jnp.asarray(bias[..., i::2])) for i in (1, 0))
        down = Linear(*(jnp.asarray(state[f"{name}mlp.experts.down_proj{end}"]) for end in ("", "_bias")))
        sinks = jnp.asarray(state[f"{name}self_attn.sinks"])
        return layer._replace(router=_linear(state, f"{name}mlp.router"), experts=Mlp(up, down, gate), sinks=sinks)
    if family == "llama4_text":
        if index not in config.moe_layers:
            raise ValueError(f"moe_layers is {config.moe_layers}: must name every layer, as the layers of one scan are alike")
        name += "feed_forward."
        gate, up = map(jnp.asarray, np.split(state[f"{name}experts.gate_up_proj"], 2, axis=2))
        experts = Mlp(Linear(up), Linear(jnp.asarray(state[f"{name}experts.down_proj"])), Linear(gate))
        return layer._replace(mlp=_mlp(state, f"{name}shared_expert"), router=_linear(state, f"{name}router"), experts=experts)
    return layer._replace(mlp=_mlp(state, f"{name}mlp"))


def mpt(config: Any, state: State) -> tuple[Config, Weights]:
    """MPT: ALiBi, LayerNorm without bias, one matrix for queries, keys and values."""
    if config.attn_config.clip_qkv:
        raise ValueError(f"clip_qkv is {config.attn_config.clip_qkv}: must be None")
    layers = []
    for i in range(config.n_layers):
        name = f"transformer.blocks.{i}."
        query, key, value = (Linear(jnp.asarray(side.T)) for side in np.split(state[f"{name}attn.Wqkv.weight"], 3))
        layer = Layer(
            Attention(query, key, value, _linear(state, f"{name}attn.out_proj")),
            mlp=Mlp(_linear(state, f"{name}ffn.up_proj"), _linear(state, f"{name}ffn.down_proj")),
            attention_norm=_norm(state, f"{name}norm_1"),
            mlp_norm=_norm(state, f"{name}norm_2"),
        )
        layers.append(layer)
    ours = Config(
        num_layers=config.n_layers,
        num_heads=config.n_heads,
        num_kv_heads=config.n_heads,
        head_size=config.d_model // config.n_heads,
        norm_eps=config.layer_norm_epsilon,
        layer_norm=True,
        activation="gelu",
        scale=config.attn_config.softmax_scale,
    )
    weights = Weights(
        embedding=jnp.asarray(state["transformer.wte.weight"]),
        layers=_stack(layers),
        head=_linear(state, "lm_head"),
        final_norm=_norm(state, "transformer.norm_f"),
        alibi_slopes=jnp.asarray(alibi_slopes(config.n_heads)),
    )
    return ours, weights


def whisper(config: Any, state: State) -> tuple[Config, Weights]:
    """Whisper: an audio encoder, and a decoder that attends across to it."""
    if config.encoder_attention_heads != config.decoder_attention_heads:
        raise ValueError(f"encoder_attention_heads is {config.encoder_attention_heads}: must be decoder_attention_heads here")

    def attention(name: str) -> Attention:
        return _attention(state, *(f"{name}.{side}_proj" for side in ("q", "k", "v", "out")))

    def layers(side: str, count: int) -> Layer:
        found = []
        for i in range(count):
            name = f"model.{side}.layers.{i}."
            cross = Cross(_norm(state, f"{name}encoder_attn_layer_norm"), attention(f"{name}encoder_attn")) if side == "decoder" else None
            layer = Layer(
                attention(f"{name}self_attn"),
                mlp=Mlp(_linear(state, f"{name}fc1"), _linear(state, f"{name}fc2")),
                attention_norm=_norm(state, f"{name}self_attn_layer_norm"),
                mlp_norm=_norm(state, f"{name}final_layer_norm"),
                cross=cross,
            )
            found.append(layer)
        return _stack(found)

    def convolution(name: str) -> Convolution:
        return Convolution(*(jnp.asarray(state[f"model.encoder.{name}.{side}"]) for side in ("weight", "bias")))

    ours = Config(
        num_layers=config.decoder_layers,
        num_heads=config.decoder_attention_heads,
        num_kv_heads=config.decoder_attention_heads,
        head_size=config.d_model // config.decoder_attention_heads,
        norm_eps=1e-5,
        layer_norm=True,
        activation="gelu",
        embedding_scale=config.d_model**0.5 if config.scale_embedding else 1.0,
    )
    audio = AudioEncoder(
        convolution("conv1"),
        convolution("conv2"),
        jnp.asarray(state["model.encoder.embed_positions.weight"]),
        layers("encoder", config.encoder_layers),
        _norm(state, "model.encoder.layer_norm"),
    )
    weights = Weights(
        embedding=jnp.asarray(state["model.decoder.embed_tokens.weight"]),
        layers=layers("decoder", config.decoder_layers),
        head=_linear(state, "proj_out"),
        final_norm=_norm(state, "model.decoder.layer_norm"),
        positions=jnp.asarray(state["model.decoder.embed_positions.weight"]),
        audio=audio,
    )
    return ours, weights


def bert(config: Any, state: State) -> tuple[Config, Weights]:
    """BERT with the head of its masked language model; every token is of type 0."""
    layers = []
    for i in range(config.num_hidden_layers):
        name = f"bert.encoder.layer.{i}."
        layer = Layer(
            _attention(state, *(f"{name}attention.{side}" for side in ("self.query", "self.key", "self.value", "output.dense"))),
            mlp=Mlp(_linear(state, f"{name}intermediate.dense"), _linear(state, f"{name}output.dense")),
            attention_sum=_norm(state, f"{name}attention.output.LayerNorm"),
            mlp_sum=_norm(state, f"{name}output.LayerNorm"),
        )
        layers.append(layer)
    ours = Config(
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_attention_heads,
        head_size=config.hidden_size // config.num_attention_heads,
        norm_eps=config.layer_norm_eps,
        layer_norm=True,
        activation="gelu",
    )
    embeddings, head = "bert.embeddings.", "cls.predictions."
    weights = Weights(
        embedding=jnp.asarray(state[f"{embeddings}word_embeddings.weight"]),
        layers=_stack(layers),
        head=_linear(state, f"{head}decoder"),
        embedding_norm=_norm(state, f"{embeddings}LayerNorm"),
        head_in=(_linear(state, f"{head}transform.dense"), _norm(state, f"{head}transform.LayerNorm")),
        positions=jnp.asarray(state[f"{embeddings}position_embeddings.weight"] + state[f"{embeddings}token_type_embeddings.weight"][0]),
    )
    return ours, weights


READERS: dict[str, Callable[[Any, State], tuple[Config, Weights]]] = {
    **dict.fromkeys(("llama", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt_oss", "llama4_text", "paligemma"), llama),
    "mpt": mpt,
    "whisper": whisper,
    "bert": bert,
}
"""By `model_type` of a configuration."""


def read(config: Any, state: State) -> tuple[Config, Weights]:
    """A model of `transformers` as ours.

    Args:
      config: its configuration.
      state: its arrays by name, float32.

    Raises:
      ValueError: a family or an option that this example does not have.
    """
    if config.model_type not in READERS:
        raise ValueError(f"model_type is {config.model_type!r}: must be one of {', '.join(sorted(READERS))}")
    return READERS[config.model_type](config, state)
