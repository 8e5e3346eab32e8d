"""A backend as a value: its `Capabilities` and the functions that both modules export, bound to it.

`rocm_attn` and `rocm_aiter_unified_attn` are one table each and the few functions in which they differ.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from ..attention import encoder_attention, output_dtype_of, paged_attention
from ..cache import FP8_DTYPES, CacheSpec, KVCache, check_cache, check_layer
from ..cache import init_cache as init_plain_cache
from ..cache_writers import update_cache
from ..checks import MODEL_DTYPES, check_tokens
from ..config import AttentionConfig, AttentionType, is_array
from ..errors import UnsupportedError, bad_type, bad_value
from ..fp8 import e4m3_dtype, kv_cache_dtype, quantize
from ..fused_writers import qk_norm_mrope_and_update_cache, qk_norm_rope_and_update_cache, rope_and_update_cache
from ..layout import layout_of
from ..literals import Content, Implementation, Order
from ..metadata import AttentionMetadata, check_metadata
from ..new_tokens import attention_with_new_tokens
from ..target import current_target, named_target
from .capabilities import ENCODERS, Capabilities
from .metadata_builder import RocmAttentionMetadata, capture_metadata, plain_metadata

Cache = TypeVar("Cache", bound=KVCache | None)

PROBE_BLOCK_SIZE = 1
"""vLLM asks for the spec of one-token blocks to learn the bytes of a token; no cache is made of it."""


def device_arch() -> str | None:
    """The architecture of the target, "gfx942", ...; None where that is no AMD GPU."""
    return current_target().amd_arch


@dataclass(frozen=True, repr=False)
class Backend:
    """One of vLLM's backends: what it declares, and the methods of its class as pure functions.

    Args:
      capabilities: the backend's table.
    """

    capabilities: Capabilities

    def __repr__(self) -> str:
        return f"Backend({self.capabilities.name})"

    def supports(self, config: AttentionConfig, spec: CacheSpec | None) -> tuple[str, ...]:
        """Why this backend refuses a layer over a cache.

        Args:
          config: the layer.
          spec: its cache; None for encoder attention types, which have none.

        Returns:
          Reasons, each of which starts with the argument's name; empty where the layer is served.
        """
        return self.capabilities.supports(config, spec)

    def init_cache(self, spec: CacheSpec, *, k_scale: Any = 1.0, v_scale: Any = 1.0, sharding: Any = None) -> KVCache:
        """An empty cache of a spec that this backend serves; see `purepage.init_cache`.

        Args:
          spec: see `cache_spec`.
          k_scale, v_scale: a scalar, f32[L] or f32[L, H]; 1 unless the cache is fp8.
          sharding: a `jax.sharding.Sharding` of the buffer.

        Returns:
          A cache of zeros.

        Raises:
          UnsupportedError: the spec is another backend's.
        """
        if isinstance(spec, CacheSpec):
            self._refuse(self.supports(_layer_of(spec, "auto"), spec))
        return init_plain_cache(spec, k_scale=k_scale, v_scale=v_scale, sharding=sharding)

    def get_kv_cache_stride_order(self, order: Order | None = None, *, include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Physical order of the axes of `get_kv_cache_shape`, outermost first.

        Args:
          order: one of `CAPABILITIES.layouts`; None is the preferred one.
          include_num_layers_dimension: whether the layer is counted, as the outermost axis.

        Returns:
          A permutation of the axes.

        Raises:
          ValueError: `order` is none of this backend's.
        """
        layouts = self.capabilities.layouts
        order = layouts[0] if order is None else order
        if order not in layouts:
            bad_value("order", order, f"one of {', '.join(map(repr, layouts))}")
        logical = "LBHNC" if include_num_layers_dimension else "BHNC"
        return tuple(logical.index(axis) for axis in order if axis in logical)

    def build_for_cudagraph_capture(self, metadata: AttentionMetadata) -> RocmAttentionMetadata:
        """Metadata of the same shapes to warm up or record a step with.

        Args:
          metadata: a step's common metadata.

        Returns:
          Sequences of one token, slots of -1, `num_actual_tokens` of the step. ROCM_ATTN has no queries either (`query_start_loc` is 0).
        """
        return capture_metadata(metadata, zero_query_starts=self.capabilities.capture_zeroes_query_starts)

    def forward(
        self,
        query: Float[Array, "T Hq D"],
        key: Float[Array, "T H D"] | None,
        value: Float[Array, "T H D"] | None,
        cache: KVCache | None,
        metadata: AttentionMetadata | None,
        config: AttentionConfig,
        *,
        layer: Any = 0,
        q_scale: Any = None,
        output_scale: Any = None,
        output_dtype: Any = None,
        output_block_scale: Any = None,
        implementation: Implementation | None = None,
    ) -> Float[Array, "T Hq D"]:
        """One layer's attention. Ports the class's `forward`.

        Args:
          query: [T, Hq, D], float32, float16, bfloat16, or fp8 codes.
          key, value: [T, H, D], this step's, or both None. Encoder types attend them. `rocm_attn` attends them, at full precision, in
            sequences of more than one query token; a sequence of one query token reads everything from the cache, its own token too.
            `rocm_aiter_unified_attn` reads everything from the cache. None reads everything from the cache in both: one pass, and the same
            result where the cache holds the same bits.
          cache: a cache of `cache_spec`'s layouts. It must hold this step's tokens already (see `kv_cache_update`); never changed.
            None where the attention type has none, and in a profiling run.
          metadata: `AttentionMetadata` or `build`'s; None is a profiling run, which gives zeros before any cache exists.
          config: the layer. Encoder types attend `key` and `value`, not causal; ENCODER_DECODER attends the whole of each cached sequence.
          layer: layer of the cache, an int or a traced i32 scalar. A layer that shares another's cache passes that layer's index.
          q_scale: f32 scalar that an fp8 query was divided by; `rocm_attn` takes a static 1 alone. Ignored beside any other query and by
            encoder types, as in the class.
          output_scale: f32 scalar: out / output_scale comes back as fp8.
          output_dtype: default: the query's, bfloat16 for an fp8 query; with `output_scale` the arch's e4m3.
          output_block_scale: refused, as in vLLM.
          implementation: None (best), "xla", "pallas", "triton" or "aiter".

        Returns:
          [T, Hq, D]; rows of padding tokens are 0.

        Raises:
          ValueError, TypeError: a bad argument: its name, what it was, what it must be.
          UnsupportedError: what `supports` says, or an argument that this backend or the named implementation can't serve.
        """
        attn_type = _attn_type(config)
        if output_block_scale is not None:
            raise UnsupportedError(f"{self._name} can't serve output_block_scale: only one static scale per tensor, output_scale")
        query = check_tokens("query", query, None, config.head_size, fp8=True)
        if output_scale is not None and output_dtype is None:
            output_dtype = e4m3_dtype(device_arch())
        dtype = output_dtype_of(query.dtype, output_dtype, output_scale is not None)
        if metadata is None:
            return jnp.zeros((*query.shape[:2], config.value_size), dtype)
        metadata = plain_metadata(check_metadata(metadata))
        if attn_type in ENCODERS:
            key, value = self._check_encoder(query, key, value, config, output_scale, dtype)
            return encoder_attention(query, key, value, metadata, causal=False, implementation=implementation, **_options(config))
        num_heads, num_kv_heads = self._check_layer(config, cache)
        assert cache is not None  # _check_layer refuses it
        metadata = check_metadata(metadata, cache.local_spec)
        query = check_tokens("query", query, num_heads, config.head_size, fp8=True)
        new_tokens = self._check_new_tokens(query, key, value, num_kv_heads, metadata, config)
        options: dict[str, Any] = {
            "layer": layer,
            "q_scale": self._query_scale(query, q_scale),
            "output_scale": output_scale,
            "output_dtype": dtype,
            "implementation": implementation,
            **_options(config),
            "alibi_slopes": config.alibi_slopes,
        }
        if new_tokens is not None:
            return attention_with_new_tokens(query, *new_tokens, cache, metadata, **options)
        if attn_type == AttentionType.ENCODER_DECODER:
            metadata = replace(metadata, causal=False)
        return paged_attention(query, cache, metadata, **options)

    def kv_cache_update(
        self,
        key: Float[Array, "T H D"],
        value: Float[Array, "T H D"],
        cache: Cache,
        slot_mapping: Int[Array, " T"] | None,
        config: AttentionConfig,
        *,
        layer: Any = 0,
        implementation: Implementation | None = None,
    ) -> Cache:
        """The cache with this step's keys and values. Ports `do_kv_cache_update`; see `purepage.update_cache`.

        Args:
          key, value: [T, H, D], float32, float16 or bfloat16; or fp8 codes of the cache's own dtype, whose bits are stored as they are.
          cache: None where there is none yet.
          slot_mapping: i32[<= T] or i64; None is a profiling run.
          config: the layer.
          layer, implementation: see `purepage.update_cache`.

        Returns:
          The updated cache; for encoder types and without slots the cache as it came.

        Raises:
          ValueError, TypeError: a bad argument: its name, what it was, what it must be.
          UnsupportedError: what `supports` says, or an argument that the named implementation can't serve.
        """
        if _attn_type(config) in ENCODERS or slot_mapping is None:
            return cache
        self._check_layer(config, cache)
        function: Any = update_cache
        if any(is_array(side) and side.dtype in FP8_DTYPES for side in (key, value)):
            function = _store_codes
        return function(cache, key, value, slot_mapping, layer=layer, implementation=implementation)

    def rope_and_kv_cache_update(
        self,
        query: Float[Array, "T Hq D"],
        key: Float[Array, "T H D"],
        value: Float[Array, "T H D"],
        positions: Int[Array, " T"],
        cos_sin_cache: Float[Array, "P R"],
        cache: Cache,
        slot_mapping: Int[Array, " T"] | None,
        config: AttentionConfig,
        *,
        is_neox: bool = True,
        layer: Any = 0,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "T Hq D"], Float[Array, "T H D"], Cache]:
        """Rotary embedding and cache write. Ports `do_rope_and_kv_cache_update`; see `purepage.rope_and_update_cache`.

        Args:
          query: [T, Hq, D]; key, value: [T, H, D]; float32, float16 or bfloat16.
          positions, cos_sin_cache, is_neox: see `purepage.rotary_embedding`.
          cache, slot_mapping, config, layer, implementation: see `kv_cache_update`.

        Returns:
          (query, key, cache). For encoder types and without slots the arguments come back as they are: nothing is rotated, as in the class.

        Raises:
          ValueError, TypeError, UnsupportedError: see `kv_cache_update`.
        """
        if _attn_type(config) in ENCODERS or slot_mapping is None:
            return query, key, cache
        num_heads, _ = self._check_layer(config, cache)
        query = check_tokens("query", query, num_heads, config.head_size)
        function: Any = rope_and_update_cache
        options = {"is_neox": is_neox, "layer": layer, "implementation": implementation}
        return function(query, key, value, positions, cos_sin_cache, cache, slot_mapping, **options)

    def qk_norm_rope_and_kv_cache_update(
        self,
        qkv: Float[Array, "T C"],
        q_weight: Float[Array, " D"],
        k_weight: Float[Array, " D"],
        positions: Int[Array, " T"],
        cos_sin_cache: Float[Array, "P R"],
        cache: Cache,
        slot_mapping: Int[Array, " T"] | None,
        config: AttentionConfig,
        *,
        eps: float = 1e-6,
        is_neox: bool = True,
        layer: Any = 0,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "T Hq D"], Float[Array, "T H D"], Float[Array, "T H D"], Cache]:
        """RMS norm of queries and keys, rotary embedding and cache write. Ports `do_qk_norm_rope_kvcache_update`.

        Args:
          qkv, q_weight, k_weight, positions, cos_sin_cache, eps, is_neox: see `purepage.qk_norm_rope_and_update_cache`.
          cache, slot_mapping, config, layer, implementation: see `kv_cache_update`.

        Returns:
          (query, key, value, cache). Encoder types are normalised and rotated too, and write nothing. Without slots (a profiling run)
          the query and key of all other types are zeros, as vLLM leaves in their buffers.

        Raises:
          ValueError, TypeError, UnsupportedError: see `kv_cache_update`.
        """
        arguments = (q_weight, k_weight, positions, cos_sin_cache)
        options = {"eps": eps, "is_neox": is_neox, "layer": layer, "implementation": implementation}
        return self._qk_norm(qk_norm_rope_and_update_cache, qkv, arguments, cache, slot_mapping, config, options)

    def qk_norm_mrope_and_kv_cache_update(
        self,
        qkv: Float[Array, "T C"],
        q_weight: Float[Array, " D"],
        k_weight: Float[Array, " D"],
        positions: Int[Array, "3 T"],
        cos_sin_cache: Float[Array, "P R"],
        cache: Cache,
        slot_mapping: Int[Array, " T"] | None,
        config: AttentionConfig,
        *,
        mrope_section: tuple[int, int, int],
        is_interleaved: bool = False,
        eps: float = 1e-6,
        is_neox: bool = True,
        layer: Any = 0,
        implementation: Implementation | None = None,
    ) -> tuple[Float[Array, "T Hq D"], Float[Array, "T H D"], Float[Array, "T H D"], Cache]:
        """`qk_norm_rope_and_kv_cache_update` with M-RoPE. Ports `do_qk_norm_mrope_kvcache_update`.

        Args:
          positions: [3, T], temporal, height and width position of each token.
          mrope_section, is_interleaved: see `purepage.qk_norm_mrope_and_update_cache`.
          qkv, q_weight, k_weight, cos_sin_cache, cache, slot_mapping, config, eps, is_neox, layer, implementation: see
            `qk_norm_rope_and_kv_cache_update`.

        Returns:
          As `qk_norm_rope_and_kv_cache_update`.

        Raises:
          ValueError, TypeError, UnsupportedError: see `kv_cache_update`.
        """
        arguments = (q_weight, k_weight, positions, cos_sin_cache)
        options = {"eps": eps, "is_neox": is_neox, "layer": layer, "implementation": implementation}
        options |= {"mrope_section": mrope_section, "is_interleaved": is_interleaved}
        return self._qk_norm(qk_norm_mrope_and_update_cache, qkv, arguments, cache, slot_mapping, config, options)

    def spec_of(
        self,
        content: Content,
        order: Order | None,
        *,
        num_blocks: int,
        num_kv_heads: int,
        head_size: int,
        head_size_v: int | None,
        block_size: int | None,
        num_layers: int,
        dtype: Any,
        kv_cache_dtype_name: str,
        kv_connector: bool,
        arch: str | None,
    ) -> CacheSpec:
        """The spec of this backend's cache with `content`; the modules' `cache_spec` choose the content."""
        if head_size_v not in (None, head_size) and not layout_of(content).sides_are_adjacent:
            raise UnsupportedError(
                f"head_size_v is {head_size_v}: {self._name}'s {content!r} cache keeps keys and values of one head_size ({head_size})"
            )
        orders = self.capabilities.supported_kv_cache_layouts(kv_connector=kv_connector)
        if not orders:
            raise UnsupportedError(f"kv_connector: {self._name} has no layout for a KV connector")
        if order is None:
            order = orders[0]
        if order not in orders:
            able = ", ".join(map(repr, orders)) + (" with a KV connector" if kv_connector else "")
            raise UnsupportedError(f"order is {order!r}: {self._name} serves {able}")
        spec = CacheSpec(
            num_blocks=num_blocks,
            block_size=self.capabilities.get_preferred_block_size() if block_size is None else block_size,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            head_size_v=head_size_v,
            num_layers=num_layers,
            dtype=kv_cache_dtype(kv_cache_dtype_name, model_dtype=dtype, arch=device_arch() if arch is None else named_target(arch).arch),
            content=content,
            order=order,
        )
        checked = spec
        if spec.block_size == PROBE_BLOCK_SIZE:
            checked = replace(spec, block_size=self.capabilities.get_preferred_block_size())
        self._refuse(self.supports(_layer_of(checked, kv_cache_dtype_name), checked))
        return spec

    def check_block_size(self, block_size: int) -> None:
        """Raises ValueError for a block size that no kernel of the backend has."""
        if not self.capabilities.supports_block_size(block_size):
            bad_value("block_size", block_size, f"a multiple of {self.capabilities.kernel_block_size_multiple}")

    @property
    def _name(self) -> str:
        return self.capabilities.name

    def _refuse(self, reasons: tuple[str, ...]) -> None:
        if reasons:
            raise UnsupportedError(f"{self._name} can't serve this layer: {'; '.join(reasons)}")

    def _check_layer(self, config: AttentionConfig, cache: Any) -> tuple[int, int]:
        """Refuses what the backend does not serve over a cache; returns the (query heads, KV heads) of this shard."""
        local = check_cache(cache)
        spec = local if local.num_kv_heads == config.num_kv_heads else cache.spec
        for name in ("num_kv_heads", "head_size", "head_size_v"):
            if getattr(spec, name) != getattr(config, name):
                bad_value(f"cache.spec.{name}", getattr(spec, name), f"the config's {getattr(config, name)}")
        self._refuse(self.supports(config, spec))
        return config.num_heads * local.num_kv_heads // config.num_kv_heads, local.num_kv_heads

    def _check_encoder(self, query, key, value, config, output_scale, dtype) -> tuple[Array, Array]:
        """Refuses what an encoder does not serve; returns its key and value, of the whole layer or of a shard of its KV heads."""
        self._refuse(self.supports(config, None))
        kind = AttentionType(config.attn_type).name
        if key is None:
            bad_value("key", key, f"given where attn_type is {kind}: an encoder has no cache")
        num_kv_heads = config.num_kv_heads
        if is_array(key) and len(key.shape) == 3 and key.shape[1] and num_kv_heads % key.shape[1] == 0:
            num_kv_heads = key.shape[1]
        key, value = _check_pair(key, value, num_kv_heads, config, fp8=False)
        check_tokens("query", query, config.num_heads * num_kv_heads // config.num_kv_heads, None, fp8=True)
        if query.dtype in FP8_DTYPES:
            raise UnsupportedError(f"query is {query.dtype.name}: {self._name}'s encoder attention is not quantized")
        if output_scale is not None:
            raise UnsupportedError(f"{self._name} can't serve output_scale where attn_type is {kind}: encoder attention is not quantized")
        if dtype != query.dtype:
            raise UnsupportedError(f"output_dtype is {dtype.name}: {self._name}'s encoder attention returns the query's {query.dtype.name}")
        return key, value

    def _check_new_tokens(self, query, key, value, num_kv_heads, metadata, config) -> tuple[Array, Array] | None:
        """This step's key and value where `forward` attends them; None where all is read from the cache."""
        if key is None and value is None:
            return None
        read = self.capabilities.full_precision_new_tokens and metadata.max_query_len > 1
        key, value = _check_pair(key, value, num_kv_heads, config, fp8=not read)
        if config.attn_type == AttentionType.DECODER and key.shape[0] != query.shape[0]:
            bad_value("key", key, f"of the query's {query.shape[0]} tokens where attn_type is DECODER")
        return (key, value) if read else None

    def _query_scale(self, query: Array, q_scale: Any) -> Any:
        """The scale of an fp8 query; None for any other query, beside which the class ignores `q_scale`."""
        if q_scale is None or query.dtype not in FP8_DTYPES:
            return None
        if self.capabilities.quant_query_input:
            return q_scale
        if isinstance(q_scale, Tracer) or np.any(np.asarray(q_scale, np.float32) != 1):
            found = "traced" if isinstance(q_scale, Tracer) else np.asarray(q_scale)
            raise UnsupportedError(f"q_scale is {found}: {self._name} takes an fp8 query with a static scale of 1 alone")
        return None

    def _qk_norm(self, function, qkv, arguments, cache, slot_mapping, config, options):
        """The fused qk-norm writers; `function` is the public one of the writer."""
        encoder = _attn_type(config) in ENCODERS
        if not encoder and slot_mapping is not None:
            num_heads, _ = self._check_layer(config, cache)
            return function(qkv, *arguments, cache, slot_mapping, num_heads=num_heads, **options)
        num_heads, num_kv_heads = _heads_of_qkv(qkv, config)
        if not encoder:
            rotated = num_heads + num_kv_heads
            zeros = jnp.zeros((qkv.shape[0], rotated, config.head_size), qkv.dtype)
            value = jnp.asarray(qkv)[:, rotated * config.head_size :].reshape(qkv.shape[0], num_kv_heads, config.value_size)
            return zeros[:, :num_heads], zeros[:, num_heads:], value, cache
        self._refuse(self.supports(config, None))
        # Norm and rotation are the writer's own: it gets a cache of one block, and no token has a slot in it.
        sizes = {"head_size": config.head_size, "head_size_v": config.head_size_v}
        scratch = CacheSpec(num_blocks=1, block_size=16, num_kv_heads=num_kv_heads, **sizes, dtype=qkv.dtype)
        slots = jnp.full(qkv.shape[0], -1, jnp.int32)
        *parts, _ = function(qkv, *arguments, init_plain_cache(scratch), slots, num_heads=num_heads, **{**options, "layer": 0})
        return (*parts, cache)


def process_weights_after_loading(config: AttentionConfig) -> AttentionConfig:
    """The layer with `sinks` and `alibi_slopes` as float32 device arrays, once, after a checkpoint is read in any dtype.

    Args:
      config: the layer.

    Returns:
      An equal layer with float32 vectors.
    """
    arrays = {name: getattr(config, name) for name in ("sinks", "alibi_slopes")}
    return replace(config, **{name: jnp.asarray(array, jnp.float32) for name, array in arrays.items() if array is not None})


def _attn_type(config: Any) -> AttentionType:
    if not isinstance(config, AttentionConfig):
        bad_type("config", config, "an AttentionConfig")
    return AttentionType(config.attn_type)


def _layer_of(spec: CacheSpec, kv_cache_dtype_name: str) -> AttentionConfig:
    """A layer over a cache of this spec, to ask `supports` with."""
    heads = spec.num_kv_heads
    sizes = {"head_size": spec.head_size, "head_size_v": spec.head_size_v}
    return AttentionConfig(num_heads=heads, num_kv_heads=heads, **sizes, kv_cache_dtype=kv_cache_dtype_name)


def _options(config: AttentionConfig) -> dict[str, Any]:
    names = ("sliding_window", "logits_soft_cap", "sinks")
    return {"scale": config.softmax_scale, **{name: getattr(config, name) for name in names}}


def _check_pair(key: Any, value: Any, num_kv_heads: int, config: AttentionConfig, *, fp8: bool) -> tuple[Array, Array]:
    if (key is None) != (value is None):
        bad_value("value" if value is None else "key", None, "given, or both None")
    key = check_tokens("key", key, num_kv_heads, config.head_size, fp8=fp8)
    value = check_tokens("value", value, num_kv_heads, config.value_size, fp8=fp8)
    if value.shape[0] != key.shape[0]:
        bad_value("value", value, f"of the key's {key.shape[0]} tokens")
    return key, value


def _store_codes(cache: KVCache, key: Any, value: Any, slot_mapping: Any, *, layer: Any, implementation: Implementation | None) -> KVCache:
    """Writes fp8 keys or values whose bits are stored as they are; the other side is quantized by its scale.

    Codes are numbers of at most 4 significant bits, so that a write of their values at scale 1 stores the same codes. float8_e5m2 also has
    infinities, which a write would saturate: its bits pass as float8_e4m3fn, which has none and whose NaNs are NaN in both.
    """
    spec = check_cache(cache)
    index = check_layer(layer, spec)
    carrier = jnp.dtype("float8_e4m3fn") if spec.dtype == jnp.dtype("float8_e5m2") else spec.dtype
    sides = []
    for name, side, size, scale in (("key", key, spec.head_size, cache.k_scale), ("value", value, spec.value_size, cache.v_scale)):
        codes = check_tokens(name, side, spec.num_kv_heads, size, fp8=True)
        if codes.dtype in MODEL_DTYPES and spec.is_quantized:
            codes = quantize(codes, jnp.reshape(scale[index], (-1, 1)), spec.dtype)
        elif codes.dtype != spec.dtype:
            bad_type(name, codes, f"of a model dtype, or of the cache's {spec.dtype.name}: fp8 codes are stored as they are")
        sides.append(jax.lax.bitcast_convert_type(codes, carrier).astype(jnp.float32))
    bits = cache.data if cache.data.dtype == spec.storage_dtype else jax.lax.bitcast_convert_type(cache.data, spec.storage_dtype)
    plain = KVCache(bits, jnp.ones_like(cache.k_scale), jnp.ones_like(cache.v_scale), replace(cache.spec, dtype=carrier))
    written = update_cache(plain, sides[0], sides[1], slot_mapping, layer=layer, implementation=implementation)
    return replace(cache, data=written.data)


def _heads_of_qkv(qkv: Any, config: AttentionConfig) -> tuple[int, int]:
    """(query heads, KV heads) of a fused projection, of the whole layer or of a shard of its KV heads."""
    queries_per_kv_head = config.num_heads // config.num_kv_heads
    group = (queries_per_kv_head + 1) * config.head_size + config.value_size
    if (
        not is_array(qkv)
        or len(qkv.shape) != 2
        or qkv.shape[1] == 0
        or (config.num_kv_heads * group) % qkv.shape[1]
        or qkv.shape[1] % group
    ):
        bad_value("qkv", qkv, f"an array of shape [T, (Hq + 2 H) * D] = [T, {config.num_kv_heads * group}], or a shard of its KV heads")
    if jnp.dtype(qkv.dtype) not in MODEL_DTYPES:
        bad_type("qkv", qkv, f"of dtype {', '.join(d.name for d in MODEL_DTYPES)}")
    num_kv_heads = qkv.shape[1] // group
    return queries_per_kv_head * num_kv_heads, num_kv_heads
