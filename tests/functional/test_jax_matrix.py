"""Every public function under every transformation and setting of JAX: the result is the eager one, or a refusal that says why.

The whole product is marked `slow`; a pairwise sample of it runs always.
"""

import contextlib
import json
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from functional_calls import CALLS, KINDS, arguments
from pairwise import pairwise
from processes import run_python

import purepage as pp

ATTENTION = ("paged_attention", "encoder_attention", "cascade_attention")


def call(name, static, arrays):
    return CALLS[name](**arrays, **static)


@cache
def eager(name, kind):
    """(arrays, static options, result), the result as NumPy leaves."""
    arrays, static = arguments(name, kind)
    return arrays, static, host(call(name, static, arrays))


def host(tree):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def check_equal(actual, expected):
    """Equal to float32's or the dtype's own rounding: XLA may fuse another way in another program."""
    actual = host(actual)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype and a.shape == e.shape
        if jnp.issubdtype(a.dtype, jnp.floating):
            step = float(jnp.finfo(a.dtype).eps)
            np.testing.assert_allclose(a.astype(np.float64), e.astype(np.float64), rtol=4 * step, atol=4 * step)
        elif a.dtype == np.uint16:  # bits of bfloat16; a rounding that falls the other way changes the last one
            assert np.max(np.abs(a.astype(np.int32) - e.astype(np.int32)), initial=0) <= 1
        elif a.dtype == np.uint8:
            assert np.max(np.abs(a.astype(np.int32) - e.astype(np.int32)), initial=0) <= 1
        else:
            np.testing.assert_array_equal(a, e)


def stack(tree, count=2):
    return jax.tree.map(lambda leaf: jnp.stack([leaf] * count), tree)


def first(tree):
    return jax.tree.map(lambda leaf: leaf[0], tree)


def under(setting):
    """A mode that calls eagerly and jitted inside a context."""

    def mode(run, arrays, expected):
        with setting():
            check_equal(run(arrays), expected)
            check_equal(jax.jit(run)(arrays), expected)

    return mode


def jitted(run, arrays, expected):
    check_equal(jax.jit(run)(arrays), expected)


def again(run, arrays, expected):
    for actual, wanted in zip(host(run(arrays)), expected, strict=True):
        np.testing.assert_array_equal(actual, wanted)


def vmapped(run, arrays, expected):
    outs = jax.vmap(run)(stack(arrays))
    for at in range(2):
        check_equal(jax.tree.map(lambda leaf, at=at: leaf[at], outs), expected)


def scanned(run, arrays, expected):
    _, outs = jax.lax.scan(lambda carry, x: (carry, run(x)), None, stack(arrays))
    check_equal(first(outs), expected)


def conditional(run, arrays, expected):
    zeros = partial(jax.tree.map, jnp.zeros_like)
    outs = jax.jit(lambda take, x: jax.lax.cond(take, run, lambda x: zeros(run(x)), x))(True, arrays)
    check_equal(outs, expected)


def rematerialised(run, arrays, expected):
    check_equal(jax.jit(jax.checkpoint(run))(arrays), expected)


def differentiated(run, arrays, expected):
    leaves, structure = jax.tree.flatten(arrays)
    at = next(i for i, leaf in enumerate(leaves) if jnp.issubdtype(leaf.dtype, jnp.floating))

    def total(x):
        outs = jax.tree.leaves(run(jax.tree.unflatten(structure, [*leaves[:at], x, *leaves[at + 1 :]])))
        return sum((jnp.sum(out.astype(jnp.float32)) for out in outs if jnp.issubdtype(out.dtype, jnp.floating)), jnp.zeros(()))

    with pytest.raises(pp.UnsupportedError, match="has no derivatives"):
        jax.grad(total)(leaves[at])


def shaped(run, arrays, expected):
    outs = jax.tree.leaves(jax.eval_shape(run, arrays))
    assert [(out.shape, out.dtype) for out in outs] == [(leaf.shape, leaf.dtype) for leaf in expected]


def compiled_ahead(run, arrays, expected):
    check_equal(
        jax.jit(run).lower(jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)).compile()(arrays), expected
    )


def numpy_leaves(run, arrays, expected):
    check_equal(run(jax.tree.map(np.asarray, arrays)), expected)


def guarded_transfers(run, arrays, expected):
    step = jax.jit(run)
    step(arrays)
    with jax.transfer_guard("disallow"):
        outs = step(arrays)
    check_equal(outs, expected)


def exported(run, arrays, expected):
    """Over flat leaves; the export of whole pytrees has tests of its own."""
    leaves, structure = jax.tree.flatten(arrays)
    flat = jax.jit(lambda *leaves: jax.tree.leaves(run(jax.tree.unflatten(structure, leaves))))
    blob = jax.export.export(flat)(*leaves).serialize()
    check_equal(jax.export.deserialize(blob).call(*leaves), expected)


