"""Random cases as plain dicts of strings and numbers, and what runs one of them: an operation, judged by the oracle."""

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pool import bits, expected_pool, random_cache

import purepage as pp
from purepage.testing import (
    assert_close,
    random_batch,
    reference_encoder_attention,
    reference_qk_norm_rope,
    reference_rope,
)

Case = dict[str, Any]

MODEL = ("float32", "bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
LAYOUTS = tuple(itertools.product(("packed", "xpacked", "xpacked_interleaved_v", "shuffled", "flash"), ("LBHNC", "LHBNC")))
EXPONENTS = ((0, 0), (40, -40), (-40, 40), (50, 50), (-50, -50), (0, -100))
"""Powers of two on queries and on keys; the scale of the scores takes them back."""

SHAPES: Mapping[str, tuple[Any, ...]] = {
    "dtype": MODEL,
    "cache_dtype": (None, None, *FP8),
    "layout": LAYOUTS,
    "block_size": (16, 16, 32, 48, 64),
    "heads": ((4, 2), (1, 1), (6, 1), (8, 8), (10, 2), (16, 1)),
    "head_size": (32, 64, 80, 128, 256),
    "value_size": (None, None, None, 16, 48, 128),
    "num_layers": (1, 3),
    "scales": ("one", "layer", "head"),
}
ATTENTION: Mapping[str, tuple[Any, ...]] = {
    **SHAPES,
    "kind": ("mixed", "decode", "prefill", "chunked", "cross"),
    "max_seq_len": (2, 17, 60, 200),
    "max_query_len": (1, 5, 12, 40),
    "query_dtype": (None, None, None, *FP8),
    "sliding_window": (None, None, 1, 2, 15, 16, 17, 2**30),
    "window_is_data": (False, False, True),
    "key_range": (False, False, True),
    "logits_soft_cap": (None, None, 1e-3, 0.5, 30.0, 1e4, 1e8),
    "alibi": (None, None, 0.5, 1e-4, -0.25, 100.0),
    "sinks": (None, None, 0.0, -1e4, 80.0),
    "qq_bias": (None, None, "shared", "each"),
    "poison_newest": (False, False, True),
    "output": (None, None, "float32", *FP8),
    "exponents": EXPONENTS,
    "value_exponent": (0, 0, 100, -60),
    "score_size": (1.0, 1.0, 0.0, 1e-3, 30.0, -1.0),
}
ENCODER: Mapping[str, tuple[Any, ...]] = {
    name: ATTENTION[name]
    for name in ("dtype", "heads", "head_size", "value_size", "max_query_len", "sliding_window", "logits_soft_cap", "sinks", "score_size")
} | {"causal": (False, True)}
WRITE: Mapping[str, tuple[Any, ...]] = {
    **SHAPES,
    "writer": ("plain", "rope", "qk_norm_rope"),
    "table_dtype": MODEL,
    "rotary": ("whole", "half"),
    "is_neox": (True, False),
    "eps": (1e-6, 1e-5, 1e-30, 1.0),
    "value_exponent": (0, 0, 40, -40),
}
OPERATIONS: Mapping[str, Mapping[str, tuple[Any, ...]]] = {"attention": ATTENTION, "encoder": ENCODER, "write": WRITE}
DATA_SEEDS = 3
"""Batches of each case: they share its trace, which costs most."""


def draw(seed: int, number: int, operations: tuple[str, ...] = tuple(OPERATIONS)) -> Case:
    """Case `number` of a seed: the first choice of each option is its plain one, and half of the options keep it."""
    rng = np.random.default_rng([seed, number])
    weights = np.array([{"attention": 6, "encoder": 1, "write": 3}[name] for name in operations], float)
    operation = str(rng.choice(operations, p=weights / weights.sum()))
    plain = rng.choice([0.3, 0.6, 0.9])
    case: Case = {"operation": operation, "data_seed": int(rng.integers(2**20))}
    for name, choices in OPERATIONS[operation].items():
        case[name] = choices[0] if rng.random() < plain else choices[rng.integers(len(choices))]
    return case


def run(case: Case, implementation: str) -> None:
    """Runs one case on `DATA_SEEDS` batches.

    Raises:
      AssertionError: a result is wrong.
      UnsupportedError: the implementation refuses the call.
    """
    {"attention": _attention, "encoder": _encoder, "write": _write}[case["operation"]](case, implementation)


def _value_size(case: Case) -> int | None:
    """Only packed rows have values of another size."""
    return case["value_size"] if case.get("layout", ("packed",))[0] == "packed" else None


def _batch(case: Case, seed: int, **options: Any):
    heads, kv_heads = case["heads"]
    return random_batch(
        seed,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size_v=_value_size(case),
        dtype=jnp.dtype(case["dtype"]),
        cache_dtype=case["cache_dtype"] and jnp.dtype(case["cache_dtype"]),
        **{name: case[name] for name in ("block_size", "head_size", "num_layers", "scales")},
        **options,
    )


def _times(array: np.ndarray, exponent: int) -> np.ndarray:
    """Times a power of two, exactly; NaN stays."""
    return (np.asarray(array).astype(np.float64) * 2.0**exponent).astype(array.dtype)


def _per_head(size: float | None, heads: int) -> np.ndarray | None:
    return None if size is None else (size * np.linspace(1.0, 0.25, heads)).astype(np.float32)


def _score_scale(case: Case, exponents: tuple[int, int]) -> float:
    return float(case["score_size"] * case["head_size"] ** -0.5 * 2.0 ** -sum(exponents))


def _attention(case: Case, implementation: str) -> None:
    content, order = case["layout"]
    wide = case["dtype"] != "float16" and case["cache_dtype"] is None and case["query_dtype"] is None
    exponents = case["exponents"] if wide else (0, 0)
    value_exponent = case["value_exponent"] if wide and case["output"] is None else 0
    layer, heads = case["num_layers"] - 1, case["heads"][0]
    quantized = case["output"] in FP8
    options = {
        "scale": _score_scale(case, exponents),
        "logits_soft_cap": case["logits_soft_cap"],
        "alibi_slopes": _per_head(case["alibi"], heads),
        "sinks": _per_head(case["sinks"], heads),
        "output_scale": 0.01 if quantized else None,
        "output_dtype": case["output"] and jnp.dtype(case["output"]),
    }
    options = {name: value for name, value in options.items() if value is not None}

    @jax.jit
    def attend(query: Any, cache: Any, metadata: Any, masks: Any, q_scale: Any) -> Any:
        given = {"sliding_window": case["sliding_window"], **options, **masks, "q_scale": q_scale}
        return pp.paged_attention(query, cache, metadata, layer=layer, return_lse=True, implementation=implementation, **given)

    for seed in range(case["data_seed"], case["data_seed"] + DATA_SEEDS):
        drawn = ("kind", "max_seq_len", "max_query_len", "sliding_window", "key_range", "qq_bias", "poison_newest")
        shaped = {name: case[name] for name in drawn}
        batch = _batch(case, seed, query_dtype=case["query_dtype"] and jnp.dtype(case["query_dtype"]), **shaped)
        query, keys, values = (
            _times(x, exponent)
            for x, exponent in ((batch.query, exponents[0]), (batch.key_cache, exponents[1]), (batch.value_cache, value_exponent))
        )
        batch = replace(batch, query=query, key_cache=keys, value_cache=values)
        masks = {name: value for name, value in batch.masks.items() if name != "sliding_window"}
        if case["window_is_data"] and case["sliding_window"] is not None:
            masks["sliding_window"] = np.int32(case["sliding_window"])
        out, lse = attend(query, batch.cache(content=content, order=order), batch.metadata, masks, batch.q_scale)
        expected, expected_lse = batch.reference(layer=layer, **{**batch.masks, **options})
        wanted = np.dtype(case["output"] or ("bfloat16" if case["query_dtype"] else case["dtype"]))
        given = {"equal_nan": case["poison_newest"]}
        assert_close(lse, expected_lse, dtype="lse", what=f"lse, data seed {seed}", **given)
        if case["sinks"] is not None:
            expected_lse = _with_sinks(expected_lse, batch.reference(layer=layer, **{**batch.masks, **options, "sinks": None})[1])
        given |= {"compute_dtype": _coarsest(case), "lse": expected_lse}
        out, expected = np.array(out), np.asarray(expected, np.float64)
        if wanted == np.float32:
            out = _without_underflow(out, expected, values)
        assert_close(out, expected, dtype=wanted, what=f"out, data seed {seed}", **given)


def _with_sinks(lse: np.ndarray, of_keys: np.ndarray) -> np.ndarray:
    """The size of a row's scores: that of its lse, or of its keys' alone, whose weights a sink above them makes small, not exact."""
    return np.maximum(np.abs(lse), np.where(np.isfinite(of_keys), np.abs(of_keys), 0))


def _without_underflow(out: np.ndarray, expected: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Takes the oracle's number where both are below what weights beneath float32's smallest normal number sum to; a sink leaves such."""
    finite = np.abs(np.where(np.isfinite(values), values, 0).astype(np.float64))
    floor = np.finfo(np.float32).tiny * np.max(finite, initial=0.0) * values.shape[1] * values.shape[2]
    return np.where(np.maximum(np.abs(expected), np.abs(out)) < floor, expected, out).astype(out.dtype)


def _coarsest(case: Case) -> np.dtype:
    """The dtype in which an implementation may take products: that of the query or of the cache, whichever is coarser."""
    names = [case["query_dtype"] or case["dtype"], case["cache_dtype"] or case["dtype"]]
    order = ("float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
    # Only a query in fp8 is multiplied in fp8; a cache in fp8 is read as the query's dtype.
    return np.dtype(jnp.dtype(names[0] if names[0] in FP8 else max(names[0], case["dtype"], key=order.index)))


def _encoder(case: Case, implementation: str) -> None:
    heads, kv_heads = case["heads"]
    options = {"causal": case["causal"], "sliding_window": case["sliding_window"], "logits_soft_cap": case["logits_soft_cap"]}
    options |= {"sinks": _per_head(case["sinks"], heads), "scale": _score_scale(case, (0, 0))}

    @jax.jit
    def attend(query: Any, key: Any, value: Any, metadata: Any) -> Any:
        return pp.encoder_attention(query, key, value, metadata, implementation=implementation, **options)

    for seed in range(case["data_seed"], case["data_seed"] + DATA_SEEDS):
        batch = random_batch(
            seed,
            kind="prefill",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=case["head_size"],
            head_size_v=_value_size(case),
            dtype=jnp.dtype(case["dtype"]),
            max_query_len=case["max_query_len"],
            max_seq_len=max(2, case["max_query_len"]),
        )
        out = attend(batch.query, batch.key, batch.value, batch.metadata)
        arrays = batch.query, batch.key, batch.value, batch.metadata.query_start_loc
        expected, lse = reference_encoder_attention(*arrays, **options)
        if case["sinks"] is not None:
            lse = _with_sinks(lse, reference_encoder_attention(*arrays, **{**options, "sinks": None})[1])
        assert_close(out, expected, dtype=jnp.dtype(case["dtype"]), lse=lse, what=f"data seed {seed}")


def _write(case: Case, implementation: str) -> None:
    content, order = case["layout"]
    heads, kv_heads = case["heads"]
    size, layer = case["head_size"], case["num_layers"] - 1
    dtype, table_dtype = jnp.dtype(case["dtype"]), jnp.dtype(case["table_dtype"])
    exponent = case["value_exponent"] if case["dtype"] != "float16" else 0
    given = {"layer": layer, "implementation": implementation}
    names = {"plain": pp.update_cache, "rope": pp.rope_and_update_cache, "qk_norm_rope": pp.qk_norm_rope_and_update_cache}
    if case["writer"] != "plain":
        given["is_neox"] = case["is_neox"]
    if case["writer"] == "qk_norm_rope":
        given |= {"num_heads": heads, "eps": case["eps"]}
    write = jax.jit(lambda *arrays: names[case["writer"]](*arrays, **given))
    for seed in range(case["data_seed"], case["data_seed"] + DATA_SEEDS):
        rng = np.random.default_rng(seed)
        batch = _batch(case, seed)
        spec = batch.spec(content=content, order=order)
        cache = random_cache(spec, seed, k_scale=batch.k_scale, v_scale=batch.v_scale)
        slots = np.array(batch.metadata.slot_mapping)
        slots[slots < 0] = rng.choice([-1, -(2**31), spec.num_slots, 2**31 - 1], np.sum(slots < 0))
        rotary = size if case["rotary"] == "whole" else size // 2
        table = rng.uniform(-1, 1, (64, rotary)).astype(table_dtype)
        query, key, value = (
            rng.standard_normal((len(slots), n, channels)).astype(np.float32) * np.float32(2.0**exponent)
            for n, channels in ((heads, size), (kv_heads, size), (kv_heads, spec.value_size))
        )
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        stored_key = key
        if case["writer"] == "plain":
            after = write(cache, key, value, slots)
        elif case["writer"] == "rope":
            rotated, stored_key, after = write(query, key, value, batch.positions, table, cache, slots)
            for found, x, name in ((rotated, query, "query"), (stored_key, key, "key")):
                expected = reference_rope(batch.positions, x.astype(np.float64), table, is_neox=case["is_neox"])
                assert_close(found, expected, dtype=dtype, compute_dtype=np.float32, what=f"{name}, data seed {seed}")
        else:
            qkv = np.concatenate([x.reshape(len(slots), -1) for x in (query, key, value)], axis=1)
            weights = [rng.uniform(0.5, 1.5, size).astype(dtype) for _ in range(2)]
            arrays = (qkv, *weights, batch.positions, table)
            found_query, stored_key, found_value, after = write(*arrays, cache, slots)
            wide = np.concatenate([qkv[:, : (heads + kv_heads) * size], np.zeros_like(key).reshape(len(slots), -1)], axis=1)
            expected = reference_qk_norm_rope(wide, *arrays[1:], num_heads=heads, eps=case["eps"], is_neox=case["is_neox"])
            expected = (*expected[:2], value)
            for found, wanted, name in zip((found_query, stored_key, found_value), expected, ("query", "key", "value"), strict=True):
                # Two roundings: the second may start from a neighbour of what the oracle's starts from.
                assert_close(found, wanted.astype(np.float64), dtype=dtype, compute_dtype=dtype, what=f"{name}, data seed {seed}")
        wrong = bits(after.data) != expected_pool(cache, np.asarray(stored_key), value, slots, layer)
        assert not wrong.any(), f"{int(wrong.sum())} elements of the cache are not what must be stored, data seed {seed}"


def smaller(case: Case, failure: Exception, implementation: str) -> Case:
    """The case with as many options as possible at their plain choice that still fails as it did."""
    for name, choices in OPERATIONS[case["operation"]].items():
        if case[name] == choices[0]:
            continue
        simpler = {**case, name: choices[0]}
        try:
            run(simpler, implementation)
        except type(failure):
            case = simpler
        except Exception:
            continue
    return case
