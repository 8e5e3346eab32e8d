"""What each backend declares, what it serves beyond that, and what it refuses: tables against tables."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import purepage as pp
from purepage.functional.backends.backend import device_arch
from purepage.functional.backends.hip_gates import HIP_DECODE_GATES
from purepage.functional.cache import CACHE_DTYPES

ROCM, UNIFIED = pp.rocm_attn, pp.rocm_aiter_unified_attn
BACKENDS = pytest.mark.parametrize("backend", [ROCM, UNIFIED], ids=lambda b: b.CAPABILITIES.name)
TYPES = pp.AttentionType


def config(**changes):
    return pp.AttentionConfig(**{"num_heads": 8, "num_kv_heads": 2, "head_size": 64, **changes})


def spec(backend, **changes):
    content, order = backend.CAPABILITIES.contents[0], backend.CAPABILITIES.layouts[0]
    known = {"num_blocks": 4, "block_size": 16, "num_kv_heads": 2, "head_size": 64, "content": content, "order": order}
    return pp.CacheSpec(**{**known, **changes})


@BACKENDS
def test_capabilities_are_frozen_and_hashable_and_extensions_name_fields(backend):
    fields = {field.name for field in dataclasses.fields(pp.Capabilities)}
    hash(backend.CAPABILITIES)
    with pytest.raises(dataclasses.FrozenInstanceError):
        backend.CAPABILITIES.sinks = True
    names = [name for name, _ in backend.CAPABILITIES.extensions]
    assert len(names) == len(set(names)) and set(names) <= fields | {"q_scale", "unused_slots"}


@BACKENDS
def test_a_backend_is_one_value_whose_methods_the_module_exports(backend):
    assert backend.BACKEND.capabilities is backend.CAPABILITIES
    for name in ("forward", "supports", "init_cache", "kv_cache_update", "rope_and_kv_cache_update", "qk_norm_rope_and_kv_cache_update"):
        function = getattr(backend, name)
        assert function == getattr(backend.BACKEND, name) and "Returns:" in function.__doc__ and "self" not in function.__doc__


BETTER = [
    # docs/semantics.md, Beyond the classes: a word of each entry's text
    (ROCM, "logits_soft_cap", "encoders"),
    (UNIFIED, "logits_soft_cap", "encoders"),
    (ROCM, "per_head_quant_scales", "per KV head"),
    (UNIFIED, "per_head_quant_scales", "per KV head"),
    (UNIFIED, "non_causal", "scales"),
    (ROCM, "non_causal", "symmetric"),
    (UNIFIED, "non_causal", "values in a window"),
    (ROCM, "kv_cache_dtypes", "fp8_e5m2"),
    (UNIFIED, "kv_cache_dtypes", "fp8_e5m2"),
    (ROCM, "sliding_window", "window of 1"),
    (UNIFIED, "sliding_window", "window of 1"),
    (ROCM, "sliding_window", "alibi prefill"),
    (ROCM, "unused_slots", "NaN"),
    (UNIFIED, "unused_slots", "NaN"),
    (ROCM, "fused_rope_kvcache", "partial rotary"),
    (UNIFIED, "fused_rope_kvcache", "float16 caches"),
    (ROCM, "kv_cache_dtypes", "readers take for e5m2"),
    (UNIFIED, "kv_cache_dtypes", "views the cache as e4m3"),
    (ROCM, "alibi", "encoders refuse alibi"),
    (UNIFIED, "alibi", "encoders refuse alibi"),
    (ROCM, "fused_qk_norm_rope_kvcache", "before it was quantized, where the class dequantizes"),
    (UNIFIED, "fused_qk_norm_rope_kvcache", "model's dtype"),
    (ROCM, "sinks", "declared unsupported"),
]


@pytest.mark.parametrize(("backend", "field", "words"), BETTER, ids=[f"{b.CAPABILITIES.name}-{f}-{w}" for b, f, w in BETTER])
def test_what_is_better_than_the_source_is_named(backend, field, words):
    assert words in backend.CAPABILITIES.beyond[field]


SERVED = [
    # backend, config, spec
    (ROCM, {}, {}),
    (ROCM, {}, {"order": "LBHNC"}),
    (ROCM, {}, {"content": "xpacked_interleaved_v"}),
    (ROCM, {}, {"dtype": jnp.float32, "block_size": 544}),
    (ROCM, {"sinks": np.zeros(8, np.float32), "logits_soft_cap": 30.0, "alibi_slopes": np.ones(8, np.float32), "sliding_window": 1}, {}),
    (ROCM, {"kv_cache_dtype": "fp8"}, {"dtype": jnp.float8_e4m3fn}),
    (ROCM, {"kv_cache_dtype": "fp8_e4m3"}, {"dtype": jnp.float8_e4m3fnuz}),
    (ROCM, {"kv_cache_dtype": "fp8_e5m2"}, {"dtype": jnp.float8_e5m2}),
    (ROCM, {"attn_type": TYPES.ENCODER, "logits_soft_cap": 30.0, "sinks": np.zeros(8, np.float32)}, None),
    (UNIFIED, {}, {}),
    (UNIFIED, {}, {"order": "LHBNC", "block_size": 48}),
    (UNIFIED, {}, {"content": "shuffled", "order": "LHBNC"}),
    (UNIFIED, {}, {"content": "flash"}),
    (UNIFIED, {"head_size": 72}, {"head_size": 72}),
    (UNIFIED, {"kv_cache_dtype": "float8_e5m2fnuz"}, {"dtype": jnp.float8_e5m2fnuz}),
    (UNIFIED, {"attn_type": TYPES.ENCODER_DECODER}, {}),
    (UNIFIED, {}, {"dtype": jnp.float32}),
]

REFUSED = [
    # backend, config, spec, the argument that the reason starts with
    (ROCM, {"attn_type": TYPES.ENCODER_DECODER}, {}, "attn_type"),
    (ROCM, {"head_size": 512}, {"head_size": 512}, "head_size"),
    (UNIFIED, {"head_size": 16}, {"head_size": 16}, "head_size"),
    (ROCM, {}, {"content": "packed"}, "content"),
    (ROCM, {}, {"content": "flash"}, "content"),
    (UNIFIED, {}, {"content": "xpacked"}, "content"),
    (ROCM, {}, {"block_size": 24}, "block_size"),
    (UNIFIED, {}, {"block_size": 8}, "block_size"),
    (ROCM, {"kv_cache_dtype": "int8_per_token_head"}, {}, "kv_cache_dtype"),
    (UNIFIED, {"kv_cache_dtype": "fp8"}, {}, "kv_cache_dtype"),
    (UNIFIED, {"kv_cache_dtype": "fp8"}, {"dtype": jnp.float8_e5m2}, "kv_cache_dtype"),
    (UNIFIED, {"kv_cache_dtype": "bfloat16"}, {"dtype": jnp.float16}, "kv_cache_dtype"),
    (ROCM, {}, {"num_kv_heads": 4}, "num_kv_heads"),
    (UNIFIED, {}, {"head_size": 128}, "head_size"),
    (ROCM, {"attn_type": TYPES.ENCODER, "kv_cache_dtype": "fp8"}, None, "kv_cache_dtype"),
    (UNIFIED, {"attn_type": TYPES.ENCODER_ONLY, "kv_cache_dtype": "float8_e4m3fnuz"}, None, "kv_cache_dtype"),
    (UNIFIED, {"attn_type": TYPES.ENCODER_ONLY, "alibi_slopes": np.ones(8, np.float32)}, None, "alibi_slopes"),
]


def row_id(row):
    backend, made, cache = row[:3]
    return f"{backend.CAPABILITIES.name}-{changes_id({**made, **(cache or {})})}"


def changes_id(changes):
    def short(value):
        return "set" if isinstance(value, np.ndarray) else getattr(value, "name", getattr(value, "__name__", value))

    return "-".join(f"{name}={short(value)}" for name, value in changes.items())


@pytest.mark.parametrize("row", SERVED, ids=map(row_id, SERVED))
def test_what_is_served_has_no_reason_against_it(row):
    backend, made, cache = row
    assert backend.supports(config(**made), None if cache is None else spec(backend, **cache)) == ()


@pytest.mark.parametrize("row", REFUSED, ids=map(row_id, REFUSED))
def test_a_refusal_names_the_argument(row):
    backend, made, cache, argument = row
    reasons = backend.supports(config(**made), None if cache is None else spec(backend, **cache))
    assert [reason.split()[0].rstrip(":") for reason in reasons] == [argument]


@BACKENDS
def test_all_reasons_come_at_once(backend):
    reasons = backend.supports(config(head_size=16, kv_cache_dtype="int4"), spec(backend, head_size=16, block_size=8, dtype=jnp.bfloat16))
    assert len(reasons) == 3


@pytest.mark.parametrize(
    ("backend", "asked", "words"),
    [
        (ROCM, {"has_sink": True}, "sinks"),
        (ROCM, {"use_kv_connector": True}, "kv_connector"),
        (ROCM, {"use_mm_prefix": True}, "mm_prefix"),
        (UNIFIED, {"use_mm_prefix": True}, "mm_prefix"),
        (UNIFIED, {"use_non_causal": True}, "non_causal"),
        (UNIFIED, {"dtype": jnp.float32}, "dtype"),
        (UNIFIED, {"use_mla": True}, "mla"),
        (UNIFIED, {"use_sparse": True}, "sparse"),
        (UNIFIED, {"use_batch_invariant": True}, "batch_invariance"),
        (UNIFIED, {"use_per_head_quant_scales": True}, "per_head_quant_scales"),
        (ROCM, {"use_pcp": True}, "pcp"),
        (UNIFIED, {"use_dcp": True}, "dcp"),
        (UNIFIED, {"use_rswa": True}, "rswa"),
        (ROCM, {"attn_type": "encoder_decoder"}, "attn_type"),
        (UNIFIED, {"block_size": 24}, "block_size"),
        (ROCM, {"head_size": 72}, "head_size"),
        (ROCM, {"attn_type": TYPES.ENCODER_DECODER}, "attn_type"),
        (ROCM, {"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else getattr(getattr(v, "CAPABILITIES", None), "name", ""),
)
def test_vllms_selector_would_pass_over_what_the_class_does_not_declare(backend, asked, words):
    usual = {"head_size": 64, "dtype": jnp.bfloat16}
    taken = {"attn_type": "decoder", "has_sliding_window": True, "use_adaptive_verification": True, "device_capability": (9, 4)}
    assert backend.CAPABILITIES.validate_configuration(**usual, **taken) == ()
    (reason,) = backend.CAPABILITIES.validate_configuration(**{**usual, **asked})
    assert reason.startswith(words)


@pytest.mark.parametrize(
    ("arch", "takes"), [("gfx90a", True), ("gfx942", True), ("gfx950", True), ("gfx1100", False), ("gfx1151", False), ("gfx1201", True)]
)
def test_quantized_queries_per_arch(arch, takes):
    assert UNIFIED.CAPABILITIES.supports_quant_query_input(arch) is takes
    assert not ROCM.CAPABILITIES.supports_quant_query_input(arch)


def test_products_are_taken_for_their_archs_and_unknown_ones_are_refused():
    usual = (ml_dtypes.bfloat16, 64, 16, 8, 4096, None, "auto")
    assert ROCM.use_rocm_custom_paged_attention(*usual, arch="MI300X") and not ROCM.use_rocm_custom_paged_attention(*usual, arch="gfx1100")
    size = {"num_blocks": 1, "num_kv_heads": 1, "head_size": 64, "kv_cache_dtype": "fp8"}
    assert UNIFIED.cache_spec(**size, arch="MI300X").dtype == jnp.float8_e4m3fnuz
    refused = (
        lambda: ROCM.use_rocm_custom_paged_attention(*usual, arch="MI9"),
        lambda: UNIFIED.CAPABILITIES.supports_quant_query_input("MI9"),
        lambda: UNIFIED.cache_spec(**size, arch="MI9"),
    )
    for call in refused:
        with pytest.raises(ValueError, match=r"arch is 'MI9'.*gfx942"):
            call()


@BACKENDS
def test_output_quantization_is_one_static_scale_per_tensor(backend):
    assert backend.CAPABILITIES.fused_output_quant_supported("kFp8StaticTensorSym")
    assert not backend.CAPABILITIES.fused_output_quant_supported("kNvfp4Dynamic")


# --- the specs that the backends ask for


@pytest.mark.parametrize(
    ("backend", "asked", "expected"),
    [
        (ROCM, {}, ("xpacked", "LHBNC", 16, "bfloat16")),
        (ROCM, {"order": "LBHNC"}, ("xpacked", "LBHNC", 16, "bfloat16")),
        (ROCM, {"interleaved_v": True, "block_size": 784}, ("xpacked_interleaved_v", "LHBNC", 784, "bfloat16")),
        (ROCM, {"kv_cache_dtype": "fp8", "arch": "gfx942"}, ("xpacked", "LHBNC", 16, "float8_e4m3fnuz")),
        (ROCM, {"kv_cache_dtype": "fp8_e5m2", "arch": "gfx942"}, ("xpacked", "LHBNC", 16, "float8_e5m2")),
        (UNIFIED, {"dtype": jnp.float16}, ("packed", "LBHNC", 64, "float16")),
        (UNIFIED, {"order": "LHBNC"}, ("packed", "LHBNC", 64, "bfloat16")),
        (UNIFIED, {"kv_connector": True}, ("packed", "LBHNC", 64, "bfloat16")),
        (UNIFIED, {"shuffled": True, "arch": "gfx1250", "kv_cache_dtype": "fp8"}, ("shuffled", "LHBNC", 64, "float8_e4m3fn")),
        (UNIFIED, {"kv_cache_dtype": "float8_e4m3fn", "arch": "gfx942"}, ("packed", "LBHNC", 64, "float8_e4m3fn")),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_cache_spec_chooses_layout_block_size_and_dtype(backend, asked, expected):
    made = backend.cache_spec(num_blocks=3, num_kv_heads=2, head_size=64, num_layers=2, **asked)
    assert (made.content, made.order, made.block_size, made.dtype.name) == expected
    assert (made.num_blocks, made.num_kv_heads, made.head_size, made.num_layers) == (3, 2, 64, 2)
    cache = backend.init_cache(made)
    assert cache.spec == made and not np.any(np.asarray(cache.data))


@pytest.mark.parametrize(
    ("backend", "asked", "error", "words"),
    [
        (ROCM, {"kv_connector": True}, pp.UnsupportedError, "kv_connector"),
        (UNIFIED, {"kv_connector": True, "order": "LHBNC"}, pp.UnsupportedError, "order"),
        (UNIFIED, {"kv_connector": True, "shuffled": True}, pp.UnsupportedError, "shuffled"),
        (ROCM, {"order": "BLHNC"}, pp.UnsupportedError, "order"),
        (ROCM, {"head_size_v": 32}, pp.UnsupportedError, "head_size_v"),
        (ROCM, {"block_size": 40}, pp.UnsupportedError, "block_size"),
        (ROCM, {"head_size": 48}, pp.UnsupportedError, "head_size"),
        (UNIFIED, {"num_blocks": 0}, ValueError, "num_blocks"),
        (UNIFIED, {"kv_cache_dtype": "nvfp4"}, ValueError, "kv_cache_dtype"),
    ],
    ids=lambda v: "-".join(v) if isinstance(v, dict) else "",
)
def test_cache_spec_refuses_by_name(backend, asked, error, words):
    with pytest.raises(error, match=words):
        backend.cache_spec(**{"num_blocks": 3, "num_kv_heads": 2, "head_size": 64, **asked})


@BACKENDS
def test_the_probe_of_one_token_a_block_tells_the_bytes_of_a_token(backend):
    for name, itemsize in (("auto", 2), ("fp8", 1)):
        asked = {"num_kv_heads": 2, "head_size": 64, "num_layers": 3, "kv_cache_dtype": name}
        probe = backend.cache_spec(num_blocks=1, block_size=1, **asked)
        assert probe.nbytes == 3 * 2 * 2 * 64 * itemsize
        assert probe.nbytes * 160 == backend.cache_spec(num_blocks=10, block_size=16, **asked).nbytes
    with pytest.raises(pp.UnsupportedError, match="block_size"):
        backend.init_cache(probe)


def test_init_cache_refuses_the_other_backends_spec():
    with pytest.raises(pp.UnsupportedError, match="content"):
        ROCM.init_cache(spec(UNIFIED))
    with pytest.raises(pp.UnsupportedError, match="content"):
        UNIFIED.init_cache(spec(ROCM))


@pytest.mark.parametrize("order", ["LBHNC", "LHBNC"])
@BACKENDS
def test_vllms_shape_and_strides_hold_the_specs_elements(backend, order):
    made = spec(backend, order=order, num_layers=3)
    shape = backend.get_kv_cache_shape(made.num_blocks, made.block_size, made.num_kv_heads, made.head_size)
    assert math.prod(shape) * made.num_layers == made.size
    physical = [shape[axis] for axis in backend.get_kv_cache_stride_order(order)]
    assert physical[:2] == list(made.shape[1:3])  # block and head slot, in the buffer's order
    with_layers = backend.get_kv_cache_stride_order(order, include_num_layers_dimension=True)
    assert with_layers == (0, *(axis + 1 for axis in backend.get_kv_cache_stride_order(order)))


@BACKENDS
def test_vllms_shape_refuses_a_block_size_that_no_kernel_has(backend):
    with pytest.raises(ValueError, match="block_size"):
        backend.get_kv_cache_shape(4, 24, 2, 64)
    with pytest.raises(ValueError, match="order"):
        backend.get_kv_cache_stride_order("BLHNC")


@pytest.mark.parametrize(("default", "rocm", "unified"), [(16, 16, 64), (32, 32, 64), (24, 16, 64), (544, 544, 64)])
def test_preferred_block_size(default, rocm, unified):
    assert ROCM.CAPABILITIES.get_preferred_block_size(default) == rocm
    assert UNIFIED.CAPABILITIES.get_preferred_block_size(default) == unified


def test_device_arch_is_amds_alone():
    assert (device_arch() is None) == (not any("gfx" in str(getattr(d, "compute_capability", "")) for d in jax.devices()))


# --- which kernel vLLM's ROCM_ATTN would take

GATE = [
    # arch, what differs from a bf16 query, D 128, N 16, 8 query heads a KV head, 4096 tokens; the answer
    ("gfx90a", {}, True),
    ("gfx942", {}, True),
    ("gfx950", {}, True),
    ("gfx1100", {}, True),
    ("gfx1201", {}, True),
    ("sm_90", {}, False),
    ("gfx942", {"query_dtype": np.float16}, True),
    ("gfx942", {"query_dtype": np.float32}, False),
    ("gfx942", {"head_size": 64}, True),
    ("gfx1100", {"head_size": 64}, False),
    ("gfx942", {"head_size": 80}, False),
    ("gfx942", {"block_size": 32}, True),
    ("gfx1100", {"block_size": 32}, False),
    ("gfx942", {"block_size": 64}, False),
    ("gfx942", {"gqa_ratio": 1}, True),
    ("gfx942", {"gqa_ratio": 16}, True),
    ("gfx942", {"gqa_ratio": 17}, False),
    ("gfx1201", {"gqa_ratio": 2}, False),
    ("gfx1201", {"gqa_ratio": 3}, True),
    ("gfx942", {"max_seq_len": 131072}, True),
    ("gfx942", {"max_seq_len": 131073}, False),
    ("gfx942", {"sliding_window": 0}, True),
    ("gfx942", {"sliding_window": (-1, -1)}, True),
    ("gfx942", {"sliding_window": 4096}, False),
    ("gfx942", {"kv_cache_dtype": "fp8"}, True),
    ("gfx1100", {"kv_cache_dtype": "fp8"}, False),
    ("gfx942", {"alibi_slopes": np.ones(8)}, True),
    ("gfx1100", {"alibi_slopes": np.ones(8)}, False),
    ("gfx942", {"sinks": np.ones(8)}, False),
    ("gfx908", {}, True),
    ("gfx940", {"kv_cache_dtype": "fp8"}, True),
    ("gfx1250", {"head_size": 64, "block_size": 32, "gqa_ratio": 1}, True),
    ("gfx1250", {"alibi_slopes": np.ones(8), "kv_cache_dtype": "fp8"}, True),
]


@pytest.mark.parametrize(("arch", "change", "expected"), GATE, ids=[f"{a}-{changes_id(c)}" for a, c, _ in GATE])
def test_gate_of_the_hip_decode_kernel(arch, change, expected):
    usual = {
        "query_dtype": ml_dtypes.bfloat16,
        "head_size": 128,
        "block_size": 16,
        "gqa_ratio": 8,
        "max_seq_len": 4096,
        "sliding_window": None,
        "kv_cache_dtype": "auto",
    }
    assert ROCM.use_rocm_custom_paged_attention(**{**usual, **change}, arch=arch) is expected


@pytest.mark.parametrize(
    ("content", "order", "block_size", "decode", "writer"),
    [
        ("xpacked", "LHBNC", 16, "paged_attention_rocm", "reshape_and_cache"),
        ("xpacked_interleaved_v", "LHBNC", 32, "paged_attention_rocm", "reshape_and_cache"),
        ("xpacked", "LBHNC", 16, "kernel_paged_attention_2d", "triton_reshape_and_cache_flash"),
        ("xpacked", "LHBNC", 64, "paged_attention_rocm", "triton_reshape_and_cache_flash"),
        ("xpacked", "LHBNC", 48, "kernel_paged_attention_2d", "triton_reshape_and_cache_flash"),
        ("packed", "LHBNC", 16, "kernel_paged_attention_2d", "triton_reshape_and_cache_flash"),
    ],
)
def test_native_kernels_need_native_layouts(content, order, block_size, decode, writer):
    made = spec(ROCM, content=content, order=order, block_size=block_size)
    assert ROCM.decode_path(made, use_custom=True) == decode
    assert ROCM.decode_path(made, use_custom=False) == "kernel_paged_attention_2d"
    assert ROCM.writer_path(made) == writer
    assert ROCM.has_native_kv_cache_layout(made) == (order == "LHBNC" and content != "packed")


def test_gates_take_only_what_the_backend_declares():
    for gate in HIP_DECODE_GATES.values():
        assert set(gate.head_sizes) <= set(ROCM.CAPABILITIES.head_sizes)
        assert set(gate.block_sizes) <= set(ROCM.CAPABILITIES.native_block_sizes)


# --- metadata builders


def common():
    return pp.make_metadata([3, 1], [20, 33], [[0, 1, -1], [2, 3, 4]], block_size=16, num_tokens=8, num_seqs=3)


@BACKENDS
def test_build_keeps_the_step_and_adds_no_cascade(backend):
    metadata = common()
    built = backend.build(0, metadata)
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        np.testing.assert_array_equal(getattr(built, name), getattr(metadata, name))
    assert (built.max_query_len, built.max_seq_len, built.causal) == (metadata.max_query_len, metadata.max_seq_len, True)
    assert int(built.num_actual_tokens) == 4 and built.scheduler_metadata is None


@BACKENDS
def test_a_common_prefix_changes_nothing(backend):
    built = jax.jit(lambda metadata: backend.build(16, metadata))(common())
    for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
        np.testing.assert_array_equal(getattr(built, name), getattr(common(), name))


@BACKENDS
@pytest.mark.parametrize(("length", "error"), [(-1, ValueError), (1.0, TypeError), (True, TypeError)])
def test_build_names_a_bad_prefix(backend, length, error):
    with pytest.raises(error, match="common_prefix_len"):
        backend.build(length, common())


def test_capture_metadata_has_one_token_sequences_and_rocm_attn_no_queries():
    metadata = common()
    rocm, unified = ROCM.build_for_cudagraph_capture(metadata), UNIFIED.build_for_cudagraph_capture(metadata)
    for built in (rocm, unified):
        np.testing.assert_array_equal(built.seq_lens, [1, 1, 1])
        np.testing.assert_array_equal(built.slot_mapping, np.full(8, -1))
        assert int(built.num_actual_tokens) == 4 and int(ROCM.build(0, built).num_actual_tokens) == 4
        assert jax.tree.structure(built) == jax.tree.structure(ROCM.build(0, metadata))
    np.testing.assert_array_equal(rocm.query_start_loc, [0, 0, 0, 0])
    np.testing.assert_array_equal(unified.query_start_loc, metadata.query_start_loc)
    np.testing.assert_array_equal(metadata.seq_lens, [20, 33, 0])


@BACKENDS
def test_drafts_are_built_as_steps(backend):
    draft, step = backend.build_for_drafting(common(), 2), backend.build(0, common())
    assert jax.tree.structure(draft) == jax.tree.structure(step)


@BACKENDS
def test_a_warm_up_step_writes_nothing(backend):
    made = spec(backend, num_blocks=5)
    cache = backend.init_cache(made)
    rows = jnp.ones((8, 2, 64), jnp.bfloat16)
    warm = backend.build_for_cudagraph_capture(common())
    written = backend.kv_cache_update(rows, rows, cache, warm.slot_mapping, config(), implementation="xla")
    assert not np.any(np.asarray(written.data))


def test_attention_types_are_taken_as_strings():
    assert config(attn_type="encoder_only").attn_type is TYPES.ENCODER_ONLY
    assert UNIFIED.supports(config(attn_type="encoder_decoder"), spec(UNIFIED)) == ()
    assert ROCM.CAPABILITIES.supports_attn_type("decoder") and not ROCM.CAPABILITIES.supports_attn_type("encoder_decoder")
    with pytest.raises(ValueError, match=r"attn_type.*'decoder', 'encoder', 'encoder_only', 'encoder_decoder'"):
        config(attn_type="decoders")
    with pytest.raises(TypeError, match="attn_type"):
        config(attn_type=1)


def test_weights_become_float32_once():
    made = config(sinks=np.ones(8, ml_dtypes.bfloat16), alibi_slopes=np.ones(8, np.float16))
    processed = ROCM.process_weights_after_loading(made)
    assert processed.sinks.dtype == processed.alibi_slopes.dtype == jnp.float32
    assert UNIFIED.process_weights_after_loading(config()).sinks is None


def test_every_cache_dtype_is_served_by_name():
    for backend in (ROCM, UNIFIED):
        for dtype in CACHE_DTYPES:
            assert backend.supports(config(kv_cache_dtype=dtype.name), spec(backend, dtype=dtype)) == (), dtype
