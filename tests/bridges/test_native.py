"""The native bridge without a GPU: the library builds, programs are packed as the code objects declare it, and a step can be exported.

Runs on a GPU are in test_gpu.py.
"""

import base64
import ctypes
import hashlib
import importlib.util
import shutil
import subprocess
import zipfile
from pathlib import Path

import jax
import jax.numpy as jnp
import native_arguments
import pytest
from processes import run_python

import purepage as pp
from purepage.bridges.execute import using_bridge
from purepage.bridges.native import library

pytest.importorskip("triton")
pytest.importorskip("torch")

_SCRIPT = importlib.util.spec_from_file_location("platform_wheel", Path(__file__).parents[2] / ".ci" / "platform_wheel.py")
platform_wheel = importlib.util.module_from_spec(_SCRIPT)
_SCRIPT.loader.exec_module(platform_wheel)

needs_compiler = pytest.mark.skipif(library.compiler() is None, reason="needs a C++ compiler")


@needs_compiler
@pytest.mark.skipif(shutil.which("objdump") is None, reason="needs objdump")
def test_the_handler_builds_with_the_headers_of_the_installed_jaxlib_for_older_systems(tmp_path):
    built = library.build(tmp_path / "handler.so", platform_wheel.OPTIONS)
    assert built.exists() and [path.name for path in tmp_path.iterdir()] == ["handler.so"]
    version = library.header_version(jax.ffi.include_dir())
    assert ctypes.CDLL(str(built)).purepage_ffi_version() == 1000 * version[0] + version[1]
    dump = subprocess.run(["objdump", "-p", "-T", str(built)], capture_output=True, text=True, check=True).stdout
    assert "GLIBC_2" in dump and "libstdc++.so.6" in dump and platform_wheel.too_new(dump) == []


def test_what_an_older_system_lacks_is_told():
    dump = """
  NEEDED               libcudart.so.12
  NEEDED               libc.so.6
0000 DF *UND* 0000 (GLIBC_2.34) dlopen
0000 DF *UND* 0000 (GLIBC_2.2.5) free
0000 DF *UND* 0000 (GLIBCXX_3.4.29) _ZSt28__throw_bad_array_new_lengthv
"""
    assert platform_wheel.too_new(dump) == ["GLIBCXX_3.4.29", "GLIBC_2.34", "libcudart.so.12"]


