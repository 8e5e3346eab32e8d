"""The paged KV cache: one buffer for all layers, its scales, and a static description of where everything lies."""

import json
import math
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float

from .config import check_positive_int, int_or_none, is_array, is_floating
from .derivatives import refuse_derivatives
from .errors import bad_type, bad_value
from .html import table
from .integers import INT32_MAX, narrow
from .layout import CONTENTS, ORDERS, Extents, SideStrides, layout_of, physical_axes, side_axes, side_strides
from .literals import Content, Order
from .pytrees import equal_by_value, register_for_export

FP8_DTYPES = tuple(jnp.dtype(name) for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"))
CACHE_DTYPES = (*(jnp.dtype(name) for name in ("float32", "float16", "bfloat16")), *FP8_DTYPES)

_STORAGE = {jnp.dtype("bfloat16"): jnp.dtype("uint16"), **{dtype: jnp.dtype("uint8") for dtype in FP8_DTYPES}}


@dataclass(frozen=True, kw_only=True)
class CacheSpec:
    """Static description of a paged KV cache; hashable.

    Args:
      num_blocks: blocks B in the pool.
      block_size: tokens N a block.
      num_kv_heads: KV heads H.
      head_size: channels D a head.
      head_size_v: channels Dv of a value, where they differ from a key's; None is `head_size`. Content "packed" alone, whose row of a token
        and head is then its key and its value, D + Dv channels.
      num_layers: layers L that share the buffer; the layer is always its outermost axis.
      dtype: dtype of the stored keys and values: float32, float16, bfloat16, or one of the four fp8 kinds.
      content: "packed", "xpacked", "xpacked_interleaved_v", "shuffled" or "flash" (see `purepage.functional.layout`).
      order: "LBHNC", or "LHBNC" with the head slot (for all but "packed": the key/value slot) outside the block.

    Raises:
      ValueError, TypeError: names the field, what it was and the rule that it breaks.
    """

    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_size: int
    head_size_v: int | None = None
    num_layers: int = 1
    dtype: Any = jnp.bfloat16
    content: Content = "packed"
    order: Order = "LBHNC"

    def __post_init__(self) -> None:
        for name in ("num_blocks", "block_size", "num_kv_heads", "head_size", "num_layers"):
            object.__setattr__(self, name, check_positive_int(name, getattr(self, name)))
        if self.head_size_v is not None:  # equal specs are equal, however they are written
            size = check_positive_int("head_size_v", self.head_size_v)
            object.__setattr__(self, "head_size_v", None if size == self.head_size else size)
        try:
            dtype = jnp.dtype(self.dtype)
        except TypeError:
            bad_type("dtype", self.dtype, f"one of {', '.join(d.name for d in CACHE_DTYPES)}")
        if dtype not in CACHE_DTYPES:
            hint = "; bytes of unknown meaning are refused: name the fp8 kind" if dtype.itemsize == 1 else ""
            bad_value("dtype", dtype.name, f"one of {', '.join(d.name for d in CACHE_DTYPES)}{hint}")
        object.__setattr__(self, "dtype", dtype)
        if not isinstance(self.content, str) or self.content not in CONTENTS:
            bad_value("content", self.content, f"one of {', '.join(map(repr, CONTENTS))}")
        if not isinstance(self.order, str) or self.order not in ORDERS:
            bad_value("order", self.order, f"one of {', '.join(map(repr, ORDERS))}")
        if self.num_slots > INT32_MAX:
            bad_value(
                "num_blocks",
                self.num_blocks,
                f"at most {INT32_MAX // self.block_size} with block_size {self.block_size}: a slot is an int32",
            )
        if self.head_size_v is not None and not layout_of(self.content).sides_are_adjacent:
            able = ", ".join(repr(content) for content in CONTENTS if layout_of(content).sides_are_adjacent)
            bad_value("head_size_v", self.head_size_v, f"head_size ({self.head_size}) with content {self.content!r}; {able} takes any")
        axes = {axis for side in self.side_axes for axis in side}
        if "D/x" in axes and self.head_size % self.vector:
            bad_value("head_size", self.head_size, f"a multiple of {self.vector} (16 bytes of {dtype.name}) with content {self.content!r}")
        if "N/x" in axes and self.block_size % self.vector:
            bad_value(
                "block_size", self.block_size, f"a multiple of {self.vector} (16 bytes of {dtype.name}) with content {self.content!r}"
            )

    def to_json(self) -> str:
        """The spec as a JSON object of its fields, dtype by name; `from_json` reads it."""
        return json.dumps({f.name: getattr(self, f.name) for f in fields(self)} | {"dtype": self.dtype.name})

    @classmethod
    def from_json(cls, text: str) -> "CacheSpec":
        """The spec that `to_json` wrote, checked as any other; fields that have a default may be missing.

        Args:
          text: a JSON object.

        Raises:
          ValueError, TypeError: no JSON object, an unknown or missing field, or a value that breaks a rule.
        """
        if not isinstance(text, (str, bytes)):
            bad_type("text", text, "JSON text")
        try:
            found = json.loads(text)
        except ValueError:
            bad_value("text", text, "a JSON object")
        known = {f.name: f.default is MISSING for f in fields(cls)}
        if not isinstance(found, dict) or set(found) - set(known) or any(needed and name not in found for name, needed in known.items()):
            bad_value("text", text, f"a JSON object with the fields of CacheSpec: {', '.join(known)}")
        return cls(**found)

    def _repr_html_(self) -> str:
        x = self.vector
        sizes = [("x", x), *((axis, size) for axis, size in zip(self.axes, self.shape, strict=True))]
        rows = [
            ("buffer", f"{self.storage_dtype.name} [{', '.join(map(str, self.shape))}], {format_bytes(self.nbytes)}"),
            ("axes", " ".join(self.axes)),
            ("layout", f"{self.content}, {self.order}"),
            *((f"a {side}'s axes", " ".join(axes)) for side, axes in zip(("key", "value"), self.side_axes, strict=True)),
            ("sizes", ", ".join(f"{axis} = {size}" for axis, size in sizes)),
            ("a token", f"{format_bytes(self.nbytes / self.num_slots)} of {self.dtype.name} in {self.num_layers} layers"),
        ]
        return table(f"CacheSpec: {self.num_blocks} blocks of {self.block_size} tokens", rows)

    @cached_property
    def vector(self) -> int:
        """x: elements of the cache's dtype in 16 bytes."""
        return 16 // self.dtype.itemsize

    @cached_property
    def extents(self) -> Extents:
        return Extents(self.num_layers, self.num_blocks, self.num_kv_heads, self.block_size, self.head_size, self.vector, self.value_size)

    @property
    def value_size(self) -> int:
        """Dv: channels of a value."""
        return self.head_size if self.head_size_v is None else self.head_size_v

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes of `shape`."""
        return physical_axes(self.content, self.order)

    @cached_property
    def side_axes(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        return side_axes(self.content, self.order)

    @cached_property
    def side_strides(self) -> tuple[SideStrides, SideStrides]:
        """Element strides of (key, value) for kernels."""
        return side_strides(self.content, self.order, self.extents)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Physical shape of the one buffer."""
        return self.extents.shape(self.axes)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffer, all layers together."""
        return self.size * self.dtype.itemsize

    @cached_property
    def num_slots(self) -> int:
        """Token slots of one layer: num_blocks * block_size."""
        return self.num_blocks * self.block_size

    @cached_property
    def is_quantized(self) -> bool:
        return self.dtype in FP8_DTYPES

    @property
    def storage_dtype(self) -> np.dtype:
        """Dtype of `KVCache.data`. Unsigned integers stand for bfloat16 and fp8: XLA:CPU would widen a scatter into these to float32, which
        takes twice the cache in temporaries; a scatter of bits is in place on every backend."""
        return _STORAGE.get(self.dtype, self.dtype)


@partial(jax.tree_util.register_dataclass, data_fields=["data", "k_scale", "v_scale"], meta_fields=["spec"])
@dataclass(frozen=True, repr=False, eq=False)
class KVCache:
    """A paged KV cache; a pytree whose spec is static. Two are equal where spec, buffer and scales are, bit for bit; they have no hash.

    Attributes:
      data: the buffer, shape `spec.shape`, dtype `spec.storage_dtype` (the bits of `spec.dtype`; `spec.dtype` itself is accepted).
      k_scale, v_scale: f32[L] or f32[L, H]; logical value = stored value * scale. All 1 for an unquantized cache.
      spec: see `CacheSpec`. Under `shard_map` the local shard's own extents are those of `local_spec`.
    """

    data: Array
    k_scale: Float[Array, "..."]
    v_scale: Float[Array, "..."]
    spec: CacheSpec

    @property
    def local_spec(self) -> CacheSpec:
        """The spec with layers, blocks and KV heads read off `data`: inside `shard_map` a shard holds a part of them."""
        return local_spec(self.data.shape, self.spec)

    @property
    def nbytes(self) -> int:
        return self.spec.nbytes

    def __eq__(self, other: object) -> bool:
        return equal_by_value(self, other) if isinstance(other, KVCache) else NotImplemented

    __hash__ = None  # type: ignore[assignment]  # equal by value, and arrays have no hash

    def __repr__(self) -> str:
        s = self.spec
        shape = "x".join(map(str, getattr(self.data, "shape", s.shape)))
        quantized = f", scales per {'head' if getattr(self.k_scale, 'ndim', 1) == 2 else 'layer'}" if s.is_quantized else ""
        return (
            f"KVCache({s.dtype.name}[{shape}] as {' '.join(s.axes)}, {s.content}/{s.order}, {s.num_layers} layers, "
            f"{s.num_blocks} blocks of {s.block_size} tokens, {s.num_kv_heads} KV heads of "
            f"{s.head_size}{'' if s.head_size_v is None else f' (values {s.head_size_v})'}, "
            f"{format_bytes(s.nbytes)}{quantized})"
        )

    def _repr_html_(self) -> str:
        scales = {
            name: getattr(self, name)
            for name in ("k_scale", "v_scale")
            if self.spec.is_quantized and not isinstance(getattr(self, name), (Tracer, jax.ShapeDtypeStruct))
        }
        rows = [
            ("data", f"{self.data.dtype} [{', '.join(map(str, self.data.shape))}]"),
            *((name, np.array2string(np.asarray(scale), threshold=8, precision=4)) for name, scale in scales.items()),
        ]
        return table("KVCache", rows) + self.spec._repr_html_()


register_for_export(KVCache, ("spec",), CacheSpec.to_json, CacheSpec.from_json)


def format_bytes(count: float) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


def local_spec(shape: tuple[int, ...], spec: CacheSpec) -> CacheSpec:
    if tuple(shape) == spec.shape:
        return spec
    size = dict(zip(spec.axes, shape, strict=True))
    return replace(spec, num_layers=size["L"], num_blocks=size["B"], num_kv_heads=size["H"])


def check_cache(cache: Any, name: str = "cache") -> CacheSpec:
    """Checks the cache of a public function; returns its `local_spec`."""
    if not isinstance(cache, KVCache):
        bad_type(name, cache, "a KVCache (see init_cache)")
    spec = cache.spec
    if not isinstance(spec, CacheSpec):
        bad_type(f"{name}.spec", spec, "a CacheSpec")
    for field in ("data", "k_scale", "v_scale"):
        if not is_array(getattr(cache, field)) or isinstance(getattr(cache, field), type):
            bad_type(f"{name}.{field}", getattr(cache, field), "an array")
    if cache.data.ndim != len(spec.shape) or any(
        size != full and axis not in ("L", "B", "H") for axis, size, full in zip(spec.axes, cache.data.shape, spec.shape, strict=False)
    ):
        bad_value(f"{name}.data", cache.data, f"an array of shape {spec.shape} ({' '.join(spec.axes)}), or a shard of it along L, B or H")
    if cache.data.dtype not in (spec.dtype, spec.storage_dtype):
        bad_type(f"{name}.data", cache.data, f"of dtype {spec.storage_dtype.name}, the bits of {spec.dtype.name}")
    local = cache.local_spec
    for side in ("k_scale", "v_scale"):
        scale = getattr(cache, side)
        if tuple(scale.shape) not in ((local.num_layers,), (local.num_layers, local.num_kv_heads)):
            bad_value(f"{name}.{side}", scale, f"f32[{local.num_layers}] or f32[{local.num_layers},{local.num_kv_heads}]")
    return local


def check_layer(layer: Any, spec: CacheSpec) -> Array:
    """A static int within the cache, or a traced integer scalar (whose value can't be checked)."""
    if is_array(layer):
        if layer.shape != () or not jnp.issubdtype(layer.dtype, jnp.integer):
            bad_type("layer", layer, "an int or an integer scalar")
        if isinstance(layer, Tracer):
            return narrow(layer, spec.num_layers)
    index = int_or_none(layer)
    if index is None or isinstance(layer, bool):
        bad_type("layer", layer, "an int or an integer scalar")
    if not 0 <= index < spec.num_layers:
        bad_value("layer", layer, f"in [0, num_layers = {spec.num_layers})")
    return jnp.asarray(np.int32(index))  # of a Python int it would be two programs on the device


def _scale(name: str, scale: Any, spec: CacheSpec) -> Float[Array, "..."]:
    """A scale in any of its spellings as a fresh f32[L] or f32[L, H]."""
    try:
        shape, dtype = tuple(np.shape(scale)), scale.dtype if is_array(scale) else np.asarray(scale).dtype
    except Exception:  # a ragged list
        bad_value(name, scale, "a scalar, [num_layers] or [num_layers, num_kv_heads]")
    if not (is_floating(dtype) or np.issubdtype(dtype, np.integer)):
        bad_type(name, scale, "real: a scalar, [num_layers] or [num_layers, num_kv_heads]")
    layers, heads = spec.num_layers, spec.num_kv_heads
    if shape not in ((), (1,), (layers,), (layers, heads), (1, heads)):
        bad_value(name, scale, f"a scalar, [num_layers] = [{layers}] or [num_layers, num_kv_heads] = [{layers}, {heads}]")
    if not isinstance(scale, Tracer):
        with np.errstate(over="ignore"):
            values = np.asarray(scale, np.float32)
        if not np.all(np.isfinite(values)) or np.any(values <= 0):
            bad_value(name, scale, "finite and above 0")
        if not spec.is_quantized and np.any(values != 1):
            bad_value(name, scale, f"1 for an unquantized cache ({spec.dtype.name} stores values as they are)")
    target = (layers, heads) if len(shape) == 2 else (layers,)
    # `+ 0` owns the result: two scales of one cache must never be one buffer, or donating the cache donates it twice.
    return jnp.broadcast_to(jnp.asarray(scale, jnp.float32), target) + jnp.float32(0)


def init_cache(spec: CacheSpec, *, k_scale: Any = 1.0, v_scale: Any = 1.0, sharding: Any = None) -> KVCache:
    """An empty cache, all zeros.

    Args:
      spec: what to allocate.
      k_scale, v_scale: a scalar, [L] or [L, H], above 0; 1 unless the cache is fp8.
      sharding: where the cache lies: `purepage.sharding.Shardings`, a `KVCache` of shardings (what its `cache` makes), or a
        `jax.sharding.Sharding` of the buffer, whose axes are `spec.axes`; per-head scales then follow the heads. No device ever holds more
        than its part.

    Returns:
      A cache of `spec` whose buffer is new.

    Raises:
      ValueError, TypeError: names the scale, or the sharding, and the rule that it breaks.
    """
    if not isinstance(spec, CacheSpec):
        bad_type("spec", spec, "a CacheSpec")
    scales = _scale("k_scale", k_scale, spec), _scale("v_scale", v_scale, spec)
    if sharding is None:
        return KVCache(jnp.zeros(spec.shape, spec.storage_dtype), *scales, spec)
    of_data, *of_scales = _cache_shardings(sharding, spec, scales)
    data = jnp.zeros(spec.shape, spec.storage_dtype, device=of_data)
    k_scale, v_scale = (
        scale if place is None or isinstance(scale, Tracer) else jax.device_put(np.asarray(scale), place)
        for scale, place in zip(scales, of_scales, strict=True)
    )
    return KVCache(data, k_scale, v_scale, spec)


def _cache_shardings(sharding: Any, spec: CacheSpec, scales: tuple[Array, Array]) -> tuple[Any, Any, Any]:
    """The shardings of buffer and scales that `init_cache` was given in any of its forms; None leaves a scale where it is."""
    if not isinstance(sharding, KVCache) and hasattr(sharding, "cache"):  # Shardings, which builds on this module
        sharding = sharding.cache(KVCache(jnp.zeros(()), scales[0], scales[1], spec))
    if isinstance(sharding, KVCache):
        return sharding.data, sharding.k_scale, sharding.v_scale
    if not isinstance(sharding, jax.sharding.Sharding):
        bad_type("sharding", sharding, "None, a jax.sharding.Sharding, a KVCache of shardings, or purepage.sharding.Shardings")
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding, None, None
    heads = (*sharding.spec, *[None] * len(spec.axes))[spec.axes.index("H")]
    per_layer, per_head = (jax.sharding.NamedSharding(sharding.mesh, jax.sharding.PartitionSpec(*axes)) for axes in ((), (None, heads)))
    k_scale, v_scale = (per_head if scale.ndim == 2 else per_layer for scale in scales)
    return sharding, k_scale, v_scale


def to_bits(array: Array, spec: CacheSpec) -> Array:
    """Values of the cache's dtype as what `KVCache.data` holds."""
    return array if array.dtype == spec.storage_dtype else jax.lax.bitcast_convert_type(array, spec.storage_dtype)


def from_bits(array: Array, spec: CacheSpec) -> Array:
    """What `KVCache.data` holds as values of the cache's dtype."""
    return array if array.dtype == spec.dtype else jax.lax.bitcast_convert_type(array, spec.dtype)


def token_order(axes: tuple[str, ...]) -> tuple[str, ...]:
    """The axes of one block of one side (no L, B, 2) as they lie."""
    return tuple(axis for axis in axes if axis not in ("L", "B", "2"))


def unpack_block(block: Array, axes: tuple[str, ...], spec: CacheSpec) -> Array:
    """[..., axes of one block as they lie] to [..., N, H, D]."""
    names = token_order(axes)
    lead = block.ndim - len(names)
    wanted = [axis for group in ("N", "H", "D") for axis in _split(group, names)]
    permuted = jnp.transpose(block, (*range(lead), *(lead + names.index(axis) for axis in wanted)))
    return permuted.reshape(*block.shape[:lead], spec.block_size, spec.num_kv_heads, spec.head_size)


def pack_block(block: Array, axes: tuple[str, ...], spec: CacheSpec) -> Array:
    """[..., N, H, D] to [..., axes of one block as they lie]; the inverse of `unpack_block`."""
    names = token_order(axes)
    lead = block.ndim - 3
    wanted = [axis for group in ("N", "H", "D") for axis in _split(group, names)]
    split = block.reshape(*block.shape[:lead], *(spec.extents.of(axis) for axis in wanted))
    return jnp.transpose(split, (*range(lead), *(lead + wanted.index(axis) for axis in names)))


def _split(axis: str, names: tuple[str, ...]) -> tuple[str, ...]:
    return (f"{axis}/x", "x") if f"{axis}/x" in names else (axis,)


def take_blocks(cache: KVCache, layer: Array | int, block_ids: Array) -> tuple[Array, Array]:
    """Keys and values of some blocks of one layer, [..., N, H, D] each, as stored bits in `spec.dtype`. Ids must lie in [0, B)."""
    spec = cache.local_spec
    if spec.head_size_v is not None:
        return _take_rows(cache, layer, block_ids)
    sides = []
    for side, axes in enumerate(spec.side_axes):
        view = jnp.asarray(cache.data).reshape(spec.extents.shape(axes))
        pick = {"L": layer, "B": block_ids, "2": side}
        index = tuple(pick.get(axis, slice(None)) for axis in axes)
        taken = view.at[index].get(mode="promise_in_bounds")
        sides.append(from_bits(unpack_block(_ids_first(taken, axes, block_ids.ndim), axes, spec), spec))
    return sides[0], sides[1]


def _take_rows(cache: KVCache, layer: Array | int, block_ids: Array) -> tuple[Array, Array]:
    """`take_blocks` where a row is a key and a value of another size: the blocks are taken whole and then split."""
    spec = cache.local_spec
    pick = {"L": layer, "B": block_ids}
    taken = jnp.asarray(cache.data).at[tuple(pick.get(axis, slice(None)) for axis in spec.axes)].get(mode="promise_in_bounds")
    taken = _ids_first(taken, spec.axes, block_ids.ndim)
    names, lead = token_order(spec.axes), block_ids.ndim
    rows = from_bits(jnp.transpose(taken, (*range(lead), *(lead + names.index(axis) for axis in ("N", "H", "2D")))), spec)
    return rows[..., : spec.head_size], rows[..., spec.head_size :]


def _ids_first(taken: Array, axes: tuple[str, ...], ids_ndim: int) -> Array:
    """NumPy puts the axes of adjacent advanced indices in place, those of separated ones first."""
    advanced = [i for i, axis in enumerate(axes) if axis in ("L", "B", "2")]
    adjacent = advanced[-1] - advanced[0] == len(advanced) - 1
    start = advanced[0] if adjacent else 0
    return jnp.moveaxis(taken, tuple(range(start, start + ids_ndim)), tuple(range(ids_ndim)))


def cache_to_logical(cache: KVCache, layer: Any = 0) -> tuple[Array, Array]:
    """Key and value of one layer in logical order.

    Args:
      cache: any cache; its leaves may be NumPy arrays.
      layer: an int or a traced i32 scalar.

    Returns:
      (key, value), [B, N, H, D] and [B, N, H, Dv], in the cache's dtype: the stored codes, not multiplied by the scales.

    Raises:
      TypeError, ValueError: not a cache, or a layer that it does not have.
    """
    cache = refuse_derivatives("cache_to_logical", cache)
    spec = check_cache(cache)
    return take_blocks(cache, check_layer(layer, spec), jnp.arange(spec.num_blocks))


def cache_from_logical(spec: CacheSpec, key: Array, value: Array, *, k_scale: Any = 1.0, v_scale: Any = 1.0) -> KVCache:
    """A cache with given contents; the inverse of `cache_to_logical` for all layers at once.

    Args:
      spec: what to make.
      key: [L, B, N, H, D], already in the cache's dtype: bits are stored as they are, not divided by the scales.
      value: as `key`, [L, B, N, H, Dv].
      k_scale, v_scale: a scalar, [L] or [L, H], above 0; 1 unless the cache is fp8.

    Returns:
      The cache.

    Raises:
      ValueError, TypeError: shape or dtype of `key` or `value` is not the spec's, or a scale is wrong.
    """
    if not isinstance(spec, CacheSpec):
        bad_type("spec", spec, "a CacheSpec")
    for name, array, size in (("key", key, spec.head_size), ("value", value, spec.value_size)):
        shape = (spec.num_layers, spec.num_blocks, spec.block_size, spec.num_kv_heads, size)
        if not is_array(array) or tuple(array.shape) != shape:
            bad_value(name, array, f"an array of shape [L, B, N, H, D] = {list(shape)}")
        if array.dtype != spec.dtype:
            bad_type(name, array, f"of the cache's dtype {spec.dtype.name}")
    key, value = refuse_derivatives("cache_from_logical", (key, value))
    scales = _scale("k_scale", k_scale, spec), _scale("v_scale", v_scale, spec)
    if spec.head_size_v is not None:
        rows = jnp.concatenate([to_bits(jnp.asarray(side), spec) for side in (key, value)], axis=-1)
        axes = ("L", "B", "N", "H", "2D")
        return KVCache(jnp.transpose(rows, [axes.index(axis) for axis in spec.axes]), *scales, spec)
    merged = []
    for array, axes in zip((key, value), spec.side_axes, strict=True):
        block_axes = ("L", "B", *token_order(axes))
        packed = pack_block(to_bits(jnp.asarray(array), spec), axes, spec)
        order = [block_axes.index(axis) for axis in axes if axis != "2"]
        merged.append(jnp.transpose(packed, order))
    key_axes, value_axes = spec.side_axes
    if key_axes == value_axes:
        data = jnp.stack(merged, axis=key_axes.index("2")).reshape(spec.shape)
    else:  # key and value differ within a block only, so the two sides meet as flat blocks
        at = key_axes.index("2")
        lead = max(key_axes.index("2"), key_axes.index("B"))
        data = jnp.stack([side.reshape(*side.shape[:lead], -1) for side in merged], axis=at).reshape(spec.shape)
    return KVCache(data, *scales, spec)
