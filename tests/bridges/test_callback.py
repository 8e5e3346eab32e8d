"""Programs and torch functions inside jit: in place under donation, nothing else touched, right in loops, threads and shards."""

import logging
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import bridge_kernels as kernels
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from processes import run_python

from purepage.bridges import dlpack, launcher
from purepage.bridges.callback import call_torch, run_program
from purepage.functional.errors import UnsupportedError
from purepage.functional.target import settings_of, using_settings

LAYERS, SLOTS, WIDTH = 3, 64, 24


def numbers(seed, shape, dtype="float32"):
    """Random values of any dtype; integers fill their whole range."""
    rng = np.random.default_rng(seed)
    if np.issubdtype(np.dtype(dtype), np.integer):
        info = np.iinfo(dtype)
        return rng.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
    return rng.standard_normal(shape).astype(dtype)


def scattered(pool, rows, slots, layer):
    """What `scatter_program` leaves, in NumPy."""
    pool = np.array(pool)
    for row, slot in zip(np.asarray(rows), slots, strict=True):
        if 0 <= slot < pool.shape[1]:
            pool[layer, slot] = row
    return pool


def scatter(pool, rows, slots, layer):
    program = kernels.scatter_program(*pool.shape, rows.shape[0], dtype=pool.dtype.name)
    arrays = {"pool": pool, "rows": rows, "slots": slots, "layer": jnp.reshape(layer, (1,)).astype(jnp.int32)}
    return run_program(program, arrays)[0]


SCATTER_CASES = {
    "first layer": (0, [3, 7, 63, 0, 1]),
    "last layer": (LAYERS - 1, [63, 62, 0, 5, 6]),
    "slots -1 and past the end are skipped": (1, [-1, 64, 2, -(2**31), 2**31 - 1]),
    "every slot skipped": (1, [-1, -1, -1, 64, 65]),
}


@pytest.mark.parametrize("size", [1, 255, 256, 1000])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_a_program_gives_what_its_kernels_compute(size, dtype):
    x, y = jnp.asarray(numbers(1, size, dtype)), jnp.asarray(numbers(2, size, dtype))
    program = kernels.add_program(size, dtype=dtype)
    for run in (run_program, jax.jit(run_program, static_argnums=0)):
        (out,) = run(program, {"x": x, "y": y})
        np.testing.assert_array_equal(out, np.asarray(x) + np.asarray(y))


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"])
def test_kernels_see_fp8_buffers_as_bytes(dtype):
    x = jnp.asarray(np.arange(256, dtype=np.uint8).view(jnp.dtype(dtype)))
    (out,) = jax.jit(run_program, static_argnums=0)(kernels.flip_sign_program(256, dtype=dtype), {"x": x})
    assert out.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(out).view(np.uint8), np.arange(256, dtype=np.uint8) ^ 0x80)


@pytest.mark.parametrize("donate", [True, False], ids=["donated", "kept"])
@pytest.mark.parametrize("dtype", ["uint16", "uint8", "float32"])
@pytest.mark.parametrize("case", SCATTER_CASES, ids=str)
def test_an_update_changes_its_rows_and_no_other_byte_of_the_pool(case, dtype, donate):
    layer, slots = SCATTER_CASES[case]
    before = numbers(3, (LAYERS, SLOTS, WIDTH), dtype)
    rows = numbers(4, (len(slots), WIDTH), dtype)
    update = jax.jit(scatter, donate_argnums=0) if donate else jax.jit(scatter)
    after = update(jnp.asarray(before), jnp.asarray(rows), jnp.asarray(slots, jnp.int32), jnp.int32(layer))
    assert np.asarray(after).tobytes() == scattered(before, rows, slots, layer).tobytes()


