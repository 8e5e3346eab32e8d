"""The shapes that are tuned: from flags, or from facts of a model. Plain data; no device is used."""

import json
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from ...functional.cache import CacheSpec
from ...functional.errors import bad_value

KERNELS = ("decode", "prefill", "update", "rope", "qk_norm")
"""What a case may be: two kernels of attention and three cache writers."""
OPERATIONS: Mapping[str, str] = {
    "decode": "paged_attention",
    "prefill": "paged_attention",
    "update": "update_cache",
    "rope": "rope_and_update_cache",
    "qk_norm": "qk_norm_rope_and_update_cache",
}
WRITER_NAMES = {"update": "write", "rope": "rope + write", "qk_norm": "qk-norm + rope + write"}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One shape of one kernel.

    Attributes:
      kernel: one of `KERNELS`.
      heads, kv_heads, head_size, value_size: Hq, H, D, Dv; `value_size` None is D.
      block_size, content, order, cache_dtype: see `CacheSpec`.
      dtype: of queries, and of new keys and values.
      batch: S, sequences; of a writer the tokens.
      query: new tokens of a sequence; 1 of decode.
      context: tokens of a sequence, the new ones among them.
      window, soft_cap, sinks, alibi, scale: options of the scores, see `AttentionConfig`.
    """

    kernel: str
    heads: int
    kv_heads: int
    head_size: int
    value_size: int | None = None
    block_size: int = 16
    content: str = "packed"
    order: str = "LBHNC"
    cache_dtype: str = "bfloat16"
    dtype: str = "bfloat16"
    batch: int = 1
    query: int = 1
    context: int = 1
    window: int | None = None
    soft_cap: float | None = None
    sinks: bool = False
    alibi: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        if self.kernel not in KERNELS:
            bad_value("kernel", self.kernel, f"one of {', '.join(map(repr, KERNELS))}")
        for name in ("heads", "kv_heads", "head_size", "block_size", "batch", "query", "context"):
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                bad_value(name, getattr(self, name), "a positive int")
        if self.heads % self.kv_heads:
            bad_value("heads", self.heads, f"a multiple of the KV heads ({self.kv_heads})")
        if self.query > self.context:
            bad_value("query", self.query, f"at most the context ({self.context})")
        if self.dtype not in ("float32", "float16", "bfloat16"):
            bad_value("dtype", self.dtype, "one of 'float32', 'float16', 'bfloat16'")
        self.spec(1, 1)  # raises for what no cache has

    @property
    def operation(self) -> str:
        return OPERATIONS[self.kernel]

    @property
    def is_writer(self) -> bool:
        return self.kernel in WRITER_NAMES

    @property
    def values(self) -> int:
        return self.value_size or self.head_size

    @property
    def name(self) -> str:
        if self.is_writer:
            return f"{WRITER_NAMES[self.kernel]}, {self.batch} tokens"
        shape = f"{self.batch} x {self.context}" if self.query in (1, self.context) else f"{self.batch} x ({self.query} of {self.context})"
        options = [f"window {self.window}"] if self.window else []
        options += [name for name in ("soft_cap", "sinks", "alibi") if getattr(self, name)]
        return ", ".join([f"{self.kernel} {shape}", *options])

    @property
    def facts(self) -> str:
        """The heads and the cache, as the table prints them once."""
        sizes = f"{self.head_size}" if self.value_size is None else f"{self.head_size}/{self.value_size}"
        cache = f"{self.content} {self.order} blocks of {self.block_size}, {self.cache_dtype} cache"
        return f"heads {self.heads}/{self.kv_heads} of {sizes}, {self.dtype}, {cache}"

    def spec(self, num_blocks: int, num_layers: int) -> CacheSpec:
        """The cache of so many blocks and layers.

        Raises:
          ValueError: no such cache; names the field.
        """
        return CacheSpec(
            num_blocks=num_blocks,
            block_size=self.block_size,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            head_size_v=None if self.values == self.head_size else self.values,
            num_layers=num_layers,
            dtype=jnp.dtype(self.cache_dtype),
            content=self.content,  # pyright: ignore[reportArgumentType]: checked there
            order=self.order,  # pyright: ignore[reportArgumentType]: checked there
        )

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def case_of(fields: Mapping[str, Any]) -> Case:
    """The case that `Case.to_json` made the fields of."""
    return Case(**fields)


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The steps of a server that are tuned.

    Attributes:
      kernels: of `KERNELS`.
      batches, contexts: decode is tuned for each pair.
      prompts: new tokens of a prefill, which is also the context where none of `chunk_contexts` is larger.
      chunk_contexts: contexts of chunked prefills, for each prompt that is shorter.
      prompt_batch: sequences of a prefill.
    """

    kernels: tuple[str, ...] = KERNELS
    batches: tuple[int, ...] = (1, 8, 64)
    contexts: tuple[int, ...] = (8192,)
    prompts: tuple[int, ...] = (2048,)
    chunk_contexts: tuple[int, ...] = ()
    prompt_batch: int = 1

    def __post_init__(self) -> None:
        unknown = [kernel for kernel in self.kernels if kernel not in KERNELS]
        if unknown:
            bad_value("kernels", unknown[0], f"of {', '.join(map(repr, KERNELS))}")


