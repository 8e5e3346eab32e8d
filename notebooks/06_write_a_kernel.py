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
# # Write a kernel, and find what is wrong with it
#
# A decode kernel of one's own, first in Pallas, then in Triton, both run by an interpreter on a CPU. `purepage.testing` makes batches whose
# unused slots are NaN and whose tables point nowhere, has a float64 oracle, and `check_attention` reduces what fails to the smallest batch
# that shows it.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when a Triton kernel is defined

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from purepage.testing import check_attention, random_batch

# %% [markdown]
# ## A first try
#
# A program for each sequence goes over the blocks of its table with an online softmax: `m` is the largest score so far, `l` the sum of
# weights, `acc` the weighted values. Keys past the length get a score of -inf, hence a weight of 0.


# %%
def decode_kernel(query, key, value, table, lens, out, *, scale):
    s, block_size, group = pl.program_id(0), key.shape[1], query.shape[1] // key.shape[2]
    q, n = query[0].astype(jnp.float32) * scale, lens[s]

    def one_block(j, carry):
        m, l, acc = carry
        block = table[s, j]
        k, v = (jnp.repeat(side[block].astype(jnp.float32), group, axis=1) for side in (key, value))
        scores = jnp.einsum("hd,nhd->hn", q, k)
        visible = j * block_size + jnp.arange(block_size) < n
        scores = jnp.where(visible, scores, -jnp.inf)
        new_m = jnp.maximum(m, scores.max(-1))
        old, p = jnp.exp(m - new_m), jnp.exp(scores - new_m[:, None])
        return new_m, l * old + p.sum(-1), acc * old[:, None] + jnp.einsum("hn,nhd->hd", p, v)

    heads, size = q.shape
    start = jnp.full(heads, -jnp.inf), jnp.zeros(heads), jnp.zeros((heads, size))
    _, l, acc = jax.lax.fori_loop(0, pl.cdiv(n, block_size), one_block, start)
    out[0] = (acc / l[:, None]).astype(out.dtype)


@partial(jax.jit, static_argnames=("kernel", "scale"))
def decode(kernel, query, key, value, table, lens, *, scale):
    whole = [pl.BlockSpec(array.shape, lambda s, ndim=array.ndim: (0,) * ndim) for array in (key, value, table, lens)]
    row = pl.BlockSpec((1, *query.shape[1:]), lambda s: (s, 0, 0))
    return pl.pallas_call(
        partial(kernel, scale=scale),
        grid=(len(lens),),
        in_specs=[row, *whole],
        out_specs=row,
        out_shape=jax.ShapeDtypeStruct(query.shape, query.dtype),
        interpret=True,
    )(query, key, value, table, lens)


# %% [markdown]
# The adapter takes a batch of the test kit. `batch.pick` refuses a batch that asks for an option that the kernel does not take, and a
# `NotImplementedError` any other that it does not serve: both are listed, and are no failures.


# %%
def adapted(kernel, batch, decode=decode):
    options = batch.pick("scale")
    if batch.metadata.max_query_len > 1 or not batch.metadata.causal:
        raise NotImplementedError("one query for each sequence")
    if batch.key_cache.dtype.itemsize == 1:
        raise NotImplementedError("no fp8")
    scale = options.get("scale", batch.query.shape[-1] ** -0.5)
    seqs = batch.num_tokens  # the sequences before padding
    key, value = jnp.asarray(batch.key_cache[0]), jnp.asarray(batch.value_cache[0])
    metadata = batch.metadata
    out = decode(kernel, jnp.asarray(batch.query[:seqs]), key, value, metadata.block_table[:seqs], metadata.seq_lens[:seqs], scale=scale)
    return np.concatenate([out, np.zeros_like(batch.query[seqs:])])


only = {"dtype": ["float32", "bfloat16"], "head size": ["64"], "block size": ["16", "32"]}
report = check_attention(partial(adapted, decode_kernel), features=only, pairs=False, verbose=False)
print(report)
assert [list(failure.kinds) for failure in report.failures] == [["lengths"], ["unused slots"]]

# %% [markdown]
# Two faults. An empty sequence, which a padded batch has, divides 0 by 0. And unused slots must hold numbers, while they hold what earlier
# sequences left there: 0 times NaN is NaN, so a weight of 0 does not remove a value. The smallest batch of that has one sequence of one
# token: the other 15 slots of its block are enough. Values must be *selected*, not multiplied by 0:


