"""Both backends against facts that `record_vllm.py` took from the wheel of vLLM 0.33.0: nothing differs but what `extensions` names."""

import base64
import dataclasses
import inspect
import itertools
import json
import re
import zlib
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purepage as pp

RECORD = json.loads((Path(__file__).parent / "data" / "vllm_0_33.json").read_text())
BACKENDS = {"ROCM_ATTN": pp.rocm_attn, "ROCM_AITER_UNIFIED_ATTN": pp.rocm_aiter_unified_attn}
EACH = pytest.mark.parametrize(("backend", "facts"), [(BACKENDS[name], facts) for name, facts in RECORD["backends"].items()], ids=BACKENDS)

RENAMED_FLAGS = {"sink": "sinks"}
ATTRIBUTES = {
    # an attribute of backend, implementation or builder: the field, or None where the port has no such notion
    "forward_includes_kv_cache_update": "forward_includes_kv_cache_update",
    "supports_kv_cache_update_bypass": "kv_cache_update_bypass",
    "supports_pcp": "pcp",
    "supports_dcp": "dcp",
    "supports_quant_query_input": None,  # the class sets it per instance, see `no_quant_query_archs`
    "can_return_lse_for_decode": None,
    "reorder_batch_threshold": None,
    "supports_update_block_table": None,
    "supports_draft_decode_metadata_update": None,
}
TESTED_ELSEWHERE_HERE = {
    *("name", "dtypes", "kv_cache_dtypes", "head_sizes", "min_head_size", "kernel_block_size_multiple", "preferred_block_size"),
    *("attn_types", "layouts", "layouts_with_kv_connector", "logits_soft_cap", "alibi", "cudagraph", "capture_zeroes_query_starts"),
    *("full_precision_new_tokens", "fused_output_quant", "fused_qk_norm_mrope_kvcache"),
}
NOT_RECORDED = {
    "native_block_sizes",  # of the HIP kernels
    "contents",  # the port's names of layouts
    "compute_capability",  # any device, see validate_configuration
    "combination",  # none refused, see validate_configuration
    "fused_rope_kvcache",  # where AITER is on
    "fused_qk_norm_rope_kvcache",  # where AITER is on
    "quant_query_input",  # set per instance by the arch
    "no_quant_query_archs",
    "extensions",
}
METHODS = {
    "forward": "forward",
    "do_kv_cache_update": "kv_cache_update",
    "do_rope_and_kv_cache_update": "rope_and_kv_cache_update",
    "do_qk_norm_rope_kvcache_update": "qk_norm_rope_and_kv_cache_update",
    "do_qk_norm_mrope_kvcache_update": "qk_norm_mrope_and_kv_cache_update",
}
RENAMED = {"kv_cache": "cache", "attn_metadata": "metadata", "layer_slot_mapping": "slot_mapping", "rms_norm_eps": "eps"}
NOT_PASSED = {"output", "q_out", "k_out", "rotary_dim"}
"""Buffers, which the port returns, and the width of `cos_sin_cache`."""

ADDED = {"config", "layer", "implementation", "q_scale", "output_dtype"}
"""What the class keeps in the layer or reads off its buffers, and the choice of an implementation."""


def field_of(flag: str) -> str:
    name = re.sub("^(supports|is)_", "", flag)
    return RENAMED_FLAGS.get(name, name)


def numbers(ranges: list[list[int]]) -> set[int]:
    return {n for first, last, step in ranges for n in range(first, last + 1, step or 1)}


@EACH
def test_flags_are_the_classes_answers(backend, facts):
    declared = {flag: getattr(backend.CAPABILITIES, field_of(flag)) for flag in facts["flags"]}
    assert declared == facts["flags"]
    assert set(facts["attributes"]) == set(ATTRIBUTES)
    for attribute, field in ATTRIBUTES.items():
        assert field is None or getattr(backend.CAPABILITIES, field) == facts["attributes"][attribute], attribute


def test_every_field_is_recorded_or_listed():
    flags = {field_of(flag) for facts in RECORD["backends"].values() for flag in facts["flags"]}
    known = flags | {field for field in ATTRIBUTES.values() if field} | TESTED_ELSEWHERE_HERE | NOT_RECORDED
    assert {field.name for field in dataclasses.fields(pp.Capabilities)} == known


