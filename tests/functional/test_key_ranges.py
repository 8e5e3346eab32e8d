"""Builders of key ranges, against masks that are written out key by key."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purepage as pp
from purepage.testing import assert_close, random_batch

build = pp.key_ranges
KEYS = 60
POSITION = np.array([0, 1, 5, 7, 8, 9, 20, 21, 33, 40, 59, 3])


def shown(ranges):
    """[T, KEYS] which keys a range shows."""
    start, stop = (np.asarray(side)[:, None] for side in ranges)
    assert start.dtype == stop.dtype == np.int32
    return (np.arange(KEYS)[None] >= start) & (np.arange(KEYS)[None] < stop)


def mask(sees):
    return np.array([[sees(p, k) for k in range(KEYS)] for p in POSITION.tolist()])


IMAGES = ([4, 20, 50], [9, 22, 50])
DOCUMENTS = [21, 0, 8]
CASES = {
    "causal": (lambda p: build.causal(p), lambda p, k: k <= p),
    "window": (lambda p: build.window(p, 4, 2), lambda p, k: -2 <= p - k <= 4),
    "one side": (lambda p: build.window(p, right=0), lambda p, k: k <= p),
    "the other side": (lambda p: build.window(p, left=3), lambda p, k: p - k <= 3),
    "wider than int32": (lambda p: build.window(p, 2**40, 2**31 - 1), lambda p, k: True),
    "traced window": (lambda p: build.window(p, jnp.int32(4), jnp.int32(0)), lambda p, k: 0 <= p - k <= 4),
    "chunks": (lambda p: build.chunked(p, 8), lambda p, k: k // 8 == p // 8),
    "a prefix": (lambda p: build.prefix(p, 10), lambda p, k: k <= p or k < 10),
    "a prefix of each row": (lambda p: build.prefix(p, np.arange(12) * 4), None),
    "images": (lambda p: build.spans(p, *IMAGES), lambda p, k: k <= p or any(a <= p < b and k < b for a, b in zip(*IMAGES, strict=True))),
    "documents": (
        lambda p: build.documents(p, DOCUMENTS),
        lambda p, k: sum(d <= p for d in DOCUMENTS) == sum(d <= k for d in DOCUMENTS),
    ),
    "no document": (lambda p: build.documents(p, []), lambda p, k: True),
    "an intersection": (
        lambda p: build.intersection(build.causal(p), build.chunked(p, 16), build.window(p, 9)),
        lambda p, k: k <= p and k // 16 == p // 16 and p - k <= 9,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_range_shows_what_its_definition_says(name):
    make, sees = CASES[name]
    expected = mask(sees) if sees else np.array([[k <= p or k < 4 * t for k in range(KEYS)] for t, p in enumerate(POSITION)])
    for found in (make(POSITION), jax.jit(make)(jnp.asarray(POSITION, jnp.int32))):
        np.testing.assert_array_equal(shown(found), expected)


def test_rows_of_a_batch_are_its_positions_and_sequences():
    batch = random_batch(1)
    position, sequence = jax.jit(build.rows, static_argnums=1)(batch.metadata, len(batch.query))
    np.testing.assert_array_equal(position, batch.positions)
    expected = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
    np.testing.assert_array_equal(sequence[: len(expected)], expected)


def check(batch, key_range, sees):
    """Attention with the range is attention with a bias of -inf at every key that the definition hides."""
    q, count = batch.query_lens, max(batch.query_lens)
    bias = np.zeros((len(q), count, count), np.float32)
    for s, length in enumerate(q):
        for i in range(length):
            bias[s, i] = [0 if sees(s, i, k) else -np.inf for k in range(count)]
    expected, _ = batch.reference(qq_bias=bias)
    out = pp.paged_attention(jnp.asarray(batch.query), batch.cache(), batch.metadata, key_range=key_range, implementation="xla")
    assert_close(out, expected, dtype=np.float32)


def test_images_of_each_sequence_are_seen_whole():
    batch = random_batch(2, kind="prefill", num_seqs=3, max_query_len=40, causal=False, padding_seqs=0)
    first, last = np.array([[3, 20], [0, 9], [5, 5]]), np.array([[9, 30], [4, 12], [5, 5]])
    position, sequence = build.rows(batch.metadata, len(batch.query))
    key_range = build.spans(position, first[sequence], last[sequence])

    def sees(s, i, k):
        return k <= i or any(a <= i < b and k < b for a, b in zip(first[s], last[s], strict=True))

    check(batch, key_range, sees)


def test_chunks_of_a_causal_batch():
    batch = random_batch(3, kind="prefill", num_seqs=2, max_query_len=40)
    position, _ = build.rows(batch.metadata, len(batch.query))
    check(batch, build.chunked(position, 8), lambda s, i, k: k <= i and k // 8 == i // 8)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: build.causal(np.zeros((2, 2), int)), "position"),
        (lambda: build.causal(np.zeros(2)), "position"),
        (lambda: build.causal([[1], [2, 3]]), "position"),
        (lambda: build.window(POSITION, -1), "left"),
        (lambda: build.window(POSITION, 1, "2"), "right"),
        (lambda: build.window(POSITION, np.zeros(2, int)), "left"),
        (lambda: build.chunked(POSITION, 0), "size"),
        (lambda: build.chunked(POSITION, None), "size"),
        (lambda: build.prefix(POSITION, np.zeros(3, int)), "length"),
        (lambda: build.spans(POSITION, [1, 2], [3]), "stop"),
        (lambda: build.spans(POSITION, np.zeros((2, 2), int), [3, 3]), "start"),
        (lambda: build.documents(POSITION, [0.5]), "start"),
        (lambda: build.intersection(), "ranges"),
        (lambda: build.intersection(build.causal(POSITION), build.causal(POSITION[:3])), "ranges"),
        (lambda: build.rows(3, 4), "metadata"),
        (lambda: build.rows(random_batch(1).metadata, -1), "num_tokens"),
    ],
)
def test_bad_arguments_are_named(make, name):
    with pytest.raises((ValueError, TypeError), match=name):
        make()
