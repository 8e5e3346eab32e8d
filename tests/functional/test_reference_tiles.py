"""The oracle's tiles of rows are the oracle row by row: every mask, score and NaN; and a sequence of 4096 keys is one of many rows."""

import numpy as np
import pytest

from purepage.functional.testing import random_batch, reference_encoder_attention, reference_tiles

CASES = {
    "plain": {},
    "window": {"sliding_window": 17},
    "soft cap, alibi, sinks": {"logits_soft_cap": 2.0, "alibi": True, "sinks": True},
    "ranges and sinks": {"key_range": True, "sinks": True},
    "a tree for each sequence": {"qq_bias": "each", "sliding_window": 40},
    "cross": {"kind": "cross"},
    "newest key is NaN": {"poison_newest": True},
    "fp8": {"cache_dtype": "float8_e4m3fn", "scales": "head"},
}


def attend(batch, monkeypatch, scores_from):
    monkeypatch.setattr(reference_tiles, "SCORES_FROM", scores_from)
    return batch.reference(**batch.options)


@pytest.mark.parametrize("name", CASES)
def test_tiles_are_the_rows(name, monkeypatch):
    batch = random_batch(3, query_lens=[70, 1, 0, 130], seq_lens=[100, 90, 5, 130], head_size_v=48, **CASES[name])
    tiled, by_rows = attend(batch, monkeypatch, 0), attend(batch, monkeypatch, 2**62)
    for found, expected in zip(tiled, by_rows, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-13)
    assert np.isnan(tiled[0]).any() == (name == "newest key is NaN")


def test_an_encoders_tiles_are_its_rows(monkeypatch):
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((90, heads, 16)) for heads in (4, 2, 2))
    found = []
    for scores_from in (0, 2**62):
        monkeypatch.setattr(reference_tiles, "SCORES_FROM", scores_from)
        found.append(reference_encoder_attention(query, key, value, [0, 70, 70, 85], sliding_window=9, sinks=[0.0, 1.0, 2.0, -1.0]))
    for mine, expected in zip(*found, strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-12, atol=1e-13)


def test_no_row_of_a_long_sequence_is_taken_alone(monkeypatch):
    """What makes the oracle fast: 1024 queries of 4096 keys are 16 tiles, and a NaN that no row sees leaves none out."""
    taken = []
    tile = reference_tiles.attend_tile
    monkeypatch.setattr(reference_tiles, "attend_tile", lambda *args, **options: taken.append(tile(*args, **options)) or taken[-1])
    batch = random_batch(0, query_lens=[1024], seq_lens=[4096], num_heads=2, num_kv_heads=1, sliding_window=3000)
    out, _ = batch.reference(**batch.options)
    assert len(taken) == 1024 // reference_tiles.ROWS and all(found is not None for found in taken)
    assert np.isfinite(out).all()
