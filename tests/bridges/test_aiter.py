"""AITER's own operators inside `jax.jit`, from the real package: the Triton ones run through Triton's interpreter against the oracle; the
calls of the HIP ones, which can't run here, are checked against the package's sources.
"""

import ast
import os
from dataclasses import replace
from functools import partial

os.environ.setdefault("TRITON_INTERPRET", "1")

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.testing import assert_close, random_batch, reference_rope

pytest.importorskip("torch")
pytest.importorskip("triton")
from purepage.bridges.aiter import (
    decode as aiter_decode,
)
from purepage.bridges.aiter import (
    package as aiter_package,
)
from purepage.bridges.aiter import plan
from purepage.bridges.aiter import (
    rules as aiter_rules,
)
from purepage.bridges.aiter import (
    unified as aiter,
)
from purepage.bridges.aiter import (
    writers as aiter_writers,
)
from purepage.functional.attention import paged_attention_call
from purepage.functional.calls import QkNormRopeUpdateCall, RopeUpdateCall, UpdateCacheCall
from purepage.functional.dispatch import Unsupported
from purepage.functional.target import Settings, Target, current_target, using_settings

BF16, F16, E4M3 = ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn
MI300X, MI355X = Target("rocm", "gfx942", 304, 64), Target("rocm", "gfx950", 256, 64)

needs_package = pytest.mark.skipif(aiter_package.root() is None, reason="amd-aiter is not installed")
on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="runs AITER's Triton operators through the interpreter, on a CPU")


def check(batch, *, content="packed", order="LBHNC", layer=0, dtype=F16, **options):
    @jax.jit
    def attend(query, cache, metadata, layer):
        return pp.paged_attention(query, cache, metadata, layer=layer, implementation="aiter", **options)

    out = attend(batch.query, batch.cache(content=content, order=order), batch.metadata, layer)
    expected, _ = batch.reference(layer=layer, **options)
    assert_close(out, expected, dtype=dtype)


@pytest.mark.sampled(4)
@needs_package
@on_cpu
@pytest.mark.parametrize("content", ["packed", "flash"])
@pytest.mark.parametrize("order", ["LBHNC", "LHBNC"])
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_every_layout_and_batch_over_nan_in_every_unowned_slot(content, order, kind):
    check(random_batch(1, kind=kind, dtype=F16, num_layers=2), content=content, order=order, layer=1)


FEATURES = {
    "window": {"sliding_window": 9},
    "window of itself": {"sliding_window": 1},
    "window beyond": {"sliding_window": 1000},
    "soft cap": {"logits_soft_cap": 0.7},
    "soft cap far below the scores": {"logits_soft_cap": 0.01, "scale": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, -0.1, 1.0]},
    "sinks": {"sinks": [0.3, -1.0, 5.0, -np.inf]},
    "scale": {"scale": -0.3},
    "window, soft cap, sinks": {"sliding_window": 20, "logits_soft_cap": 3.0, "sinks": [0.3, -1.0, 5.0, 4.0]},
}


@pytest.mark.sampled(6)
@needs_package
@on_cpu
@pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES)
@pytest.mark.parametrize("kind", ["decode", "chunked"])
def test_every_feature(kind, options):
    window = options.get("sliding_window")
    check(random_batch(2, kind=kind, dtype=F16, max_query_len=9, max_seq_len=80, sliding_window=window), **options)


@needs_package
@on_cpu
@pytest.mark.parametrize("lost", [-1, 10_000])
def test_a_needed_block_outside_the_cache_makes_its_sequence_nan_and_no_other(lost):
    """The oracle gives NaN rows there; without the rule AITER's kernel would read another sequence's block."""
    batch = random_batch(21, kind="decode", dtype=F16, num_seqs=3, max_seq_len=70)
    lengths = np.asarray(batch.metadata.seq_lens)
    sequence = int(np.argmax(lengths))
    table = np.asarray(batch.metadata.block_table).copy()
    table[sequence, 0] = lost
    out = pp.paged_attention(batch.query, batch.cache(), replace(batch.metadata, block_table=jnp.asarray(table)), implementation="aiter")
    starts = np.asarray(batch.metadata.query_start_loc)
    broken = np.zeros(len(out), bool)
    broken[starts[sequence] : starts[sequence + 1]] = True
    expected, _ = batch.reference()
    assert broken.any() and np.all(np.isnan(np.asarray(out, np.float32)[broken]))
    assert_close(np.asarray(out)[~broken], expected[~broken], dtype=F16)


