"""The jax-triton bridge without a GPU: what it would pass to each release, run through the interpreter; and where it refuses."""

import os
import re
import sys
from dataclasses import replace
from types import SimpleNamespace

import bridge_kernels as kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import run_python

from purepage.bridges import callback, jax_triton
from purepage.bridges.execute import run, using_bridge
from purepage.functional.errors import UnsupportedError
from purepage.functional.target import Settings, Target, assuming_target, current_settings, named_target, settings_of, using_settings
from purepage.kernels.launch import Buffer, Launch, Program

torch = pytest.importorskip("torch")

interpreted = pytest.mark.skipif(jax.default_backend() != "cpu", reason="runs the generated kernels through the interpreter")
H200 = Target("cuda", "sm_90", 132, 32)
MI300X = Target("rocm", "gfx942", 304, 64)


class FakeJaxTriton:
    """A `triton_call` with the rules of one release, on CPU tensors. Outputs start as garbage; an aliased one is its input's memory."""

    def __init__(self, version):
        self.__version_info__ = version
        self.calls = []

    def triton_call(self, *args, kernel, grid, name, num_warps, num_stages, input_output_aliases, **rest):
        old = self.__version_info__ < (0, 4)
        assert ("out_shape" in rest) is old
        outputs = rest.pop("out_shape" if old else "out_type")
        options = rest.pop("backend_options", {})
        assert not (old and options)
        assert (rest.pop("enable_fp_fusion") if old else options.pop("enable_fp_fusion")) is True
        assert all(isinstance(arg, jax.Array | (np.float32 if old else float)) for arg in args), "numbers come after arrays, floats only"
        arrays = [arg for arg in args if isinstance(arg, jax.Array)]
        assert args[: len(arrays)] == tuple(arrays), "aliases count arrays only in one release, numbers too in the other"
        tensors = [torch.from_numpy(np.array(array)) for array in arrays]
        memory = {out: tensors[source] for source, out in input_output_aliases.items()}
        results = [memory.get(i, torch.from_numpy(np.full(o.shape, 77, o.dtype))) for i, o in enumerate(outputs)]
        pointers = [result for i, result in enumerate(results) if old or i not in memory]
        kernel[grid](*tensors, *(float(arg) for arg in args[len(arrays) :]), *pointers, **rest)
        shape = (num_warps, num_stages)
        self.calls.append(SimpleNamespace(name=name, aliases=input_output_aliases, options=options, shape=shape))
        return [jnp.asarray(result.numpy()) for result in results]


@pytest.fixture(params=[(0, 3, 1), (0, 4, 1)], ids=["jax-triton 0.3.1", "jax-triton 0.4.1"])
def fake(request, monkeypatch):
    module = FakeJaxTriton(request.param)
    monkeypatch.setattr(jax_triton, "_load", lambda: module)
    with assuming_target(H200):
        yield module


def arrays_of(program, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, buffer in program.inputs:
        if buffer.dtype == "int32":
            arrays[name] = jnp.asarray(rng.integers(0, 2, buffer.shape), jnp.int32)
        elif buffer.dtype.startswith("uint"):
            arrays[name] = jnp.asarray(rng.integers(0, 255, buffer.shape), buffer.dtype)
        else:
            arrays[name] = jnp.asarray(rng.standard_normal(buffer.shape), buffer.dtype)
    return arrays


def accumulate_program():
    """An output that two launches write, the second in place; a pool that both read; one buffer passed twice."""
    row, pool = Buffer((32,), "float32"), Buffer((32,), "float32")
    add = ("BLOCK", 32)
    launches = (
        Launch("bridge_kernels:add_kernel", (1, 1, 1), ("x", "x", "out", 32), ("out",), (add,)),
        Launch("bridge_kernels:add_kernel", (1, 1, 1), ("out", "pool", "out", 32), ("out",), (add,), 2, 3, (("waves_per_eu", 2),)),
    )
    return Program("accumulate", (("x", row), ("pool", pool)), (("out", row),), (), (), launches)


PROGRAMS = {
    "element-wise": kernels.add_program(1000),
    "in place": kernels.scatter_program(2, 64, 24, 2),
    "one row, width 1": kernels.scatter_program(2, 64, 1, 1),
    "scratch and a float": kernels.total_program(6, 10),
    "a float that is 1": kernels.total_program(6, 10, scale=1.0),
    "an output written twice": accumulate_program(),
    "fp8 as bytes": kernels.flip_sign_program(200, dtype="float8_e4m3fn"),
    "empty grid": kernels.scatter_program(2, 64, 24, 0),
}


@interpreted
@pytest.mark.parametrize("case", PROGRAMS)
def test_both_bridges_give_the_same_bits(fake, case):
    program = PROGRAMS[case]
    arrays = arrays_of(program)
    before = {name: np.array(array) for name, array in arrays.items()}
    expected = callback.run_program(program, arrays, named_target("cpu"))
    results = jax_triton.run_program(program, arrays)
    assert len(results) == len(expected)
    for result, wanted in zip(results, expected, strict=True):
        assert result.dtype == wanted.dtype
        assert np.asarray(result).tobytes() == np.asarray(wanted).tobytes()
    assert len(fake.calls) == sum(0 not in launch.grid for launch in program.launches)
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, before[name])