def cases_of(layers: Iterable[Case], steps: Steps) -> tuple[Case, ...]:
    """A case for each kernel, layer and step. Writers come once: no option of the scores concerns them."""
    found: dict[Case, None] = {}
    layers = tuple(layers)
    for layer in layers:
        for batch in steps.batches if "decode" in steps.kernels else ():
            for context in steps.contexts:
                found[replace(layer, kernel="decode", batch=batch, query=1, context=context)] = None
        for prompt in steps.prompts if "prefill" in steps.kernels else ():
            for context in (prompt, *(context for context in steps.chunk_contexts if context > prompt)):
                found[replace(layer, kernel="prefill", batch=steps.prompt_batch, query=prompt, context=context)] = None
    plain = {"window": None, "soft_cap": None, "sinks": False, "alibi": False, "scale": None, "query": 1, "context": 1}
    for layer in layers:
        for kernel in steps.kernels:
            writes_values = kernel != "qk_norm" or layer.values == layer.head_size
            if kernel in WRITER_NAMES and writes_values:
                tokens = sorted({*steps.batches, *(prompt * steps.prompt_batch for prompt in steps.prompts)})
                found |= {replace(layer, kernel=kernel, batch=count, **plain): None for count in tokens}
    return tuple(found)


def layers_of_models(path: Path, base: Case) -> tuple[tuple[Case, ...], tuple[str, ...]]:
    """Attention layers from facts of models, and what is left out and why.

    Args:
      path: a JSON or TOML file: one model, a list of models, or {"model": [...]}. A model has `heads` [Hq, H], `size` D, and where they
        apply `value_size`, `kinds` (of "full" and "window W"; others need masks as data, which are not tuned), `cap`, `sinks`, `alibi`,
        `scale`, `name`.
      base: what the file does not say: block size, layout, dtypes.

    Raises:
      ValueError: a file of another form; names the model and the field.
    """
    text = path.read_text()
    given = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    given = given.get("model", given) if isinstance(given, dict) else given
    layers: dict[Case, None] = {}
    left_out = []
    for place, model in enumerate(given if isinstance(given, list) else [given]):
        if not isinstance(model, dict) or not {"heads", "size"} <= set(model):
            bad_value(f"{path}: model {place}", model, "an object with 'heads' [query heads, KV heads] and 'size'")
        name = str(model.get("name", f"model {place}"))
        if "refused" in model:
            left_out.append(f"{name}: {model['refused']}")
            continue
        heads, kv_heads = model["heads"]
        for kind in model.get("kinds", ["full"]):
            word, _, number = str(kind).partition(" ")
            if word not in ("full", "window"):
                left_out.append(f"{name}: layers of kind {kind!r} have masks as data, which are not tuned")
                continue
            layer = replace(
                base,
                heads=heads,
                kv_heads=kv_heads,
                head_size=model["size"],
                value_size=model.get("value_size"),
                window=int(number) if word == "window" else None,
                soft_cap=model.get("cap"),
                sinks=bool(model.get("sinks", False)),
                alibi=bool(model.get("alibi", False)),
                scale=model.get("scale"),
            )
            layers[layer] = None
    return tuple(layers), tuple(left_out)
