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
# # Layouts: where a token's key and value lie
#
# A cache is one buffer. Which byte belongs to which token is its *layout*: the `content` of a block and the `order` of the axes around it.
# vLLM's two ROCm backends use different ones, because their kernels load keys differently. purepage reads and writes all of them; the same
# call gives the same result in each.
#
# Below, a block of 4 tokens with 2 KV heads of 8 channels in float32 is drawn element by element, in the order of memory. A color is a
# token, keys are strong and values pale, and `K1.3` is channel 3 of head 1's key.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

import purepage as pp
from purepage import viz


def spec_of(content, order="LBHNC", block_size=4):
    return pp.CacheSpec(num_blocks=6, block_size=block_size, num_kv_heads=2, head_size=8, dtype=jnp.float32, content=content, order=order)


# %% [markdown]
# ## `packed` and `flash`: a token's channels are a row
#
# `packed` keeps a key and its value beside each other, head by head. `flash` keeps all keys of a block before all its values, token by
# token.

# %%
figure, axes = plt.subplots(1, 2, figsize=(15, 4), layout="constrained")
for ax, content in zip(axes, ("packed", "flash"), strict=True):
    viz.layout(spec_of(content), ax=ax)

# %% [markdown]
# ## `xpacked` and `shuffled`: vectors of 16 bytes
#
# `ROCM_ATTN`'s native kernels load 16 bytes a lane, here x = 4 channels of float32. So `xpacked` splits a key in vectors of x channels, and
# puts the same vector of all tokens side by side. Its values lie channel by channel, tokens innermost. `shuffled`, AITER's name, keeps x
# tokens of a channel together: values of 8 tokens are two groups of 4. `xpacked_interleaved_v` is the same memory, under the name of the
# backend that writes it. Blocks here have 8 tokens.

# %%
figure, axes = plt.subplots(1, 2, figsize=(15, 5), layout="constrained")
for ax, content in zip(axes, ("xpacked", "shuffled"), strict=True):
    viz.layout(spec_of(content, block_size=8), ax=ax)

# %% [markdown]
# ## Orders
#
# `LBHNC` keeps a block together, `LHBNC` keeps what is outermost in a block (the KV head of `packed`, keys or values of the others) of all
# blocks together. A KV connector that sends whole blocks wants the first. Below are two blocks.

# %%
figure, axes = plt.subplots(2, 2, figsize=(15, 7), layout="constrained")
for row, content in zip(axes, ("packed", "xpacked"), strict=True):
    for ax, order in zip(row, ("LBHNC", "LHBNC"), strict=True):
        viz.layout(spec_of(content, order), blocks=2, ax=ax)

# %% [markdown]
# ## A write, seen in the buffer
#
# `update_cache` puts token 2 of block 4 (slot 4 * 8 + 2) where the picture says. The elements that changed are found by comparing buffers,
# not by asking the library for addresses.

# %%
rng = np.random.default_rng(0)
key, value = (jnp.asarray(rng.standard_normal((1, 2, 8)), jnp.float32) for _ in range(2))
contents = ("packed", "flash", "xpacked", "xpacked_interleaved_v", "shuffled")
figure, axes = plt.subplots(len(contents), 1, figsize=(11, 4.4), layout="constrained", sharex=True)
for ax, content in zip(axes, contents, strict=True):
    cache = pp.init_cache(spec_of(content, block_size=8))
    written = pp.update_cache(cache, key, value, jnp.array([4 * 8 + 2]))
    changed = np.flatnonzero(np.asarray(written.data).ravel() != np.asarray(cache.data).ravel())
    assert len(changed) == 2 * 2 * 8  # key and value, 2 heads of 8 channels
    runs = 1 + int((np.diff(changed) > 1).sum())
    ax.eventplot([changed], lineoffsets=0.5, linelengths=1, linewidths=1.2, colors="#4c78a8")
    ax.set(yticks=[], xlim=(4 * 256 - 4, 5 * 256 + 4), ylim=(0, 1), title=f"{content}: {runs} runs")
axes[-1].set_xlabel("element of the buffer; block 4 is elements 1024 to 1279")
# %% [markdown]
# ## The same result in each
#
# `convert_cache` moves contents between layouts. Attention reads any of them: the bits that it reads are the same, so the results are.

# %%
spec = spec_of("packed", block_size=8)
metadata = pp.make_metadata([3, 1], [11, 5], [[4, 1], [2, -1]], block_size=8)
logical = [jnp.asarray(rng.standard_normal((1, 6, 8, 2, 8)), jnp.float32) for _ in range(2)]
cache = pp.cache_from_logical(spec, *logical)
query = jnp.asarray(rng.standard_normal((4, 4, 8)), jnp.float32)
attend = jax.jit(pp.paged_attention)
expected = attend(query, cache, metadata)
for content in contents:
    for order in ("LBHNC", "LHBNC"):
        other = pp.convert_cache(cache, spec_of(content, order, block_size=8))
        found = attend(query, other, metadata)
        print(f"{content:22} {order}  shape {' '.join(other.spec.axes):14} largest difference {float(jnp.abs(found - expected).max()):.1e}")
        assert jnp.allclose(found, expected, atol=1e-6)

# %% [markdown]
# Which backend of vLLM keeps which:

# %%
for backend in (pp.rocm_attn, pp.rocm_aiter_unified_attn):
    print(f"{backend.CAPABILITIES.name:24}", ", ".join(backend.CAPABILITIES.contents), "in", ", ".join(backend.CAPABILITIES.layouts))

# %% [markdown]
# A spec shows itself as a table:

# %%
spec_of("xpacked", "LHBNC")
