"""Probes of a GPU: each answers one question about this machine, in a child process, since a wrong answer may be a crash."""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...functional.attention import paged_attention
from ...functional.cache import CacheSpec, init_cache
from ...functional.cache_writers import update_cache
from ...functional.metadata import AttentionMetadata
from ...functional.metadata_builders import make_metadata
from ...functional.target import current_target, using_settings, xla_flags
from ...functional.testing import assert_close, random_batch
from .. import callback, choice, trial
from ..dlpack import to_torch
from ..native import unavailable as native_unavailable
from . import facts

Facts = dict[str, Any]


class Skipped(Exception):
    """The probe has nothing to ask here; the message says why."""


@dataclass(frozen=True)
class Probe:
    """One question.

    Attributes:
      name: names it in the report.
      shows: what it shows where it passes.
      ask: yields what it finds; raises `Skipped` where there is nothing to ask, and anything else where it fails.
      packages: modules that it needs.
    """

    name: str
    shows: str
    ask: Callable[[], Iterator[Facts]]
    packages: tuple[str, ...] = ()


def need_gpu() -> None:
    """Raises `Skipped` where JAX computes on none."""
    if not trial.on_gpu():
        raise Skipped("no GPU: JAX computes on the CPU")


def need_packages(names: tuple[str, ...]) -> None:
    """Raises `Skipped` where one of them is not installed. One that is broken fails where the probe imports it."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise Skipped(f"no {' and no '.join(missing)}")


def run(probe: Probe) -> Iterator[Facts]:
    """What the probe finds. Raises as `Probe.ask` does."""
    need_gpu()
    need_packages(probe.packages)
    yield from probe.ask()


# --- one process, one runtime -------------------------------------------------------------------------------------------------------------


def _one_runtime() -> Iterator[Facts]:
    jax.block_until_ready(jnp.ones(8) + 1)
    before = facts.own_libraries()
    import torch  # noqa: F401

    after = facts.own_libraries()
    known = {entry["inode"] for entry in before}
    yield {"with_torch": [entry["path"] for entry in after if entry["inode"] not in known]}
    if current_target().platform == "rocm" and (why := trial.foreign_runtime(_paths(after, trial.HIP_LIBRARY))):
        raise RuntimeError(why)


def _paths(entries: list[Facts], library: str) -> tuple[str, ...]:
    return tuple(entry["path"] for entry in entries if entry["name"].startswith(library))


def _torch_sees() -> Iterator[Facts]:
    import torch

    yield facts.torch_build()
    if not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no GPU: it is built for {_built_for(torch)}")
    total = float(torch.arange(1000, device="cuda", dtype=torch.float64).sum())
    if total != 499500.0:
        raise RuntimeError(f"torch sums 0 to 999 to {total}")


def _built_for(torch: Any) -> str:
    return f"HIP {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"


def _ordinals() -> Iterator[Facts]:
    """An array of JAX on each GPU lies on torch's device of the same ordinal, and both runtimes say the same of it."""
    devices = jax.local_devices()
    arrays = [jax.block_until_ready(jax.device_put(jnp.arange(4), device)) for device in devices]
    runtime = facts.own_libraries()
    addresses = [facts.pci_of_runtime(device.local_hardware_id, runtime) for device in devices]
    import torch

    differ = []
    for device, array, address in zip(devices, arrays, addresses, strict=True):
        tensor = to_torch(array)
        ordinal = tensor.device.index
        has = torch.cuda.get_device_properties(ordinal)
        units, name = getattr(device, "core_count", None), device.device_kind
        pci = facts.pci_address(has)
        yield {
            "jax": device.local_hardware_id,
            "jax_pci": address,
            "jax_kind": name,
            "torch": ordinal,
            "torch_pci": pci,
            "torch_kind": has.name,
        }
        if pci and address and not address.startswith(pci):
            differ.append(f"{device} is {address} in JAX's runtime and {pci} in torch's")
        if ordinal != device.local_hardware_id:
            differ.append(f"JAX's {device.local_hardware_id} is torch's {ordinal}")
        if units and units != has.multi_processor_count:
            differ.append(f"{device}: JAX counts {units} compute units, torch {has.multi_processor_count}")
        if tensor.tolist() != [0, 1, 2, 3]:
            differ.append(f"{device}: torch reads {tensor.tolist()} where JAX wrote 0 to 3")
    if differ:
        raise RuntimeError("; ".join(differ))


# --- streams and command buffers ----------------------------------------------------------------------------------------------------------

_SIZE = 1 << 24
"""Elements that take a GPU long enough that work on another stream would come too early."""


def _double(inputs: tuple[Any, ...], outputs: tuple[Any, ...]) -> None:
    outputs[0].copy_(inputs[0])
    outputs[0].mul_(2)


