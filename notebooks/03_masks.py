# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Masks as attention maps
#
# Which keys a query sees is decided by the length of its sequence, by causality, and by what a model adds: windows, chunks, images that see
# themselves whole, trees of draft tokens. Sinks, soft caps and ALiBi change how much it sees of them. Each is an argument of one function,
# `pp.paged_attention`; this notebook draws what each does to the same 24 tokens.
#
# The maps are the library's own: `viz.attention_weights` runs `paged_attention` over values that are unit vectors, so what comes out are
# the weights.

# %%
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import purepage as pp
from purepage import viz

TOKENS, HEADS, SIZE = 24, 4, 32
rng = np.random.default_rng(1)
spec = pp.CacheSpec(num_blocks=6, block_size=8, num_kv_heads=2, head_size=SIZE, dtype=jnp.float32)
keys, values = (jnp.asarray(rng.standard_normal((TOKENS, 2, SIZE)), jnp.float32) for _ in range(2))
query = jnp.asarray(rng.standard_normal((TOKENS, HEADS, SIZE)), jnp.float32)

causal = pp.make_metadata([TOKENS], [TOKENS], [[5, 0, 2]], block_size=8)
both_ways = pp.make_metadata([TOKENS], [TOKENS], [[5, 0, 2]], block_size=8, causal=False)
cache = pp.update_cache(pp.init_cache(spec), keys, values, causal.slot_mapping)
position, _ = pp.key_ranges.rows(causal, TOKENS)

# %% [markdown]
# ## Who is seen
#
# A `key_range` is data: a first and a past-the-last key for each token. `pp.key_ranges` builds the usual ones. Where a token sees keys
# after itself the metadata says `causal=False`, and the range alone decides.

# %%
masks = {
    "causal": (causal, {}),
    "window of 6": (causal, {"sliding_window": 6}),
    "chunks of 8 (Llama 4)": (causal, {"key_range": pp.key_ranges.chunked(position, 8)}),
    "window, both sides": (both_ways, {"sliding_window": 4}),
    "prefix of 7 (PaliGemma)": (both_ways, {"key_range": pp.key_ranges.prefix(position, 7)}),
    "images at 4 to 9 and 13 to 19 (Gemma 3)": (both_ways, {"key_range": pp.key_ranges.spans(position, [4, 13], [9, 19])}),
}
figure, axes = plt.subplots(2, 3, figsize=(13, 9), layout="constrained")
for ax, (name, (metadata, mask)) in zip(axes.flat, masks.items(), strict=True):
    viz.attention_map(query, cache, metadata, ax=ax, **mask)
    ax.set_title(name, fontsize=10)
    visible = viz.visible_keys(metadata, **mask)
    weights = viz.attention_weights(query, cache, metadata, **mask)
    assert np.array_equal(weights[:, 0] > 0, visible)  # the definition of the masks, in NumPy
    assert np.allclose(weights.sum(-1), 1, atol=1e-5)

# %% [markdown]
# The ranges themselves, as bars from the first to the last key that a token sees:

# %%
figure, axes = plt.subplots(1, 3, figsize=(13, 4.4), layout="constrained")
for ax, name in zip(axes, ("chunks of 8 (Llama 4)", "prefix of 7 (PaliGemma)", list(masks)[5]), strict=True):
    metadata, mask = masks[name]
    viz.mask(metadata, ax=ax, **mask)
    ax.set_title(f"{name}\n{ax.get_title()}", fontsize=9)

# %% [markdown]
# ## A tree of draft tokens
#
# Speculative decoding proposes a tree of continuations and checks all of it in one step. Token 18 is the root; `qq_bias` says which of the
# 6 new tokens each of them descends from: 0 where it does, -inf where it does not. Older tokens are seen by all.

# %%
parents = [-1, 0, 0, 1, 1, 2]
tree = np.full((6, 6), -np.inf, np.float32)
for token in range(6):
    ancestor = token
    while ancestor >= 0:
        tree[token, ancestor] = 0
        ancestor = parents[ancestor]
draft = pp.make_metadata([6], [TOKENS], [[5, 0, 2]], block_size=8)
ax = viz.attention_map(query[-6:], cache, draft, qq_bias=jnp.asarray(tree))
ax.set_title("6 draft tokens after 18 tokens", fontsize=10)
assert np.array_equal(
    viz.attention_weights(query[-6:], cache, draft, qq_bias=jnp.asarray(tree))[:, 0] > 0, viz.visible_keys(draft, qq_bias=tree)
)

# %% [markdown]
# ## How much is seen
#
# - A *sink* is a logit in the denominator without a value: the weights of a row sum to less than 1 (gpt-oss).
# - A *soft cap* c replaces a score z by c tanh(z / c): no score is above c, so no key takes all (Gemma 2).
# - *ALiBi* adds a slope times the distance, another slope for each head: far keys lose (BLOOM, MPT).

# %%
scores = {
    "no option": {},
    "sinks of 1, 2, 3, 4": {"sinks": jnp.array([1.0, 2.0, 3.0, 4.0])},
    "soft cap of 0.5": {"logits_soft_cap": 0.5},
    "ALiBi, slopes 1/2, 1/4, 1/8, 1/16": {"alibi_slopes": jnp.array([0.5, 0.25, 0.125, 0.0625])},
}
weights = {name: viz.attention_weights(query, cache, causal, **options) for name, options in scores.items()}
figure, axes = plt.subplots(1, 4, figsize=(15, 3.2), layout="constrained", sharey=True)
for ax, (name, found) in zip(axes, weights.items(), strict=True):
    for head in range(HEADS):
        ax.plot(found[-1, head], marker=".", label=f"head {head}: sum {found[-1, head].sum():.2f}")
    ax.set(title=name, xlabel="position of the key")
    ax.legend(fontsize=7)
axes[0].set_ylabel("weight for the last token")
# %%
assert (weights["sinks of 1, 2, 3, 4"].sum(-1) < 1).all()
plain, capped = weights["no option"], weights["soft cap of 0.5"]
print("largest weight of the last token:", plain[-1].max().round(3), "and with the cap", capped[-1].max().round(3))
assert capped[-1].max() <= np.exp(1.0) / (np.exp(1.0) + TOKENS - 1) + 1e-6  # scores lie in [-0.5, 0.5]

# %% [markdown]
# All of them combine, in every implementation. A masked key never matters, whatever it holds: here all but the last 6 keys are NaN.

# %%
hidden = jnp.where(jnp.arange(TOKENS)[:, None, None] < TOKENS - 6, jnp.nan, 1.0)
poisoned = pp.update_cache(pp.init_cache(spec), keys * hidden, values * hidden, causal.slot_mapping)
last = pp.make_metadata([1], [TOKENS], [[5, 0, 2]], block_size=8)
options = {"sliding_window": 6, "sinks": jnp.ones(HEADS), "logits_soft_cap": 5.0, "alibi_slopes": jnp.full(HEADS, 0.1)}
out = pp.paged_attention(query[-1:], poisoned, last, **options)
assert jnp.array_equal(out, pp.paged_attention(query[-1:], cache, last, **options)) and bool(jnp.isfinite(out).all())
print("18 of 24 keys are NaN, and the result is the same")
