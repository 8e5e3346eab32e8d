"""The traffic that docs/sharding.md computes is what compiled steps move."""

import json

import pytest
from processes import run_python

from benchmarks import sharded_bytes

SMALL = sharded_bytes.Model(layers=2, width=256, heads=8, kv_heads=4, head_size=32, itemsize=4)
MESHES = {
    "data=2,context=2,model=2": {"data": 2, "context": 2, "model_axis": 2},
    "context=8": {"context": 8},
}
COMPILE = """
    import json, sys
    from examples.sharded_step import compile_step
    from examples.smollm2.parallel import parse_mesh
    from purepage.sharding import collectives

    model, seqs, tokens, dtype, meshes = map(json.loads, sys.argv[1:])
    for mesh in meshes:
        compiled, cache = compile_step(model, parse_mesh(mesh), seqs=seqs, tokens=tokens, dtype=dtype)
        moved = [(each.kind, each.arrays, each.sent, each.in_loop, each.largest_operand) for each in collectives(compiled.as_text())]
        part = cache.data.sharding.shard_shape(cache.data.shape)
        size = cache.data.dtype.itemsize
        for extent in part:
            size *= extent
        print(json.dumps([mesh, moved, size, compiled.memory_analysis().alias_size_in_bytes]))
"""


def compiled(*arguments):
    pytest.importorskip("gguf")
    lines = run_python(COMPILE, *map(json.dumps, arguments), devices=8).splitlines()
    return {mesh: rest for mesh, *rest in map(json.loads, lines)}


def test_the_page_and_its_chart_are_the_computed_ones():
    assert sharded_bytes.PAGE.read_text() == sharded_bytes.page()
    assert sharded_bytes.CHART.read_text() == sharded_bytes.chart()


def test_the_formulas_are_the_sizes_in_compiled_programs():
    found = compiled("small", 16, 512, "float32", list(MESHES))
    for mesh, axes in MESHES.items():
        moved, part, alias = found[mesh]
        tokens = 16 // axes.get("data", 1)
        of_model = {"model_axis": axes.get("model_axis", 1)}
        attention = sharded_bytes.attention_bytes(SMALL, tokens, context=axes.get("context", 1), **of_model)
        projections = sharded_bytes.projection_bytes(SMALL, tokens, **of_model)
        assert sum(SMALL.layers * sent for _, _, sent, in_loop, _ in moved if in_loop) == attention + projections, mesh
        assert all(kind == "all-reduce" for kind, _, _, in_loop, _ in moved if in_loop)
        assert all(operand < part for *_, operand in moved)
        assert alias >= part


@pytest.mark.slow
def test_a_step_of_llama_70b_on_eight_devices_moves_two_all_reduces_a_layer():
    ((moved, part, alias),) = compiled("llama-70b", 64, 8192, "bfloat16", ["model=8"]).values()
    assert [(kind, arrays, in_loop) for kind, arrays, _, in_loop, _ in moved] == [("all-reduce", ["f32[64,8192]"], True)] * 2
    assert part == 20 * 2**30
    assert alias >= part
