"""Continuous batching: which sequences compute which tokens in the next step, and which blocks of the cache they own.

Host bookkeeping only, no arrays. A step mixes sequences that decode one token with chunks of prompts (chunked prefill). Blocks are taken
as a sequence grows and given back when it ends. A full block is known by what it holds and all that came before it, so that sequences with
a common prefix share its blocks, while they run and after they ended, until the block is needed for something else.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np


class BlockPool:
    """Which blocks of the cache are used, how often, and what the full ones hold.

    Args:
      num_blocks: blocks of the cache.
      block_size: tokens a block.
      devices: devices that the blocks lie over, each with as many after one another. They give blocks in turn.
    """

    def __init__(self, num_blocks: int, block_size: int, *, devices: int = 1) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.references = [0] * num_blocks
        self.peak_used = 0
        each = num_blocks // devices
        in_turn = sorted(range(num_blocks), key=lambda block: block % each)
        self._free = OrderedDict.fromkeys(in_turn)  # the least recently freed first
        self._block_of: dict[bytes, int] = {}
        self._content_of: dict[int, bytes] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def holds_content(self, block: int) -> bool:
        """Whether a sequence may find `block` by what it holds, free or not."""
        return block in self._content_of

    def allocate(self, count: int) -> list[int]:
        """`count` blocks for one owner; their contents are forgotten. The caller has checked `num_free`."""
        return [self._take(self._free.popitem(last=False)[0], forget=True) for _ in range(count)]

    def share(self, content: bytes) -> int | None:
        """The block that holds `content`, with one more owner; None if there is none."""
        block = self._block_of.get(content)
        if block is None:
            return None
        self._free.pop(block, None)
        return self._take(block, forget=False)

    def publish(self, block: int, content: bytes) -> None:
        """Makes `block` shareable as `content`."""
        if content not in self._block_of:
            self._block_of[content], self._content_of[block] = block, content

    def release(self, blocks: list[int]) -> None:
        """Removes one owner of each of `blocks`. A sequence's last block is reused first, since the beginnings of prompts recur."""
        for block in reversed(blocks):
            self.references[block] -= 1
            if self.references[block] == 0:
                self._free[block] = None

    def _take(self, block: int, *, forget: bool) -> int:
        if forget and block in self._content_of:
            del self._block_of[self._content_of.pop(block)]
        self.references[block] += 1
        self.peak_used = max(self.peak_used, self.num_used)
        return block


@dataclass(eq=False)
class Sequence:
    """One prompt and its reply.

    Attributes:
      prompt: token ids, at least one.
      max_tokens: most tokens of the reply.
      stop_id: token that ends it; None: only `max_tokens` does.
      temperature: 0 is greedy.
      top_p: samples from the most likely tokens that have this much probability together.
      seed: the reply is a function of prompt and seed, whatever else is in the batch.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    stop_id: int | None = None
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    tokens: list[int] = field(init=False)
    """Prompt and reply so far."""
    computed: int = field(default=0, init=False)
    """Tokens whose keys and values are in the cache."""
    blocks: list[int] = field(default_factory=list, init=False)
    contents: list[bytes] = field(default_factory=list, init=False)
    """What each full block holds; grows with `tokens`, never changes."""

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def reply(self) -> list[int]:
        return self.tokens[len(self.prompt) :]

    @property
    def pending(self) -> int:
        """Tokens to compute before the next can be sampled; 1 when decoding."""
        return len(self.tokens) - self.computed

    @property
    def finished(self) -> bool:
        return len(self.reply) >= self.max_tokens or (self.stop_id is not None and self.reply[-1:] == [self.stop_id])

    def content(self, index: int, block_size: int) -> bytes:
        """A digest of full block `index` and of all before it."""
        while len(self.contents) <= index:
            start = len(self.contents) * block_size
            before = self.contents[-1] if self.contents else b""
            block = np.asarray(self.tokens[start : start + block_size], np.int64).tobytes()
            self.contents.append(blake2b(before + block, digest_size=16).digest())
        return self.contents[index]


@dataclass(frozen=True)
class Chunk:
    """`count` tokens of a sequence to compute in this step, from position `sequence.computed` on."""

    sequence: Sequence
    count: int

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the sequence's last token, so that the next one can be sampled."""
        return self.count == self.sequence.pending


