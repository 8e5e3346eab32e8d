"""Tiny models of ten families give the logits and tokens of `transformers`' own models with the same weights."""

from dataclasses import replace

import numpy as np
import pytest

for package in ("torch", "transformers"):
    pytest.importorskip(package)

# ruff: noqa: E402
import purepage as pp
from examples.families.compare import PREFIXES, PROMPTS, TINY, compare
from examples.families.weights import alibi_slopes, read, rope_table

TOLERANCE = 1e-4
"""Greatest absolute difference of a float32 logit; logits have a standard deviation of about 3, the encoder's of 1."""
STEPS = 50
ALWAYS = ("gpt_oss", "whisper")
"""Families that `make test` runs: traced windows, sinks and experts; an encoder and cross attention. The others are slow."""


@pytest.mark.parametrize("family", [pytest.param(name, marks=[] if name in ALWAYS else pytest.mark.slow) for name in TINY])
def test_a_family_gives_the_logits_and_tokens_of_transformers(family):
    found = compare(family, steps=STEPS)
    assert len(found) == len(PROMPTS)
    for one, length in zip(found, PROMPTS, strict=True):
        decoded = 0 if family == "bert" else STEPS
        assert one.ours.shape == one.theirs.shape == (length + decoded, 64)
        assert one.difference < TOLERANCE, one.difference
        assert len(one.tokens) == (decoded + 1 if decoded else 0)
        np.testing.assert_array_equal(one.tokens, one.greedy)


def layers(**changes):
    return lambda config, weights: (config, weights._replace(layers=weights.layers._replace(**changes)))


def arrays(**changes):
    return lambda config, weights: (config, weights._replace(**changes))


def options(**changes):
    return lambda config, weights: (replace(config, **changes), weights)


PLAIN_ROPE = rope_table({"rope_theta": 1e4}, 16, 96)
CHANGES = {
    "llama, pairs of rope": options(is_neox=False),
    "llama, scaling of rope": arrays(rope=PLAIN_ROPE[None]),
    "qwen3, norm of heads": layers(query_norm=None, key_norm=None),
    "gemma2, window": layers(window=None),
    "gemma2, cap of scores": options(soft_cap=None),
    "gemma2, cap of logits": options(final_soft_cap=None),
    "gemma2, scale": options(scale=None),
    "gemma3, two bases": lambda config, weights: layers(rope=1 - weights.layers.rope)(config, weights),
    "gpt_oss, window": layers(window=None),
    "gpt_oss, sinks": layers(sinks=None),
    "llama4, chunk": layers(chunk=None),
    "llama4, temperature": options(temperature=None),
    "llama4, norm of heads": options(l2_norm=False),
    "mpt, ALiBi": arrays(alibi_slopes=None),
    "whisper, positions": arrays(positions=None),
    "whisper, positions of the audio": lambda config, weights: arrays(audio=weights.audio._replace(positions=0.0))(config, weights),
    "bert, positions": arrays(positions=None),
}
"""What each family has beyond plain attention, taken away from ours."""


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_logits_tell_whether_a_family_has_its_options(change):
    found = compare(change.partition(",")[0], steps=1, change=CHANGES[change])
    assert max(one.difference for one in found) > 100 * TOLERANCE


@pytest.mark.slow
def test_logits_tell_whether_a_prefix_is_seen_whole(monkeypatch):
    monkeypatch.setattr(pp.key_ranges, "prefix", lambda position, length: pp.key_ranges.causal(position))
    found = compare("paligemma", steps=1)
    differs = [one.difference > 100 * TOLERANCE for one in found]
    assert differs == [length > 1 for length in PREFIXES]


def test_what_the_example_does_not_have_is_refused_by_name():
    with pytest.raises(ValueError, match="rope_type is 'longrope'"):
        rope_table({"rope_type": "longrope", "rope_theta": 1e4}, 8, 4)
    with pytest.raises(ValueError, match="model_type is 't5'"):
        read(type("Config", (), {"model_type": "t5"}), {})


@pytest.mark.parametrize("heads", [4, 6, 8])
def test_alibi_slopes_are_those_of_transformers(heads):
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    np.testing.assert_allclose(alibi_slopes(heads), -build_mpt_alibi_tensor(heads, 2)[:, 0, 0].numpy(), rtol=1e-6)
