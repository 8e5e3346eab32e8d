"""Who serves a call: what is not declared is refused by every implementation, asking is planning, and one plan serves one call."""

import dataclasses
import os
import sys
from collections import Counter
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import purepage as pp
from purepage.functional import calls, dispatch, features, layout
from purepage.functional.attention import paged_attention_call
from purepage.functional.dispatch import IMPLEMENTATIONS, Plan, Unsupported, plan_with
from purepage.functional.features import Serves, call_type, constant, option
from purepage.functional.target import Settings, Target, current_target, named_target, settings_of, settings_table, using_settings

pytest.importorskip("torch")
pytest.importorskip("triton")

from purepage.bridges.aiter import package as aiter_package

ROOT = Path(pp.__file__).resolve().parents[2]
SPEC = pp.CacheSpec(num_blocks=4, block_size=16, num_kv_heads=2, head_size=64, dtype="float16")
MI300X = Target("rocm", "gfx942", 304, 64)


def metadata_of(tokens, causal=True):
    ints = [jnp.zeros(size, jnp.int32) for size in ((tokens + 1,), (tokens,), (tokens, 4), (tokens,))]
    return pp.AttentionMetadata(*ints, max_query_len=1, causal=causal)


def attention(spec=SPEC, dtype="float16", **options):
    return paged_attention_call(jnp.zeros((3, 4, spec.head_size), dtype), pp.init_cache(spec), metadata_of(3), **options)


def write(spec=SPEC, dtype=None):
    new = jnp.zeros((3, spec.num_kv_heads, spec.head_size), dtype or spec.dtype)
    return calls.UpdateCacheCall(cache=pp.init_cache(spec), key=new, value=new, slot_mapping=jnp.zeros(3, jnp.int32), layer=jnp.int32(0))


def rope(spec=SPEC):
    query, new = jnp.zeros((3, 4, spec.head_size), spec.dtype), jnp.zeros((3, spec.num_kv_heads, spec.head_size), spec.dtype)
    return calls.RopeUpdateCall(
        query=query,
        key=new,
        value=new,
        positions=jnp.zeros(3, jnp.int32),
        cos_sin_cache=jnp.zeros((8, spec.head_size)),
        cache=pp.init_cache(spec),
        slot_mapping=jnp.zeros(3, jnp.int32),
        layer=jnp.int32(0),
        is_neox=True,
    )


def qk_norm(spec=SPEC):
    one = jnp.ones(spec.head_size, spec.dtype)
    return calls.QkNormRopeUpdateCall(
        qkv=jnp.zeros((3, 8 * spec.head_size), spec.dtype),
        q_weight=one,
        k_weight=one,
        positions=jnp.zeros(3, jnp.int32),
        cos_sin_cache=jnp.zeros((8, spec.head_size), spec.dtype),
        cache=pp.init_cache(spec),
        slot_mapping=jnp.zeros(3, jnp.int32),
        layer=jnp.int32(0),
        num_heads=4,
        eps=1e-6,
        is_neox=True,
        mrope_section=None,
        is_interleaved=False,
    )


CALLS = {
    "paged_attention": attention,
    "update_cache": write,
    "rope_and_update_cache": rope,
    "qk_norm_rope_and_update_cache": qk_norm,
}
"""The operations over a cache, each with a plain call."""

TYPES = {kind for kind in vars(calls).values() if isinstance(kind, type) and issubclass(kind, calls.Call) and kind is not calls.Call}


def reasons(implementation, operation, call, target=MI300X):
    planned = plan_with(implementation, operation, call, target, explicit=True)
    return "; ".join(planned.reasons) if isinstance(planned, Unsupported) else ""


@call_type
class AttentionWithAHalo(calls.PagedAttentionCall):
    """A call type that gained a field."""

    halo: int | None = option(static=True)


@call_type
class WriteWithAHalo(calls.UpdateCacheCall):
    halo: int | None = option(static=True)


def with_halo(kind, call, halo):
    return kind(**{field.name: getattr(call, field.name) for field in dataclasses.fields(call)}, halo=halo)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_feature_that_was_not_declared_is_refused_by_its_name(implementation):
    for operation, kind in (("paged_attention", AttentionWithAHalo), ("update_cache", WriteWithAHalo)):
        plain = CALLS[operation]()
        unused, used = with_halo(kind, plain, None), with_halo(kind, plain, 3)
        assert used.features() - unused.features() == {"halo"}
        assert reasons(implementation, operation, unused) == reasons(implementation, operation, plain)
        assert "halo" in reasons(implementation, operation, used)


