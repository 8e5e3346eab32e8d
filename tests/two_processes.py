"""One of two processes that serve one batch: `python two_processes.py PORT NUMBER [steps]`, two fake devices each, or one GPU.

Process 1 kills itself in the second step where STEPS is above 1. Prints "step N right" for each step that gave what one device gives.
"""

import os
import signal
import sys

import jax

PORT, NUMBER, STEPS = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
ON_GPUS = os.environ.get("JAX_PLATFORMS") != "cpu"
jax.distributed.initialize(
    f"127.0.0.1:{PORT}",
    num_processes=2,
    process_id=NUMBER,
    local_device_ids=[NUMBER] if ON_GPUS else None,
    heartbeat_timeout_seconds=10,
    initialization_timeout=120,
)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.experimental import multihost_utils  # noqa: E402

import purepage as pp  # noqa: E402

assert jax.process_count() == 2 and jax.device_count() == 2 * jax.local_device_count()
mesh = jax.make_mesh((2, jax.local_device_count()), ("context", "model"))
assert len({device.process_index for device in mesh.devices[:, 0]}) == 2, "the axis context crosses the processes"
s = pp.sharding.Shardings(mesh)
spec = pp.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=2, head_size=32, dtype=jnp.float32)
metadata = pp.make_metadata([1, 1], [40, 20], [[0, 5, 2], [6, 1, 0]], block_size=16)
rng = np.random.default_rng(0)
query, *sides = (rng.standard_normal((2, heads, 32)).astype(np.float32) for heads in (4, 2, 2))
prompts = [rng.standard_normal((60, 2, 32)).astype(np.float32) for _ in range(2)]
slots = np.concatenate(
    [np.asarray(metadata.block_table)[i, : -(-n // 16)].repeat(16)[:n] * 16 + np.arange(n) % 16 for i, n in ((0, 40), (1, 20))]
)


def step(cache, query, key, value, metadata):
    cache = pp.update_cache(cache, key, value, metadata.slot_mapping, implementation="xla")
    return cache, pp.paged_attention(query, cache, metadata, implementation="xla")


def filled(sharding=None):
    cache = pp.init_cache(spec, sharding=sharding)
    place = (lambda array: array) if sharding is None else (lambda array: jax.device_put(array, s.tokens))
    return pp.update_cache(
        cache, *map(place, prompts), jnp.asarray(slots, jnp.int32) if sharding is None else jax.device_put(slots.astype(np.int32), s.rows)
    )


expected = np.asarray(jax.jit(step)(filled(), query, *sides, metadata)[1])
cache = filled(s)
arguments = [jax.device_put(array, s.tokens) for array in (query, *sides)]
whole = jax.device_put(jax.device_get(metadata), s.metadata(metadata))
compiled = jax.jit(step, donate_argnums=0)
for number in range(STEPS):
    if NUMBER == 1 and number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    cache, out = compiled(cache, *arguments, whole)
    found = multihost_utils.process_allgather(out, tiled=True)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    print(f"step {number} right", flush=True)
