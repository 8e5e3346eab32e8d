"""New tokens at full precision beside a cache: in one pass, and in parts that are merged, by every implementation."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")

from dataclasses import replace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from rocm_attn_rule import cache_without_dense_tokens
from rocm_attn_rule import expected_of_rocm_attn as expected

import purepage as pp
from purepage.functional import dispatch, new_tokens
from purepage.functional.attention import paged_attention_call
from purepage.functional.new_tokens import attention_with_new_tokens
from purepage.testing import assert_close, random_batch, reference_encoder_attention

F32, BF16 = np.dtype("float32"), np.dtype(ml_dtypes.bfloat16)
E4M3, E4M3Z, E5M2 = (np.dtype(getattr(ml_dtypes, f"float8_{kind}")) for kind in ("e4m3fn", "e4m3fnuz", "e5m2"))
SINKS = np.linspace(-1.5, 1.5, 4).astype(np.float32)
SLOPES = np.array([0.5, 0.25, 0.125, -0.1], np.float32)


@pytest.fixture(params=["xla", "triton"])
def implementation(request, monkeypatch):
    """`xla` is made to attend in parts, as an implementation without a one-pass kernel does."""
    monkeypatch.setattr(new_tokens, "ONE_PASS", "no_such_operation")
    return request.param


def attend(batch, implementation, **options):
    """Over a cache that holds NaN where the dense tokens are stored: the copies in there must not be read."""
    cache = cache_without_dense_tokens(batch, content="xpacked", order="LHBNC")

    @jax.jit
    def call(query, key, value, cache, metadata):
        return attention_with_new_tokens(query, key, value, cache, metadata, implementation=implementation, **options)

    return call(batch.query, batch.key, batch.value, cache, batch.metadata)


ALL = {"sliding_window": 9, "alibi_slopes": SLOPES, "sinks": SINKS, "logits_soft_cap": 3.0}
CASES = {
    # batch, options. "mixed" has sequences without context, whose first part sees nothing, without new tokens, and of one query token.
    "plain-cap-sinks": ({"padding_seqs": 3, "max_query_len": 20}, {"sinks": SINKS, "logits_soft_cap": 3.0}),
    "window-of-itself": ({"sliding_window": 1}, {"sliding_window": 1}),
    "window-past-every-context": ({}, {"sliding_window": 1000}),
    "alibi": ({}, {"alibi_slopes": SLOPES}),
    "everything": ({"sliding_window": 9, "max_query_len": 20}, ALL),
    "decode-window": ({"kind": "decode", "sliding_window": 7}, {"sliding_window": 7, "sinks": SINKS}),
    "decode-everything": ({"kind": "decode", "num_seqs": 7, "sliding_window": 9, "max_seq_len": 200}, ALL),
    "most-of-one-token": ({"num_seqs": 9, "sliding_window": 4, "max_query_len": 2}, {"sliding_window": 4, "alibi_slopes": SLOPES}),
    "chunked-window": ({"kind": "chunked", "sliding_window": 14}, {"sliding_window": 14}),
    "chunked-everything": ({"kind": "chunked", "sliding_window": 9, "max_query_len": 40, "max_seq_len": 120}, ALL),
    "not-causal-window": ({"causal": False}, {"sliding_window": 5, "sinks": SINKS}),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
def test_the_parts_equal_the_oracle(case, implementation):
    made, options = CASES[case]
    batch = random_batch(5, cache_dtype=E4M3, scales="head", **made)
    out = attend(batch, implementation, **options)
    assert_close(out, expected(batch, **options), dtype=F32)
    assert not np.any(np.asarray(out[batch.num_tokens :]))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("cache_dtype", [E4M3Z, E5M2], ids=str)
def test_parts_of_bfloat16_are_rounded_once_to_fp8(cache_dtype, implementation):
    batch = random_batch(6, dtype=BF16, cache_dtype=cache_dtype, scales="layer", sliding_window=9)
    out = attend(batch, implementation, output_scale=0.01, output_dtype=E5M2, **ALL)
    assert_close(out, expected(batch, output_scale=0.01, output_dtype=E5M2, **ALL), dtype=E5M2, compute_dtype=BF16)


@pytest.mark.parametrize("parts", [1, 2])
def test_a_sequence_shorter_than_its_queries_leaves_out_the_first(parts, monkeypatch):
    """Whatever made such lengths: a query at a negative position sees nothing, and its own key has no place."""
    if parts == 2:
        monkeypatch.setattr(new_tokens, "ONE_PASS", "no_such_operation")
    batch = random_batch(7, kind="prefill", cache_dtype=E4M3)
    assert batch.query_lens[:5].min() > 1
    shorter = batch.seq_lens - np.array([2, 0, batch.seq_lens[2], 1, 0, 0])
    out = np.asarray(attend(replace(batch, metadata=replace(batch.metadata, seq_lens=jnp.asarray(shorter, jnp.int32))), "xla"))
    starts = np.asarray(batch.metadata.query_start_loc)
    for s, length in enumerate(shorter):
        rows = slice(starts[s + 1] - length, starts[s + 1])
        assert not out[starts[s] : rows.start].any()
        alone = [np.asarray(side)[rows] for side in (batch.query, batch.key, batch.value)]
        wanted, _ = reference_encoder_attention(*alone, np.array([0, length]), causal=True)
        assert_close(out[rows], wanted, dtype=F32)


@pytest.mark.parametrize("kind", ["mixed", "decode"])
def test_the_context_alone_is_attention_over_shorter_sequences(kind, implementation):
    """Without positions in the scores; a sequence without context gives 0 and -inf."""
    batch = random_batch(8, kind=kind, cache_dtype=E4M3, scales="head", causal=kind == "decode")
    cache = batch.cache_before(content="xpacked", order="LHBNC")
    made = paged_attention_call(jnp.asarray(batch.query), cache, batch.metadata, return_lse=True, logits_soft_cap=3.0)
    out, lse = dispatch.run("paged_attention", replace(made, context_only=True), implementation)
    lens = np.diff(np.asarray(batch.metadata.query_start_loc))
    shorter = replace(batch, metadata=replace(batch.metadata, seq_lens=jnp.asarray(batch.seq_lens - lens, jnp.int32)))
    wanted, wanted_lse = shorter.reference(causal=False, logits_soft_cap=3.0)
    assert_close(out, wanted, dtype=F32)
    assert_close(lse, wanted_lse, dtype=F32)
    assert kind == "decode" or np.isneginf(np.asarray(lse)[: batch.num_tokens]).any()


def test_a_step_of_one_query_token_a_sequence_is_one_pass_over_the_cache():
    """No scratch cache and no merge: the traced program is that of `paged_attention`."""
    batch = random_batch(9, kind="decode", cache_dtype=E4M3)
    arrays = [jnp.asarray(side) for side in (batch.query, batch.key, batch.value)]
    cache = batch.cache(content="xpacked", order="LHBNC")

    def step(query, key, value, cache, metadata):
        return attention_with_new_tokens(query, key, value, cache, metadata, implementation="xla")

    def plain(query, key, value, cache, metadata):
        return pp.paged_attention(query, cache, metadata, implementation="xla")

    programs = [str(jax.make_jaxpr(f)(*arrays, cache, batch.metadata)) for f in (step, plain)]
    assert programs[0] == programs[1]


@pytest.mark.sampled(5)
@pytest.mark.parametrize("option", [{"sliding_window": 128}, {"alibi_slopes": [0.1] * 32}, {}], ids=lambda o: next(iter(o), "plain"))
@pytest.mark.parametrize("arch", ["gfx942", "gfx1100", "sm_90"])
def test_triton_serves_every_part_beside_an_fp8_cache(arch, option):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    config = pp.AttentionConfig(num_heads=32, num_kv_heads=8, head_size=128, kv_cache_dtype="fp8_e5m2", **option)
    spec = pp.rocm_attn.cache_spec(num_blocks=64, num_kv_heads=8, head_size=128, kv_cache_dtype="fp8_e5m2", arch="gfx942")
    ints = [jax.ShapeDtypeStruct(sizes, jnp.int32) for sizes in ((5,), (4,), (4, 8), (40,))]
    query, key = (jax.ShapeDtypeStruct((40, heads, 128), jnp.bfloat16) for heads in (32, 8))
    found = pp.explain(pp.rocm_attn.forward, query, key, key, spec, pp.AttentionMetadata(*ints, max_query_len=32), config, arch=arch)
    attend, merge = "paged_attention", "merge_attention_states"
    operations = [attend, "update_cache", attend, attend, merge, merge]
    assert [(c.operation, c.implementation) for c in found.choices] == [(name, "triton") for name in operations]


def test_aiter_says_that_it_attends_whole_sequences():
    from purepage.bridges.aiter.rules import unsupported_reasons
    from purepage.functional.target import named_target

    batch = random_batch(9, dtype=BF16, cache_dtype=BF16)
    made = paged_attention_call(jnp.asarray(batch.query), batch.cache(), batch.metadata)
    assert unsupported_reasons("paged_attention", made, named_target("gfx942"), explicit=True) == ()
    (reason,) = unsupported_reasons("paged_attention", replace(made, context_only=True), named_target("gfx942"), explicit=True)
    assert "before this step's tokens" in reason
