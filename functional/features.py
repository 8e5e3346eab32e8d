"""What a call uses and what an implementation serves, as data: the names of features, layout properties and dtypes, and `Serves`.

A call type declares each of its fields with `array`, `constant` or `option`; a field without a declaration is an error when the class is
made. So a field that is added later is a feature that no implementation serves until it declares it.
"""

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, dataclass_transform

import jax

from .cache import CacheSpec, KVCache
from .layout import layout_of
from .metadata import AttentionMetadata
from .target import Target

ARGUMENTS: Mapping[str, str] = {
    "non_causal": "metadata.causal",
    "quantized_query": "query",
    "quantized_cache": "cache.spec.dtype",
    "scales_per_head": "cache.k_scale, cache.v_scale of one value per KV head",
    "mixed_scale_ranks": "cache.k_scale, cache.v_scale, one per layer and the other per KV head",
    "mixed_dtypes": "query, key or value of another dtype than the cache",
    "score_scale": "q_scale, or scale as an array",
    "partial_rotary": "cos_sin_cache narrower than head_size",
    "gptj_rotary": "is_neox",
    "head_size_v": "values of another head size than keys",
    "traced_window": "sliding_window as an array",
    "qq_bias_per_sequence": "qq_bias of shape [S, Lq, Lk]",
    "context_only": "keys before this step's tokens alone",
}
"""The argument behind a feature, where it has another name than the feature."""

ACCOUNTED: Mapping[type, frozenset[str]] = {
    AttentionMetadata: frozenset(
        ("query_start_loc", "seq_lens", "block_table", "slot_mapping", "max_query_len", "max_seq_len", "causal", "block_size")
    ),
    KVCache: frozenset(("data", "k_scale", "v_scale", "spec")),
    CacheSpec: frozenset(
        ("num_blocks", "block_size", "num_kv_heads", "head_size", "head_size_v", "num_layers", "dtype", "content", "order")
    ),
}
"""Fields of the types inside a call that every implementation takes, or that `features`, `dtypes` and layout properties stand for. A field
that is added there must be added here: as a feature in `nested_features` unless every implementation serves it."""

_Class = TypeVar("_Class", bound=type)


def array(*, dtype: bool = False) -> Any:
    """A field of a call type: an array, or a pytree of arrays, that is in every call. With `dtype`, its dtype is up to the caller."""
    return dataclasses.field(metadata={"static": False, "dtype": dtype})


def constant(*, dtype: bool = False) -> Any:
    """A field of a call type: a static value of which every implementation takes every value. With `dtype`, it is a dtype."""
    return dataclasses.field(metadata={"static": True, "dtype": dtype})


def option(feature: str | None = None, *, static: bool = False, unused: Any = None, default: Any = dataclasses.MISSING) -> Any:
    """A field of a call type that is a feature unless it is None, False or `unused`.

    Args:
      feature: name of the feature; default: the field's own.
      static: whether it is a static value and no array.
      unused: a further value that asks for nothing.
      default: default of the field.
    """
    return dataclasses.field(default=default, metadata={"static": static, "feature": feature, "unused": unused})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(array, constant, option))
def call_type(cls: _Class) -> _Class:
    """A frozen dataclass that is a pytree. Every field is declared with `array`, `constant` or `option`.

    Raises:
      TypeError: a field is declared otherwise; the message names it.
    """
    made: Any = dataclass(frozen=True, kw_only=True)(cls)
    options, dtypes = [], []
    for field in dataclasses.fields(made):
        if "static" not in field.metadata:
            raise TypeError(
                f"{cls.__name__}.{field.name}: declare it with array(), constant() or option(), see purepage.functional.features"
            )
        if "feature" in field.metadata:
            options.append((field.name, field.metadata["feature"] or field.name, field.metadata["unused"]))
        elif field.metadata["dtype"]:
            dtypes.append((field.name, field.metadata["static"]))
    made.OPTIONS, made.DTYPES = tuple(options), tuple(dtypes)
    static = [field.name for field in dataclasses.fields(made) if field.metadata["static"]]
    data = [field.name for field in dataclasses.fields(made) if not field.metadata["static"]]
    return jax.tree_util.register_dataclass(made, data_fields=data, meta_fields=static)


class Call:
    """What every call type answers."""

    OPTIONS: tuple[tuple[str, str, Any], ...] = ()
    DTYPES: tuple[tuple[str, bool], ...] = ()

    def features(self) -> frozenset[str]:
        """Names of the features that this call uses beyond the plain one."""
        used = [
            feature
            for name, feature, unused in self.OPTIONS
            if (value := getattr(self, name)) is not None and value is not False and (unused is None or value != unused)
        ]
        return frozenset((*used, *self.nested_features()))

    def nested_features(self) -> Iterable[str]:
        """Features that follow from several fields, or from what is inside one."""
        return ()

    def dtypes(self) -> dict[str, str]:
        """Names of the dtypes that are up to the caller, by argument."""
        found = {name: (getattr(self, name) if static else getattr(self, name).dtype).name for name, static in self.DTYPES}
        cache = getattr(self, "cache", None)
        if cache is not None:
            found["cache"] = cache.spec.dtype.name
        return found


def check_accounted() -> None:
    """Raises `TypeError` where a type inside a call has a field that `ACCOUNTED` does not know."""
    for kind, known in ACCOUNTED.items():
        unknown = [field.name for field in dataclasses.fields(kind) if field.name not in known]
        if unknown:
            raise TypeError(f"{kind.__name__}.{unknown[0]}: account for it in purepage.functional.features")


check_accounted()


@dataclass(frozen=True, kw_only=True)
class Serves:
    """What an implementation serves of an operation. What is not named here is refused.

    Attributes:
      features: names of features.
      dtypes: names of the dtypes that it takes, by argument.
      layouts: properties of cache layouts, see `purepage.functional.layout.Layout`; empty where the operation has no cache.
      archs: names of architectures; None: whatever JAX runs on.
      because: the reason why a feature is refused, by feature, where there is more to say than its name.
    """

    features: frozenset[str] = frozenset()
    dtypes: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    layouts: frozenset[str] = frozenset()
    archs: Collection[str] | None = None
    because: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def unsupported_reasons(self, call: Any, target: Target) -> tuple[str, ...]:
        """Why a call is not served; empty where it is."""
        reasons = []
        if self.archs is not None and target.arch not in self.archs:
            reasons.append(f"arch {target.arch}: it serves {', '.join(sorted(self.archs))}")
        for feature in sorted(call.features() - self.features):
            argument = ARGUMENTS.get(feature)
            reasons.append(self.because.get(feature) or f"does not serve {feature}" + (f" ({argument})" if argument else ""))
        for argument, dtype in call.dtypes().items():
            served = self.dtypes.get(argument, frozenset())
            if dtype not in served:
                able = ", ".join(sorted(served)) or "no dtype"
                reasons.append(f"{argument} is {dtype}: it serves {able}")
        cache = getattr(call, "cache", None)
        if cache is not None:
            spec = cache.spec
            for name in sorted(layout_of(spec.content).properties - self.layouts):
                reasons.append(f"cache.spec.content is {spec.content!r}: does not serve its {name}")
        return tuple(reasons)
