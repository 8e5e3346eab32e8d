"""The sharded paths on two devices: `python -m benchmarks.two_gpus`, or with `--small` on two CPU devices, which checks the script itself.

1. Steps over `model`, `data` and `context` against one device, with each writer, and donation in place on each device.
2. SmolLM2's tokens over `model=2` and `data=2` against one device's.
3. Cache writes and attention of a decode step of 32 layers in Llama-8B's shape: time, speed-up over one device, the share of the
   merges, and bytes sent against those computed.
4. Two processes with a device each, and one killed.

Writes `results/two_gpus.json`. Leave NVLink multicast off (NCCL_NVLS_ENABLE=0).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TESTS = ROOT / "tests"
CASES = ((8, 4096), (64, 8192))


def seconds(run: Callable[[Any], Any], state: Any, repeats: int) -> tuple[float, Any]:
    """(median time of a call, last state) of a step that takes and returns its state."""
    import jax

    times = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        state = jax.block_until_ready(run(state))
        times.append(time.perf_counter() - start)
    return sorted(times[2:])[repeats // 2], state


def check_steps(implementation: str) -> list[str]:
    """Steps over each mesh of two devices, through the helper of the tests."""
    sys.path.insert(0, str(TESTS))
    import sharded

    passed = []
    for mesh in ("model", "data", "context"):
        sharded.MESHES[mesh] = {mesh: 2}
        for kind in ("Auto", "Explicit"):
            for write in ("update", "rope", "qk_norm"):
                sharded.check_step(mesh, kind, implementation, write=write)
                passed.append(f"{mesh}, {kind}, {write}")
    return passed


def check_tokens(num_layers: int | None, num_tokens: int) -> dict[str, bool]:
    """Whether SmolLM2 writes the tokens of one device over each mesh."""
    import jax
    from gguf import GGUFReader

    from examples.smollm2.engine import Engine
    from examples.smollm2.parallel import parse_mesh
    from examples.smollm2.scheduler import Sequence
    from examples.smollm2.weights import find_gguf, read_config, read_weights

    reader = GGUFReader(find_gguf())
    config = read_config(reader)
    config = replace(config, num_layers=num_layers or config.num_layers)
    weights = read_weights(reader, config)

    def replies(mesh: str) -> list[list[int]]:
        engine = Engine(config, weights, max_seqs=2, max_tokens=32, max_seq_len=128, shardings=parse_mesh(mesh))
        sequences = [Sequence(tuple(range(100 * i + 1, 100 * i + 20 + i)), num_tokens) for i in range(3)]
        for _ in engine.generate(sequences):
            pass
        return [sequence.reply for sequence in sequences]

    with jax.default_matmul_precision("highest"):
        expected = replies("")
        return {mesh: replies(mesh) == expected for mesh in ("model=2", "data=2")}


def measure(implementation: str | None, *, layers: int, seqs: int, tokens: int, repeats: int) -> dict[str, Any]:
    """Times of the decode step over one device, `model` and `context`."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import purepage as pp
    from purepage.functional.context import merge_over

    from .sharded_bytes import Model, attention_bytes

    heads, kv_heads, size, block = 32, 8, 128, 16
    width = tokens // block
    spec = pp.CacheSpec(num_blocks=seqs * width, block_size=block, num_kv_heads=kv_heads, head_size=size, num_layers=layers)
    # Sequence i has every `seqs`-th block: half of them on each device of `context`.
    table = (np.arange(width)[None] * seqs + np.arange(seqs)[:, None]).astype(np.int32)
    metadata = pp.make_metadata([1] * seqs, [tokens] * seqs, table, block_size=block)
    rng = np.random.default_rng(0)
    query, key, value = (jnp.asarray(rng.standard_normal((seqs, count, size)), jnp.bfloat16) for count in (heads, kv_heads, kv_heads))

    def step(cache: pp.KVCache, query: Any, key: Any, value: Any, metadata: Any) -> Any:
        def layer(carry: Any, index: Any) -> Any:
            cache, x = carry
            cache = pp.update_cache(cache, key, value, metadata.slot_mapping, layer=index, implementation=implementation)
            out = pp.paged_attention(x, cache, metadata, layer=index, implementation=implementation)
            return (cache, out), None

        (cache, out), _ = jax.lax.scan(layer, (cache, query), jnp.arange(layers))
        return cache, out

    def merges(out: Any, lse: Any) -> Any:
        return jax.lax.scan(lambda carry, _: (merge_over(("context",), *carry), None), (out, lse), None, length=layers)[0]

    found: dict[str, Any] = {"seqs": seqs, "tokens": tokens, "layers": layers}
    for name in ("one", "model", "context"):
        devices = jax.devices()[: 1 if name == "one" else 2]
        s = pp.sharding.Shardings(jax.make_mesh((len(devices),), ("model" if name == "one" else name,), devices=devices))
        arrays = [jax.device_put(array, s.tokens) for array in (query, key, value)]
        there = jax.device_put(metadata, s.metadata(metadata))
        cache = pp.init_cache(spec, sharding=s)
        compiled = jax.jit(step, donate_argnums=0).lower(cache, *arrays, there).compile()
        time_s, state = seconds(lambda state: compiled(state[0], *arrays, there), (cache, None), repeats)  # noqa: B023
        result = {"us": time_s * 1e6}
        if name != "one":
            moved = pp.sharding.collectives(compiled.as_text() or "")
            axes = {"context": 2} if name == "context" else {"model_axis": 2}
            result["speed_up"] = found["one"]["us"] / result["us"]
            result["bytes_sent"] = sum(each.sent * (layers if each.in_loop else 1) for each in moved)
            result["bytes_computed"] = attention_bytes(Model(layers, 0, heads, kv_heads, size), seqs, **axes)
        if name == "context":
            whole = (jax.sharding.PartitionSpec(),) * 2
            mapped = jax.jit(jax.shard_map(merges, mesh=s.mesh, in_specs=whole, out_specs=whole, check_vma=False))
            parts = jax.device_put((jnp.ones((seqs, heads, size)), jnp.ones((seqs, heads))), s.replicated)
            merge_s, _ = seconds(lambda state: mapped(*state), parts, repeats)  # noqa: B023
            result["share_of_merges"] = merge_s / time_s
        found[name] = result
        del state, cache
    return found