@interpreted
def test_updates_are_aliases_and_fresh_outputs_are_not(fake):
    jax_triton.run_program(PROGRAMS["in place"], arrays_of(PROGRAMS["in place"]))
    jax_triton.run_program(PROGRAMS["an output written twice"], arrays_of(PROGRAMS["an output written twice"]))
    assert [call.aliases for call in fake.calls] == [{0: 0}, {}, {0: 0}]
    assert [call.shape for call in fake.calls] == [(4, 2), (4, 2), (2, 3)]
    assert fake.calls[0].name == "scatter_scatter_kernel"


@interpreted
@pytest.mark.parametrize(("arch", "options"), [(H200, {}), (MI300X, {"waves_per_eu": 2})], ids=["H200", "MI300X"])
def test_options_reach_the_vendor_that_has_them_where_the_release_can_pass_them(fake, arch, options):
    jax_triton.run_program(PROGRAMS["an output written twice"], arrays_of(PROGRAMS["an output written twice"]), arch)
    assert fake.calls[-1].options == (options if fake.__version_info__ >= (0, 4) else {})


@interpreted
def test_a_launch_that_reads_what_no_launch_wrote_is_refused(fake):
    program = kernels.total_program(6, 10)
    backwards = Program(program.name, program.inputs, program.outputs, (), program.scratch, program.launches[::-1])
    with pytest.raises(ValueError, match=r"total: bridge_kernels:total_kernel reads sums, which no launch before it wrote"):
        jax_triton.run_program(backwards, arrays_of(program))


@interpreted
def test_equal_launches_share_one_generated_kernel(fake):
    source = jax_triton.wrapper_source(kernels.add_program(64).launches[0], ("x", "y"), ("out",), 0)
    path = "bridge_kernels:add_kernel"
    assert jax_triton._compile_wrapper(source, path) is jax_triton._compile_wrapper(str(source), path)


ARGUMENTS = {
    "one is specialized": (1, "size=1"),
    "fits 32 bits": (64, "size=tl.full((), 64, tl.int32)"),
    "needs 64 bits": (2**31, "size=tl.full((), 2147483648, tl.int64)"),
    "negative": (-1, "size=tl.full((), -1, tl.int32)"),
    "float": (0.5, "size=f_0"),
    "float that is 1": (1.0, "size=tl.full((), 1.0, tl.float32)"),
    "none": (None, "size=None"),
    "flag": (True, "size=True"),
}


@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_number_is_typed_as_tritons_launcher_types_it(case):
    value, text = ARGUMENTS[case]
    launch = Launch("bridge_kernels:add_kernel", (1, 1, 1), ("x", "y", "out", value), ("out",), (("BLOCK", 16),))
    source = jax_triton.wrapper_source(launch, ("x", "y"), ("out",), 2)
    assert f"{text}, BLOCK=c_BLOCK)" in source
    floats = "f_0, " if text.endswith("f_0") else ""
    assert source.startswith(f"def add_kernel_call(b_x, b_y, {floats}b_out, unused_0, unused_1, c_BLOCK: tl.constexpr):")


def test_the_generated_kernels_compile_for_both_vendors():
    script = """
    import bridge_kernels as kernels
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from purepage.bridges import jax_triton
    launch = kernels.scatter_program(2, 2**27, 24, 5).launches[0]
    wrapper = jax_triton._compile_wrapper(jax_triton.wrapper_source(launch, ("pool", "rows", "slots", "layer"), (), 1), launch.kernel)
    names = ["b_pool", "b_rows", "b_slots", "b_layer", "unused_0"]
    signature = dict(zip(names, ["*u16", "*u16", "*i32", "*i32", "*u16"])) | {"c_WIDTH": "constexpr"}
    for target in (GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)):
        source = ASTSource(wrapper, signature, {"c_WIDTH": 32})
        print(target.backend, len(triton.compile(source, target=target, options={"num_warps": 1}).asm["ttgir"]) > 0)
    """
    out = run_python(script, environment={"TRITON_INTERPRET": "0"})
    assert out.split() == ["cuda", "True", "hip", "True"]


REFUSED_DEVICES = {
    "cpu": (Target("cpu", "cpu", 1, 1), "jax runs on cpu"),
    "tpu": (Target("tpu", "tpu", 1, 1), "jax runs on tpu"),
    "RDNA 3": (Target("rocm", "gfx1100", 96, 32), "gfx1100 runs 32 threads a wave"),
    "gfx1250": (Target("rocm", "gfx1250", 256, 32), "gfx1250 runs 32 threads a wave"),
}


