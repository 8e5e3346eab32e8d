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
# # Torch, plans, and AMD machine code without an AMD GPU
#
# Three views of one call: its arrays as torch tensors without a copy, the kernels that would serve it on any device, and the machine code
# of those kernels for an AMD GPU, compiled here.

# %%
import os

os.environ.pop("TRITON_INTERPRET", None)  # compile, don't interpret

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import torch

import purepage as pp
from purepage import viz
from purepage.bridges.dlpack import cache_to_torch, shares_memory, to_jax, to_torch

# %% [markdown]
# ## DLPack: one memory, two names
#
# `to_torch` and `to_jax` hand buffers over. `cache_to_torch` gives keys and values as strided views `[L, B, N, H, D]` of the one buffer.

# %%
rng = np.random.default_rng(0)
spec = pp.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_size=64, dtype=jnp.float32)
metadata = pp.make_metadata([5, 1], [37, 20], [[3, 0, 6], [5, 1, -1]], block_size=16)
sides = [jnp.asarray(rng.standard_normal((1, 8, 16, 2, 64)), jnp.float32) for _ in range(2)]
cache = pp.cache_from_logical(spec, *sides)
query = jnp.asarray(rng.standard_normal((6, 8, 64)), jnp.float32)

tensor = to_torch(query)
assert shares_memory(query, tensor) and tensor.data_ptr() == query.unsafe_buffer_pointer()
keys, values = cache_to_torch(cache)
print("keys in torch:", tuple(keys.shape), "strides", keys.stride(), "the cache's memory:", shares_memory(cache.data, keys))
assert torch.equal(keys[0], to_torch(pp.cache_to_logical(cache)[0]))
back = to_jax(tensor)
assert jnp.array_equal(back, query)

# %% [markdown]
# So torch can check JAX: each sequence's keys gathered through the table, and torch's own attention.

# %%
out = pp.paged_attention(query, cache, metadata)
for s, (first, last) in enumerate([(0, 5), (5, 6)]):
    n = int(metadata.seq_lens[s])
    blocks = torch.tensor(np.asarray(metadata.block_table)[s, : -(-n // 16)], dtype=torch.long)
    key, value = (side[0, blocks].flatten(0, 1)[:n].transpose(0, 1)[None] for side in (keys, values))
    mask = torch.ones(last - first, n, dtype=torch.bool).tril(n - (last - first))
    attended = torch.nn.functional.scaled_dot_product_attention(tensor[None, first:last].transpose(1, 2), key, value, mask, enable_gqa=True)
    difference = (attended[0].transpose(0, 1) - to_torch(out)[first:last]).abs().max().item()
    print(f"sequence {s}: largest difference from torch {difference:.1e}")
    assert difference < 1e-5

# %% [markdown]
# ## What would run where
#
# `explain` plans a call for a device that need not be here, and says why the other implementations are not chosen. Shapes are enough: a
# `CacheSpec` stands for a cache. Below, a decode step of 64 sequences of 4096 tokens.

# %%
large = pp.CacheSpec(num_blocks=8192, block_size=64, num_kv_heads=8, head_size=128)
decode = pp.AttentionMetadata(
    *(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((65,), (64,), (64, 64), (64,))), max_query_len=1, max_seq_len=4096, block_size=64
)
step = jax.ShapeDtypeStruct((64, 32, 128), jnp.bfloat16)
plans = {}
for arch in ("MI300X", "gfx1201", "sm_90", "cpu"):
    plans[arch] = pp.explain(pp.paged_attention, step, large, decode, arch=arch)
    best = plans[arch].choices[0]
    print(f"{arch:8} {best.implementation}")
kernels = {arch: pp.explain(pp.paged_attention, step, large, decode, arch=arch, implementation="triton") for arch in ("MI300X", "gfx1201")}
viz.plan(kernels["MI300X"])
# %% [markdown]
# In a notebook an explanation shows itself as tables:

# %%
kernels["gfx1201"]

# %% [markdown]
# ## The machine code
#
# A plan is data: kernels, grids, tiles. `compile_for` compiles its launches for an architecture with Triton's AMD backend and reads
# registers, spills and the kinds of instructions off the assembly. No GPU is needed, and none is used.

# %%
from purepage.kernels.compile_check import compile_for, compile_job, jobs_of

jobs = {arch: jobs_of(kernels[name].choices[0].program, arch) for name, arch in (("MI300X", "gfx942"), ("gfx1201", "gfx1201"))}
print(f"{'':8} {'kernel':26} {'warps':>5} {'VGPRs':>5} {'spills':>6} {'LDS bytes':>9} {'waves/SIMD':>10} {'matrix ops':>10}")
for arch, of_arch in jobs.items():
    for usage in compile_for(of_arch):
        assert usage.error is None and usage.vgpr_spills == 0, usage
        numbers = (
            f"{usage.num_warps:5} {usage.vgprs:5} {usage.vgpr_spills:6} {usage.lds_bytes:9} {usage.waves_per_simd:10} {usage.matrix_ops:10}"
        )
        print(f"{arch:8} {usage.kernel.partition(':')[2] or usage.kernel:26} {numbers}")

# %% [markdown]
# The matrix instructions of the decode kernel on gfx942 (MI300X), and what it consists of:

# %%
assembly = compile_job(jobs["gfx942"][0]).asm["amdgcn"].splitlines()
instructions = [
    line.split()[0] for line in map(str.strip, assembly) if line and line.split()[0][:2] in ("v_", "s_", "ds", "gl", "bu", "fl")
]
for line in [line.strip() for line in assembly if "mfma" in line][:4]:
    print(line)
groups = {
    "matrix": ("v_mfma",),
    "global loads": ("global_load", "buffer_load"),
    "LDS": ("ds_",),
    "waits and barriers": ("s_waitcnt", "s_barrier"),
    "scalar": ("s_",),
    "vector": ("v_",),
}
counts = dict.fromkeys(groups, 0)
for name in instructions:
    group = next((group for group, prefixes in groups.items() if name.startswith(prefixes)), None)
    if group:
        counts[group] += 1
assert counts["matrix"] > 0
figure, ax = plt.subplots(figsize=(7, 2.4), layout="constrained")
bars = ax.barh(list(counts), list(counts.values()), color="#4c78a8")
ax.bar_label(bars, fontsize=8)
ax.invert_yaxis()
ax.set(title="instructions of the decode kernel on gfx942", xlim=(0, max(counts.values()) * 1.1))