@EACH
def test_sizes_dtypes_types_and_layouts_are_the_classes(backend, facts):
    able = backend.CAPABILITIES
    assert able.name in RECORD["backends"]
    assert [dtype.name for dtype in able.dtypes] == facts["dtypes"]
    assert list(able.kv_cache_dtypes) == facts["kv_cache_dtypes"]
    assert {size for size in range(1, 513) if able.supports_head_size(size)} == numbers(facts["head_sizes up to 512"])
    assert {size for size in range(1, 2049) if able.supports_block_size(size)} == numbers(facts["block_sizes up to 2048"])
    assert able.supports_block_size(None) == facts["block_size None"]
    assert {size: able.get_preferred_block_size(int(size)) for size in facts["preferred_block_size"]} == facts["preferred_block_size"]
    assert [kind for kind in (*RECORD["attention types"], "other") if able.supports_attn_type(kind)] == facts["attn_types"]
    assert list(able.supported_kv_cache_layouts()) == facts["layouts"]["without"]
    with_connector = facts["layouts"]["with a KV connector"] if facts["flags"]["supports_kv_connector"] else []
    assert list(able.supported_kv_cache_layouts(kv_connector=True)) == with_connector
    assert list(able.fused_output_quant) == facts["fused_output_quant"]
    assert able.fused_qk_norm_mrope_kvcache == facts["fused_mrope"] == hasattr(backend, "qk_norm_mrope_and_kv_cache_update")


def test_attention_types_are_vllms_strings():
    assert [kind.value for kind in pp.AttentionType] == RECORD["attention types"]
    assert all(pp.AttentionType(kind) == kind for kind in RECORD["attention types"])


@EACH
def test_the_selector_asks_and_is_answered_as_in_the_class(backend, facts):
    asked = inspect.signature(backend.CAPABILITIES.validate_configuration).parameters
    assert list(asked) == facts["validate_configuration"]
    usual = {"head_size": 64, "dtype": jnp.bfloat16}
    assert backend.CAPABILITIES.validate_configuration(**usual) == ()
    toggles = [name for name in asked if name.startswith(("use_", "has_"))]
    refused = [name for name in toggles if backend.CAPABILITIES.validate_configuration(**usual, **{name: True})]
    assert refused == facts["refused by validate_configuration"]