@needs_package
@on_cpu
def test_alibi_beside_sinks_where_a_sequence_has_one_query():
    check(random_batch(3, kind="decode", dtype=F16), alibi_slopes=[0.5, 0.25, 0.1, 1.0], sinks=[0.3, -1.0, 5.0, 2.0])


@needs_package
@on_cpu
@pytest.mark.parametrize("block_size", [8, 48, 64])
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_block_sizes_that_its_kernels_assert_on_or_do_not_mask(block_size, kind):
    check(random_batch(4, kind=kind, dtype=F16, block_size=block_size, max_seq_len=150))


@needs_package
@on_cpu
@pytest.mark.parametrize("head_size, heads", [(80, (4, 2)), (64, (5, 1))], ids=str)
def test_head_sizes_and_groups_that_are_no_power_of_two(head_size, heads):
    check(random_batch(5, dtype=F16, head_size=head_size, num_heads=heads[0], num_kv_heads=heads[1]))


@needs_package
@on_cpu
@pytest.mark.parametrize("kind", ["decode", "mixed"])
def test_an_fp8_cache_is_multiplied_by_its_layers_scales_once(kind):
    batch = random_batch(6, kind=kind, dtype=F16, cache_dtype=E4M3, num_layers=2)
    assert not np.allclose(batch.k_scale[0], batch.k_scale[1])
    check(batch, layer=1)


@needs_package
@on_cpu
def test_a_traced_scale_goes_with_the_scales_of_an_fp8_cache_and_is_refused_without():
    batch = random_batch(7, dtype=F16, cache_dtype=E4M3)
    attend = jax.jit(lambda scale: pp.paged_attention(batch.query, batch.cache(), batch.metadata, scale=scale, implementation="aiter"))
    # AITER rounds each key to the query's dtype once its scale is in, hence the wider tolerance
    assert_close(attend(jnp.float32(0.4)), batch.reference(scale=0.4)[0], dtype=F16, compute_dtype=BF16)
    batch = random_batch(7, dtype=F16)
    with pytest.raises(pp.UnsupportedError, match="traced scale"):
        pp.paged_attention(batch.query, batch.cache(), batch.metadata, scale=jnp.float32(0.4), implementation="aiter")


@needs_package
@on_cpu
def test_an_output_scale_gives_the_platforms_fp8_kind():
    """Triton's interpreter loses the carry where rounding to fp8 reaches the next power of two: such codes may come out as half of it, and
    asking for it on a CPU is refused.
    """
    batch = random_batch(8, dtype=F16)
    arguments = jnp.asarray(batch.query), batch.cache(), batch.metadata
    with pytest.raises(pp.UnsupportedError, match="output_scale"):
        pp.paged_attention(*arguments, output_scale=0.02, implementation="aiter")
    call = paged_attention_call(*arguments, output_scale=0.02)
    out = np.asarray(jax.jit(partial(aiter.unified_attention, current_target()))(call)[0])
    expected = batch.reference(output_scale=0.02, output_dtype=E4M3)[0]
    wide, wanted = out.astype(np.float64), expected.astype(np.float64)
    lost = (2 * wide == wanted) & (np.abs(np.frexp(wanted)[0]) == 0.5)
    assert lost.mean() < 0.05
    assert_close(np.where(lost, expected, out), expected, dtype=E4M3, compute_dtype=E4M3)


@needs_package
@on_cpu
@pytest.mark.parametrize("switch", [None, "aiter_finite_cache", "aiter_paged_decode"])
def test_a_sequence_without_a_query_between_others_moves_no_row(switch):
    """AITER takes token s for sequence s where `max_seqlen_q` is 1, or has no query starts at all."""
    batch = random_batch(15, kind="mixed", max_query_len=1, dtype=F16, num_seqs=6)
    assert batch.metadata.max_query_len == 1 and not batch.query_lens[: np.flatnonzero(batch.query_lens)[-1]].all()
    cache = batch.cache()
    if switch == "aiter_finite_cache":
        cache = replace(cache, data=jnp.nan_to_num(cache.data))
    with using_settings(**({switch: True} if switch else {})):
        out = jax.jit(lambda q, c, m: pp.paged_attention(q, c, m, implementation="aiter"))(batch.query, cache, batch.metadata)
    assert_close(out, batch.reference()[0], dtype=F16)


