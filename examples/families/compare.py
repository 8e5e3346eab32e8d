"""Each family, tiny and of random weights, beside `transformers`' own model with the same weights."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import torch
import transformers

import purepage as pp

from .model import Audio, Config, Generated, Weights, encode, generate
from .weights import read

BLOCK_SIZE = 4
PROMPTS = (11, 1, 6)
PREFIXES = (7, 1, 6)
"""Tokens of each prompt, and, for a prefix LM, how many of them are its prefix."""

_SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 96}
_HEADS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
_TEXT = {**_SIZES, **_HEADS, "pad_token_id": 0, "tie_word_embeddings": False}
_MIXED = {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "sliding_window": 5, "num_hidden_layers": 3}
_YARN = {"rope_type": "yarn", "rope_theta": 150.0, "factor": 8.0, "original_max_position_embeddings": 12, "truncate": False}
_LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
_LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
_TWO_BASES = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in (("sliding_attention", 1e4), ("full_attention", 1e6))}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4}
_CHUNKS = {"attention_chunk_size": 8, "no_rope_layers": [1, 0, 1], "num_hidden_layers": 3, "floor_scale": 4, "attn_scale": 0.3}
_LLAMA4 = {**_CHUNKS, "intermediate_size_mlp": 48, "num_local_experts": 4}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": _YARN}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1}
_WHISPER = {"num_mel_bins": 6, "d_model": 32, "max_source_positions": 9, "max_target_positions": 96, **_SPECIAL}
_SIDES = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))}
_BERT = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

TINY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**_TEXT, "rope_parameters": _LLAMA3}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _TEXT),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", {**_TEXT, **_MIXED, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {**_TEXT, **_MIXED, "query_pre_attn_scalar": 24, "rope_parameters": _TWO_BASES}),
    "gpt_oss": ("GptOssConfig", "GptOssForCausalLM", {**_TEXT, **_MIXED, **_EXPERTS}),
    "llama4": ("Llama4TextConfig", "Llama4ForCausalLM", {**_TEXT, **_LLAMA4}),
    "mpt": ("MptConfig", "MptForCausalLM", {"vocab_size": 64, "d_model": 48, "n_heads": 6, "n_layers": 2, "max_seq_len": 96}),
    "whisper": ("WhisperConfig", "WhisperForConditionalGeneration", {"vocab_size": 64, **_WHISPER, **_SIDES}),
    "bert": ("BertConfig", "BertForMaskedLM", {"vocab_size": 64, "max_position_embeddings": 24, **_BERT}),
    "paligemma": ("PaliGemmaConfig", "PaliGemmaForConditionalGeneration", {"text_config": _TEXT, "vision_config": _VISION}),
}
"""A configuration, a model and the sizes of each family; `paligemma` is the prefix LM, and reads text alone here."""


def build(family: str, seed: int = 0) -> Any:
    """The model of `transformers`, its weights drawn so that its layers and experts matter and its tokens vary."""
    config_name, model_name, sizes = TINY[family]
    given = dict(sizes)
    if family == "paligemma":
        given["text_config"] = transformers.GemmaConfig(**given["text_config"])
        given["vision_config"] = transformers.SiglipVisionConfig(**given["vision_config"])
        given |= {"projection_dim": given["text_config"].hidden_size, "tie_word_embeddings": False, "image_token_index": 63}
    config = getattr(transformers, config_name)(**{"tie_word_embeddings": False, **given})
    config._attn_implementation = "eager"
    model = getattr(transformers, model_name)(config).eval().float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in sorted(model.named_parameters()):
            mean, std = (weight.mean(), 0.2) if weight.ndim == 1 else (0.0, weight.shape[-1] ** -0.5)
            weight.copy_(mean + std * torch.randn(weight.shape, generator=generator))
            if name.endswith(("lm_head.weight", "proj_out.weight")):
                weight.mul_(3)
    return model


class Comparison(NamedTuple):
    """What ours and theirs say of one sequence: logits of all its tokens, and the tokens that ours decoded (empty for an encoder)."""

    ours: np.ndarray
    theirs: np.ndarray
    tokens: np.ndarray
    prompt_length: int

    @property
    def difference(self) -> float:
        return float(np.max(np.abs(self.ours - self.theirs)))

    @property
    def greedy(self) -> np.ndarray:
        """The tokens that theirs would decode: each the likeliest after those before it."""
        return self.theirs[self.prompt_length - 1 :].argmax(axis=1) if len(self.tokens) else self.tokens


def compare(
    family: str, steps: int = 50, seed: int = 0, change: Callable[[Config, Weights], tuple[Config, Weights]] | None = None
) -> list[Comparison]:
    """Three prompts of different lengths in one batch: ours decodes `steps` tokens of each; theirs reads prompt and tokens at once.

    `change` makes ours another model than theirs.
    """
    model = build(family, seed)
    config, weights = read(model.config, {name: array.numpy() for name, array in model.state_dict().items()})
    if change is not None:
        config, weights = change(config, weights)
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(2, 60, length) for length in PROMPTS]
    tokens = jnp.asarray(np.concatenate(prompts), jnp.int32)
    if family == "bert":
        metadata = pp.make_metadata(PROMPTS, PROMPTS, np.zeros((len(PROMPTS), 0), np.int32), block_size=1, causal=False)
        logits = np.split(np.asarray(encode(weights, tokens, metadata, config=config)), np.cumsum(PROMPTS)[:-1])
        return [Comparison(ours, _theirs(model, prompt), prompt[:0], len(prompt)) for ours, prompt in zip(logits, prompts, strict=True)]

    table, spec = _blocks(rng, max(PROMPTS) + steps, config)
    prefix = np.repeat(PREFIXES, PROMPTS) if family == "paligemma" else None
    metadata = pp.make_metadata(PROMPTS, PROMPTS, table, block_size=BLOCK_SIZE)
    audio = _audio(rng, model.config, config) if family == "whisper" else None
    features = None if audio is None else np.asarray(audio.features)
    out = generate(weights, tokens, pp.init_cache(spec), metadata, config=config, steps=steps, prefix=prefix, audio=audio)
    return [_sequence(model, out, prompts, s, features) for s in range(len(prompts))]


def _sequence(model: Any, out: Generated, prompts: list[np.ndarray], s: int, features: np.ndarray | None) -> Comparison:
    first = sum(PROMPTS[:s])
    tokens = np.asarray(out.tokens[s])
    text = np.concatenate([prompts[s], tokens[:-1]])
    ours = np.concatenate([out.prompt_logits[first : first + PROMPTS[s]], out.logits[s]])
    given: dict[str, Any] = {}
    if features is not None:
        given["input_features"] = torch.tensor(features[s : s + 1])
    if model.config.model_type == "paligemma":
        given["token_type_ids"] = torch.tensor(np.arange(len(text))[None] >= PREFIXES[s]).long()
    return Comparison(ours, _theirs(model, text, **given), tokens, PROMPTS[s])


def _theirs(model: Any, text: np.ndarray, **given: Any) -> np.ndarray:
    name = "decoder_input_ids" if model.config.model_type == "whisper" else "input_ids"
    with torch.no_grad():
        return model(**{name: torch.tensor(text)[None].long()}, use_cache=False, **given).logits[0].numpy()


def _blocks(rng: np.random.Generator, tokens: int, config: Config) -> tuple[np.ndarray, pp.CacheSpec]:
    """A table of shuffled blocks for so many tokens of every sequence, and the cache that has them."""
    table = rng.permutation(len(PROMPTS) * -(-tokens // BLOCK_SIZE)).reshape(len(PROMPTS), -1)
    spec = pp.CacheSpec(
        num_blocks=table.size,
        block_size=BLOCK_SIZE,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        dtype=jnp.float32,
    )
    return table, spec


def _audio(rng: np.random.Generator, theirs: Any, config: Config) -> Audio:
    frames = theirs.max_source_positions
    table, spec = _blocks(rng, frames, config)
    lengths = [frames] * len(PROMPTS)
    prompt, decode = (
        pp.cross_metadata(queries, lengths, table, block_size=BLOCK_SIZE, write=write)
        for queries, write in ((PROMPTS, True), ([1] * len(PROMPTS), False))
    )
    features = rng.standard_normal((len(PROMPTS), theirs.num_mel_bins, 2 * frames)).astype(np.float32)
    return Audio(jnp.asarray(features), pp.init_cache(spec), prompt, decode)
