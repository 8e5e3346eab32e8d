"""Configurations that a tuner found: the key of a shape, and how a row of the device's record stands in place of the tables' rows.

A row serves calls of the same key: equal in everything that changes the code of a kernel, and of the same powers of two in what only
changes how much there is to do. Its configuration passes the same limits as any other; one that does not is refused.
"""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...functional.errors import bad_value
from ...functional.record import Key, Row, sorted_key
from ..archs import arch_facts
from ..archs.configs import DecodeConfig, PrefillConfig, WriterConfig
from .attention import kernel_window, work_cut
from .encoder import EncoderShape, encoder_config
from .shapes import PagedAttentionShape
from .sizes import next_power_of_two
from .writers import CacheShape, RopeShape, UpdateShape, rope_config, update_config

AnyConfig = PrefillConfig | DecodeConfig | WriterConfig

KINDS: Mapping[str, tuple[str, type]] = {
    "prefill": ("tiled", PrefillConfig),
    "decode": ("split", DecodeConfig),
    "write": ("tiled", WriterConfig),
}
"""Kinds of configurations: the argument of a plan that takes one, and its type."""

ATTENTION_MIN = 16
"""Rows and columns of the matrix unit's smallest operand."""
LIMITS: Mapping[str, tuple[int, int]] = {
    "block_m": (ATTENTION_MIN, 512),
    "max_block_m": (ATTENTION_MIN, 512),
    "block_n": (ATTENTION_MIN, 512),
    "masked_block_n": (ATTENTION_MIN, 512),
    "reload_query": (ATTENTION_MIN, 4096),
    "num_warps": (1, 32),
    "reduce_num_warps": (1, 32),
    "partial_sums": (1, 512),
    "block_tokens": (1, 512),
    "block_heads": (1, 64),
}
"""Least and most of the fields that are powers of two."""
MAY_BE_0 = ("masked_block_n", "reload_query", "partial_sums")
RANGES: Mapping[str, tuple[int, int]] = {"num_stages": (1, 8), "splits_per_cu": (1, 64)}
"""Least and most of other fields that a kernel can't take at any value."""


def bucket(count: int) -> int:
    """The power of two that stands for a count in a key."""
    return next_power_of_two(count) if count > 0 else 0


def shape_key(shape: Any) -> Key:
    """The key of a shape that is planned: see the module.

    Args:
      shape: a `PagedAttentionShape`, `EncoderShape`, `UpdateShape` or `RopeShape`; of any other the key is empty.
    """
    if isinstance(shape, PagedAttentionShape):
        return _paged_key(shape)
    if isinstance(shape, EncoderShape):
        return _encoder_key(shape)
    if isinstance(shape, UpdateShape):
        facts = _cache_facts(shape.cache) | {"key_dtype": shape.key_dtype, "value_dtype": shape.value_dtype}
        return sorted_key({**facts, "tokens": bucket(shape.num_tokens)})
    return _rope_key(shape) if isinstance(shape, RopeShape) else ()


def _options(**present: bool) -> str:
    return " ".join(sorted(name for name, there in present.items() if there))


def _score_options(shape: PagedAttentionShape | EncoderShape) -> dict[str, bool]:
    """Options that paged and encoder attention have alike."""
    return {
        "traced_window": shape.traced_window,
        "ranged": shape.ranged,
        "soft_cap": bool(shape.logits_soft_cap),
        "alibi": shape.has_alibi,
        "sinks": shape.has_sinks,
        "score_scale": shape.has_score_scale,
        "lse": shape.return_lse,
    }


def _paged_key(shape: PagedAttentionShape) -> Key:
    cache = shape.cache
    return sorted_key(
        {
            "heads": shape.num_heads,
            "kv_heads": cache.num_kv_heads,
            "head_size": cache.head_size,
            "value_size": cache.value_size,
            "block_size": cache.block_size,
            "content": cache.content,
            "order": cache.order,
            "cache_dtype": cache.dtype.name,
            "query_dtype": shape.query_dtype,
            "output_dtype": shape.output_dtype,
            "window": bucket(kernel_window(shape.sliding_window)),
            "seqs": bucket(shape.num_seqs),
            "tokens": bucket(shape.num_tokens),
            "query": bucket(shape.max_query_len),
            "keys": bucket(shape.longest),
            "options": _options(
                non_causal=not shape.causal,
                **_score_options(shape),
                bias=shape.qq_bias is not None,
                bias_per_sequence=shape.qq_bias is not None and len(shape.qq_bias) == 3,
                scales_per_head=shape.scales_per_head,
                output_scale=shape.has_output_scale,
                context_only=shape.context_only,
            ),
        }
    )


