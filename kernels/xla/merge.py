"""Merge of two attention results over disjoint keys, in plain JAX."""

import jax
import jax.numpy as jnp

from purepage.functional.calls import MergeCall


@jax.jit
def merge_attention_states(call: MergeCall) -> tuple[jax.Array, jax.Array]:
    """(out [T, Hq, D] in the dtype of `out_a`, lse f32[T, Hq]) of a checked call."""
    # -inf and +inf (FlashAttention 2's word for no keys) both mean that a side saw no key.
    lse_a, lse_b = (jnp.where(jnp.isposinf(lse), -jnp.inf, lse) for lse in (call.lse_a, call.lse_b))
    top = jnp.maximum(lse_a, lse_b)
    base = jnp.where(top == -jnp.inf, 0.0, top)  # -inf - -inf is NaN; two sides without keys are not
    weight_a, weight_b = jnp.exp(lse_a - base), jnp.exp(lse_b - base)
    total = weight_a + weight_b
    divisor = jnp.where(total == 0, 1.0, total)

    def part(weight: jax.Array, out: jax.Array) -> jax.Array:
        share = (weight / divisor)[..., None]
        return jnp.where(share == 0, 0.0, share * out.astype(jnp.float32))  # a side without weight may hold anything

    out = part(weight_a, call.out_a) + part(weight_b, call.out_b)
    return out.astype(call.out_a.dtype), base + jnp.log(total)
