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
# # A decode step from scratch
#
# A language model writes one token at a time. Each new token needs the keys and values of all tokens before it, so these are kept: the *KV
# cache*. Sequences grow, end and are replaced by others of other lengths. A *paged* cache is therefore one pool of equal blocks, and each
# sequence has a list of its blocks, in any order.
#
# This notebook computes one decode step of three sequences by hand and with `purepage`, and compares the results:
#
# 1. **blocks**, and the **table** of the blocks of each sequence,
# 2. **slots**, the positions of single tokens in the pool,
# 3. the **write** of the new tokens' keys and values,
# 4. the **attention** of the new tokens to all tokens before them,
# 5. the same as one pure, compiled function that a model calls at every step.

# %%
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.patches import Rectangle

import purepage as pp

rng = np.random.default_rng(0)
COLORS = ["#4c78a8", "#f58518", "#54a24b"]  # sequences 0, 1, 2
FREE = "#eeeeee"

# %% [markdown]
# ## 1. Blocks and the table
#
# A pool of 12 blocks of 4 tokens each (real ones hold 16 or more). In this layer every token has 2 key and 2 value heads of 8 channels.
# The whole pool is one buffer; a `CacheSpec` describes its layout in memory.

# %%
spec = pp.CacheSpec(num_blocks=12, block_size=4, num_kv_heads=2, head_size=8, dtype=jnp.float32)
cache = pp.init_cache(spec)
cache

# %% [markdown]
# Three sequences of 6, 11 and 3 tokens are active, and each is about to get one more token. An allocator assigned their blocks at different
# times, so they are scattered. Row *s* of the table lists the blocks of sequence *s* in the order of its tokens. Unused entries may be
# anything.

# %%
N = spec.block_size
lengths = np.array([6, 11, 3])
table = np.array([[7, 2, -1, -1], [4, 9, 0, -1], [5, -1, -1, -1]])


# %%
def draw_table(ax):
    for s, row in enumerate(table):
        for j, block in enumerate(row):
            used = block >= 0
            ax.add_patch(Rectangle((j, s), 0.94, 0.9, color=COLORS[s] if used else FREE))
            ax.text(j + 0.47, s + 0.45, block, ha="center", va="center", color="white" if used else "#999999", fontsize=11)
        ax.text(-0.15, s + 0.45, f"sequence {s}", ha="right", va="center")
    ax.set(xlim=(-1.3, table.shape[1]), ylim=(len(table), -0.5), title="block table")
    ax.set_aspect("equal")
    ax.axis("off")