def _torch_on_stream() -> Iterator[Facts]:
    @jax.jit
    def chained(x: Any) -> Any:
        for _ in range(4):
            x = jnp.sqrt(x * x) + 1
            (x,) = callback.call_torch(_double, [x], [jax.ShapeDtypeStruct(x.shape, x.dtype)])
        return x

    for start in range(3):
        out, expected = np.asarray(chained(jnp.full(_SIZE, start, jnp.float32))), float(start)
        for _ in range(4):
            expected = (expected + 1) * 2
        wrong = int(np.sum(out != expected))
        if wrong:
            raise RuntimeError(
                f"{wrong} of {_SIZE} elements are not {expected}: torch's kernel did not wait for XLA's, or XLA's for torch's"
            )
    yield {"elements": _SIZE, "runs": 3}


def bridges() -> tuple[tuple[str, str | None], ...]:
    """(bridge, why it can't be tried) of those that this library has a launcher of its own for."""
    target = current_target()
    return ("callback", choice.torch_failure(target)), ("native", native_unavailable(target))


STEP: dict[str, Any] = {"kind": "decode", "num_seqs": 16, "max_seq_len": 500, "head_size": 128}
"""The batches of `steps`."""


ROUNDS = 3
"""Times that the body of a loop runs."""


def _writes(layers: int, in_scan: bool, implementation: Any) -> Callable[..., Any]:
    """A step: in each round, each layer's keys are computed by XLA just before they are written, and read by attention after it.

    Its rounds are unrolled, or the bodies of a scan.
    """

    def one_round(cache: Any, keys: Any, values: Any, query: Any, metadata: AttentionMetadata) -> Any:
        outs = []
        for layer in range(layers):
            key, value = -keys[layer], values[layer] * 2  # exact in every dtype
            cache = update_cache(cache, key, value, metadata.slot_mapping, layer=layer, implementation=implementation)
            outs.append(paged_attention(query, cache, metadata, layer=layer, implementation=implementation))
        return cache, jnp.stack(outs)

    def step(cache: Any, keys: Any, values: Any, query: Any, metadata: AttentionMetadata) -> Any:
        if in_scan:
            return jax.lax.scan(lambda cache, new: one_round(cache, *new, query, metadata), cache, (keys, values))
        outs = []
        for number in range(len(keys)):
            cache, out = one_round(cache, keys[number], values[number], query, metadata)
            outs.append(out)
        return cache, jnp.stack(outs)

    return jax.jit(step, donate_argnums=0)


def steps(layers: int, in_scan: bool, bridge: str | None, implementation: Any = "triton") -> Facts:
    """Four steps of new data through one compiled program, each compared with plain JAX.

    Args:
      layers: in a round; each is two programs.
      in_scan: whether `ROUNDS` rounds are a loop; else a step is one round.
      bridge, implementation: what the program goes through.

    Returns:
      The largest difference, and `python_calls`, how often each step called into Python: 0 where the launches were replayed, or need none.

    Raises:
      RuntimeError: the cache is not what plain JAX writes.
      AssertionError: a result is not what plain JAX computes.
    """
    rounds, worst, python_calls = ROUNDS if in_scan else 1, 0.0, []
    with using_settings(bridge=bridge), callback.counted_python() as count:
        step = _writes(layers, in_scan, implementation)
        for seed in range(4):
            batch = random_batch(seed, num_layers=layers, dtype=jnp.bfloat16, **STEP)
            keys, values, query = (jnp.nan_to_num(jnp.asarray(x)) for x in (batch.new_keys, batch.new_values, batch.query))
            keys, values = (jnp.stack([x * 2**i for i in range(rounds)]) for x in (keys, values))
            before = count[0]
            cache, outs = jax.block_until_ready(step(batch.cache(), keys, values, query, batch.metadata))
            python_calls.append(count[0] - before)
            expected = batch.cache()
            for number in range(rounds):
                for layer in range(layers):
                    new = -keys[number, layer], values[number, layer] * 2
                    expected = update_cache(expected, *new, batch.metadata.slot_mapping, layer=layer, implementation="xla")
                    plain = paged_attention(query, expected, batch.metadata, layer=layer, implementation="xla")
                    what = f"step {seed} through {bridge}, round {number}, layer {layer}"
                    assert_close(outs[number, layer], np.asarray(plain, np.float64), dtype=outs.dtype, what=what)
                    worst = max(worst, float(jnp.max(jnp.abs(outs[number, layer].astype(jnp.float32) - plain.astype(jnp.float32)))))
            if not np.array_equal(_bits(cache.data), _bits(expected.data)):
                raise RuntimeError(
                    f"step {seed} through {bridge}: the cache is not what plain JAX writes; a recorded launch kept old data?"
                )
    return {"bridge": bridge, "layers": layers, "rounds": rounds, "largest_difference": worst, "python_calls": python_calls}


def _bits(array: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(array)).view(np.uint8)