@needs_package
@on_cpu
@pytest.mark.parametrize("kind", ["decode", "mixed"])
@pytest.mark.parametrize("most", [60, 600], ids=["one program a sequence", "split"])
def test_with_the_promise_of_a_finite_cache_aiter_chooses_its_kernel(kind, most):
    batch = random_batch(9, kind=kind, dtype=F16, max_seq_len=most, num_seqs=3, num_heads=2, num_kv_heads=1)
    cache = batch.cache()
    finite = pp.KVCache(jnp.nan_to_num(cache.data), cache.k_scale, cache.v_scale, cache.spec)
    with using_settings(aiter_finite_cache=True):
        out = jax.jit(lambda q, c, m: pp.paged_attention(q, c, m, implementation="aiter"))(batch.query, finite, batch.metadata)
    assert_close(out, batch.reference()[0], dtype=F16)


@needs_package
@on_cpu
@pytest.mark.parametrize("operator", ["unified_attention", "paged_attention_decode"])
def test_bits_of_a_bfloat16_cache_reach_aiter_as_bfloat16(monkeypatch, operator):
    """Through a repaired interpreter: Triton's takes the bits of bfloat16 operands of a dot product, or of a sum, for integers."""
    from triton.runtime import interpreter

    dot, total = interpreter.InterpreterBuilder.create_dot, interpreter.ReduceOps.sum

    def widened(x):
        if x.dtype.scalar.name != "bf16":
            return x
        return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), interpreter.tl.float32)

    def wide_sum(self, x):
        if x.dtype.scalar.name != "bf16":
            return total(self, x)
        return self.to_tensor(widened(x.handle).data.sum(axis=self.axis, keepdims=self.keep_dims), interpreter.tl.float32)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest))
    monkeypatch.setattr(interpreter.ReduceOps, "sum", wide_sum)
    decode = operator == "paged_attention_decode"
    batch = random_batch(10, dtype=BF16, kind="decode" if decode else "mixed")
    call = paged_attention_call(jnp.asarray(batch.query), batch.cache(), batch.metadata)
    attend = aiter_decode.paged_decode if decode else partial(aiter.unified_attention, current_target())
    assert_close(jax.jit(attend)(call)[0], batch.reference()[0], dtype=BF16)