def check_two_processes() -> str:
    """Two processes, a device each; one is killed after the first step."""
    sys.path[:0] = [str(TESTS), str(TESTS / "functional")]
    import test_two_processes

    test_two_processes.test_a_killed_process_ends_the_other_with_an_error_after_a_step_that_was_right()
    return "right until one was killed, then an error"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.two_gpus", description=__doc__)
    parser.add_argument("--small", action="store_true", help="two CPU devices, small shapes, plain JAX")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/two_gpus.json")
    options = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if options.small:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    report: dict[str, Any] = {}
    # The processes come first: on GPUs they need the memory that this one takes once it starts JAX.
    sections: dict[str, Callable[[], Any]] = {
        "two processes": check_two_processes,
        "steps": partial(check_steps, "xla" if options.small else "triton"),
        "tokens": partial(check_tokens, *((1, 3) if options.small else (None, 24))),
    }
    for seqs, tokens in ((4, 64),) if options.small else CASES:
        shape = {"layers": 2 if options.small else 32, "seqs": seqs, "tokens": tokens, "repeats": 3 if options.small else 20}
        sections[f"decode {seqs} x {tokens}"] = partial(measure, "xla" if options.small else None, **shape)
    for name, run in sections.items():
        start = time.perf_counter()
        try:
            report[name] = run()
        except Exception as error:  # the rest is worth its device time
            report[name] = {"failed": f"{type(error).__name__}: {error}"[-2000:]}
        print(name, f"({time.perf_counter() - start:.0f} s):", json.dumps(report[name]), flush=True)
    options.out.write_text(json.dumps(report, indent=1) + "\n")
    if any(isinstance(each, dict) and "failed" in each for each in report.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
