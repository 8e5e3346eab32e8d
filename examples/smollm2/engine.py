"""The serving loop: scheduler, cache and model together."""

from collections.abc import Iterable, Iterator
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import purepage as pp

from .model import Attention, Batch, rope_table, step
from .parallel import divide
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
      shardings: of the mesh to serve on; None: one device. Each device of the axis `data` has sequences, blocks and a scheduler of its own,
        and `max_seqs`, `max_tokens` and `num_blocks` are those of one.

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
        shardings: pp.sharding.Shardings | None = None,
    ) -> None:
        module = BACKENDS[backend]
        parts, devices = (1, 1) if shardings is None else (shardings.size(shardings.data), shardings.size(shardings.context))
        self.shardings = shardings
        rope = rope_table(config)
        if shardings is not None:
            config, weights = divide(config, weights, shardings)
            rope = jax.device_put(rope, shardings.replicated)
        self.config, self.weights, self.rope = config, weights, rope
        self.max_seqs, self.max_tokens = max_seqs, max_tokens
        size: int = module.CAPABILITIES.get_preferred_block_size() if block_size is None else block_size
        self.table_width = -(-max_seq_len // size)
        blocks = -(-(num_blocks or max_seqs * self.table_width) // devices) * devices
        spec = module.cache_spec(
            num_blocks=parts * blocks,
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
        self.cache = module.init_cache(spec, sharding=shardings)
        self.schedulers = [
            Scheduler(
                BlockPool(blocks, size, devices=devices),
                max_seqs=max_seqs,
                max_tokens=max_tokens,
                max_seq_len=min(max_seq_len, config.context_length),
                share_prefixes=share_prefixes,
            )
            for _ in range(parts)
        ]
        self.scheduler, self.pool = self.schedulers[0], self.schedulers[0].pool
        # Where batches are joined, padding tokens belong to a padding sequence.
        self.num_seqs = max_seqs + (parts > 1)

    def warm_up(self) -> None:
        """Compiles the two steps on batches of padding only, which leave the cache unchanged."""
        for decoding in (True, False):
            self._run([[] for _ in self.schedulers], decoding)

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence where the fewest are."""
        min(self.schedulers, key=lambda each: len(each.waiting) + len(each.running)).add(sequence)

    def generate(self, sequences: Iterable[Sequence] = ()) -> Iterator[list[Sequence]]:
        """Runs `sequences`, and those already queued, until all are finished. After each step it yields those that have a new token."""
        for sequence in sequences:
            self.add(sequence)
        while not all(scheduler.done for scheduler in self.schedulers):
            yield self.step()

    def step(self) -> list[Sequence]:
        """Plans, computes and records one step; returns the sequences that have a new token."""
        planned = [scheduler.plan() for scheduler in self.schedulers]
        decoding = all(chunk.count == 1 for chunks in planned for chunk in chunks)
        tokens = self._run(planned, decoding)
        return [
            sequence
            for scheduler, chunks, sampled in zip(self.schedulers, planned, tokens, strict=True)
            for sequence in scheduler.advance(chunks, sampled)
        ]

    def _run(self, planned: list[list[Chunk]], decoding: bool) -> list[list[int]]:
        """The next token of each sequence of each scheduler."""
        batch = self._joined([self._batch(chunks, decoding) for chunks in planned])
        tokens, self.cache = step(self.weights, self.rope, self.cache, batch, config=self.config, attention=self.attention)
        return np.asarray(tokens).reshape(len(planned), -1).tolist()

    def _joined(self, batches: list[Batch]) -> Batch:
        """The batches of all devices of the axis `data` as one, in its place."""
        s = self.shardings
        if s is None:
            return batches[0]
        metadata = batches[0].metadata
        if len(batches) > 1:
            joined = pp.sharding.join_metadata([batch.metadata for batch in batches], num_blocks=self.cache.spec.num_blocks)
            metadata = replace(joined, max_query_len=metadata.max_query_len)
        names = ("tokens", "positions", "temperature", "top_p", "seed")
        arrays = {name: np.concatenate([np.asarray(getattr(batch, name)) for batch in batches]) for name in names}
        return Batch(metadata=jax.device_put(metadata, s.metadata(metadata)), **jax.device_put(arrays, s.rows))

    def _batch(self, chunks: list[Chunk], decoding: bool) -> Batch:
        """The arrays of one scheduler's step, padded to the sequences and tokens of one of the two compiled steps."""
        num_tokens = self.num_seqs if decoding else max(self.max_tokens, self.num_seqs)
        tokens, positions = np.zeros(num_tokens, np.int32), np.zeros(num_tokens, np.int32)
        table = np.full((self.num_seqs, self.table_width), -1, np.int32)
        dtypes = {"temperature": np.float32, "top_p": np.float32, "seed": np.int32}
        sampling = {name: np.zeros(self.num_seqs, dtype) for name, dtype in dtypes.items()}
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
            num_seqs=self.num_seqs,
            max_query_len=1 if decoding else num_tokens,
            max_seq_len=self.table_width * self.pool.block_size,
        )
        arrays = {name: jnp.asarray(values) for name, values in {"tokens": tokens, "positions": positions, **sampling}.items()}
        return Batch(metadata=metadata, **arrays)
