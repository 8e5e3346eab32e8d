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
# # Serving: many sequences, one cache
#
# A server has more requests than memory, and they come and go. *Continuous batching* puts a new request into the batch as soon as a row is
# free. Its prompt is computed in chunks beside the tokens of the others. The cache is a pool of blocks: the host allocates them, the
# compiled step only reads the table. This notebook runs SmolLM2-135M (`examples/smollm2`) with a pool that is too small on purpose, and
# draws what happens.

# %%
import sys
from pathlib import Path

sys.path.insert(0, str(Path.cwd().parent))  # examples/

import matplotlib.pyplot as plt
from gguf import GGUFReader

import purepage as pp
from examples.smollm2.engine import Engine
from examples.smollm2.scheduler import Sequence
from examples.smollm2.tokenizer import read_tokenizer
from examples.smollm2.weights import find_gguf, load
from purepage import viz

config, weights = load()
tokenizer = read_tokenizer(GGUFReader(find_gguf()))
engine = Engine(config, weights, max_seqs=3, max_tokens=48, max_seq_len=112, block_size=16, num_blocks=9)
engine.cache

# %% [markdown]
# Two steps are compiled: one for decoding alone, 3 tokens wide, and one for steps with prompts in them, 48 tokens wide. Everything else is
# data: which sequences run, how long they are, where their blocks lie.

# %%
PROMPTS = ("Why is the sky blue?", "Why is the sea salty?", "Name three planets.", "What is a prime number?")
sequences = [Sequence(tuple(tokenizer.encode_chat(prompt)), max_tokens=40, stop_id=tokenizer.stop_id) for prompt in PROMPTS]
for sequence in sequences:
    engine.scheduler.add(sequence)

history, tables, events = [], [], []
while not engine.scheduler.done:
    before = engine.scheduler.preemptions, engine.scheduler.shared_tokens
    engine.step()
    running = engine.scheduler.running
    after = engine.scheduler.preemptions, engine.scheduler.shared_tokens
    if after[0] > before[0]:
        events.append((len(history), "preempted"))
    if after[1] > before[1]:
        events.append((len(history), f"{after[1] - before[1]} prompt tokens found"))
    history.append({sequences.index(sequence): list(sequence.blocks) for sequence in running})
    tables.append([(sequences.index(sequence), sequence.computed, list(sequence.blocks)) for sequence in running])
for step, what in events:
    print(f"step {step}: {what}")
print(f"{len(history)} steps, at most {engine.pool.peak_used} of {engine.pool.num_blocks} blocks used")
for prompt, sequence in zip(PROMPTS, sequences, strict=True):
    print(f"\n> {prompt}\n{tokenizer.decode(sequence.reply)[:140]}")

# %% [markdown]
# ## Blocks over time
#
# A color for each request. All prompts begin with the same system text: its full blocks are computed once and shared, and counted for the
# first that has them. When the pool is empty, the youngest sequence gives its blocks back and computes them anew later; it loses time and
# nothing else.


# %%
def owned(blocks_of):
    """Blocks of each request, a shared one for the first that has it."""
    seen, counts = set(), []
    for request in range(len(PROMPTS)):
        blocks = set(blocks_of.get(request, ()))
        counts.append(len(blocks - seen))
        seen |= blocks
    return counts


ax = viz.occupancy([owned(blocks) for blocks in history], num_blocks=engine.pool.num_blocks)
for step, what in events:
    ax.axvline(step, color="#c0392b" if what == "preempted" else "#333333", linewidth=0.8, linestyle=":")
    ax.text(step, engine.pool.num_blocks * 0.97, f" {what}", rotation=90, va="top", fontsize=6)
ax.set_title("blocks of each request", fontsize=10)
assert engine.scheduler.preemptions > 0 and engine.scheduler.shared_tokens > 0
assert all(sum(owned(blocks)) <= engine.pool.num_blocks for blocks in history) and engine.pool.num_used == 0

# %% [markdown]
# ## The pool at four moments
#
# A cell is a block, a strip in it a token; a strong color is a token of that step. A block with two colors is shared.


# %%
def metadata_of(table):
    """One row for each request, empty where it does not run."""
    rows = {request: (computed, blocks) for request, computed, blocks in table}
    lens = [rows.get(request, (0, ()))[0] for request in range(len(PROMPTS))]
    blocks = [[*rows.get(request, (0, ()))[1], *[-1] * 9][:9] for request in range(len(PROMPTS))]
    return pp.make_metadata([min(n, 1) for n in lens], lens, blocks, block_size=16)


full = next(step for step, what in events if what == "preempted")
figure, axes = plt.subplots(4, 1, figsize=(10, 6.5), layout="constrained")
for ax, step in zip(axes, (1, full // 2, full - 1, full + 1), strict=True):
    viz.block_table(metadata_of(tables[step]), engine.cache, ax=ax, columns=9)
    ax.set_title(f"step {step}: {ax.get_title()}", fontsize=9)

# %% [markdown]
# ## Nothing of this changes a reply
#
# The same prompts one at a time, in a pool that is large enough, without sharing:

# %%
alone = Engine(config, weights, max_seqs=3, max_tokens=48, max_seq_len=112, block_size=16, num_blocks=24, share_prefixes=False)
for sequence in sequences[:2]:
    single = Sequence(sequence.prompt, max_tokens=40, stop_id=tokenizer.stop_id)
    for _ in alone.generate([single]):
        pass
    assert single.reply == sequence.reply
print("the same replies")
