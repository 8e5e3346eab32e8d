"""The probe `recording`: may XLA record this package's launches on this device? It runs in a child process, which may crash.

Six writes and an attention of one program, and the same in a `lax.scan`, are run again and again with new data: what XLA has recorded must
give what plain JAX gives, and the Python of the bridge must not have decided anything that a replay does not repeat.
"""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...functional.attention import paged_attention
from ...functional.cache import CacheSpec, cache_to_logical, init_cache
from ...functional.cache_writers import update_cache
from ...functional.metadata_builders import make_metadata
from ...functional.target import Target, current_target, using_settings
from .. import choice, native
from .worker import child_environment

LAUNCHES = 6
RUNS = 4
LONGEST_S = 300.0
TOLERANCE = 3e-2


def run(implementation: Any, *, scanned: bool) -> list[np.ndarray]:
    """Results of `RUNS` runs of one program, each with new data.

    Args:
      implementation: "triton" or "xla".
      scanned: the layers are those of a `lax.scan`.
    """
    spec = CacheSpec(num_blocks=4, block_size=16, num_kv_heads=2, head_size=64, num_layers=LAUNCHES)
    metadata = make_metadata([1, 1], [20, 5], [[1, 2], [3, 0]], block_size=16)

    @jax.jit
    def step(cache: Any, states: Any) -> Any:
        def layer_step(carry: Any, layer: Any) -> Any:
            cache, x = carry
            new = x[:, :2] + layer.astype(x.dtype)
            cache = update_cache(cache, new, new * 2, metadata.slot_mapping, layer=layer, implementation=implementation)
            return (cache, paged_attention(x, cache, metadata, layer=layer, implementation=implementation)), None

        if scanned:
            return jax.lax.scan(layer_step, (cache, states), jnp.arange(LAUNCHES))[0]
        for layer in range(LAUNCHES):
            (cache, states), _ = layer_step((cache, states), jnp.int32(layer))
        return cache, states

    found, cache = [], init_cache(spec)
    for i in range(RUNS):
        states = jax.random.normal(jax.random.key(i), (2, 4, 64), jnp.bfloat16)
        cache, out = step(cache, states)
        found += [np.asarray(each.astype(jnp.float32)) for each in (out, *cache_to_logical(cache, LAUNCHES - 1))]
    return found


def bridges_of(target: Target) -> tuple[str | None, ...]:
    """The bridges that are probed: the one that is taken where none is named, and each that works here."""
    found: list[str | None] = [None]
    if native.unavailable(target) is None:
        found.append("native")
    if choice.torch_failure(target) is None:
        found.append("callback")
    return tuple(found)


def check() -> None:
    """Runs the probe in this process, through each bridge that works here.

    Raises:
      AssertionError: a replay gave another result than plain JAX.
    """
    for bridge in bridges_of(current_target()):
        with using_settings(command_buffer=True, bridge=bridge):
            for scanned in (False, True):
                for place, (actual, expected) in enumerate(zip(run("triton", scanned=scanned), run("xla", scanned=scanned), strict=True)):
                    where = f"{bridge or 'default'} bridge, {'in a scan' if scanned else 'unrolled'}, run {place // 3 + 1}"
                    if not np.allclose(actual, expected, rtol=TOLERANCE, atol=TOLERANCE):
                        raise AssertionError(f"{where}: {np.abs(actual - expected).max():.2g} beside plain JAX")


def probe(environment: Mapping[str, str] | None = None) -> tuple[bool, str]:
    """(Passed, why not) of `check` in a child process.

    Args:
      environment: variables of the child besides those of this process.
    """
    command = [sys.executable, "-m", __name__]
    given = child_environment(environment)
    try:
        done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=LONGEST_S, check=False)
    except subprocess.TimeoutExpired:
        return False, f"no end after {LONGEST_S:.0f} s"
    if done.returncode == 0:
        return True, ""
    said = [line for line in done.stderr.splitlines() if line.strip()]
    return False, f"status {done.returncode}: {said[-1].strip()[:300] if said else 'no output'}"


if __name__ == "__main__":
    check()
