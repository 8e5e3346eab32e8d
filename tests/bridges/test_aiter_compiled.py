"""AITER's kernels as the adapters call them, compiled for AMD without a GPU: Triton's compiler takes less than its interpreter."""

import pytest
from processes import run_python

pytest.importorskip("torch")
pytest.importorskip("triton")
from purepage.bridges.aiter import package as aiter_package

pytestmark = pytest.mark.skipif(aiter_package.root() is None, reason="amd-aiter is not installed")

PROGRAM = """
    import importlib
    import sys

    import torch
    import triton.language as tl
    from benchmarks.aiter_launches import POINTERS, Recorded, compile_recorded
    from purepage.bridges.aiter import package as aiter_package
    from triton.runtime.jit import JITFunction

    POINTERS["int64"] = "i64"
    arch, fp8 = sys.argv[1:]
    launches = []

    class Recorder:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            names = [parameter.name for parameter in self.kernel.params]
            return lambda *args, **given: launches.append(Recorded(self.kernel, grid, {**dict(zip(names, args)), **given}))

    def recorded(name):
        operator = aiter_package.load(name)
        module = importlib.import_module(operator.__module__)
        for key, value in list(vars(module).items()):
            if isinstance(value, JITFunction):
                setattr(module, key, Recorder(value))
        module.get_num_sms = lambda: 304
        return operator

    def tensor(*shape, dtype):
        return torch.empty(shape, dtype=getattr(torch, dtype), device="meta")

    decode, one = recorded("paged_attention_decode"), torch.ones(1)
    for count, keys, cache, slopes in ((64, 8192, "bfloat16", None), (8, 4096, fp8, tensor(32, dtype="float32"))):
        pages, rows = tensor(count * keys // 64, 8, 64, 128, dtype=cache), tensor(count, 32, 128, dtype="float32")
        lens, table = tensor(count, dtype="int32"), tensor(count, keys // 64, dtype="int64")
        decode(rows, rows, pages, pages, lens, table, 0.088, keys, tl.bfloat16, one, one, alibi_slopes=slopes)
    pages, rows = tensor(512, 8, 8, 128, dtype="bfloat16"), tensor(64, 32, 128, dtype="bfloat16")
    recorded("unified_attention")(
        rows, pages, pages, rows, tensor(9, dtype="int32"), 8, tensor(8, dtype="int32"), 512, 0.088, True, (-1, -1),
        tensor(8, 64, dtype="int32"), 30.0, None, None, None
    )
    for launch in launches:
        assert "amdgcn" in compile_recorded(launch, arch).asm
        print(launch.name)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("arch, fp8", [("gfx942", "float8_e4m3fnuz"), ("gfx950", "float8_e4m3fn")])
def test_paged_decode_and_the_repaired_soft_cap_compile_for_amd(arch, fp8, tmp_path):
    """In a process of its own: kernels of this one are the interpreter's."""
    environment = {"TRITON_INTERPRET": None, "JAX_PLATFORMS": "cpu", "TRITON_CACHE_DIR": str(tmp_path)}
    out = run_python(PROGRAM, arch, fp8, environment=environment)
    assert out.split() == [
        "_paged_attn_decode_v1_w_dot_kernel",
        "_paged_attn_decode_v2_w_dot_kernel",
        "_paged_attn_decode_v2_w_dot_reduce_kernel",
        "kernel_unified_attention_2d",
    ]