@needs_package
@pytest.mark.parametrize(
    "arch, sequences, keys, finite, recorded",
    [
        (MI300X, 8, 4096, False, True),
        (MI300X, 8, 4096, True, False),
        (MI300X, 256, 2048, True, True),
        (MI300X, 8, 512, True, True),
        (Target("rocm", "gfx1250", 256, 32), 256, 2048, True, False),
    ],
    ids=["masked", "few and long: split", "many", "short", "gfx1250 splits every decode"],
)
def test_what_allocates_is_never_recorded(arch, sequences, keys, finite, recorded):
    target = replace(arch, settings=Settings(aiter_command_buffer=True, aiter_finite_cache=finite))
    table = np.zeros((sequences, keys // 64), np.int32)
    metadata = pp.make_metadata([1] * sequences, [keys] * sequences, table, block_size=64)
    cache = pp.init_cache(pp.CacheSpec(num_blocks=1, block_size=64, num_kv_heads=8, head_size=64))
    call = paged_attention_call(jnp.zeros((sequences, 32, 64), jnp.bfloat16), cache, metadata)
    jaxpr = jax.make_jaxpr(partial(aiter.unified_attention, target))(call)
    (callback,) = [e for e in jaxpr.eqns if e.primitive.name == "buffer_callback"]
    assert callback.params["command_buffer_compatible"] == recorded


@pytest.fixture
def paged_decode(monkeypatch):
    """Steps of one query a sequence go to AITER's paged decode; gives the calls that it got."""
    served, original = [], aiter_decode.PagedDecode.__call__

    def watched(self, *tensors):
        served.append(self)
        original(self, *tensors)

    monkeypatch.setattr(aiter_decode.PagedDecode, "__call__", watched)
    with using_settings(aiter_paged_decode=True):
        yield served


DECODES = {
    "packed": ({"num_layers": 2}, {"layer": 1}),
    "packed, layers inside": ({"num_layers": 2}, {"layer": 1, "order": "LHBNC"}),
    "flash": ({"num_layers": 2}, {"layer": 1, "content": "flash"}),
    "alibi": ({}, {"alibi_slopes": [0.5, 0.25, -0.1, 1.0]}),
    "scale": ({}, {"scale": -0.3}),
    "blocks of 48": ({"block_size": 48, "max_seq_len": 150}, {}),
    "5 heads on 1": ({"head_size": 64, "num_heads": 5, "num_kv_heads": 1}, {}),
    "split over programs": ({"max_seq_len": 2500, "num_seqs": 3, "num_heads": 2, "num_kv_heads": 1, "block_size": 64}, {}),
    "fp8, a scale per layer": ({"cache_dtype": E4M3, "num_layers": 2}, {"layer": 1}),
    "fp8, a scale per head": ({"cache_dtype": E4M3, "num_layers": 2, "scales": "head"}, {"layer": 1}),
}


@pytest.mark.sampled(5)
@needs_package
@on_cpu
@pytest.mark.parametrize("made, options", DECODES.values(), ids=DECODES)
def test_paged_decode_over_nan_in_every_unowned_slot(paged_decode, made, options):
    check(random_batch(12, kind="decode", dtype=F16, **made), **options)
    assert len(paged_decode) == 1


@needs_package
@on_cpu
def test_paged_decode_takes_a_traced_scale(paged_decode):
    batch = random_batch(7, kind="decode", dtype=F16)
    attend = jax.jit(lambda scale: pp.paged_attention(batch.query, batch.cache(), batch.metadata, scale=scale, implementation="aiter"))
    assert_close(attend(jnp.float32(0.4)), batch.reference(scale=0.4)[0], dtype=F16)
    assert len(paged_decode) == 1


@needs_package
@on_cpu
def test_paged_decode_serves_what_only_it_can_by_name_without_being_asked_for(paged_decode):
    with using_settings(aiter_paged_decode=False):
        check(random_batch(14, kind="cross", dtype=F16, max_query_len=1))
        check(random_batch(14, kind="decode", dtype=F16, cache_dtype=E4M3, scales="head"))
        assert len(paged_decode) == 2
        check(random_batch(14, kind="decode", dtype=F16))
    assert len(paged_decode) == 2


@needs_package
@on_cpu
def test_unified_attention_keeps_what_paged_decode_can_not_serve(paged_decode):
    check(random_batch(13, kind="mixed", dtype=F16))
    check(random_batch(13, kind="decode", dtype=F16, sliding_window=9), sliding_window=9)
    assert not paged_decode


def test_paged_decode_is_chosen_where_asked_for_or_where_only_it_can(monkeypatch):
    """Otherwise `unified_attention` is what `implementation="aiter"` means, and `None` never finds paged decode by itself."""
    monkeypatch.setattr(aiter_package, "source", lambda name: ("", None))
    monkeypatch.setattr(aiter_package, "parameters", lambda name: ())
    fnuz = ml_dtypes.float8_e4m3fnuz
    plain, per_head = call_of(kind="decode"), call_of(kind="decode", cache_dtype=fnuz, scales="head")
    assert [aiter_rules.decodes(call, MI300X) for call in (plain, per_head)] == [False, True]
    *_, hint = aiter_rules.unsupported_reasons("paged_attention", per_head, MI300X, explicit=False)
    assert aiter_rules.DECODE_VARIABLE in hint
    assert not aiter_rules.unsupported_reasons("paged_attention", per_head, MI300X, explicit=True)
    asked = replace(MI300X, settings=Settings(aiter_paged_decode=True))
    assert [aiter_rules.decodes(call, asked) for call in (plain, per_head)] == [True, True]
    assert not aiter_rules.unsupported_reasons("paged_attention", per_head, asked, explicit=False)
    assert not aiter_rules.decodes(call_of(kind="mixed"), asked)


NOT_DECODED = {
    "max_query_len": ({"kind": "mixed"}, {}),
    "sliding_window": ({}, {"sliding_window": 9}),
    "logits_soft_cap": ({}, {"logits_soft_cap": 3.0}),
    "sinks": ({}, {"sinks": [0.0] * 4}),
    "return_lse": ({}, {"return_lse": True}),
    "qq_bias": ({}, {"qq_bias": np.zeros((4, 4), np.float32)}),
    "output_scale": ({}, {"output_scale": 0.1}),
    "query is float32": ({"dtype": np.float32}, {}),
    "cache is float8_e5m2": ({"cache_dtype": ml_dtypes.float8_e5m2}, {}),
    "'shuffled'": ({"content": "shuffled"}, {}),
    "multiples of 16": ({"block_size": 8}, {}),
    "a power of two": ({"head_size": 80}, {}),
    "one query head per KV head": ({"num_heads": 2, "num_kv_heads": 2}, {}),
}


@pytest.mark.parametrize("match", NOT_DECODED)
def test_what_paged_decode_can_not_do_right_is_refused_with_the_reason(match):
    made, options = NOT_DECODED[match]
    content = {"content": made["content"]} if "content" in made else {}
    batch = random_batch(0, **{"kind": "decode", "dtype": BF16, **{k: v for k, v in made.items() if k != "content"}})
    call = paged_attention_call(jnp.asarray(batch.query), batch.cache(**content), batch.metadata, **options)
    reasons = [reason for reason in aiter_rules._reasons_of("paged_attention_decode", call, MI300X) if reason]
    assert reasons and any(match in reason for reason in reasons)


@needs_package
@on_cpu
def test_paged_decode_addresses_pages_in_64_bits():
    """It multiplies a table's entry by the page's stride in the table's dtype, and caches have more than 2**31 elements."""
    import torch

    batch = random_batch(0, kind="decode", dtype=F16)
    call = paged_attention_call(jnp.asarray(batch.query), batch.cache(), batch.metadata)
    operator, arrays = aiter_decode.plan_paged_decode(call)
    tensors = tuple(torch.from_numpy(np.array(arrays[name])) for name in operator.names)
    given = operator.arguments(tensors, None)
    required, names = declared("paged_attention_decode")
    assert set(required) <= set(given) <= set(names)
    assert given["block_tables"].dtype == torch.int64
    assert given["k_scale"].device.type == given["v_scale"].device.type == "cpu" and given["query"].dtype == torch.float32
    strides = {given[name].stride() for name in ("key_cache", "value_cache")}
    assert len(strides) == 1 and given["key_cache"].shape[1] == batch.spec().num_kv_heads  # one set of strides serves both


REFUSED = {
    "causal": ({"kind": "cross"}, {}),
    "return_lse": ({}, {"return_lse": True}),
    "qq_bias": ({}, {"qq_bias": np.zeros((4, 4), np.float32)}),
    "alibi_slopes with sinks": ({}, {"alibi_slopes": [1.0] * 4, "sinks": [0.0] * 4}),
    "one scale per layer": ({"cache_dtype": E4M3, "scales": "head"}, {}),
    "float8_e5m2": ({"cache_dtype": ml_dtypes.float8_e5m2}, {}),
    "float32": ({"dtype": np.float32}, {}),
}


@needs_package
@on_cpu
@pytest.mark.parametrize("match", REFUSED)
def test_what_it_can_not_do_right_is_refused_with_the_reason(match):
    made, options = REFUSED[match]
    batch = random_batch(0, **{"dtype": F16, **made})
    with pytest.raises(pp.UnsupportedError, match=match):
        pp.paged_attention(batch.query, batch.cache(), batch.metadata, implementation="aiter", **options)


def call_of(**made):
    batch = random_batch(0, **{"dtype": BF16, **made})
    return paged_attention_call(jnp.asarray(batch.query), batch.cache(), batch.metadata)


def test_fp8_kinds_follow_the_arch():
    fnuz, fn = call_of(cache_dtype=ml_dtypes.float8_e4m3fnuz), call_of(cache_dtype=E4M3)
    served = {
        arch.arch: [not aiter_rules.unsupported_reasons("paged_attention", call, arch, explicit=True) for call in (fnuz, fn)]
        for arch in (MI300X, MI355X, Target("rocm", "gfx90a", 104, 64), Target("rocm", "gfx1201", 64, 32))
    }
    assert served == {"gfx942": [True, False], "gfx950": [False, True], "gfx90a": [False, False], "gfx1201": [False, False]}


def test_a_release_whose_soft_cap_is_elsewhere_is_not_given_one(monkeypatch):
    call = replace(call_of(), logits_soft_cap=30.0)
    monkeypatch.setattr(aiter_package, "soft_cap_module", lambda: None)
    (reason,) = aiter_rules.unsupported_reasons("paged_attention", call, MI300X, explicit=True)
    assert "logits_soft_cap" in reason
    monkeypatch.setattr(aiter_package, "soft_cap_module", lambda: "somewhere")
    assert not aiter_rules.unsupported_reasons("paged_attention", call, MI300X, explicit=True)


def test_none_leaves_to_others_what_would_split_over_slots_that_may_hold_nan():
    call = call_of(kind="decode")
    call = replace(call, metadata=replace(call.metadata, max_seq_len=4096))
    (reason,) = aiter_rules.unsupported_reasons("paged_attention", call, MI300X, explicit=False)
    assert aiter_rules.FINITE_VARIABLE in reason
    assert not aiter_rules.unsupported_reasons("paged_attention", call, MI300X, explicit=True)
    promised = replace(MI300X, settings=Settings(aiter_finite_cache=True))
    assert not aiter_rules.unsupported_reasons("paged_attention", call, promised, explicit=False)


@pytest.mark.parametrize("arch, longest", [(MI300X, 1), (Target("rocm", "gfx1250", 256, 32), 2)], ids=["gfx942", "gfx1250"])
def test_heads_of_no_power_of_two_never_reach_the_split_kernel(arch, longest):
    """Its reduction does not compile for them. At 512 keys only gfx1250 splits, and only where every sequence has one query."""
    target = replace(arch, settings=Settings(aiter_finite_cache=True))
    operator, _, _ = aiter.plan_unified_attention(call_of(kind="decode", head_size=80, max_seq_len=2000), target)
    assert (operator.max_seq_len, operator.max_query_len) == (aiter_rules.SPLIT_KERNEL_FROM, longest)


def test_a_release_with_upcast_operand_is_given_bfloat16_caches_only(monkeypatch):
    monkeypatch.setattr(aiter_package, "parameters", lambda name: ("upcast_operand",))
    reasons = {}
    for dtype in ("float16", "bfloat16"):
        spec = pp.CacheSpec(num_blocks=3, block_size=16, num_kv_heads=2, head_size=64, dtype=dtype)
        new = jnp.zeros((5, 2, 64), dtype)
        call = RopeUpdateCall(
            query=new,
            key=new,
            value=new,
            positions=jnp.zeros(5, jnp.int32),
            cos_sin_cache=jnp.zeros((20, 64)),
            cache=pp.init_cache(spec),
            slot_mapping=jnp.zeros(5, jnp.int32),
            layer=jnp.int32(0),
            is_neox=True,
        )
        reasons[dtype] = " ".join(aiter_rules.unsupported_reasons("rope_and_update_cache", call, MI300X, explicit=True))
    assert "upcast_operand" in reasons["float16"] and not reasons["bfloat16"]


def test_an_unquantized_cache_gives_aiter_no_scales():
    """It would multiply by them, whatever the cache's dtype."""
    _, arrays, _ = aiter.plan_unified_attention(call_of(), MI300X)
    assert not {"q_descale", "k_descale", "v_descale"} & set(arrays)


@on_cpu
def test_aiter_is_not_the_default_on_a_cpu():
    assert isinstance(plan("paged_attention", call_of(dtype=F16), current_target(), explicit=False), Unsupported)


@pytest.mark.sampled(5)
@needs_package
@on_cpu
@pytest.mark.parametrize("neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(
    "content, order, block_size",
    [("packed", "LBHNC", 48), ("packed", "LHBNC", 48), ("flash", "LBHNC", 48), ("xpacked", "LHBNC", 16), ("xpacked", "LBHNC", 32)],
)
def test_the_fused_rotary_writer_is_rotation_then_write(neox, content, order, block_size):
    dtype = F16
    rng = np.random.default_rng(0)
    sizes = {"block_size": block_size, "num_seqs": 4, "max_query_len": 3, "num_heads": 2, "num_kv_heads": 1}
    batch = random_batch(11, dtype=dtype, num_layers=2, **sizes)
    table = rng.uniform(-1, 1, (70, 32)).astype(np.float32)
    query, key, value = (np.where(np.isnan(x), np.zeros((), x.dtype), x) for x in (batch.query, batch.new_keys[1], batch.new_values[1]))
    slots = np.asarray(batch.metadata.slot_mapping).copy()
    slots[0] = batch.spec().num_slots
    arguments = (query, key, value, batch.positions, table, batch.cache_before(content=content, order=order), jnp.asarray(slots))

    def write(implementation):
        return jax.jit(lambda *args, layer: pp.rope_and_update_cache(*args, is_neox=neox, layer=layer, implementation=implementation))(
            *arguments, layer=1
        )

    rotated = write("aiter")
    for actual, x in zip(rotated[:2], (query, key), strict=True):
        assert_close(actual, reference_rope(batch.positions, x, table, is_neox=neox), dtype=dtype)
    written = pp.update_cache(arguments[5], rotated[1], value, jnp.asarray(slots), layer=1, implementation="xla")
    np.testing.assert_array_equal(np.asarray(rotated[2].data).view(np.uint16), np.asarray(written.data).view(np.uint16))


def declared(name):
    """Parameters that an operator's source requires, and all of them."""
    found = aiter_package.source(name)
    if found is None:
        pytest.skip(f"this release of AITER has no {name}")
    names = [argument.arg for argument in found[1].args.args]
    return names[: len(names) - len(found[1].args.defaults)], names


def slot_call(content, order="LBHNC", dtype=BF16):
    import torch

    spec = pp.CacheSpec(num_blocks=5, block_size=16, num_kv_heads=2, head_size=64, num_layers=3, dtype=dtype, content=content, order=order)
    slots = jnp.array([-1, 0, 37, 79, 80], jnp.int32)
    new = jnp.ones((5, 2, 64), spec.dtype)
    call = UpdateCacheCall(cache=pp.init_cache(spec), key=new, value=2 * new, slot_mapping=slots, layer=jnp.int32(2))
    return call, torch


@needs_package
@pytest.mark.parametrize("order", ["LBHNC", "LHBNC"])
@pytest.mark.parametrize("content", ["xpacked", "xpacked_interleaved_v", "shuffled", "flash"])
def test_the_hip_writer_is_called_as_declared_and_its_addresses_are_the_caches(content, order):
    """The operator itself is HIP and not run: its address arithmetic, as its source has it, is done here in Python."""
    call, torch = slot_call(content, order)
    operator, slots = aiter_writers.plan_update_cache(call)
    buffer = torch.zeros(call.cache.spec.shape, dtype=torch.bfloat16)
    key = torch.ones(5, 2, 64, dtype=torch.bfloat16)
    given = operator.arguments((key, 2 * key, torch.from_numpy(np.array(slots))), (buffer,))
    required, names = declared(operator.operator)
    assert set(required) <= set(given) <= set(names)
    assert given["slot_mapping"].dtype == torch.int64
    N, H, D = given["key_cache"].shape[3] if content != "flash" else 1, 2, 64
    x = 8
    flat = [given[name].as_strided((buffer.numel() - given[name].storage_offset(),), (1,)) for name in ("key_cache", "value_cache")]
    for slot in given["slot_mapping"].tolist():
        if slot < 0:
            continue
        block, n = divmod(slot, N)
        for h in range(H):
            for d in range(D):
                if content == "flash":
                    at = [block * given["key_cache"].stride(0) + n * H * D + h * D + d] * 2
                else:
                    at = [block * H * D * N + (h * D // x + d // x) * N * x + n * x + d % x]
                    side = (n // x) * D * x + d * x + n % x if given["asm_layout"] else d * N + n
                    at.append(block * H * D * N + h * D * N + side)
                flat[0][at[0]], flat[1][at[1]] = 1, 2
    expected = pp.update_cache(call.cache, call.key, call.value, call.slot_mapping, layer=2, implementation="xla")
    np.testing.assert_array_equal(buffer.view(torch.uint16).numpy(), np.asarray(expected.data))


# Signatures of later releases than the one on PyPI (docs/semantics.md, Source of the fused writers); installed ones go first.
QK_NORM = (
    "qkv qw kw cos_sin positions num_tokens num_heads_q num_heads_k num_heads_v head_size is_neox_style eps q_out k_cache v_cache "
    "slot_mapping per_tensor_k_scale per_tensor_v_scale k_out v_out return_kv use_shuffle_layout block_size x rotary_dim"
).split()
QK_NORM_MROPE = [*QK_NORM[:11], "mrope_section_", "is_interleaved", *QK_NORM[11:]]


@pytest.mark.parametrize("section", [None, (12, 10, 10)], ids=["rope", "mrope"])
def test_the_qk_norm_writers_are_called_with_everything_that_they_declare(section):
    import torch

    from purepage.bridges.aiter.views import pages

    name = "fused_qk_norm_mrope_3d_cache_pts_quant_shuffle" if section else "fused_qk_norm_rope_cache_pts_quant_shuffle"
    names = aiter_package.parameters(name) or tuple(QK_NORM_MROPE if section else QK_NORM)
    spec = pp.CacheSpec(num_blocks=3, block_size=16, num_kv_heads=2, head_size=64)
    operator = aiter_writers.QkNormRopeAndCache(name, pages(spec, 1), "bfloat16", 4, True, 1e-6, section, False, 64, names)
    tokens = 5
    integers = torch.arange(tokens, dtype=torch.int32)
    inputs = (
        torch.zeros(tokens, 8 * 64, dtype=torch.bfloat16),
        *(torch.ones(64, dtype=torch.bfloat16) for _ in range(2)),
        torch.zeros(20, 64, dtype=torch.bfloat16),
        integers.expand(3, tokens) if section else integers,
        integers,
    )
    outputs = (
        torch.zeros(tokens, 4, 64, dtype=torch.bfloat16),
        torch.zeros(tokens, 2, 64, dtype=torch.bfloat16),
        torch.zeros(spec.shape, dtype=torch.uint16),
    )
    given = operator.arguments(inputs, outputs)
    assert tuple(given) == names
    assert given["positions"].dtype == given["slot_mapping"].dtype == torch.int64
    assert given["per_tensor_k_scale"].device.type == "cpu"
    assert (given["num_heads_q"], given["num_heads_k"], given["num_heads_v"], given["head_size"]) == (4, 2, 2, 64)
    assert given["k_cache"].data_ptr() == outputs[2].data_ptr()
    assert given["v_cache"].data_ptr() == outputs[2].data_ptr() + 64 * 2
    assert given["k_cache"].shape[1] == given["block_size"] == 1
    unknown = aiter_writers.QkNormRopeAndCache(name, pages(spec, 1), "bfloat16", 4, True, 1e-6, section, False, 64, (*names, "novelty"))
    with pytest.raises(TypeError, match="novelty"):
        unknown.arguments(inputs, outputs)


@needs_package
@pytest.mark.parametrize("name", ["unified_attention", "fused_qk_rope_reshape_and_cache"])
def test_the_triton_operators_are_given_what_their_source_requires_and_nothing_else(name):
    required, names = declared(name)
    assert isinstance(aiter_package.source(name)[1], ast.FunctionDef)
    given = {
        "unified_attention": (
            "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap q_descale "
            "k_descale v_descale alibi_slopes output_scale sinks"
        ),
        "fused_qk_rope_reshape_and_cache": (
            "q k v key_cache value_cache slot_mapping pos cos sin k_scale v_scale is_neox flash_layout apply_scale q_out k_out output_zeros"
        ),
    }[name].split()
    assert set(required) <= set(given) <= set(names)


def test_the_qk_norm_rules_name_the_argument():
    spec = pp.CacheSpec(num_blocks=3, block_size=16, num_kv_heads=2, head_size=64)
    call = QkNormRopeUpdateCall(
        qkv=jnp.zeros((5, 512), jnp.bfloat16),
        q_weight=jnp.ones(64),
        k_weight=jnp.ones(64),
        positions=jnp.zeros(5, jnp.int32),
        cos_sin_cache=jnp.zeros((20, 64)),
        cache=pp.init_cache(spec),
        slot_mapping=jnp.zeros(5, jnp.int32),
        layer=jnp.int32(0),
        num_heads=4,
        eps=1e-6,
        is_neox=True,
        mrope_section=None,
        is_interleaved=False,
    )
    assert "q_weight" in aiter_rules.unsupported_reasons("qk_norm_rope_and_update_cache", call, MI300X, explicit=True)[0]