# %%
def safe_kernel(query, key, value, table, lens, out, *, scale):
    s, block_size, group = pl.program_id(0), key.shape[1], query.shape[1] // key.shape[2]
    q, n = query[0].astype(jnp.float32) * scale, lens[s]

    def one_block(j, carry):
        m, l, acc = carry
        block = table[s, j]
        k, v = (jnp.repeat(side[block].astype(jnp.float32), group, axis=1) for side in (key, value))
        visible = j * block_size + jnp.arange(block_size) < n
        v = jnp.where(visible[:, None, None], v, 0.0)  # selected
        scores = jnp.where(visible, jnp.einsum("hd,nhd->hn", q, k), -jnp.inf)
        new_m = jnp.maximum(m, scores.max(-1))
        old, p = jnp.exp(m - new_m), jnp.exp(scores - new_m[:, None])
        return new_m, l * old + p.sum(-1), acc * old[:, None] + jnp.einsum("hn,nhd->hd", p, v)

    heads, size = q.shape
    start = jnp.full(heads, -jnp.inf), jnp.zeros(heads), jnp.zeros((heads, size))
    _, l, acc = jax.lax.fori_loop(0, pl.cdiv(n, block_size), one_block, start)
    out[0] = jnp.where(n > 0, acc / l[:, None], 0.0).astype(out.dtype)  # an empty sequence is 0


report = check_attention(partial(adapted, safe_kernel), features=only, verbose=False)
print(report)
assert report.ok

# %% [markdown]
# ## Hypothesis
#
# With the extra `testing`, strategies draw batches, and a failing one shrinks. The first kernel again: the example has nothing that is not
# needed.

# %%
from hypothesis import given, settings
from hypothesis import strategies as st

from purepage.testing import strategies

lens = st.lists(st.integers(1, 40), min_size=1, max_size=3)
drawn = strategies.batches(
    kind="decode",
    seq_lens=lens,
    dtype=np.float32,
    cache_dtype=None,
    num_heads=2,
    num_kv_heads=1,
    head_size=32,
    block_size=16,
    causal=True,
    **dict.fromkeys(("sliding_window", "qq_bias", "logits_soft_cap", "scale"), None),
    **dict.fromkeys(("key_range", "alibi", "sinks", "poison_newest"), False),
)


@settings(max_examples=20, deadline=None, database=None, derandomize=True)
@given(drawn)
def test_first_try(batch):
    batch.check(adapted(decode_kernel, batch), padding=False)


try:
    test_first_try()
except AssertionError as error:
    print(str(error).splitlines()[0])
    print("\n".join(note for note in error.__notes__ if "batch=" in note))
else:
    raise AssertionError("no batch with a NaN was drawn")

# %% [markdown]
# ## The same in Triton, inside `jax.jit`
#
# `call_torch` runs a function of torch tensors on XLA's own buffers, here one that launches a Triton kernel: through Triton's interpreter
# on a CPU, compiled on a GPU. This needs the extra `triton`.

# %%
import torch
import triton
import triton.language as tl

from purepage.bridges.callback import call_torch


@triton.jit
def triton_decode(q, k, v, table, lens, out, scale, width, HEADS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    s, h = tl.program_id(0), tl.program_id(1)
    n, d, t = tl.load(lens + s), tl.arange(0, D), tl.arange(0, N)
    query = tl.load(q + (s * HEADS + h) * D + d).to(tl.float32) * scale
    m = -float("inf")
    total = 0.0
    acc = tl.zeros([D], tl.float32)
    for j in range(tl.cdiv(n, N)):
        block = tl.load(table + s * width + j).to(tl.int64)
        at = ((block * N + t[:, None]) * (HEADS // GROUP) + h // GROUP) * D + d[None]
        seen = j * N + t < n
        key = tl.load(k + at, mask=seen[:, None], other=0.0).to(tl.float32)  # a masked load reads no NaN
        value = tl.load(v + at, mask=seen[:, None], other=0.0).to(tl.float32)
        scores = tl.where(seen, tl.sum(query[None] * key, 1), -float("inf"))
        largest = tl.maximum(m, tl.max(scores, 0))
        weights = tl.exp(scores - largest)
        old = tl.exp(m - largest)
        total = total * old + tl.sum(weights, 0)
        acc = acc * old + tl.sum(weights[:, None] * value, 0)
        m = largest
    tl.store(out + (s * HEADS + h) * D + d, tl.where(total > 0, acc / total, 0.0))


def launch(inputs, outputs, *, scale):
    query, key, value, table, lens = inputs
    seqs, heads, size = query.shape
    sizes = {"HEADS": heads, "GROUP": heads // key.shape[2], "D": size, "N": key.shape[1]}
    triton_decode[(seqs, heads)](query, key, value, table, lens, outputs[0], scale, table.shape[1], **sizes)


@partial(jax.jit, static_argnames=("kernel", "scale"))
def decode_in_triton(kernel, query, key, value, table, lens, *, scale):
    inputs = (query, key, value, table, lens)
    return call_torch(partial(launch, scale=scale), inputs, [jax.ShapeDtypeStruct(query.shape, query.dtype)], name="triton_decode")[0]


print("torch", torch.__version__, "triton", triton.__version__)
batch = random_batch(3, kind="decode", num_seqs=2, head_size=64)
batch.check(adapted(None, batch, decode_in_triton), what="the Triton kernel")
report = check_attention(
    partial(adapted, None, decode=decode_in_triton),
    features={**only, "dtype": ["float32"], "block size": ["16"]},
    pairs=False,
    verbose=False,
)
print(report)
assert report.ok