def _encoder_key(shape: EncoderShape) -> Key:
    return sorted_key(
        {
            "heads": shape.num_heads,
            "kv_heads": shape.num_kv_heads,
            "head_size": shape.head_size,
            "value_size": shape.value_size,
            "dtype": shape.dtype,
            "window": bucket(kernel_window(shape.sliding_window)),
            "seqs": bucket(shape.num_seqs),
            "tokens": bucket(shape.num_tokens),
            "query": bucket(shape.max_query_len),
            "options": _options(
                causal=shape.causal,
                **_score_options(shape),
            ),
        }
    )


def _cache_facts(cache: CacheShape) -> dict[str, Any]:
    spec = cache.spec
    return {
        "kv_heads": spec.num_kv_heads,
        "head_size": spec.head_size,
        "value_size": spec.value_size,
        "block_size": spec.block_size,
        "content": spec.content,
        "order": spec.order,
        "cache_dtype": spec.dtype.name,
        "options": _options(k_scale_per_head=cache.k_scale_per_head, v_scale_per_head=cache.v_scale_per_head),
    }


def _rope_key(shape: RopeShape) -> Key:
    return sorted_key(
        {
            **(_cache_facts(shape.cache) if shape.cache is not None else {}),
            "heads": shape.num_heads,
            "kv_heads": shape.num_kv_heads,
            "head_size": shape.head_size,
            "rotary_dim": shape.rotary_dim,
            "is_neox": shape.is_neox,
            "norm": shape.packed,
            "sections": " ".join(map(str, shape.mrope_section)),
            "is_interleaved": shape.is_interleaved,
            "query_dtype": shape.query_dtype,
            "key_dtype": shape.key_dtype,
            "table_dtype": shape.table_dtype,
            "tokens": bucket(shape.num_tokens),
        }
    )


def values_of(config: AnyConfig) -> Key:
    """All fields of a configuration but `measured`, as the record keeps them."""
    return tuple((each.name, getattr(config, each.name)) for each in fields(config) if each.name != "measured")


def config_of(kind: str, values: Key) -> AnyConfig:
    """The configuration of values that came from a file.

    Raises:
      ValueError: no such kind or field, or a value that no kernel takes.
    """
    if kind not in KINDS:
        bad_value("kind", kind, f"one of {', '.join(map(repr, KINDS))}")
    made, given = KINDS[kind][1], dict(values)
    known = {each.name: each for each in fields(made) if each.name != "measured"}
    if set(given) != set(known):
        bad_value("configuration", tuple(given), f"of the fields {', '.join(known)}")
    for name, value in given.items():
        _check_field(name, value)
    return made(**given)


def _check_field(name: str, value: Any) -> None:
    if name == "options":
        if not isinstance(value, tuple) or not all(isinstance(e, tuple) and len(e) == 2 and isinstance(e[0], str) for e in value):
            bad_value(name, value, "pairs of a name and a number")
        return
    if name in ("optimistic", "frozen_max", "late_clamp", "kv_descriptor", "values_first", "one_loop"):
        if not isinstance(value, bool):
            bad_value(name, value, "a bool")
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        bad_value(name, value, "an int from 0 on")
    least, most = LIMITS.get(name) or RANGES.get(name, (0, 2**40))
    if not (value == 0 and name in MAY_BE_0) and not (least <= value <= most and (name not in LIMITS or value & (value - 1) == 0)):
        bad_value(name, value, f"{'a power of two ' if name in LIMITS else ''}from {least} to {most}")


def overrides(row: Row) -> dict[str, AnyConfig]:
    """The arguments of a plan that stand in place of the tables' rows.

    Raises:
      ValueError: see `config_of`.
    """
    return {KINDS[kind][0] if kind in KINDS else kind: config_of(kind, values) for kind, values in row.configurations}


def untuned(shape: Any, arch: str, num_cus: int | None) -> dict[str, AnyConfig]:
    """The configurations that serve a shape without a record, by kind; only of kernels that are launched.

    Raises:
      UnsupportedError: nothing is tuned for the arch, or no tile fits it.
    """
    facts = arch_facts(arch)
    if isinstance(shape, PagedAttentionShape):
        cut = work_cut(shape, arch, num_cus=num_cus)
        return {kind: row for kind, row in (("prefill", cut.prefill), ("decode", cut.decode)) if row is not None}
    if isinstance(shape, EncoderShape):
        return {"prefill": encoder_config(shape, facts)}
    if isinstance(shape, UpdateShape):
        return {"write": update_config(shape, facts, num_cus or facts.num_cus)}
    return {"write": rope_config(shape, facts, num_cus or facts.num_cus)} if isinstance(shape, RopeShape) else {}


def source_of(kind: str, config: AnyConfig) -> str:
    """Where a configuration that is not the record's comes from."""
    if isinstance(config, WriterConfig):
        return f"{kind}: chosen from the shape"
    return f"{kind}: table row, {config.measured}" if config.measured else f"{kind}: chosen, not measured"