def test_a_field_without_a_declaration_is_an_error_when_its_class_is_made():
    with pytest.raises(TypeError, match=r"Sloppy\.halo: declare it with array\(\), constant\(\) or option\(\)"):

        @call_type
        class Sloppy(calls.UpdateCacheCall):
            halo: int = 3

    @call_type
    class Declared(calls.UpdateCacheCall):
        size: int = constant()

    assert {field.name for field in dataclasses.fields(Declared)} > {"size"}


def test_a_field_of_the_types_inside_a_call_is_accounted_for(monkeypatch):
    features.check_accounted()
    for kind, known in features.ACCOUNTED.items():
        names = {field.name for field in dataclasses.fields(kind)}
        assert known == names, "a name without a field"
        for name in names:
            monkeypatch.setitem(features.ACCOUNTED, kind, known - {name})
            with pytest.raises(TypeError, match=rf"{kind.__name__}\.{name}: account for it"):
                features.check_accounted()
            monkeypatch.setitem(features.ACCOUNTED, kind, known)


def served_features():
    modules = [dispatch._module(name) for name in IMPLEMENTATIONS]
    return {feature for module in modules if module for serves in module.SERVES.values() for feature in serves.features}


def test_every_served_feature_is_one_that_a_call_can_have():
    declared = {feature for kind in TYPES for _, feature, _ in kind.OPTIONS}
    nested = set(features.ARGUMENTS) - {"score_scale", "context_only"}
    assert served_features() == declared | nested


@pytest.fixture
def invented_layout(monkeypatch):
    """Adds a layout to the table: its name, and the axes of key, value and buffer."""

    def add(name, key, value, physical):
        monkeypatch.setitem(layout.CONTENTS, name, (key, value))
        monkeypatch.setitem(layout._PHYSICAL, name, physical)
        return dataclasses.replace(SPEC, content=name)

    return add


@pytest.mark.parametrize("operation", CALLS)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_layout_that_no_question_describes_is_refused_by_its_name(invented_layout, implementation, operation):
    spec = invented_layout("channel_major", "2 D H N", "2 D H N", "2 D H N")
    assert any("axes" in name for name in layout.layout_of("channel_major").properties)
    refused = reasons(implementation, operation, CALLS[operation](spec))
    assert refused and ("channel_major" in refused or "has no kernel" in refused)


def hnd(invented_layout):
    """FlashInfer's layout: rows of channels, the tokens of a head next to each other."""
    return invented_layout("hnd", "2 H N D", "2 H N D", "2 H N D")


def test_a_new_layout_of_known_answers_is_never_planned_as_another(invented_layout):
    spec = hnd(invented_layout)
    refused = "heads of a token for neighbours" if aiter_package.root() is not None else "needs amd-aiter"
    assert refused in reasons("aiter", "update_cache", write(spec))
    made = layout.layout_of("hnd")
    assert made.tokens_are_rows and made.sides_are_apart and not made.heads_are_adjacent and not made.sides_are_adjacent


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="runs Triton's interpreter")
@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_a_new_layout_of_known_answers_holds_what_was_written(invented_layout, implementation):
    rng = np.random.default_rng(0)
    spec = hnd(invented_layout)
    metadata = pp.make_metadata([5, 1], [5, 20], [[3, 0], [2, 1]], block_size=16)
    tokens = metadata.slot_mapping.shape[0]
    key, value = (jnp.asarray(rng.standard_normal((tokens, 2, 64)), jnp.float16) for _ in range(2))
    query = jnp.asarray(rng.standard_normal((tokens, 4, 64)), jnp.float16)
    found = {}
    for each in (spec, SPEC):
        cache = pp.update_cache(pp.init_cache(each), key, value, metadata.slot_mapping, implementation=implementation)
        found[each.content] = (*pp.cache_to_logical(cache), pp.paged_attention(query, cache, metadata, implementation=implementation))
    for actual, expected in zip(found["hnd"], found["packed"], strict=True):
        np.testing.assert_array_equal(actual, expected)
    assert np.asarray(found["hnd"][0]).any()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_dtype_that_was_not_declared_is_refused_by_its_argument(monkeypatch, implementation):
    """Each dtype of each call in turn is one that JAX does not have yet."""
    for operation, make in CALLS.items():
        call = make()
        known = call.dtypes()
        for argument in known:
            monkeypatch.setattr(type(call), "dtypes", lambda self, changed={**known, argument: "float4_new"}: changed)
            refused = reasons(implementation, operation, call)
            assert f"{argument} is float4_new: it serves " in refused or "has no kernel" in refused
        monkeypatch.undo()