def draw_pool(ax, lengths, new=()):
    """Blocks as columns, their tokens from top to bottom; a number is a token's position in its sequence."""
    for block in range(spec.num_blocks):
        for offset in range(N):
            ax.add_patch(Rectangle((block, offset), 0.94, 0.94, color=FREE))
        ax.text(block + 0.47, -0.35, block, ha="center", color="#555555")
    for s, length in enumerate(lengths):
        for position in range(length):
            block, offset = table[s, position // N], position % N
            edge = {"edgecolor": "black", "linewidth": 2} if (s, position) in new else {}
            ax.add_patch(Rectangle((block, offset), 0.94, 0.94, facecolor=COLORS[s], **edge))
            ax.text(block + 0.47, offset + 0.47, position, ha="center", va="center", color="white", fontsize=9)
    ax.set(xlim=(-0.1, spec.num_blocks), ylim=(N + 0.1, -1), title="pool: a column is a block")
    ax.set_aspect("equal")
    ax.axis("off")


figure, axes = plt.subplots(1, 2, figsize=(11, 2.6), width_ratios=[1, 2.4])
draw_table(axes[0])
draw_pool(axes[1], lengths)

# %% [markdown]
# ## 2. Slots
#
# Token *p* of a sequence is in its block number *p // N*, at offset *p % N*. Its position in the whole pool is its **slot**:
#
# $$\text{slot} = \text{table}[s,\; \lfloor p / N \rfloor] \cdot N + p \bmod N$$

# %%
position = lengths  # the new token of a sequence comes after all others
slots = table[np.arange(3), position // N] * N + position % N
slots

# %% [markdown]
# `make_metadata` derives the same for a whole batch: here each sequence has 1 new token, and 7, 12 and 4 tokens including it.

# %%
metadata = pp.make_metadata(query_lens=[1, 1, 1], seq_lens=lengths + 1, block_table=table, block_size=N)
print("new tokens start at", metadata.query_start_loc)
print("tokens with them   ", metadata.seq_lens)
print("slots              ", metadata.slot_mapping)
assert np.array_equal(metadata.slot_mapping, slots)

# %% [markdown]
# ## 3. Write
#
# First the 6 + 11 + 3 earlier tokens. It is the same call, with more tokens a sequence. Their keys and values would come from a model; here
# they are random.

# %%
past = pp.make_metadata(query_lens=lengths, seq_lens=lengths, block_table=table, block_size=N)
key, value = (jnp.asarray(rng.standard_normal((lengths.sum(), 2, 8)), jnp.float32) for _ in range(2))
cache = pp.update_cache(cache, key, value, past.slot_mapping)
past.slot_mapping

# %% [markdown]
# Now the new tokens, one a sequence, outlined below. `update_cache` is a pure function: it returns a new cache, and the old one is
# unchanged.

# %%
new_key, new_value = (jnp.asarray(rng.standard_normal((3, 2, 8)), jnp.float32) for _ in range(2))
written = pp.update_cache(cache, new_key, new_value, metadata.slot_mapping)

figure, axes = plt.subplots(1, 2, figsize=(13, 2.4))
draw_pool(axes[0], lengths)
draw_pool(axes[1], lengths + 1, new={(s, int(p)) for s, p in enumerate(position)})
axes[0].set_title("before")
axes[1].set_title("after")

keys, values = pp.cache_to_logical(written)  # [block, offset, head, channel], whatever the layout
old_keys, _ = pp.cache_to_logical(cache)
changed = np.flatnonzero((keys != old_keys).any(axis=(2, 3)))
print("slots that changed:", changed)
assert set(changed) == set(slots)
assert np.array_equal(keys.reshape(-1, 2, 8)[slots], new_key)


# %% [markdown]
# ## 4. Attend
#
# The query of each new token attends all tokens of its own sequence and no others. In the pool that is a mask over slots. There are 4 query
# heads for 2 key and value heads (grouped-query attention): query heads 0 and 1 use key head 0, the other two key head 1.


# %%
def slots_of(s):
    """Slots of all tokens of sequence s, in the order of the sequence."""
    p = np.arange(lengths[s] + 1)
    return table[s, p // N] * N + p % N


mask = np.zeros((3, spec.num_slots), bool)
for s in range(3):
    mask[s, slots_of(s)] = True

figure, ax = plt.subplots(figsize=(11, 1.6))
for s in range(3):
    for slot in range(spec.num_slots):
        ax.add_patch(Rectangle((slot, s), 0.9, 0.9, facecolor=COLORS[s] if mask[s, slot] else FREE))
ax.set(xlim=(-0.2, spec.num_slots), ylim=(3, 0), yticks=np.arange(3) + 0.45, yticklabels=["query 0", "query 1", "query 2"])
ax.set(xticks=np.arange(0, spec.num_slots, N), xticklabels=range(spec.num_blocks), xlabel="block", title="who sees which slot")
ax.tick_params(length=0)
ax.spines[:].set_visible(False)

# %% [markdown]
# By hand, in float64: gather a sequence's keys and values in order, compute scores and softmax, and average the values.

# %%
query = jnp.asarray(rng.standard_normal((3, 4, 8)), jnp.float32)


def attend_by_hand(s):
    k = np.asarray(keys, np.float64).reshape(-1, 2, 8)[slots_of(s)]
    v = np.asarray(values, np.float64).reshape(-1, 2, 8)[slots_of(s)]
    outputs, weights = [], []
    for head in range(4):
        scores = k[:, head // 2] @ np.asarray(query, np.float64)[s, head] / np.sqrt(8)
        weight = np.exp(scores - scores.max())
        weight /= weight.sum()
        weights.append(weight)
        outputs.append(weight @ v[:, head // 2])
    return np.array(outputs), np.array(weights)


by_hand = np.stack([attend_by_hand(s)[0] for s in range(3)])
attended = pp.paged_attention(query, written, metadata)
assert np.allclose(attended, by_hand, atol=1e-5)
print("purepage and by hand, largest difference below 1e-5")

# %%
figure, axes = plt.subplots(1, 3, figsize=(11, 1.9), width_ratios=lengths + 1)
for s, ax in enumerate(axes):
    ax.imshow(attend_by_hand(s)[1], cmap="Greys", vmin=0, vmax=0.6)
    ax.set(title=f"sequence {s}", xlabel="position", xticks=range(lengths[s] + 1), yticks=range(4))
    ax.title.set_color(COLORS[s])
axes[0].set(ylabel="query head")
# %% [markdown]
# Slots that a sequence does not own never influence its result, even if they hold NaN:

# %%
owned = np.zeros(spec.num_slots, bool)
for s in range(3):
    owned[slots_of(s)] = True
poison = jnp.where(owned.reshape(12, N, 1, 1), 0, jnp.nan)
poisoned = pp.cache_from_logical(spec, (keys + poison)[None], (values + poison)[None])
assert np.array_equal(pp.paged_attention(query, poisoned, metadata), attended)
print(f"{(~owned).sum()} of {spec.num_slots} slots are NaN, and the result is the same")

# %% [markdown]
# ## 5. One compiled function
#
# A model does the write and the attention in one jitted step per layer. The cache is *donated*: the caller promises not to use it again, so
# the update happens in place, whatever the size of the cache. Lengths, slots and the table are data. Only shapes are fixed, so growing
# sequences need no new compilation.

# %%
traces = 0


def decode_step(cache, query, key, value, metadata):
    global traces
    traces += 1  # runs when jax traces, not when the compiled step runs
    cache = pp.update_cache(cache, key, value, metadata.slot_mapping)
    return pp.paged_attention(query, cache, metadata), cache


step = jax.jit(decode_step, donate_argnums=0)

where, free, grown = cache.data.unsafe_buffer_pointer(), [1, 3, 6, 8, 10, 11], lengths.copy()
for _ in range(5):
    for s in range(3):
        if grown[s] % N == 0:  # its last block is full
            table[s, grown[s] // N] = free.pop(0)
    grown = grown + 1
    metadata = pp.make_metadata([1, 1, 1], grown, table, block_size=N, max_seq_len=table.shape[1] * N)
    query, key, value = (jnp.asarray(rng.standard_normal((3, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    out, cache = step(cache, query, key, value, metadata)

assert traces == 1 and cache.data.unsafe_buffer_pointer() == where
print(f"5 steps, {traces} trace, the cache still at the same address")

figure, axes = plt.subplots(1, 2, figsize=(11, 2.6), width_ratios=[1, 2])
draw_table(axes[0])
draw_pool(axes[1], grown, new={(s, int(p) - 1) for s, p in enumerate(grown)})

# %% [markdown]
# `purepage.testing` has an oracle in NumPy float64, token by token, that shares no code with the library. It can test other kernels too.

# %%
from purepage.testing import assert_close, reference_attention

keys, values = pp.cache_to_logical(cache)
arrays = map(np.asarray, (query, keys, values, metadata.query_start_loc, metadata.seq_lens, metadata.block_table))
expected, _ = reference_attention(*arrays)
assert_close(out, expected, dtype=jnp.float32)
print("the last step's output is the oracle's")

# %% [markdown]
# Next: [02_layouts](02_layouts.py) draws where these tokens lie in memory, and `examples/smollm2` runs a real model this way, with prompts
# and decoding in one batch, blocks allocated and freed as sequences come and go, and shared prefixes: `python -m examples.smollm2`.