def test_a_donated_update_is_in_place_and_takes_no_memory_of_the_pools_size():
    pool, rows = jnp.asarray(numbers(5, (2, 4096, 64), "uint16")), jnp.asarray(numbers(6, (4, 64), "uint16"))
    slots = jnp.asarray([0, 4095, 17, -1], jnp.int32)
    compiled = jax.jit(scatter, donate_argnums=0).lower(pool, rows, slots, jnp.int32(1)).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= pool.nbytes
    assert memory.temp_size_in_bytes < pool.nbytes // 8
    address = pool.unsafe_buffer_pointer()
    after = compiled(pool, rows, slots, jnp.int32(1))
    assert after.unsafe_buffer_pointer() == address
    assert pool.is_deleted()


def test_without_donation_the_old_pool_survives_and_both_can_be_read_in_one_program():
    before = numbers(7, (LAYERS, SLOTS, WIDTH), "uint16")
    rows, slots = numbers(8, (2, WIDTH), "uint16"), [5, 9]
    pool = jnp.asarray(before)

    @jax.jit
    def both(pool, rows, slots):
        after = scatter(pool, rows, slots, 1)
        return pool + jnp.uint16(0), after

    old, new = both(pool, jnp.asarray(rows), jnp.asarray(slots, jnp.int32))
    expected = scattered(before, rows, slots, 1)
    np.testing.assert_array_equal(old, before)
    np.testing.assert_array_equal(pool, before)
    np.testing.assert_array_equal(new, expected)


def test_a_torch_view_that_is_still_alive_keeps_its_contents_when_the_pool_is_donated():
    before = numbers(9, (1, SLOTS, WIDTH), "uint16")
    pool = jnp.array(before)
    view = dlpack.to_torch(pool)
    rows, slots = numbers(10, (1, WIDTH), "uint16"), [3]
    after = jax.jit(scatter, donate_argnums=0)(pool, jnp.asarray(rows), jnp.asarray(slots, jnp.int32), jnp.int32(0))
    np.testing.assert_array_equal(after, scattered(before, rows, slots, 0))
    np.testing.assert_array_equal(view.cpu().numpy(), before)


def test_two_launches_share_scratch_that_does_not_come_back():
    x = numbers(11, (6, 10))
    results = jax.jit(run_program, static_argnums=0)(kernels.total_program(6, 10), {"x": jnp.asarray(x)})
    assert [r.shape for r in results] == [(1,)]
    np.testing.assert_allclose(results[0], [x.astype(np.float64).sum() * 0.5], rtol=1e-5)


def test_a_program_without_rows_leaves_the_pool_alone():
    before = numbers(12, (LAYERS, SLOTS, WIDTH), "uint16")
    after = jax.jit(scatter)(jnp.asarray(before), jnp.zeros((0, WIDTH), jnp.uint16), jnp.zeros((0,), jnp.int32), jnp.int32(0))
    np.testing.assert_array_equal(after, before)


LOOPS = {
    "scan": lambda body, pool: jax.lax.scan(lambda pool, layer: (body(pool, layer), None), pool, jnp.arange(LAYERS))[0],
    "fori_loop": lambda body, pool: jax.lax.fori_loop(0, LAYERS, lambda layer, pool: body(pool, layer), pool),
    "while_loop": lambda body, pool: jax.lax.while_loop(
        lambda state: state[0] < LAYERS, lambda state: (state[0] + 1, body(state[1], state[0])), (0, pool)
    )[1],
}


@pytest.mark.parametrize("loop", LOOPS)
def test_a_loop_over_traced_layers_updates_one_donated_pool_in_place(loop):
    before = numbers(13, (LAYERS, SLOTS, WIDTH), "uint16")
    rows, slots = numbers(14, (LAYERS, 4, WIDTH), "uint16"), [0, 63, -1, 20]
    expected = before
    for layer in range(LAYERS):
        expected = scattered(expected, rows[layer], slots, layer)

    @jax.jit
    def step(pool, rows, slots):
        return LOOPS[loop](lambda pool, layer: scatter(pool, rows[layer], slots, layer), pool)

    pool = jnp.asarray(before)
    donating = jax.jit(step, donate_argnums=0)
    address = pool.unsafe_buffer_pointer()
    after = donating(pool, jnp.asarray(rows), jnp.asarray(slots, jnp.int32))
    np.testing.assert_array_equal(after, expected)
    assert after.unsafe_buffer_pointer() == address