def exported_to_another_process(run, arrays, expected, tmp_path):
    leaves, structure = jax.tree.flatten(arrays)
    flat = jax.jit(lambda *leaves: jax.tree.leaves(run(jax.tree.unflatten(structure, leaves))))
    (tmp_path / "step").write_bytes(bytes(jax.export.export(flat)(*leaves).serialize()))
    for side, values in (("in", leaves), ("out", expected)):
        for at, leaf in enumerate(map(np.asarray, values)):
            (tmp_path / f"{side}{at}").write_bytes(leaf.tobytes())
    shapes = {
        side: [(leaf.shape, leaf.dtype.name) for leaf in map(np.asarray, values)] for side, values in (("in", leaves), ("out", expected))
    }
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    run_python(
        f"""
        import json, pathlib
        import jax, jax.numpy as jnp, numpy as np
        from jax import export
        folder = pathlib.Path({str(tmp_path)!r})
        shapes = json.loads((folder / "shapes.json").read_text())
        read = lambda side: [
            np.frombuffer((folder / f"{{side}}{{i}}").read_bytes(), jnp.dtype(dtype)).reshape(shape)
            for i, (shape, dtype) in enumerate(shapes[side])
        ]
        outs = export.deserialize(bytearray((folder / "step").read_bytes())).call(*map(jnp.asarray, read("in")))
        for out, wanted in zip(outs, read("out"), strict=True):
            out, wanted = np.asarray(out).astype(np.float64), wanted.astype(np.float64)
            np.testing.assert_allclose(out, wanted, rtol=0.02, atol=1)
        """
    )


MODES = {
    "eager": again,
    "jit": jitted,
    "vmap": vmapped,
    "scan": scanned,
    "cond": conditional,
    "remat": rematerialised,
    "grad": differentiated,
    "eval_shape": shaped,
    "ahead of time": compiled_ahead,
    "export": exported,
    "NumPy leaves": numpy_leaves,
    "transfer guard": guarded_transfers,
    "x64": under(lambda: jax.enable_x64(True)),
    "strict promotion": under(lambda: jax.numpy_dtype_promotion("strict")),
    "rank promotion": under(lambda: jax.numpy_rank_promotion("raise")),
    "strict and x64": under(lambda: _both(jax.enable_x64(True), jax.numpy_dtype_promotion("strict"))),
    "debug_nans": under(lambda: jax.debug_nans(True)),
    "disable_jit": under(jax.disable_jit),
}


@contextlib.contextmanager
def _both(one, two):
    with one, two:
        yield


CELLS = {"name": tuple(CALLS), "mode": tuple(MODES), "kind": KINDS}
SAMPLE = [tuple(case.values()) for case in pairwise({"name": CELLS["name"], "mode": CELLS["mode"]})]
SAMPLE = [(name, mode, KINDS[at % len(KINDS)]) for at, (name, mode) in enumerate(SAMPLE)][::4]
WHOLE = [(name, mode, kind) for name in CALLS for mode in MODES for kind in KINDS]


def run_cell(name, mode, kind):
    arrays, static, expected = eager(name, kind)
    MODES[mode](partial(call, name, static), arrays, expected)


@pytest.mark.sampled(24)
@pytest.mark.parametrize(("name", "mode", "kind"), SAMPLE)
def test_a_cell_of_the_sample_is_the_eager_result(name, mode, kind):
    run_cell(name, mode, kind)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "mode", "kind"), WHOLE)
def test_every_cell_is_the_eager_result(name, mode, kind):
    run_cell(name, mode, kind)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CALLS)
def test_an_exported_step_runs_in_another_process(name, kind, tmp_path):
    arrays, static, expected = eager(name, kind)
    exported_to_another_process(partial(call, name, static), arrays, expected, tmp_path)


SYMBOLIC = {
    "query": ("tokens", 0),
    "key": ("tokens", 0),
    "value": ("tokens", 0),
    "qkv": ("tokens", 0),
    "positions": ("tokens", -1),
    "slot_mapping": ("tokens", 0),
    "out_a": ("tokens", 0),
    "out_b": ("tokens", 0),
    "lse_a": ("tokens", 0),
    "lse_b": ("tokens", 0),
    "block_ids": ("blocks", 0),
    "src": ("blocks", 0),
    "dst": ("blocks", 0),
}
NOT_SYMBOLIC = {*ATTENTION, "scatter_blocks", "gather_blocks", "convert_cache", "cache_to_logical", "cache_from_logical"}
"""Attention refuses a symbolic number of tokens by name; the others count blocks in a static spec, or take no tokens."""


