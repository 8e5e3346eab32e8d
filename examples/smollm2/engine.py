"""The serving loop: scheduler, cache and model together."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import jax.numpy as jnp
import numpy as np

import purepage as pp

from .model import Attention, Batch, rope_table, step
from .scheduler import BlockPool, Chunk, Scheduler, Sequence
from .weights import ModelConfig, Weights

BACKENDS = {"rocm_attn": pp.rocm_attn, "rocm_aiter_unified_attn": pp.rocm_aiter_unified_attn}


class Engine:
    """Generates for many sequences at once. All shapes are fixed but the number of tokens: one step for decoding alone, one with prompts in
    it, so two compilations serve every batch.

    Args:
      config, weights: the model (see `weights.load`).
      backend: one of `BACKENDS`.
      implementation: of attention and writers; None picks the best that can serve them.
      block_size, num_blocks: of the cache; by default the backend's own, and enough for every running sequence to reach `max_seq_len`.
      cache_dtype: "auto" (the model's own), "fp8", or another `kv_cache_dtype` of vLLM's.
      content, order: the cache's layout; default: what the backend prefers.
      max_seqs: sequences that run at once.
      max_tokens: tokens of a step that has prompts in it.
      max_seq_len: prompt and reply of one sequence.
      share_prefixes: whether sequences share the blocks of a common prefix.

    Raises:
      UnsupportedError: the backend can't serve the model with this cache; says why.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Weights,
        *,
        backend: str = "rocm_attn",
        implementation: str | None = None,
        block_size: int | None = None,
        num_blocks: int | None = None,
        cache_dtype: str = "auto",
        content: str | None = None,
        order: str | None = None,
        max_seqs: int = 4,
        max_tokens: int = 64,
        max_seq_len: int = 512,
        share_prefixes: bool = True,
    ) -> None:
        module = BACKENDS[backend]
        self.config, self.weights, self.rope = config, weights, rope_table(config)
        self.max_seqs, self.max_tokens = max_seqs, max_tokens
        size: int = module.CAPABILITIES.get_preferred_block_size() if block_size is None else block_size
        self.table_width = -(-max_seq_len // size)
        spec = module.cache_spec(
            num_blocks=num_blocks or max_seqs * self.table_width,
            block_size=size,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            num_layers=config.num_layers,
            dtype=weights.embedding.dtype,
            kv_cache_dtype=cache_dtype,
            order=order,
        )
        if content is not None:
            spec = replace(spec, content=content)
        self.attention = Attention(backend=module, cache_dtype=cache_dtype, implementation=implementation)
        self.cache = module.init_cache(spec)
        self.pool = BlockPool(spec.num_blocks, size)
        self.scheduler = Scheduler(
            self.pool,
            max_seqs=max_seqs,
            max_tokens=max_tokens,
            max_seq_len=min(max_seq_len, config.context_length),
            share_prefixes=share_prefixes,
        )

    def warm_up(self) -> None:
        """Compiles the two steps on batches of padding only, which leave the cache unchanged."""
        for decoding in (True, False):
            self._run([], decoding)

    def generate(self, sequences: Iterable[Sequence] = ()) -> Iterator[list[Sequence]]:
        """Runs `sequences`, and those already queued, until all are finished. After each step it yields those that have a new token."""
        for sequence in sequences:
            self.scheduler.add(sequence)
        while not self.scheduler.done:
            yield self.step()

    def step(self) -> list[Sequence]:
        """Plans, computes and records one step; returns the sequences that have a new token."""
        chunks = self.scheduler.plan()
        decoding = all(chunk.count == 1 for chunk in chunks)
        return self.scheduler.advance(chunks, self._run(chunks, decoding))

    def _run(self, chunks: list[Chunk], decoding: bool) -> list[int]:
        tokens, self.cache = step(
            self.weights, self.rope, self.cache, self._batch(chunks, decoding), config=self.config, attention=self.attention
        )
        return np.asarray(tokens).tolist()

    def _batch(self, chunks: list[Chunk], decoding: bool) -> Batch:
        """The step's arrays, padded to `max_seqs` sequences and to the token count of one of the two compiled steps."""
        num_tokens = self.max_seqs if decoding else self.max_tokens
        tokens, positions = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
        table = np.full((self.max_seqs, self.table_width), -1, np.int32)
        dtypes = {"temperature": np.float32, "top_p": np.float32, "seed": np.int32}
        sampling = {name: np.zeros(self.max_seqs, dtype) for name, dtype in dtypes.items()}
        at = 0
        for i, chunk in enumerate(chunks):
            sequence, start, end = chunk.sequence, chunk.sequence.computed, chunk.sequence.computed + chunk.count
            tokens[at : at + chunk.count] = sequence.tokens[start:end]
            positions[at : at + chunk.count] = np.arange(start, end)
            table[i, : len(sequence.blocks)] = sequence.blocks
            for name, values in sampling.items():
                values[i] = getattr(sequence, name)
            at += chunk.count
        metadata = pp.make_metadata(
            [chunk.count for chunk in chunks],
            [chunk.sequence.computed + chunk.count for chunk in chunks],
            table[: len(chunks)],
            block_size=self.pool.block_size,
            num_tokens=num_tokens,
            num_seqs=self.max_seqs,
            max_query_len=1 if decoding else num_tokens,
            max_seq_len=self.table_width * self.pool.block_size,
        )
        arrays = {name: jnp.asarray(values) for name, values in {"tokens": tokens, "positions": positions, **sampling}.items()}
        return Batch(metadata=metadata, **arrays)
