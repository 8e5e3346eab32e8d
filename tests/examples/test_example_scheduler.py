"""Laws of the example's scheduler and block allocator, without a model."""

import random

import pytest

from examples.smollm2.scheduler import BlockPool, Chunk, Scheduler, Sequence


def next_token(tokens: list[int]) -> int:
    """A deterministic stand-in for a model: any mistake in the history shows in all that follows."""
    return sum((i + 1) * token for i, token in enumerate(tokens)) % 97


class Cache:
    """Each slot holds the tokens up to and with its own, as keys and values depend on all of them; nothing else is ever right to read."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool, self.slots = pool, {}

    def run(self, chunks: list[Chunk]) -> list[int]:
        """A step as the model computes it: all writes, then all reads."""
        written = set()
        for sequence, position in self._positions(chunks):
            slot = self._slot(sequence, position)
            assert slot not in written, "two tokens of one step share a slot"
            written.add(slot)
            self.slots[slot] = tuple(sequence.tokens[: position + 1])
        for chunk in chunks:
            sequence = chunk.sequence
            for position in range(sequence.computed + chunk.count):
                assert self.slots[self._slot(sequence, position)] == tuple(sequence.tokens[: position + 1])
        return [next_token(chunk.sequence.tokens) for chunk in chunks]

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.blocks[position // self.pool.block_size] * self.pool.block_size + position % self.pool.block_size

    @staticmethod
    def _positions(chunks: list[Chunk]) -> list[tuple[Sequence, int]]:
        return [(c.sequence, p) for c in chunks for p in range(c.sequence.computed, c.sequence.computed + c.count)]


def scheduler(*, num_blocks: int = 64, block_size: int = 4, max_seqs: int = 4, max_tokens: int = 16, **options) -> Scheduler:
    options = {"max_seq_len": 128, **options}
    return Scheduler(BlockPool(num_blocks, block_size), max_seqs=max_seqs, max_tokens=max_tokens, **options)


def run(plan: Scheduler, sequences: list[Sequence], cache: Cache | None = None) -> list[list[tuple[int, int]]]:
    """Runs to the end; returns each step as (index of the sequence, tokens)."""
    cache = cache or Cache(plan.pool)
    for sequence in sequences:
        plan.add(sequence)
    steps = []
    while not plan.done:
        chunks = plan.plan()
        steps.append([(sequences.index(chunk.sequence), chunk.count) for chunk in chunks])
        plan.advance(chunks, cache.run(chunks))
        assert len(steps) < 10_000, "no progress"
    return steps


def expected_reply(prompt: tuple[int, ...], length: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(length):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("share", [True, False], ids=["sharing", "no-sharing"])
@pytest.mark.parametrize("num_blocks", [9, 14, 64], ids=["scarce", "tight", "ample"])
@pytest.mark.parametrize("seed", range(6))
def test_every_sequence_finds_its_own_history_whatever_the_batch_does(seed, num_blocks, share):
    rng = random.Random(seed)
    heads = [tuple(rng.randrange(50) for _ in range(rng.randrange(1, 14))) for _ in range(2)]
    prompts = [rng.choice(heads) + tuple(rng.randrange(50) for _ in range(rng.randrange(0, 10))) for _ in range(12)]
    sequences = [Sequence(prompt, rng.randrange(1, 12)) for prompt in prompts]
    plan = scheduler(num_blocks=num_blocks, max_seqs=rng.choice([1, 3, 5]), max_tokens=rng.choice([5, 8, 32]), share_prefixes=share)
    steps = run(plan, sequences)
    for sequence in sequences:
        assert sequence.reply == expected_reply(sequence.prompt, sequence.max_tokens)
    for step in steps:
        indices = [i for i, _ in step]
        assert step and len(indices) == len(set(indices)) <= plan.max_seqs
        assert sum(count for _, count in step) <= plan.max_tokens
    assert plan.pool.num_used == 0 and set(plan.pool.references) == {0}


def test_scarce_blocks_preempt_and_ample_ones_do_not():
    preempted = {}
    for num_blocks in (9, 64):
        plan = scheduler(num_blocks=num_blocks, share_prefixes=False)
        run(plan, [Sequence((i, 1, 2, 3, 4), 20) for i in range(4)])
        preempted[num_blocks] = plan.preemptions
    assert preempted[9] > 0
    assert preempted[64] == 0


def test_the_oldest_sequence_is_never_preempted():
    plan = scheduler(num_blocks=9, share_prefixes=False)
    sequences = [Sequence((i, 1, 2, 3, 4), 20) for i in range(4)]
    steps = run(plan, sequences)
    assert [dict(step).get(0) for step in steps[:20]] == [5] + [1] * 19


def test_prompts_are_cut_into_chunks_and_mixed_with_decoding():
    plan = scheduler(max_seqs=2, max_tokens=8)
    steps = run(plan, [Sequence((1, 2, 3), 6), Sequence(tuple(range(10, 30)), 2)])
    assert steps == [[(0, 3), (1, 5)], [(0, 1), (1, 7)], [(0, 1), (1, 7)], [(0, 1), (1, 1)], [(0, 1), (1, 1)], [(0, 1)]]


def test_a_decoding_sequence_never_waits_for_a_prompt():
    plan = scheduler(max_seqs=3, max_tokens=4)
    steps = run(plan, [Sequence((5,), 12), Sequence(tuple(range(40)), 1), Sequence(tuple(range(50, 70)), 1)])
    assert all((0, 1) in step for step in steps[:12])


def test_a_waiting_sequence_enters_when_another_ends():
    plan = scheduler(max_seqs=1)
    steps = run(plan, [Sequence((1, 2), 2), Sequence((3, 4), 1)])
    assert steps == [[(0, 2)], [(0, 1)], [(1, 2)]]


def test_a_stop_token_ends_a_reply():
    prompt = (3, 1, 4)
    reply = expected_reply(prompt, 5)
    sequence = Sequence(prompt, 5, stop_id=reply[2])
    run(scheduler(), [sequence])
    assert sequence.reply == reply[: reply.index(reply[2]) + 1]


def test_a_common_prefix_is_computed_once():
    head = tuple(range(10))  # two full blocks of four, and a part
    plan = scheduler(max_tokens=64)
    steps = run(plan, [Sequence((*head, 90), 1), Sequence((*head, 91, 92), 1), Sequence((*head, 93), 1)])
    assert steps == [[(0, 11), (1, 4), (2, 3)]]
    assert plan.shared_tokens == 16
    assert plan.pool.peak_used == 2 + 3 * 1


def test_a_prompt_in_progress_adopts_what_another_computes_meanwhile():
    head = tuple(range(24))
    plan = scheduler(max_seqs=2, max_tokens=8)
    steps = run(plan, [Sequence((*head, 90), 1), Sequence((*head, 91), 1)])
    assert sum(count for step in steps for i, count in step if i == 1) == 1
    assert plan.shared_tokens == 24


def test_the_last_token_is_computed_even_if_all_of_the_prompt_is_cached():
    plan = scheduler()
    cache = Cache(plan.pool)
    prompt = tuple(range(8))
    run(plan, [Sequence(prompt, 1)], cache)
    assert run(plan, [Sequence(prompt, 1)], cache) == [[(0, 4)]]


def test_a_prefix_outlives_its_sequence_until_its_blocks_are_needed():
    plan = scheduler(num_blocks=6)
    cache = Cache(plan.pool)
    run(plan, [Sequence(tuple(range(9)), 1)], cache)
    assert plan.pool.num_used == 0
    assert run(plan, [Sequence(tuple(range(9)), 1)], cache) == [[(0, 1)]]
    run(plan, [Sequence(tuple(range(50, 70)), 4)], cache)
    assert run(plan, [Sequence(tuple(range(9)), 1)], cache) == [[(0, 9)]]


def test_the_same_tokens_after_another_prefix_are_not_shared():
    plan = scheduler(max_tokens=64)
    run(plan, [Sequence((1, 1, 1, 1, 7, 7, 7, 7, 5), 1), Sequence((2, 2, 2, 2, 7, 7, 7, 7, 5), 1)])
    assert plan.shared_tokens == 0


def test_a_sequence_that_cannot_run_is_refused():
    with pytest.raises(ValueError, match="may reach 17 tokens: it must be at most 16"):
        scheduler(num_blocks=4).add(Sequence(tuple(range(10)), 7))
    with pytest.raises(ValueError, match="may reach 33 tokens: it must be at most 32"):
        scheduler(max_seq_len=32).add(Sequence((1,), 32))
    for wrong in ({"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5}, {"seed": 2**31}):
        with pytest.raises(ValueError, match=str(next(iter(wrong.values())))):
            scheduler().add(Sequence((1,), 1, **wrong))
    with pytest.raises(ValueError, match="0 prompt tokens"):
        scheduler().add(Sequence((), 3))
    with pytest.raises(ValueError, match="max_tokens is 3: it must be at least max_seqs"):
        scheduler(max_tokens=3)