@pytest.mark.parametrize("case", REFUSED_DEVICES)
def test_devices_that_jax_triton_does_not_serve_are_refused_with_the_reason(case):
    arch, reason = REFUSED_DEVICES[case]
    assert reason in jax_triton.unavailable(arch)


@pytest.mark.parametrize("arch", [H200, MI300X], ids=lambda target: target.arch)
def test_a_gpu_with_a_fitting_release_is_served(fake, monkeypatch, arch):
    monkeypatch.setattr(jax_triton.importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    assert jax_triton.unavailable(arch) is None
    interpreting = replace(arch, settings=Settings(interpret=True))
    assert "no compiled kernels" in jax_triton.unavailable(interpreting)


def test_a_missing_or_broken_installation_is_a_reason(monkeypatch):
    monkeypatch.setattr(jax_triton.importlib.util, "find_spec", lambda name: None)
    assert "not installed" in jax_triton.unavailable(H200)

    def refuse():
        raise ImportError("jax-triton requires JAX to be installed with GPU support")

    monkeypatch.setattr(jax_triton.importlib.util, "find_spec", lambda name: SimpleNamespace(name=name))
    monkeypatch.setattr(jax_triton, "_load", refuse)
    assert "does not import: jax-triton requires JAX" in jax_triton.unavailable(H200)


@pytest.mark.parametrize(
    ("release", "jax_release", "reason"),
    [
        ((0, 3, 0), (0, 11, 2), "jax-triton 0.3.0 is older than 0.3.1"),
        ((0, 3, 1), (0, 11, 2), None),
        ((0, 4, 1), (0, 11, 2), None),
        ((0, 4, 1), (0, 12, 0), "jax-triton 0.4.1 does not work with jax 0.12 and later"),
        ((0, 4, 2), (0, 12, 0), None),
    ],
)
def test_releases_that_do_not_fit_together_are_refused(release, jax_release, reason):
    assert jax_triton.refusal_of_versions(release, jax_release) == reason


@pytest.mark.parametrize("before", [None, "/somewhere/kept"])
def test_importing_jax_triton_leaves_tritons_cache_where_it_was(monkeypatch, tmp_path, before):
    (tmp_path / "jax_triton.py").write_text("import os\nos.environ['TRITON_CACHE_DIR'] = ''\n__version_info__ = (0, 3, 1)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "jax_triton", raising=False)
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_DIR", before)
    assert jax_triton._load.__wrapped__().__version_info__ == (0, 3, 1)
    assert os.environ.get("TRITON_CACHE_DIR") == before
    sys.modules.pop("jax_triton")


def test_the_bridge_is_chosen_by_argument_then_block_then_environment():
    program = kernels.add_program(16)
    assert settings_of({}).bridge is None and settings_of({"PUREPAGE_BRIDGE": "jax_triton"}).bridge == "jax_triton"
    with using_settings(**vars(settings_of({"PUREPAGE_BRIDGE": "jax_triton"}))), using_bridge("callback"):
        assert current_settings().bridge == "callback"
        with using_bridge("jax_triton"):
            assert current_settings().bridge == "jax_triton"
            with pytest.raises(UnsupportedError, match="the jax_triton bridge can't run"):
                run(program, arrays_of(program))
            run(program, arrays_of(program), "callback")
    rule = re.escape("bridge is 'ffi': it must be None or one of 'callback', 'jax_triton'")
    with pytest.raises(ValueError, match=rule), using_bridge("ffi"):
        pass
    with pytest.raises(ValueError, match=rule):
        run(program, arrays_of(program), "ffi")


@interpreted
def test_a_jitted_function_that_ran_through_one_bridge_is_traced_again_for_another():
    program, traces = kernels.add_program(16), []

    @jax.jit
    def add(arrays):
        traces.append(current_settings().bridge)
        return run(program, arrays)

    add(arrays_of(program))
    with using_bridge("jax_triton"), pytest.raises(UnsupportedError, match="jax_triton bridge"):
        add(arrays_of(program))
    add(arrays_of(program))
    assert traces == [None, "jax_triton"]


@interpreted
def test_a_bridge_that_cannot_run_here_is_refused_by_name_never_replaced():
    program = kernels.add_program(16)
    with pytest.raises(UnsupportedError, match=r"add: the jax_triton bridge can't run: jax runs on cpu.*the callback bridge can"):
        run(program, arrays_of(program), "jax_triton")
    arrays = arrays_of(program)
    np.testing.assert_array_equal(run(program, arrays)[0], np.asarray(arrays["x"]) + np.asarray(arrays["y"]))


@pytest.mark.gpu
@pytest.mark.skipif(jax_triton.unavailable() is not None, reason=jax_triton.unavailable() or "")
@pytest.mark.parametrize("case", PROGRAMS)
def test_on_a_gpu_both_bridges_give_the_same_bits(case):
    program = PROGRAMS[case]
    arrays = arrays_of(program)
    both = [jax.jit(lambda arrays, bridge=bridge: run(program, arrays, bridge))(arrays) for bridge in ("callback", "jax_triton")]
    for a, b in zip(*both, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
