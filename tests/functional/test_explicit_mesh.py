"""A mesh of Explicit axes: the heads stay sharded through `xla`, no device gathers the cache, and the values are those of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

import purepage as pp
from purepage.testing import random_batch

SETUP = """
    from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

    mesh = jax.make_mesh((2,), ("heads",), axis_types=(AxisType.Explicit,))
    batch = random_batch(3, num_seqs=3, num_kv_heads=4, num_heads=8, dtype=np.float32, cache_dtype=CACHE_DTYPE)
    spec = batch.spec(content=CONTENT, order=ORDER)
    over_heads = lambda array, axis: jax.device_put(array, NamedSharding(mesh, P(*[None] * axis, "heads")))
    put = lambda array: over_heads(jnp.asarray(array), 1)
    plain = batch.cache_before(spec)
    cache = pp.KVCache(over_heads(plain.data, spec.axes.index("H")), plain.k_scale, plain.v_scale, spec)
    arrays = (batch.query, batch.key, batch.value)
    query, key, value = new = tuple(map(put, arrays))
    lost = lambda text: [line for line in text.splitlines() if "all-gather" in line or "all-to-all" in line]
    same = lambda found, expected: np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-5)
"""

STEP = """
    def step(cache, query, key, value, metadata):
        cache = pp.update_cache(cache, key, value, metadata.slot_mapping, implementation="xla")
        return cache, *pp.paged_attention(query, cache, metadata, implementation="xla", return_lse=True)

    expected_cache, expected, expected_lse = jax.jit(step)(plain, *map(jnp.asarray, arrays), batch.metadata)
    compiled = jax.jit(step, donate_argnums=0).lower(cache, query, key, value, batch.metadata).compile()
    assert not lost(compiled.as_text()), lost(compiled.as_text())
    assert compiled.memory_analysis().alias_size_in_bytes >= cache.data.nbytes // 2
    written, out, lse = jax.jit(step)(cache, query, key, value, batch.metadata)
    assert jax.typeof(written.data).sharding.spec[spec.axes.index("H")] == "heads"
    assert jax.typeof(out).sharding.spec[1] == jax.typeof(lse).sharding.spec[1] == "heads"
    assert written == expected_cache
    same(out, expected), same(lse, expected_lse)
    with jax.set_mesh(mesh):
        same(step(cache, query, key, value, batch.metadata)[1], expected)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("content", "order", "dtype"),
    [("packed", "LBHNC", "np.float32"), ("shuffled", "LHBNC", "jnp.float8_e4m3fn"), ("flash", "LBHNC", "jnp.bfloat16")],
)
def test_a_step_over_a_cache_that_is_sharded_over_heads_gathers_nothing(run_with_devices, content, order, dtype):
    choice = f"\n    CONTENT, ORDER, CACHE_DTYPE = {content!r}, {order!r}, {dtype}\n"
    run_with_devices(2, choice + SETUP + STEP)


TYPES = """
    import purepage.functional.layout as layout

    metadata = jax.tree.map(jnp.asarray, batch.metadata)
    table, positions = jnp.ones((64, batch.query.shape[-1])), jnp.asarray(batch.positions)
    lse = put(np.zeros(batch.query.shape[:2], np.float32))
    calls = {
        "update": lambda c: pp.update_cache(c, key, value, metadata.slot_mapping, implementation="xla").data,
        "rope": lambda c: pp.rope_and_update_cache(*new, positions, table, c, metadata.slot_mapping, implementation="xla")[2].data,
        "gather": lambda c: pp.gather_blocks(c, [1, 2]).data,
        "copy": lambda c: pp.copy_blocks(c, [1, 2], [0, 3]).data,
        "scatter": lambda c: pp.scatter_blocks(c, [0, 3], pp.gather_blocks(c, [1, 2])).data,
        "logical": lambda c: pp.cache_to_logical(c)[1],
        "convert": lambda c: pp.convert_cache(c, batch.spec(content="xpacked")).data,
        "attention": lambda c: pp.paged_attention(query, c, metadata, implementation="xla"),
        "cascade": lambda c: pp.cascade_attention(query, c, metadata, common_prefix_len=16, implementation="xla"),
        "encoder": lambda c: pp.encoder_attention(query, key, value, metadata, return_lse=True, implementation="xla")[1],
        "merge": lambda c: pp.merge_attention_states(query, lse, query, lse, implementation="xla")[0],
        "rotary": lambda c: pp.rotary_embedding(positions, query, key, table, implementation="xla")[1],
    }
    for content in layout.CONTENTS:
        for order in layout.ORDERS:
            spec = batch.spec(content=content, order=order)
            data = over_heads(jnp.zeros(spec.shape, spec.storage_dtype), spec.axes.index("H"))
            cache = pp.KVCache(data, plain.k_scale, plain.v_scale, spec)
            for name, call in calls.items():
                if name in ("attention", "cascade", "encoder", "merge", "rotary") and content != "packed":
                    continue
                found = jax.eval_shape(call, cache).sharding.spec
                assert "heads" in found, (content, order, name, found)
"""


def test_the_result_of_every_function_is_sharded_over_the_heads_of_its_arguments(run_with_devices):
    run_with_devices(2, '\n    CONTENT, ORDER, CACHE_DTYPE = "packed", "LBHNC", jnp.bfloat16\n' + SETUP + TYPES)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("axes", [("model",), ("data", "context", "model")])
def test_a_mesh_of_one_device_is_served_as_that_device_is(axes):
    """Axes of size 1 divide nothing, but stand in the types of arrays, which a scan over layers must keep."""
    mesh = jax.make_mesh((1,) * len(axes), axes, axis_types=(AxisType.Explicit,) * len(axes), devices=jax.devices()[:1])
    s = pp.sharding.Shardings(mesh)
    batch = random_batch(3, num_seqs=2, max_seq_len=20, num_layers=2, dtype=np.float32)
    cache, arrays = batch.cache_before(), tuple(map(jnp.asarray, (batch.query, batch.key, batch.value)))

    def step(cache, query, key, value, metadata):
        def one(cache, layer):
            cache = pp.update_cache(cache, key, value, metadata.slot_mapping, layer=layer, implementation="xla")
            return cache, pp.paged_attention(query, cache, metadata, layer=layer, implementation="xla")

        return jax.lax.scan(one, cache, jnp.arange(2))

    placed = jax.device_put(cache, s.cache(cache)), *(jax.device_put(array, s.tokens) for array in arrays)
    there = jax.device_put(batch.metadata, s.metadata(batch.metadata))
    expected_cache, expected = jax.jit(step)(cache, *arrays, batch.metadata)
    written, out = jax.jit(step)(*placed, there)
    assert jax.typeof(written.data) == jax.typeof(placed[0].data)
    np.testing.assert_array_equal(np.asarray(written.data), np.asarray(expected_cache.data))
    np.testing.assert_allclose(np.asarray(out), np.asarray(expected), rtol=1e-6, atol=1e-6)
    eager = pp.update_cache(placed[0], *placed[2:], there.slot_mapping, layer=1, implementation="xla")
    np.testing.assert_array_equal(np.asarray(eager.data[1]), np.asarray(expected_cache.data[1]))
