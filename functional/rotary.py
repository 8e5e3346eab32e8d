"""Rotary position embedding of queries and keys: the public function."""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from . import dispatch
from .calls import RotaryCall
from .checks import MODEL_DTYPES, check_bool, check_tokens
from .config import is_array
from .derivatives import refuse_derivatives
from .errors import bad_type, bad_value
from .integers import narrow
from .literals import Implementation


def check_cos_sin_cache(cos_sin_cache: Any, head_size: int) -> Array:
    """[max_pos, rotary_dim]: cos || sin."""
    if not is_array(cos_sin_cache) or len(cos_sin_cache.shape) != 2 or cos_sin_cache.shape[0] == 0:
        bad_value("cos_sin_cache", cos_sin_cache, "an array of shape [max_pos, rotary_dim]: cos and sin, each rotary_dim/2 wide")
    if jnp.dtype(cos_sin_cache.dtype) not in (*MODEL_DTYPES, np.dtype(np.float64)):
        bad_type("cos_sin_cache", cos_sin_cache, f"of dtype {', '.join(d.name for d in MODEL_DTYPES)}")
    width = cos_sin_cache.shape[1]
    if width == 0 or width % 2 or width > head_size:
        bad_value("cos_sin_cache", cos_sin_cache, f"of an even width (rotary_dim) of at most head_size = {head_size}")
    return jnp.asarray(cos_sin_cache)


def check_positions(positions: Any, shape: tuple[int, ...], max_pos: int) -> Int[Array, "..."]:
    """Positions of `shape` as i32. NumPy integers outside [0, max_pos) raise; positions on a device are not read, and give NaN there."""
    if not is_array(positions) or tuple(positions.shape) != shape:
        bad_value("positions", positions, f"an integer array of shape {list(shape)}")
    if not jnp.issubdtype(positions.dtype, jnp.integer):
        bad_type("positions", positions, "of an integer dtype")
    if isinstance(positions, np.ndarray) and positions.size:
        outside = positions[(positions < 0) | (positions >= max_pos)]
        if outside.size:
            bad_value("positions", int(outside[0]), f"in [0, {max_pos}), the rows of cos_sin_cache")
    return narrow(positions, max_pos)


def rotary_embedding(
    positions: Int[Array, " T"],
    query: Float[Array, "T Hq D"],
    key: Float[Array, "T H D"],
    cos_sin_cache: Float[Array, "P R"],
    *,
    is_neox: bool = True,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "T Hq D"], Float[Array, "T H D"]]:
    """Rotates the first `rotary_dim` channels of every query and key head by its token's position. Ports vLLM's `RotaryEmbedding`.

        neox: out[d] = x[d] cos - x[d + r/2] sin, out[d + r/2] = x[d + r/2] cos + x[d] sin, for d < r/2; gptj: pairs (2j, 2j+1) likewise

    Computed in float32 and rounded once.

    Args:
      positions: [T], any integer dtype. A position outside the rows of `cos_sin_cache` raises where it is a NumPy integer; elsewhere it
        makes the token's rotated channels NaN.
      query: [T, Hq, D]; key: [T, H, D]; float32, float16 or bfloat16.
      cos_sin_cache: [max_pos, rotary_dim], cos || sin, each rotary_dim/2 wide; channels at or past rotary_dim pass through.
      is_neox: pairs (d, d + rotary_dim/2); False (GPT-J): pairs (2j, 2j+1).
      implementation: None (best), "xla", "pallas", "triton" or "aiter".

    Returns:
      (query, key), rotated, in their dtypes.

    Raises:
      ValueError, TypeError: a bad argument: its name, what it was, what it must be.
      UnsupportedError: the named implementation can't serve the call.
    """
    query = check_tokens("query", query, None, None)
    key = check_tokens("key", key, None, query.shape[2])
    if key.shape[0] != query.shape[0]:
        bad_value("key", key, f"of the query's {query.shape[0]} tokens")
    table = check_cos_sin_cache(cos_sin_cache, query.shape[2])
    call = RotaryCall(
        positions=check_positions(positions, query.shape[:1], table.shape[0]),
        query=query,
        key=key,
        cos_sin_cache=table,
        is_neox=check_bool("is_neox", is_neox),
    )
    return dispatch.run("rotary_embedding", refuse_derivatives("rotary_embedding", call), implementation)