def test_one_trace_serves_new_contents():
    traces = []

    @jax.jit
    def step(pool, rows, slots, layer):
        traces.append(pool.shape)
        return scatter(pool, rows, slots, layer)

    for seed in range(4):
        before, rows = numbers(seed, (LAYERS, SLOTS, WIDTH), "uint16"), numbers(seed + 50, (3, WIDTH), "uint16")
        slots, layer = np.random.default_rng(seed).permutation(SLOTS)[:3], seed % LAYERS
        after = step(jnp.asarray(before), jnp.asarray(rows), jnp.asarray(slots, jnp.int32), jnp.int32(layer))
        np.testing.assert_array_equal(after, scattered(before, rows, slots, layer))
    assert len(traces) == 1


def test_equal_programs_share_one_executable(caplog):
    arrays = {"x": jnp.ones(321), "y": jnp.full(321, 2.0)}
    compilations = []
    for _ in range(2):
        caplog.clear()
        with jax.log_compiles(), caplog.at_level(logging.WARNING):
            (out,) = run_program(kernels.add_program(321), arrays)
        compilations.append(sum("Compiling" in record.getMessage() for record in caplog.records))
    np.testing.assert_array_equal(out, np.full(321, 3.0))
    assert compilations == [1, 0]


def test_vmap_runs_the_program_for_each_entry():
    x, y = jnp.asarray(numbers(15, (5, 300))), jnp.asarray(numbers(16, 300))
    out = jax.jit(jax.vmap(lambda x: run_program(kernels.add_program(300), {"x": x, "y": y})[0]))(x)
    np.testing.assert_array_equal(out, np.asarray(x) + np.asarray(y))
    pools, rows = numbers(17, (2, LAYERS, SLOTS, WIDTH), "uint16"), numbers(18, (2, 2, WIDTH), "uint16")
    after = jax.vmap(scatter, in_axes=(0, 0, None, None))(
        jnp.asarray(pools), jnp.asarray(rows), jnp.asarray([4, 8], jnp.int32), jnp.int32(1)
    )
    np.testing.assert_array_equal(after, np.stack([scattered(p, r, [4, 8], 1) for p, r in zip(pools, rows, strict=True)]))


def test_eight_threads_at_once_give_what_one_gives():
    step = jax.jit(scatter, donate_argnums=0)
    rows = [numbers(100 + i, (2, WIDTH), "uint16") for i in range(50)]
    slots = [np.random.default_rng(i).permutation(16)[:2] for i in range(50)]

    def serve(seed):
        pool = jnp.asarray(numbers(seed, (1, 16, WIDTH), "uint16"))
        for row, slot in zip(rows, slots, strict=True):
            pool = step(pool, jnp.asarray(row), jnp.asarray(slot, jnp.int32), jnp.int32(0))
        return np.asarray(pool)

    with ThreadPoolExecutor(8) as threads:
        pools = list(threads.map(serve, range(8)))
    for seed, pool in enumerate(pools):
        expected = numbers(seed, (1, 16, WIDTH), "uint16")
        for row, slot in zip(rows, slots, strict=True):
            expected = scattered(expected, row, slot, 0)
        np.testing.assert_array_equal(pool, expected)


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_what_a_kernel_raises_names_the_program_and_the_next_call_works(transform):
    with pytest.raises(Exception, match=re.escape("broken program: bridge_kernels:broken_kernel failed")):
        jax.block_until_ready(transform(lambda x: run_program(kernels.broken_program(), {"x": x}))(jnp.ones(16)))
    (out,) = run_program(kernels.add_program(16), {"x": jnp.ones(16), "y": jnp.ones(16)})
    np.testing.assert_array_equal(out, np.full(16, 2.0))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        pytest.param({"x": jnp.ones(16)}, r"arrays is \['x'\]: it must be the inputs of add: \['x', 'y'\]", id="missing"),
        pytest.param({"x": jnp.ones(16), "y": jnp.ones(17)}, r"input y is float32\[17\]: it must be float32\[16\]", id="shape"),
        pytest.param({"x": jnp.ones(16), "y": jnp.ones(16, jnp.int32)}, r"input y is int32\[16\]: it must be float32\[16\]", id="dtype"),
    ],
)
def test_arrays_that_are_not_the_plans_raise_when_tracing(arrays, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda arrays: run_program(kernels.add_program(16), arrays), arrays)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the refusal is a CPU's")
def test_without_the_interpreter_a_cpu_refuses_and_says_how_to_turn_it_on(monkeypatch):
    monkeypatch.setattr(launcher, "is_interpreted", lambda kernel: False)
    with pytest.raises(UnsupportedError, match=r"add: .*TRITON_INTERPRET=1"):
        run_program(kernels.add_program(77), {"x": jnp.ones(77), "y": jnp.ones(77)})


