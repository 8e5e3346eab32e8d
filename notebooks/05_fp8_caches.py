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
# # fp8 caches: memory against error, on a real model's keys
#
# A cache in fp8 takes half the memory of bfloat16, so twice as many sequences fit. It costs rounding: 3 or 2 bits of mantissa, and a range
# that needs a scale. This notebook takes keys and values of SmolLM2-135M for a text, stores them in every dtype with three kinds of scales,
# and measures the error of keys, values and attention outputs.

# %%
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # examples/

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import ml_dtypes
import numpy as np
from gguf import GGUFReader

import purepage as pp
from examples.smollm2.engine import Engine
from examples.smollm2.scheduler import Sequence
from examples.smollm2.tokenizer import read_tokenizer
from examples.smollm2.weights import find_gguf, load

TEXT = """A language model writes one token at a time. Each new token needs the keys and values of all tokens before it, so these
are kept in a cache. Sequences grow, end and are replaced by others of other lengths. A paged cache is one pool of equal
blocks, and each sequence has a list of its blocks, in any order. Why is the sky blue? The sky appears blue because air
scatters short waves more than long ones, as Rayleigh found."""

config, weights = load()
ids = read_tokenizer(GGUFReader(find_gguf())).encode(TEXT)
engine = Engine(config, weights, max_seqs=1, max_tokens=128, max_seq_len=144)
sequence, count = Sequence(tuple(ids), max_tokens=2), len(ids)
next(engine.generate([sequence]))  # the first step computes the whole text
assert sequence.computed == count
blocks = np.array(sequence.blocks)
print(f"{count} tokens, {config.num_layers} layers, {config.num_kv_heads} KV heads of {config.head_size}")

# %% [markdown]
# `cache_to_logical` gives keys and values of a layer, whatever the layout. These are the text's, `[layer, token, head, channel]`:

# %%
sides = []
for layer in range(config.num_layers):
    sides.append([np.asarray(side)[blocks].reshape(-1, *side.shape[2:])[:count] for side in pp.cache_to_logical(engine.cache, layer)])
keys, values = (np.stack([pair[side] for pair in sides]) for side in (0, 1))
figure, ax = plt.subplots(figsize=(9, 3), layout="constrained")
for name, side in (("keys", keys), ("values", values)):
    largest = np.abs(side).max((1, 2, 3))
    ax.semilogy(largest, marker="o", label=f"{name}: largest")
    ax.semilogy(side.std((1, 2, 3)), marker=".", linestyle="--", label=f"{name}: standard deviation")
ax.set(xlabel="layer", ylabel="magnitude")
ax.legend(fontsize=8, ncols=2)
# %% [markdown]
# ## Storing them
#
# A stored value is round(clamp(value / scale)). Three kinds of scales: 1 everywhere; one a layer, so that the largest value just fits; one
# a layer and head. The cache's own writer stores, and `cache_to_logical` reads the codes back.

# %%
DTYPES = {name: getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")}
KINDS = ("1", "layer", "head")


def scale_of(side, dtype, kind):
    most = float(ml_dtypes.finfo(dtype).max)
    if kind == "1" or np.dtype(dtype).itemsize > 1:
        return np.ones(config.num_layers, np.float32)
    return (np.abs(side).max((1, 3) if kind == "head" else (1, 2, 3)) / most).astype(np.float32)


SLOTS = jnp.arange(count)


@jax.jit
def write(cache, key, value):
    for layer in range(config.num_layers):
        cache = pp.update_cache(cache, key[layer], value[layer], SLOTS, layer=layer)
    return cache


def stored(dtype, kind):
    spec = pp.CacheSpec(
        num_blocks=-(-count // 16),
        block_size=16,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        num_layers=config.num_layers,
        dtype=dtype,
    )
    cache = pp.init_cache(spec, k_scale=scale_of(keys, dtype, kind), v_scale=scale_of(values, dtype, kind))
    return write(cache, jnp.asarray(keys), jnp.asarray(values))


def read(cache, layer):
    found = []
    for side, scale in zip(pp.cache_to_logical(cache, layer), (cache.k_scale, cache.v_scale), strict=True):
        codes = np.asarray(side).astype(np.float32).reshape(-1, *side.shape[2:])[:count]
        found.append(codes * np.asarray(scale)[layer].reshape(1, -1, 1))
    return found


def error(found, exact):
    """Root mean square of the error over that of the values."""
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))