@pytest.mark.parametrize("implementation", ["aiter", "triton", "pallas"])
def test_an_arch_that_was_not_declared_is_refused_by_its_name(implementation):
    """`xla` declares every device that JAX has. A name that is asked for is checked before: see the tests of `explain`."""
    for operation, make in CALLS.items():
        refused = reasons(implementation, operation, make(), Target("rocm", "gfx9999", 304, 64))
        assert "gfx9999" in refused or "has no kernel" in refused
    assert isinstance(plan_with("xla", "update_cache", write(), Target("tpu", "tpu", 1, 1), explicit=False), Plan)


def test_an_implementation_that_is_not_installed_says_so(monkeypatch):
    monkeypatch.setitem(dispatch.IMPLEMENTATIONS, "pallas", "purepage.kernels.not_here")
    for operation, make in CALLS.items():
        assert reasons("pallas", operation, make()) == "not part of this installation"
    with pytest.raises(pp.UnsupportedError, match=r"pallas can't serve this update_cache: not part of this installation; .*xla can"):
        pp.update_cache(pp.init_cache(SPEC), write().key, write().value, write().slot_mapping, implementation="pallas")


@pytest.mark.parametrize("implementation", ["tritonn", "", [], {}, 3, True], ids=str)
def test_a_name_outside_the_closed_set_raises_and_lists_the_set(implementation):
    with pytest.raises(ValueError, match=r"implementation is .*: it must be None or one of 'triton', 'aiter', 'pallas', 'xla'"):
        pp.update_cache(pp.init_cache(SPEC), write().key, write().value, write().slot_mapping, implementation=implementation)


def test_features_are_those_that_the_arguments_ask_for():
    assert attention().features() == frozenset()
    assert attention(scale=0.3).features() == frozenset()
    assert attention(logits_soft_cap=0).features() == frozenset()
    used = attention(sliding_window=4, sinks=[0.0] * 4, return_lse=True, scale=jnp.float32(0.3), q_scale=None)
    assert used.features() == {"sliding_window", "sinks", "return_lse", "score_scale"}
    fp8 = dataclasses.replace(SPEC, dtype="float8_e4m3fn")
    assert attention(fp8).features() == {"quantized_cache"}
    assert attention(dtype="bfloat16").features() == {"mixed_dtypes"}
    assert attention(fp8, dtype="float8_e4m3fn").features() == {"quantized_cache", "quantized_query"}
    cache = pp.init_cache(fp8, k_scale=jnp.full((1, 2), 2.0))
    assert dataclasses.replace(write(fp8), cache=cache).features() == {"quantized_cache", "scales_per_head", "mixed_scale_ranks"}
    assert dataclasses.replace(attention(), metadata=metadata_of(3, causal=False)).features() == {"non_causal"}
    assert dataclasses.replace(rope(), cos_sin_cache=jnp.zeros((8, 32)), is_neox=False).features() == {"partial_rotary", "gptj_rotary"}
    assert dataclasses.replace(qk_norm(), mrope_section=(8, 12, 12)).features() == {"mrope_section"}


def test_a_declaration_is_an_allow_list():
    nothing = Serves()
    refused = nothing.unsupported_reasons(attention(sliding_window=4), MI300X)
    for words in ("sliding_window", "query is float16: it serves no dtype", "output_dtype", "cache is float16", "tokens_are_rows"):
        assert any(words in reason for reason in refused), words


def walk(function, *arguments):
    """Python calls into the package while `function` is lowered, by (file, function)."""
    counted: Counter[tuple[str, str]] = Counter()
    folders = tuple(f"{ROOT / name}{os.sep}" for name in ("functional", "kernels", "bridges", "src"))

    def profile(frame, event, argument):
        code = frame.f_code
        if event == "call" and not code.co_filename.startswith("<"):
            path = os.path.realpath(code.co_filename)
            if path.startswith(folders):
                counted[path.removeprefix(f"{ROOT}{os.sep}"), code.co_qualname] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        jax.jit(function).lower(*arguments)
    finally:
        sys.setprofile(before)
    return counted