def _through_each_bridge(layers: int, in_scan: bool) -> Iterator[Facts]:
    tried = 0
    for name, why in bridges():
        if why is None:
            tried += 1
            yield steps(layers, in_scan, name)
        else:
            yield {"bridge": name, "skipped": why}
    if not tried:
        raise Skipped("no bridge can be tried")


def _triton_on_stream() -> Iterator[Facts]:
    with using_settings(command_buffer=False):
        yield from _through_each_bridge(1, False)


def _recorded(*, in_scan: bool) -> Iterator[Facts]:
    """Records whatever the default is: the answer is what a default should rest on."""
    least = choice.recorded_from(xla_flags())
    if least is None:
        raise Skipped("XLA_FLAGS turn command buffers off")
    yield {"recorded_from": least}
    with using_settings(command_buffer=True):
        yield from _through_each_bridge(5, in_scan)


# --- devices and memory -------------------------------------------------------------------------------------------------------------------


def _each_gpu() -> Iterator[Facts]:
    wrong = []
    for device in jax.local_devices():
        with jax.default_device(device):
            batch = random_batch(3, kind="mixed", num_seqs=4, max_seq_len=200, head_size=64, dtype=jnp.bfloat16)
            try:
                out = jax.jit(lambda q, c, m: paged_attention(q, c, m, implementation="triton"))(
                    jnp.asarray(batch.query), batch.cache(), batch.metadata
                )
                if out.devices() != {device}:
                    raise RuntimeError(f"the result lies on {out.devices()}")
                assert_close(out, batch.reference()[0], dtype=out.dtype)
            except Exception as error:
                wrong.append(f"{device}: {type(error).__name__}: {error}")
                yield {"device": device.id, "failed": wrong[-1]}
            else:
                yield {"device": device.id}
    if wrong:
        raise RuntimeError("; ".join(wrong))


def _past_2_gib() -> Iterator[Facts]:
    spec = CacheSpec(num_blocks=(1 << 31) // (16 * 8 * 256) + 64, block_size=16, num_kv_heads=8, head_size=128, dtype=jnp.bfloat16)
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    if limit and limit < 2.5 * spec.nbytes:
        raise Skipped(f"the GPU's {limit >> 20} MiB hold no cache of {spec.nbytes >> 20} MiB twice")
    last = spec.num_blocks - 1
    metadata = make_metadata([16], [16], np.array([[last]]), block_size=16)
    key, value = (jax.random.normal(jax.random.key(i), (16, 8, 128), jnp.bfloat16) for i in range(2))
    write = jax.jit(lambda c, k, v: update_cache(c, k, v, metadata.slot_mapping, implementation="triton"), donate_argnums=0)
    cache = write(init_cache(spec), key, value)
    touched = int(jnp.count_nonzero(jnp.any(cache.data[0, :last] != 0, axis=(1, 2, 3))))
    if touched:
        raise RuntimeError(f"{touched} blocks were written that lie below the one that was named")
    small = update_cache(init_cache(replace(spec, num_blocks=1)), key, value, jnp.arange(16), implementation="xla")
    if not np.array_equal(_bits(cache.data[0, last]), _bits(small.data[0, 0])):
        raise RuntimeError("the last block does not hold what was written to it")
    out = paged_attention(key, cache, metadata, implementation="triton")
    plain = paged_attention(key, small, make_metadata([16], [16], np.array([[0]]), block_size=16), implementation="xla")
    assert_close(out, np.asarray(plain, np.float64), dtype=out.dtype)
    yield {"cache_bytes": spec.nbytes}


def _native_library() -> Iterator[Facts]:
    why = native_unavailable(current_target())
    if why:
        raise RuntimeError(why)
    yield {"loaded": True}


PROBES = (
    Probe("one HIP runtime", "JAX and torch share one HIP runtime in a process", _one_runtime, ("torch",)),
    Probe("torch sees the GPU", "torch is built for this GPU and computes on it", _torch_sees, ("torch",)),
    Probe("ordinals agree", "a GPU has the same ordinal in JAX and torch", _ordinals, ("torch",)),
    Probe("native bridge loads", "the C++ handler is there, or was built, and found its driver", _native_library, ("triton",)),
    Probe("torch on XLA's stream", "torch's kernels are in order with XLA's", _torch_on_stream, ("torch",)),
    Probe("Triton on XLA's stream", "Triton's kernels are in order with XLA's, not recorded", _triton_on_stream, ("triton",)),
    Probe("five launches recorded", "a command buffer replays launches with new data", partial(_recorded, in_scan=False), ("triton",)),
    Probe("five launches recorded, in a scan", "the same inside a loop", partial(_recorded, in_scan=True), ("triton",)),
    Probe("each GPU", "the kernels run on every GPU of this process", _each_gpu, ("triton",)),
    Probe("a cache past 2 GiB", "addresses past 2**31 elements are right", _past_2_gib, ("triton",)),
)
"""All probes, in the order in which they are asked; each in a child of its own."""
