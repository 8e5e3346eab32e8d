"""Pictures of caches, batches, masks and plans, on matplotlib (`pip install 'purepage[viz]'`).

    from purepage import viz

    viz.block_table(metadata, spec)     # which sequence has which block, and how full it is
    viz.layout(spec)                    # where each token's key and value lie in the buffer
    viz.mask(metadata, sliding_window=4)
    viz.attention_map(query, cache, metadata, sinks=sinks)
    viz.occupancy(steps, num_blocks=64)
    viz.roofline({"decode": (flops, num_bytes, seconds)}, flops_per_s=..., bytes_per_s=...)
    viz.plan(pp.explain(...))

Each draws into `ax`, or into a new figure, and returns the axes.
"""

from .batches import block_table, occupancy
from .masks import attention_map, attention_weights, mask, visible_keys
from .memory import layout
from .plans import plan, roofline

__all__ = ["attention_map", "attention_weights", "block_table", "layout", "mask", "occupancy", "plan", "roofline", "visible_keys"]