def test_a_platform_wheel_is_the_pure_one_and_the_library(tmp_path):
    """Its RECORD lists every file with its hash, and its tag is the platform's."""
    files = {
        "purepage/bridges/native/launch.cc": b"source",
        "purepage-1.dist-info/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        "purepage-1.dist-info/RECORD": b"",
    }
    pure = tmp_path / "purepage-1-py3-none-any.whl"
    with zipfile.ZipFile(pure, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    made = platform_wheel.with_library(pure, "libpurepage_launch-ffi0.3.so", b"library", "manylinux_2_27_x86_64")
    assert made.name == "purepage-1-py3-none-manylinux_2_27_x86_64.whl"
    with zipfile.ZipFile(made) as archive:
        assert set(archive.namelist()) == {*files, "purepage/bridges/native/libpurepage_launch-ffi0.3.so"}
        assert archive.read("purepage-1.dist-info/WHEEL").splitlines()[1:] == [
            b"Root-Is-Purelib: false",
            b"Tag: py3-none-manylinux_2_27_x86_64",
        ]
        lines = archive.read("purepage-1.dist-info/RECORD").decode().splitlines()
        assert lines[-1] == "purepage-1.dist-info/RECORD,,"
        for line in lines[:-1]:
            name, digest, size = line.split(",")
            found = hashlib.sha256(archive.read(name)).digest()
            assert digest == "sha256=" + base64.urlsafe_b64encode(found).decode().rstrip("=") and int(size) == len(archive.read(name))
        assert len(lines) == len(archive.namelist())


def test_xla_takes_a_library_of_its_own_major_version_and_no_newer_minor_one(monkeypatch, tmp_path):
    (tmp_path / library.prebuilt_name((0, 4))).touch()
    found = {}
    for runtime in ((0, 3), (0, 4), (0, 11), (1, 4)):
        monkeypatch.setattr(library, "header_version", lambda folder, runtime=runtime: runtime)
        found[runtime] = library.prebuilt(tmp_path) is not None
    assert found == {(0, 3): False, (0, 4): True, (0, 11): True, (1, 4): False}


def test_without_a_compiler_the_bridge_says_so(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(RuntimeError, match=r"C\+\+ compiler.*CXX"):
        library.build(tmp_path / "handler.so")


def test_on_a_cpu_the_bridge_is_refused_by_name():
    cache = pp.init_cache(pp.CacheSpec(num_blocks=2, block_size=16, num_kv_heads=1, head_size=32, dtype=jnp.float32))
    metadata = pp.make_metadata([1], [3], [[1]], block_size=16)
    with using_bridge("native"), pytest.raises(pp.UnsupportedError, match="native bridge can't run: jax runs on cpu"):
        pp.paged_attention(jnp.ones((1, 2, 32)), cache, metadata, implementation="triton")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the stub of a HIP runtime and the handler for a CPU are built."""
    return tmp_path_factory.mktemp("native")


ARGUMENTS = {"environment": {"TRITON_INTERPRET": "", "JAX_PLATFORMS": "cpu"}}


@needs_compiler
def test_a_hip_runtime_gets_the_arguments_that_the_code_objects_declare(folder):
    """Grid, block, shared bytes, stream, and each parameter by its name in Triton's intermediate code."""
    cases = ["gfx942:qk-norm+rope+write D128 bf16", "gfx1201:attention D64 bf16 all features"]
    out = run_python("import sys, native_arguments as n; n.main(sys.argv[1], sys.argv[2:])", str(folder), *cases, **ARGUMENTS)
    assert out == "2 programs, 4 launches as the code objects declare them\n"


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("arch", ["gfx942", "gfx1201"])
def test_a_hip_runtime_gets_the_declared_arguments_of_every_kernel(arch, folder):
    cases = [f"{arch}:{variant}" for variant in native_arguments.VARIANTS]
    out = run_python("import sys, native_arguments as n; n.main(sys.argv[1], sys.argv[2:])", str(folder), *cases, **ARGUMENTS)
    assert out.startswith(f"{len(cases)} programs, ")


@needs_compiler
def test_errors_of_the_driver_name_program_and_kernel_and_are_not_kept(folder):
    """The first is a code object for another GPU, the last a launch that fails."""
    out = run_python(
        """
        import ctypes, sys
        from pathlib import Path
        import native_arguments as n
        folder = Path(sys.argv[1])
        stub = ctypes.CDLL(str(n.build_stub(folder)))
        n.register(folder)
        launched = []
        hook = n.HOOK(lambda name, *_: launched.append(name))
        stub.stub_set(hook, 0x4E)
        try:
            n.call_one(n.code_object(0x4C))
        except Exception as error:
            print(error)
        print(launched)
        stub.stub_set(hook, 0x4C)
        n.call_one(n.code_object(0x4C))
        print(launched)
        stub.stub_fail_launches(719)
        try:
            n.call_one(n.code_object(0x4C))
        except Exception as error:
            print(error)
        stub.stub_fail_launches(0)
        n.call_one(n.code_object(0x4C))
        print(launched, stub.stub_loads())
        """,
        str(folder),
        **ARGUMENTS,
    )
    assert "program: k: loading its code object, which is for gfx942, failed with driver status 209" in out
    assert "program: k: its launch failed with driver status 719" in out
    assert [line for line in out.splitlines() if line.startswith("[")] == ["[]", "[b'k']", "[b'k', b'k', b'k'] 1"]


@needs_compiler
def test_of_two_hip_runtimes_the_one_that_jaxs_plugin_is_linked_to_is_called(folder):
    """torch's was loaded first here, and has the name that is looked for first."""
    out = run_python(
        """
        import ctypes, sys
        from pathlib import Path
        import native_arguments as n
        folder = Path(sys.argv[1])
        torchs = ctypes.CDLL(str(n.build_stub(folder, "libamdhip64.so.7")))
        ours = n.build_stub(folder, "libamdhip64.so.6")
        ctypes.CDLL(str(n.build_plugin(folder, ours)))
        n.register(folder)
        n.call_one(n.code_object(0))
        print(torchs.stub_loads(), ctypes.CDLL(str(ours)).stub_loads())
        """,
        str(folder),
        **ARGUMENTS,
    )
    assert out == "0 1\n"


def test_a_step_is_exported_for_rocm_on_a_machine_without_a_gpu_and_lowered_alike_in_every_process():
    """The custom call holds the code objects, so the same step has the same text: XLA's persistent cache is keyed by it."""
    program = """
        import hashlib
        from dataclasses import replace
        import jax, jax.numpy as jnp, purepage as pp
        from jax import export
        from purepage.bridges.native import library, program as native
        from purepage.functional.target import Settings, assuming_target, named_target

        library.load = lambda: None  # nothing runs here, so nothing has to be built
        spec = pp.CacheSpec(num_blocks=4, block_size=64, num_kv_heads=1, head_size=64)
        metadata = pp.make_metadata([1], [100], [[1, 2]], block_size=64)

        def attend(query, cache):
            return pp.paged_attention(query, cache, metadata, implementation="triton")

        shapes = jax.ShapeDtypeStruct((1, 2, 64), jnp.bfloat16), jax.eval_shape(lambda: pp.init_cache(spec))
        target = replace(named_target("gfx942"), settings=Settings(bridge="native"))
        with assuming_target(target):
            check = export.DisabledSafetyCheck.custom_call(library.UNRECORDED)  # no probe has passed on this target
            exported = export.export(jax.jit(attend), platforms=["rocm"], disabled_checks=[check])(*shapes)
        text = exported.mlir_module()
        assert library.UNRECORDED in text and "paged_attention" in text
        print(len(exported.mlir_module_serialized) > 10000, hashlib.sha256(text.encode()).hexdigest())
    """
    first, second = (run_python(program, environment={"TRITON_INTERPRET": ""}) for _ in range(2))
    assert first == second and first.startswith("True ")


@pytest.mark.parametrize("bridge, needs_torch", [("callback", True), ("jax_triton", False), ("native", False)])
def test_only_the_callback_bridge_needs_torch(bridge, needs_torch):
    """On a ROCm machine torch may bring a second HIP runtime, so what runs without it is planned without it."""
    out = run_python(
        f"""
        import importlib.util
        from dataclasses import replace
        find_spec = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *more: None if name == "torch" else find_spec(name, *more)
        import jax, jax.numpy as jnp, purepage as pp
        from purepage.bridges import triton
        from purepage.functional.attention import paged_attention_call
        from purepage.functional.dispatch import Plan
        from purepage.functional.target import Settings, named_target

        cache = pp.init_cache(pp.CacheSpec(num_blocks=2, block_size=16, num_kv_heads=1, head_size=64))
        call = paged_attention_call(jnp.ones((1, 2, 64), jnp.bfloat16), cache, pp.make_metadata([1], [3], [[1]], block_size=16))
        target = replace(named_target("gfx942"), settings=Settings(bridge={bridge!r}))
        planned = triton.plan("paged_attention", call, target, explicit=False)
        print("planned" if isinstance(planned, Plan) else planned.reasons)
        """,
        environment={"TRITON_INTERPRET": ""},
    )
    assert ("needs torch" in out) if needs_torch else out == "planned\n"