errors, sizes = {}, {}
for name, dtype in DTYPES.items():
    for kind in KINDS if name != "bfloat16" else ("1",):
        cache = stored(dtype, kind)
        label = name if name == "bfloat16" else f"{name}, scale {'of 1' if kind == '1' else 'a ' + kind}"
        sizes[label] = cache.nbytes
        pairs = [read(cache, layer) for layer in range(config.num_layers)]
        errors[label] = [[error(pair[side], exact[layer]) for layer, pair in enumerate(pairs)] for side, exact in enumerate((keys, values))]

figure, axes = plt.subplots(1, 2, figsize=(12, 4), layout="constrained", sharey=True)
for ax, side in zip(axes, (0, 1), strict=True):
    for label, found in errors.items():
        if "fnuz" not in label:
            ax.semilogy(found[side], marker=".", label=label)
    ax.set(xlabel="layer", title=("keys", "values")[side])
axes[0].set_ylabel("relative error")
axes[1].legend(fontsize=7)
for label, (of_keys, of_values) in errors.items():
    print(f"{label:34} {sizes[label] / 2**10:6.0f} KiB   keys {np.mean(of_keys):.4f}   values {np.mean(of_values):.4f}")
assert sizes["float8_e4m3fn, scale of 1"] * 2 == sizes["bfloat16"]

# %% [markdown]
# A float has the same relative precision wherever it is normal, so a scale changes little while values are neither above the largest nor
# far below the smallest normal number. How far a scale may be off shows in one layer:

# %%
LAYER = config.num_layers // 2
factors = 2.0 ** np.arange(-16, 13)
figure, ax = plt.subplots(figsize=(8, 3.4), layout="constrained")
for name, dtype in list(DTYPES.items())[1:]:
    most = np.abs(keys[LAYER]).max() / float(ml_dtypes.finfo(dtype).max)
    found = []
    for factor in factors:
        scale = np.float32(most * factor)
        limit = float(ml_dtypes.finfo(dtype).max)
        codes = np.clip(keys[LAYER] / scale, -limit, limit).astype(dtype)
        found.append(error(codes.astype(np.float32) * scale, keys[LAYER]))
    ax.loglog(factors, found, marker=".", label=name, base=2)
    assert found[list(factors).index(1.0)] < 0.06
ax.set(xlabel="scale, as a multiple of largest key / largest code", ylabel="relative error", title=f"keys of layer {LAYER}")
ax.axvline(1, color="#999999", linewidth=0.8)
ax.legend(fontsize=8)
# %% [markdown]
# ## What attention makes of it
#
# Errors of keys enter the scores, errors of values the result. The queries are random, of the size of keys. Every implementation and the
# oracle compute from the stored codes, so this is the error of the storage alone.

# %%
rng = np.random.default_rng(0)
query = jnp.asarray(rng.standard_normal((1, config.num_heads, config.head_size)) * keys[LAYER].std(), jnp.float32)
table = np.arange(-(-count // 16))[None]
metadata = pp.make_metadata([1], [count], table, block_size=16)
exact = pp.paged_attention(query, stored(np.float32, "1"), metadata, layer=LAYER)
rows = {}
for name, dtype in DTYPES.items():
    for kind in KINDS if name != "bfloat16" else ("1",):
        out = pp.paged_attention(query, stored(dtype, kind), metadata, layer=LAYER, output_dtype=jnp.float32)
        rows[name if name == "bfloat16" else f"{name}, {kind}"] = error(np.asarray(out), np.asarray(exact))
figure, ax = plt.subplots(figsize=(8, 3.6), layout="constrained")
ax.barh(list(rows), list(rows.values()), color=["#54a24b"] + ["#4c78a8"] * (len(rows) - 1))
ax.set(xscale="log", xlabel="relative error of the output", title=f"attention of layer {LAYER}")
ax.invert_yaxis()
assert max(rows["float8_e4m3fn, layer"], rows["float8_e4m3fn, head"]) < rows["float8_e5m2, layer"]  # a bit more of mantissa
assert rows["bfloat16"] < min(value for name, value in rows.items() if name != "bfloat16")
