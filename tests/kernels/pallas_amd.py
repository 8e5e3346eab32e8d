"""Compiles the Pallas kernels for an AMD architecture with Triton's own backend: `python tests/kernels/pallas_amd.py gfx942`.

jax lowers a kernel to Triton's IR without a GPU; the IR goes through text to the installed Triton. It runs in a process of its own, because
Triton compiles nothing in one with TRITON_INTERPRET. It prints one line of JSON for each kernel: name, registers, spills, bytes of LDS.
"""

import json
import re
import sys
import tempfile
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1])]  # the helpers of all tests

# ruff: noqa: E402
import jax
import triton
from jax._src.lib.triton import dialect
from jaxlib.mlir import ir
from test_pallas import call_of
from triton.backends.compiler import GPUTarget

from purepage.functional.dispatch import plan_with
from purepage.functional.target import Target
from purepage.kernels.archs import arch_facts

CALLS = {
    "prefill": "paged_attention",
    "decode": "paged_attention",
    "update_cache": "update_cache",
    "rope_and_update_cache": "rope_and_update_cache",
}


def lowered(operation, arch):
    """(name, Triton IR as text, warps) of each kernel of a call."""
    call = call_of(operation)
    planned = plan_with("pallas", CALLS[operation], call, Target("rocm", arch, 1, arch_facts(arch).wave_size), explicit=True)
    module = jax.jit(planned.run).trace(call).lower(lowering_platforms=("rocm",)).compiler_ir("stablehlo")
    yield from _kernels(module.operation)


def _kernels(operation):
    for region in operation.regions:
        for block in region.blocks:
            for each in block.operations:
                attributes = each.operation.attributes
                if each.operation.name == "stablehlo.custom_call" and "mhlo.backend_config" in attributes:
                    config = attributes["mhlo.backend_config"]
                    context = ir.Context()
                    dialect.register_dialect(context)
                    with context:
                        text = ir.Module.parse(config["ir"].value_bytes).operation.get_asm(enable_debug_info=False)
                    yield config["name"].value, text, config["num_warps"].value
                yield from _kernels(each.operation)


def main(arch):
    with tempfile.TemporaryDirectory() as folder:
        for operation in CALLS:
            for name, text, num_warps in lowered(operation, arch):
                path = Path(folder, "kernel.ttir")
                path.write_text(text)
                compiled = triton.compile(
                    str(path), target=GPUTarget("hip", arch, arch_facts(arch).wave_size), options={"num_warps": num_warps}
                )
                counts = (re.search(rf"\.{key}:\s+(\d+)", compiled.asm["amdgcn"])[1] for key in ("vgpr_count", "vgpr_spill_count"))
                print(json.dumps([operation, name, *map(int, counts), compiled.metadata.shared]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