@EACH
def test_cache_spec_takes_what_customize_spec_takes_and_has_its_groups(backend, facts):
    """The class leaves block sizes to its selector, which takes multiples of 16; 1 is the probe of the bytes of a token."""
    for case, expected in facts["customize_spec"].items():
        field, value = case.split()
        asked = {"num_blocks": 3, "num_kv_heads": 2, "head_size": 32, field: int(value)}
        if field == "head_size_v" and backend is pp.rocm_aiter_unified_attn:  # the class leaves the spec as it is: vLLM's own keeps both
            spec = backend.cache_spec(**asked)
            assert spec.nbytes == 3 * 2 * spec.block_size * (32 + 16) * 2
            continue
        if field == "head_size_v" or not (value == "1" or backend.CAPABILITIES.supports_block_size(int(value))):
            with pytest.raises(pp.UnsupportedError, match=field):
                backend.cache_spec(**asked)
            continue
        spec = backend.cache_spec(**asked)
        heads, width = spec.num_kv_heads, spec.head_size
        slots = expected["num_head_slots"] or heads
        content = expected["state_content_bytes"] or 2 * width * spec.dtype.itemsize
        assert spec.nbytes == spec.num_blocks * slots * spec.block_size * content
        if value != "1":
            assert backend.get_kv_cache_shape(3, int(value), heads, width) == (3, slots, int(value), content // spec.dtype.itemsize)


@EACH
def test_methods_have_the_classes_parameters(backend, facts):
    for method, function in METHODS.items():
        if not hasattr(backend, function):
            assert method not in facts["writers without a cache"]
            continue
        theirs = {RENAMED.get(name, name) for name in facts["parameters"][method]} - NOT_PASSED
        mine = set(inspect.signature(getattr(backend, function)).parameters)
        assert theirs <= mine and mine - theirs <= ADDED, function
    layer = set(inspect.signature(pp.AttentionConfig).parameters)
    assert {*facts["parameters"]["__init__"]} - layer == {"kv_sharing_target_layer_name"}


def layer_of(attn_type, kv_cache_dtype="auto", **options):
    return pp.AttentionConfig(num_heads=4, num_kv_heads=2, head_size=32, attn_type=attn_type, kv_cache_dtype=kv_cache_dtype, **options)


@EACH
def test_forward_exits_early_where_the_class_does(backend, facts):
    query = jnp.ones((4, 4, 32))
    for case, expected in facts["forward"]["profiling"].items():
        kind, _, block_scale = case.partition(", ")
        layer, options = layer_of(kind, "fp8"), {"output_block_scale": 1.0} if block_scale else {}
        if expected == "zeros":
            assert not np.any(np.asarray(backend.forward(query, None, None, None, None, layer, **options)))
        else:
            with pytest.raises(NotImplementedError):
                backend.forward(query, None, None, None, None, layer, **options)


def step_of(backend, query_dtype, kv_cache_dtype):
    cache = backend.init_cache(backend.cache_spec(num_blocks=2, num_kv_heads=2, head_size=32, kv_cache_dtype=kv_cache_dtype))
    metadata = pp.make_metadata([4], [9], [[0]], block_size=cache.spec.block_size)
    return jnp.zeros((4, 4, 32), query_dtype), jnp.zeros((4, 2, 32), jnp.bfloat16), cache, metadata


@EACH
def test_forward_ignores_applies_and_refuses_the_query_scale_as_the_class(backend, facts):
    for case, expected in facts["forward"]["q_scale"].items():
        dtype, kind, scale = re.fullmatch(r"(\w+) query, (\w+) cache, scale (.*)", case).groups()
        query, key, cache, metadata = step_of(backend, dtype, kind)

        layer = layer_of("decoder", kind)

        def run(q_scale, layer=layer):
            return lambda *arguments: backend.forward(*arguments, layer, q_scale=q_scale, implementation="xla")

        given = (query, key, key, cache, metadata)
        if backend is pp.rocm_attn and case == "float8_e4m3fn query, auto cache, scale 0.5":
            assert expected == "ignored" and "refused beside any cache" in backend.CAPABILITIES.beyond["q_scale"]
            expected = "NotImplementedError"
        if expected == "NotImplementedError":
            with pytest.raises(NotImplementedError, match="q_scale"):
                jax.eval_shape(run(float(scale)), *given)
            continue
        assert jax.eval_shape(run(float(scale)), *given).shape == query.shape
        scored = [str(jax.make_jaxpr(run(q_scale))(*given)) for q_scale in (None, float(scale))]
        assert (scored[0] == scored[1]) == (expected == "ignored"), case


@EACH
def test_kernels_of_the_class_get_what_the_fields_say(backend, facts):
    able, arguments = backend.CAPABILITIES, facts["forward"]["kernel arguments"]
    decoder, encoder = set(arguments["decoder"]), set(arguments["encoder"])
    assert able.logits_soft_cap == ("softcap" in decoder)
    assert able.alibi == ("alibi_slopes" in decoder)
    assert able.full_precision_new_tokens == ({"key", "value"} <= decoder)
    assert {"sinks", "output_scale"} <= decoder
    # An encoder's kernel gets less than the port applies or refuses by name.
    for argument, field in (("softcap", "logits_soft_cap"), ("alibi_slopes", "alibi"), ("output_scale", "fused_output_quant")):
        assert argument not in encoder and "encoders" in able.beyond[field]
    assert "sinks" in encoder and arguments["encoder, fp8 cache"] == "NotImplementedError"


def test_the_class_serves_one_token_steps_by_its_decode_kernel_alone():
    """Which is why `rocm_attn` reads the cache alone in such a step: see test_new_tokens."""
    decode = "decode, filter_by_query_len=True"
    assert RECORD["step"] == {"max_query_len 1": [decode], "max_query_len 3": ["prefill, skip_decode=True", decode]}


@EACH
def test_writers_return_early_where_the_classes_do(backend, facts):
    """The class touches its cache, which is None here, wherever it does not return early."""
    token, table = jnp.ones((1, 4, 32)), jnp.ones((2, 32))
    key, slots, positions = token[:, :2], jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
    normed = (jnp.ones((1, 8 * 32)), jnp.ones(32), jnp.ones(32), positions, table)
    calls = {
        "do_kv_cache_update": lambda layer: backend.kv_cache_update(key, key, None, slots, layer),
        "do_rope_and_kv_cache_update": lambda layer: backend.rope_and_kv_cache_update(
            token, key, key, positions, table, None, slots, layer
        ),
        "do_qk_norm_rope_kvcache_update": lambda layer: backend.qk_norm_rope_and_kv_cache_update(*normed, None, slots, layer),
        "do_qk_norm_mrope_kvcache_update": lambda layer: backend.qk_norm_mrope_and_kv_cache_update(
            *normed, None, slots, layer, mrope_section=(8, 4, 4)
        ),
    }
    for method, outcomes in facts["writers without a cache"].items():
        for kind, outcome in outcomes.items():
            if outcome == "returns":
                found = calls[method](layer_of(kind))
                assert (found if method == "do_kv_cache_update" else found[-1]) is None
            elif kind.startswith("encoder") and kind != "encoder_decoder":
                query, *_, cache = calls[method](layer_of(kind))  # normalised, though there is no cache to write
                assert (
                    cache is None
                    and query.shape == (1, 4, 32)
                    and "encoders write nothing" in backend.CAPABILITIES.beyond["fused_qk_norm_rope_kvcache"]
                )
            else:
                with pytest.raises(TypeError, match="cache"):
                    calls[method](layer_of(kind))


def test_without_slots_the_layer_writes_nothing_and_zeroes_what_the_qk_norm_writers_return():
    """The port returns the key of both qk-norm writers, so that both are zeros."""
    found = RECORD["without slots"]
    assert found["unified_kv_cache_update"] == found["fused_rope_and_unified_kv_cache_update"] == []
    assert found["fused_qk_norm_rope_and_unified_kv_cache_update"] == ["q_out", "k_out"]
    assert found["fused_qk_norm_mrope_and_unified_kv_cache_update"] == ["q_out"]
    layer, rest = layer_of("decoder"), (jnp.ones(32), jnp.ones(32), None, jnp.ones((2, 32)), None, None)
    for backend in BACKENDS.values():
        for name, options in (("qk_norm_rope", {}), ("qk_norm_mrope", {"mrope_section": (8, 4, 4)})):
            writer = getattr(backend, f"{name}_and_kv_cache_update", None)
            if writer is not None:
                query, key, value, _ = writer(jnp.ones((3, 8 * 32)), *rest, layer, **options)
                assert not query.any() and not key.any() and value.all()


@EACH
def test_metadata_builders_have_the_classes_fields_and_captures(backend, facts):
    builder = facts["builder"]
    common = pp.make_metadata([3, 1], [20, 33], [[0, 1, -1], [2, 3, 4]], block_size=16)
    built, prefixed, captured = backend.build(0, common), backend.build(16, common), backend.build_for_cudagraph_capture(common)
    assert builder["cudagraph"] == backend.CAPABILITIES.cudagraph
    mine = {field.name for field in dataclasses.fields(backend.RocmAttentionMetadata)}
    assert set(builder["fields"] or mine) - mine == set() and mine - set(builder["fields"] or mine) <= {"block_size"}
    assert builder["common_prefix_len changes"] == []
    assert jax.tree.structure(built) == jax.tree.structure(prefixed)
    for left, right in zip(jax.tree.leaves(built), jax.tree.leaves(prefixed), strict=True):
        np.testing.assert_array_equal(left, right)
    changed = [name for name in mine if not np.array_equal(getattr(built, name), getattr(captured, name))]
    # The runner of vLLM hands its capture a slot mapping of -1 already; the port sets it.
    assert set(changed) == {*builder["capture changes"], "slot_mapping"}
    for name, value in builder["capture changes"].items():
        np.testing.assert_array_equal(getattr(captured, name), value)
    assert int(captured.num_actual_tokens) == 4 and np.all(np.asarray(captured.slot_mapping) == -1)
    assert ("query_start_loc" in builder["capture changes"]) == backend.CAPABILITIES.capture_zeroes_query_starts


@pytest.mark.parametrize("group", RECORD["gate"], ids=lambda group: group["archs"][0])
def test_the_gate_of_the_hip_decode_kernel_is_the_classes(group):
    grid = [tuple(tuple(v) if isinstance(v, list) else v for v in point) for point in itertools.product(*RECORD["gate axes"].values())]
    bits = int.from_bytes(zlib.decompress(base64.b64decode(group["answers"])), "little")
    for arch in group["archs"]:
        for count, (*facts, alibi, sinks) in enumerate(grid):
            answer = pp.rocm_attn.use_rocm_custom_paged_attention(*facts, alibi or None, sinks or None, arch=arch)
            assert answer == bool(bits >> count & 1), (arch, facts, alibi, sinks)
