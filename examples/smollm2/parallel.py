"""The model over several devices: a mesh from one flag, and weights that lie like the heads that they make.

Axes are Auto: XLA divides the matrix products as the weights lie, and adds the two all-reduces of a layer; attention and the writers are
divided by purepage as the cache lies.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jaxtyping import Array

import purepage as pp

from .weights import ModelConfig, Weights

AXES = ("data", "context", "model")


def parse_mesh(text: str) -> pp.sharding.Shardings | None:
    """The shardings of a mesh such as "model=2,data=2"; None for an empty text, one device.

    Raises:
      ValueError: an unknown axis, a size that is no positive number, or more devices than there are.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        name, _, size = part.partition("=")
        if name not in AXES or name in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(f"--mesh is {text!r}: it must be sizes of axes, each once, as in model=2,data=2; axes are {', '.join(AXES)}")
        sizes[name] = int(size)
    if not sizes:
        return None
    axes = [name for name in AXES if name in sizes]
    shape = tuple(sizes[name] for name in axes)
    count = 1
    for size in shape:
        count *= size
    if count > jax.device_count():
        raise ValueError(f"--mesh is {text!r}: it needs {count} devices, and JAX has {jax.device_count()}")
    devices = jax.devices()[:count]
    return pp.sharding.Shardings(jax.make_mesh(shape, tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices))


def divide(config: ModelConfig, weights: Weights, s: pp.sharding.Shardings) -> tuple[ModelConfig, Weights]:
    """A config whose heads divide over the axis `model`, and its weights in their places.

    KV heads are repeated and query heads padded where the mesh needs it; a padded head's output meets rows of zeros.
    """
    heads, kv_heads, size = config.num_heads, config.num_kv_heads, config.head_size
    layers = weights.layers

    def split(weight: Array, count: int) -> Array:
        return weight.reshape(*weight.shape[:-1], count, size)

    def joined(weight: Array) -> Array:
        return weight.reshape(*weight.shape[:-2], -1)

    out = layers.attention_out.reshape(layers.attention_out.shape[0], heads, size, -1)
    out = s.pad_heads(out, kv_heads, axis=1)
    layers = replace(
        layers,
        query=joined(s.pad_heads(split(layers.query, heads), kv_heads, axis=2)),
        key=joined(s.repeat_kv_heads(split(layers.key, kv_heads), axis=2)),
        value=joined(s.repeat_kv_heads(split(layers.value, kv_heads), axis=2)),
        attention_out=out.reshape(out.shape[0], -1, out.shape[-1]),
    )
    weights = replace(weights, layers=layers)
    return divide_config(config, s), jax.device_put(weights, weight_shardings(weights, s))


def divide_config(config: ModelConfig, s: pp.sharding.Shardings) -> ModelConfig:
    """The config with the heads that the mesh needs."""
    heads, kv_heads = config.num_heads, config.num_kv_heads
    return replace(config, num_heads=s.num_heads(heads, kv_heads), num_kv_heads=s.num_kv_heads(kv_heads))


def weight_shardings(weights: Weights, s: pp.sharding.Shardings) -> Weights:
    """A sharding for each weight: what makes heads or feed-forward channels is divided by columns, what consumes them by rows."""
    columns, rows = s.named(None, None, s.model), s.named(None, s.model, None)
    channels = weights.layers.gate.shape[-1] % s.size(s.model) == 0
    places = {"query": columns, "key": columns, "value": columns, "attention_out": rows}
    places |= {"gate": columns, "up": columns, "down": rows} if channels else {}
    whole = jax.tree.map(lambda _: s.replicated, weights)
    return replace(whole, layers=replace(whole.layers, **places))


def abstract_weights(config: ModelConfig, hidden: int, dtype: jnp.dtype) -> Weights:
    """Shapes and dtypes of a model's weights, to compile a step of it without them.

    Args:
      config: sizes of the model.
      hidden: channels of the feed-forward layer.
      dtype: of all weights.
    """
    from .weights import LayerWeights

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    depth, width, size = config.num_layers, config.hidden_size, config.head_size
    made: dict = {
        "attention_norm": array(depth, width),
        "query": array(depth, width, config.num_heads * size),
        "key": array(depth, width, config.num_kv_heads * size),
        "value": array(depth, width, config.num_kv_heads * size),
        "attention_out": array(depth, config.num_heads * size, width),
        "mlp_norm": array(depth, width),
        "gate": array(depth, width, hidden),
        "up": array(depth, width, hidden),
        "down": array(depth, hidden, width),
    }
    top: dict = {"embedding": array(config.vocab_size, width), "final_norm": array(width)}
    return Weights(layers=LayerWeights(**made), **top)