@pytest.mark.parametrize("name", sorted(CALLS.keys() - NOT_SYMBOLIC))
def test_a_symbolic_number_of_tokens_is_served(name):
    arrays, static, expected = eager(name, "bfloat16")
    leaves, structure = jax.tree.flatten(arrays)
    count = jax.export.symbolic_shape("n")[0]
    paths = [path[0].key for path, _ in jax.tree_util.tree_flatten_with_path(arrays)[0]]
    shapes = []
    for path, leaf in zip(paths, leaves, strict=True):
        shape = list(leaf.shape)
        if path in SYMBOLIC:
            shape[SYMBOLIC[path][1]] = count
        shapes.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype))
    flat = jax.jit(lambda *leaves: jax.tree.leaves(call(name, static, jax.tree.unflatten(structure, leaves))))
    check_equal(jax.export.export(flat)(*shapes).call(*leaves), expected)


@pytest.mark.parametrize("name", ATTENTION)
def test_a_symbolic_number_of_tokens_is_refused_by_name_in_attention(name):
    arrays, static, _ = eager(name, "float32")
    count = jax.export.symbolic_shape("n")[0]
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), arrays)
    for argument in ("query", "key", "value"):
        if argument in shapes:
            shapes[argument] = jax.ShapeDtypeStruct((count, *shapes[argument].shape[1:]), shapes[argument].dtype)
    with pytest.raises((ValueError, pp.UnsupportedError), match=r"query.*symbolic"):
        jax.export.export(jax.jit(partial(call, name, static)))(shapes)


MESHES = """
from functools import partial
import json
import numpy as np
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
import purepage as pp
from functional_calls import CALLS, arguments

def parts(tree):
    # Heads of queries, keys, values and caches lie on the mesh axis; everything else is replicated.
    def of(path, leaf):
        name = path[0].key
        if name in ("query", "key", "value", "out_a", "out_b") and leaf.ndim == 3:
            return P(None, "heads")
        if name in ("lse_a", "lse_b"):
            return P(None, "heads")
        if name in ("key", "value") and leaf.ndim == 5:
            return P(None, None, None, "heads")
        if leaf.ndim == 5:
            return P(None, None, "heads")
        return P()
    return jax.tree_util.tree_map_with_path(of, tree)

def check(outs, wanted):
    for out, want in zip(jax.tree.leaves(outs), wanted, strict=True):
        out, want = np.asarray(out).astype(np.float64), np.asarray(want).astype(np.float64)
        np.testing.assert_allclose(out, want, rtol=0.02, atol=0.02 if np.asarray(want).dtype.kind == "f" else 1)

for name, kind, mode in json.loads(CASES):
    arrays, static = arguments(name, kind)
    run = partial(lambda name, static, arrays: CALLS[name](**arrays, **static), name, static)
    wanted = [np.asarray(leaf) for leaf in jax.tree.leaves(run(arrays))]
    kinds = (AxisType.Explicit if mode == "explicit" else AxisType.Auto,)
    mesh = jax.make_mesh((2,), ("heads",), axis_types=kinds)
    specs = parts(arrays)
    place = lambda leaf, spec: jax.device_put(leaf, NamedSharding(mesh, spec))
    try:
        with jax.set_mesh(mesh):
            check(jax.jit(run)(jax.tree.map(place, arrays, specs)), wanted)
        print("CELL", json.dumps([name, kind, mode, "right"]))
    except Exception as error:
        print("CELL", json.dumps([name, kind, mode, f"{type(error).__name__}: {error}"[:300]]))
"""


def mesh_cells(run_with_devices, mode, cases):
    printed = run_with_devices(2, f"CASES = {json.dumps([(*case, mode) for case in cases])!r}\n" + MESHES)
    cells = [json.loads(line[5:]) for line in printed.splitlines() if line.startswith("CELL ")]
    assert len(cells) == len(cases)
    return {tuple(cell[:2]): cell[3] for cell in cells}


@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_a_sample_over_a_mesh_gives_the_result_of_one_device(mode, run_with_devices):
    cases = [(name, KINDS[at % 3]) for at, name in enumerate(("paged_attention", "update_cache", "rotary_embedding"))]
    found = mesh_cells(run_with_devices, mode, cases)
    assert {cell: what for cell, what in found.items() if what != "right"} == {}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "explicit"])
def test_heads_over_a_mesh_give_the_result_of_one_device(mode, run_with_devices):
    """The fused qk-norm writers take heads packed in one axis, which is not divided here."""
    found = mesh_cells(run_with_devices, mode, [(name, kind) for name in CALLS for kind in KINDS])
    assert {cell: what for cell, what in found.items() if what != "right"} == {}