CALL_LIMIT = {"xla": (350, 350), "triton": (260, 180), None: (160, 160)}
"""Most Python calls into the package while one `paged_attention` is traced: of a shape that was not planned before, and of one that was."""
FILE_LIMIT = 25


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter's path through the bridges")
@pytest.mark.parametrize("implementation", CALL_LIMIT, ids=str)
def test_a_trace_plans_once_and_takes_few_calls(implementation):
    query, cache, metadata = jnp.zeros((3, 4, 64), jnp.float16), pp.init_cache(SPEC), metadata_of(3)

    def traced(scale):
        attend = lambda query, cache, metadata: pp.paged_attention(  # noqa: E731
            query, cache, metadata, scale=scale, implementation=implementation
        )
        return walk(attend, query, cache, metadata)

    traced(0.25)  # the first trace of a process also imports
    served = implementation or "xla"
    for counted, limit, plans in zip((traced(0.75), traced(0.75)), CALL_LIMIT[implementation], (1, 0), strict=True):
        assert sum(counted.values()) <= limit, counted.most_common(20)
        assert len({file for file, _ in counted}) <= FILE_LIMIT
        assert counted["functional/dispatch.py", "choose"] == counted["functional/dispatch.py", "run"] == 1
        assert counted[{"xla": "kernels/xla/__init__.py", "triton": "bridges/triton.py"}[served], "plan"] == 1
        assert counted["kernels/plans/attention.py", "plan_paged_attention"] == (plans if served == "triton" else 0)


@pytest.mark.parametrize("backend", [pp.rocm_attn, pp.rocm_aiter_unified_attn], ids=["rocm_attn", "rocm_aiter_unified_attn"])
def test_the_arch_of_a_cache_is_one_of_a_closed_set(backend):
    sizes = {"num_blocks": 4, "num_kv_heads": 2, "head_size": 64, "kv_cache_dtype": "fp8"}
    assert backend.cache_spec(**sizes, arch="MI300X") == backend.cache_spec(**sizes, arch="gfx942")
    assert backend.cache_spec(**sizes, arch="MI300X").dtype != backend.cache_spec(**sizes, arch="MI355X").dtype
    with pytest.raises(ValueError, match=r"arch is 'banana': it must be one of .*gfx942"):
        backend.cache_spec(**sizes, arch="banana")


def test_plans_of_one_shape_are_one_plan():
    target = named_target("gfx942")
    first, again = (plan_with("triton", "paged_attention", attention(), target, explicit=True) for _ in range(2))
    assert first is again and isinstance(first, Plan) and first.program.launches
    other = plan_with("triton", "paged_attention", attention(), named_target("gfx90a"), explicit=True)
    assert isinstance(other, Plan) and other.program != first.program


def test_environment_variables_are_read_into_one_value():
    every = {field.metadata["variable"]: field for field in dataclasses.fields(Settings)}
    assert settings_of({}) == Settings() == settings_of(dict.fromkeys(every, ""))
    for variable, field in every.items():
        assert f"| `{variable}` |" in settings_table()
        if field.metadata["kind"] == "switch":
            assert [getattr(settings_of({variable: text}), field.name) for text in ("1", "0", "true", "OFF")] == [True, False, True, False]
        with pytest.raises(ValueError, match=f"{variable} is 'maybe': it must be unset or (one of|an absolute path)"):
            settings_of({variable: "maybe"})


def test_the_package_reads_no_environment_variable_elsewhere():
    readers = {
        "functional/target.py",
        "bridges/jax_triton.py",  # keeps Triton's own TRITON_CACHE_DIR as it was
        "bridges/native/library.py",  # the compiler and the folder of its build, which change no trace
        "kernels/compile_check.py",  # hands the environment on to a subprocess
        "bridges/tune/worker.py",  # so does this
    }
    for package in ("functional", "kernels", "bridges"):
        for path in (ROOT / package).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            assert name in readers or "os.environ" not in path.read_text(), name


def test_the_documentation_has_the_table_of_settings():
    assert settings_table() in (ROOT / "docs/settings.md").read_text()


def test_settings_are_part_of_the_key_of_jit():
    traced: list[bool | None] = []

    @jax.jit
    def function(x):
        traced.append(current_target().settings.command_buffer)
        return x + 1

    function(1)
    with using_settings(command_buffer=False):
        function(1)
        function(2)
    function(3)
    assert traced == [None, False]
    with pytest.raises(ValueError, match=r"setting is 'colour': it must be one of 'bridge', "), using_settings(colour="blue"):
        pass
    with pytest.raises(TypeError, match=r"command_buffer is 'yes'.*None or a bool"), using_settings(command_buffer="yes"):
        pass
    with pytest.raises(ValueError, match="cache_dir is 'here': it must be None or an absolute path"), using_settings(cache_dir="here"):
        pass