@pytest.mark.parametrize(
    ("environment", "argument", "recorded"),
    [(None, None, True), ("1", None, True), ("0", None, False), ("0", True, True), (None, False, False)],
    ids=str,
)
def test_command_buffers_are_on_unless_the_environment_or_the_call_says_otherwise(environment, argument, recorded):
    settings = settings_of({} if environment is None else {"PUREPAGE_COMMAND_BUFFER": environment})
    arrays = {"x": jnp.ones(16), "y": jnp.ones(16)}
    with using_settings(command_buffer=settings.command_buffer):
        jaxpr = jax.make_jaxpr(lambda arrays: run_program(kernels.add_program(16), arrays, command_buffer=argument))(arrays)
    (equation,) = jaxpr.eqns
    assert equation.params["command_buffer_compatible"] is recorded


@dataclass(frozen=True)
class Scale:
    """A torch function with a static option."""

    factor: float

    def __call__(self, inputs, outputs):
        outputs[0].copy_(inputs[0] * self.factor)


def add_into(inputs, outputs):
    assert inputs[0].data_ptr() == outputs[0].data_ptr()
    outputs[0].add_(inputs[1])


def fail(inputs, outputs):
    raise KeyError("no such thing")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int8", "bool", "float8_e4m3fn", "float8_e5m2"])
def test_a_torch_function_sees_typed_tensors(dtype):
    x = jnp.asarray(numbers(19, (3, 5)) > 0).astype(dtype)

    def copy(inputs, outputs):
        assert str(inputs[0].dtype) == f"torch.{dtype}"
        outputs[0].copy_(inputs[0])

    (out,) = jax.jit(lambda x: call_torch(copy, [x], [jax.ShapeDtypeStruct(x.shape, x.dtype)]))(x)
    assert np.asarray(out).tobytes() == np.asarray(x).tobytes()


def test_a_torch_function_runs_in_a_scan_and_updates_its_alias_in_place():
    x, total = numbers(20, (4, 7)), numbers(21, 7)

    @jax.jit
    def run(total, x):
        def body(total, row):
            return call_torch(add_into, [total, row], [jax.ShapeDtypeStruct((7,), jnp.float32)], aliases={0: 0})[0], None

        return jax.lax.scan(body, total, x)[0]

    np.testing.assert_allclose(run(jnp.asarray(total), jnp.asarray(x)), total + x.sum(0), rtol=1e-5)
    (out,) = call_torch(Scale(3.0), [jnp.asarray(x)], [jax.ShapeDtypeStruct((4, 7), jnp.float32)])
    np.testing.assert_allclose(out, x * 3, rtol=1e-6)


def test_what_a_torch_function_raises_names_it():
    with pytest.raises(Exception, match=r"paged thing failed: KeyError: .*no such thing"):
        jax.block_until_ready(call_torch(fail, [jnp.ones(3)], [jax.ShapeDtypeStruct((3,), jnp.float32)], name="paged thing"))