class Scheduler:
    """Plans steps of at most `max_seqs` sequences and `max_tokens` tokens.

    A decoding sequence never waits for a prompt: it comes first, and prompts take what is left of the step's tokens. When blocks run out,
    younger sequences give theirs back to older ones and compute them anew later; the oldest always gets on.

    Args:
      pool: the cache's blocks.
      max_seqs: sequences that run at once.
      max_tokens: tokens a step, at least `max_seqs`.
      max_seq_len: prompt and reply of one sequence.
      share_prefixes: False computes every prompt anew.
    """

    def __init__(self, pool: BlockPool, *, max_seqs: int, max_tokens: int, max_seq_len: int, share_prefixes: bool = True) -> None:
        if max_tokens < max_seqs:
            raise ValueError(f"max_tokens is {max_tokens}: it must be at least max_seqs ({max_seqs}), so that every sequence can decode")
        self.pool, self.max_seqs, self.max_tokens = pool, max_seqs, max_tokens
        self.max_seq_len, self.share_prefixes = max_seq_len, share_prefixes
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.shared_tokens = 0
        self.preemptions = 0

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence.

        Raises:
          ValueError: it has no prompt, samples in no way that makes sense, or could outgrow the model or the whole cache.
        """
        if not sequence.prompt or sequence.max_tokens < 1:
            raise ValueError(
                f"a sequence of {len(sequence.prompt)} prompt tokens and {sequence.max_tokens} more: it must have one of each at least"
            )
        if not (0 <= sequence.temperature < float("inf") and 0 < sequence.top_p <= 1):
            how = f"temperature {sequence.temperature}, top_p {sequence.top_p}"
            raise ValueError(f"{how}: a temperature must be finite and at least 0, a top_p above 0 and at most 1")
        if not -(2**31) <= sequence.seed < 2**31:
            raise ValueError(f"seed is {sequence.seed}: it must fit in 32 bits")
        longest = len(sequence.prompt) + sequence.max_tokens
        most = min(self.max_seq_len, self.pool.num_blocks * self.pool.block_size)
        if longest > most:
            raise ValueError(f"a sequence may reach {longest} tokens: it must be at most {most}, of the model and of the cache")
        self.waiting.append(sequence)

    @property
    def done(self) -> bool:
        return not self.waiting and not self.running

    def plan(self) -> list[Chunk]:
        """The next step; empty only when `done`. Every chunk's blocks are in its sequence's `blocks`."""
        chunks: list[Chunk] = []
        for sequence in sorted(self.running, key=lambda s: s.pending > 1):
            left = self.max_tokens - sum(chunk.count for chunk in chunks)
            if left and sequence in self.running:
                planned = [chunk.sequence for chunk in chunks]
                younger = self.running[self.running.index(sequence) + 1 :]
                chunks += self._chunk(sequence, left, [s for s in younger if s not in planned])
        while self.waiting and len(self.running) < self.max_seqs and (left := self.max_tokens - sum(chunk.count for chunk in chunks)):
            chunk = self._chunk(self.waiting[0], left, [])
            if not chunk:
                self.shared_tokens -= self.waiting[0].computed
                self._give_back(self.waiting[0])
                break
            self.running.append(self.waiting.popleft())
            chunks += chunk
        return chunks

    def _chunk(self, sequence: Sequence, most: int, victims: list[Sequence]) -> list[Chunk]:
        """The sequence's part of this step with its blocks; None if no blocks are left. `victims` may be preempted."""
        size = self.pool.block_size
        if sequence.pending > 1 and self.share_prefixes:
            self._adopt(sequence)
        count = min(sequence.pending, most)
        full_before, full_after = sequence.computed // size, (sequence.computed + count) // size
        missing = -(-(sequence.computed + count) // size) - len(sequence.blocks)
        while missing > self.pool.num_free and victims:
            self._preempt(victims.pop())
        if missing > self.pool.num_free:
            return []
        sequence.blocks += self.pool.allocate(missing)
        # Shareable at once, though this step has yet to fill them: in each layer, all tokens are written before any is attended to.
        for index in range(full_before, full_after) if self.share_prefixes else ():
            self.pool.publish(sequence.blocks[index], sequence.content(index, size))
        return [Chunk(sequence, count)]

    def _adopt(self, sequence: Sequence) -> None:
        """Shares blocks that other sequences have computed. The last token is always computed: its logits are needed."""
        size = self.pool.block_size
        while sequence.computed % size == 0 and sequence.computed + size < len(sequence.tokens):
            block = self.pool.share(sequence.content(sequence.computed // size, size))
            if block is None:
                break
            sequence.blocks.append(block)
            sequence.computed += size
            self.shared_tokens += size

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.waiting.appendleft(sequence)
        self._give_back(sequence)
        self.preemptions += 1

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks, sequence.computed = [], 0

    def advance(self, chunks: list[Chunk], sampled: list[int]) -> list[Sequence]:
        """Records a computed step: `sampled[i]` is the token after chunk i, where it `samples`. Returns the sequences with a new token."""
        grown = []
        for chunk, token in zip(chunks, sampled, strict=False):
            sequence, samples = chunk.sequence, chunk.samples
            sequence.computed += chunk.count
            if not samples:
                continue
            sequence.tokens.append(int(token))
            grown.append(sequence)
            if sequence.finished:
                self.running.remove(sequence)
                self.pool.release(sequence.blocks)
                sequence.blocks = []
        return grown