def run_script(script, *, devices=1):
    """Runs a script in a process of its own, with that many CPU devices; a deadlock is a failure, not a hang."""
    return run_python(script, devices=devices, environment={"TRITON_INTERPRET": "1"})


def test_fifty_calls_on_megabytes_do_not_deadlock():
    run_script(
        """
        import jax, jax.numpy as jnp, numpy as np
        import bridge_kernels as kernels
        from purepage.bridges.callback import run_program
        size = 1 << 19
        program = kernels.add_program(size, block=1 << 18)
        x = jnp.arange(size, dtype=jnp.float32)
        add = lambda x, y: run_program(program, {"x": x, "y": y})[0]
        step = jax.jit(add)
        y = jnp.ones(size)
        for _ in range(50):
            y = step(x, y) * 0.5
        looped = jax.jit(lambda x, y: jax.lax.scan(lambda y, _: (add(x, y) * 0.5, None), y, None, length=50)[0])
        np.testing.assert_array_equal(looped(x, jnp.ones(size)), y)
        both = jax.jit(jax.vmap(add))(jnp.stack([x, x + 1]), jnp.stack([y, y]))
        np.testing.assert_array_equal(both[1], x + 1 + y)
        """
    )


def test_under_shard_map_each_of_eight_devices_updates_its_own_shard():
    out = run_script(
        """
        from functools import partial
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import NamedSharding, PartitionSpec as P
        from test_callback import numbers, scatter, scattered
        mesh = jax.make_mesh((8,), ("heads",))
        before, rows = numbers(0, (2, 16, 64), "uint16"), numbers(1, (3, 64), "uint16")
        slots = np.array([3, -1, 15], np.int32)
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))
        pool, row = P(None, None, "heads"), P(None, "heads")
        step = jax.shard_map(scatter, mesh=mesh, in_specs=(pool, row, P(), P()), out_specs=pool, check_vma=False)
        arguments = put(before, None, None, "heads"), put(rows, None, "heads"), put(slots), put(jnp.int32(1))
        pointers = [shard.data.unsafe_buffer_pointer() for shard in arguments[0].addressable_shards]
        compiled = jax.jit(step, donate_argnums=0).lower(*arguments).compile()
        assert "all-gather" not in compiled.as_text() and "all-reduce" not in compiled.as_text()
        after = compiled(*arguments)
        assert [shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards] == pointers
        assert after.addressable_shards[0].data.shape == (2, 16, 8)
        np.testing.assert_array_equal(after, scattered(before, rows, slots, 1))
        print("ok")
        """,
        devices=8,
    )
    assert out.strip() == "ok"


def test_sharded_arrays_outside_shard_map_are_refused_or_gathered_never_misread():
    out = run_script(
        """
        import jax, jax.numpy as jnp, numpy as np
        from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
        from purepage.functional.errors import UnsupportedError
        from test_callback import numbers, scatter, scattered
        before, rows = numbers(0, (2, 16, 64), "uint16"), numbers(1, (3, 64), "uint16")
        slots = np.array([3, -1, 15], np.int32)
        for kind in (AxisType.Explicit, AxisType.Auto):
            mesh = jax.make_mesh((8,), ("heads",), axis_types=(kind,))
            pool = jax.device_put(before, NamedSharding(mesh, P(None, None, "heads")))
            for name, step in (("eager", scatter), ("jit", jax.jit(scatter))):
                try:
                    after = step(pool, rows, slots, jnp.int32(1))
                except UnsupportedError as err:
                    assert "input pool" in str(err) and "wrap the call in jax.shard_map" in str(err)
                    print(kind.name, name, "refused")
                else:
                    np.testing.assert_array_equal(after, scattered(before, rows, slots, 1))
                    print(kind.name, name, "right")
        """,
        devices=8,
    )
    assert out.split("\n")[:4] == ["Explicit eager refused", "Explicit jit refused", "Auto eager refused", "Auto jit right"]
