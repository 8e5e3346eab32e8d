"""What the kernels share: where the channels of tokens lie in a cache, and how to read and write them there."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from purepage.functional.cache import CacheSpec


@dataclass(frozen=True)
class Pool:
    """Extents of a cache whose tokens are rows of channels: contents "packed" and "flash", in both orders.

    Attributes:
      axes: names of the buffer's axes, see `purepage.functional.layout`.
      num_blocks, block_size, head_size: B, N, D.
      dtype: of the stored elements; a buffer of bytes holds fp8 codes.
      channels: D rounded up to a power of two, which Triton's vectors are; channels past D are masked.

    An element that a mask leaves out has an index outside its array, wherever that is stored to: the interpreter writes back what lies at
    an index that is masked, and would undo another element's write.
    """

    axes: tuple[str, ...]
    num_blocks: int
    block_size: int
    head_size: int
    dtype: np.dtype
    channels: int

    @classmethod
    def of(cls, spec: CacheSpec) -> "Pool":
        return cls(spec.axes, spec.num_blocks, spec.block_size, spec.head_size, spec.dtype, power_of_two(spec.head_size))

    def rows(self, ref, side: int, layer: Int[Array, ""], block: Int[Array, " R"], token: Int[Array, " R"], head: Int[Array, ""]):
        """The reference to [R, channels]: key (side 0) or value (1) of a head at places `token` of blocks `block`."""
        channel = jnp.arange(self.channels, dtype=jnp.int32)[None]
        at = {
            "L": layer,
            "B": block[:, None],
            "N": token[:, None],
            "H": head,
            "2": side,
            "D": channel,
            "2D": side * self.head_size + channel,
        }
        return ref.at[tuple(at[axis] for axis in self.axes)]

    def decoded(self, stored: Array) -> Array:
        """Stored elements in the cache's dtype."""
        return stored if stored.dtype == self.dtype else jax.lax.bitcast_convert_type(stored, self.dtype)

    def encoded(self, values: Array, storage_dtype: np.dtype) -> Array:
        """The opposite of `decoded`."""
        return values if values.dtype == storage_dtype else jax.lax.bitcast_convert_type(values, storage_dtype)

    def is_channel(self) -> Bool[Array, "1 channels"]:
        return (jnp.arange(self.channels, dtype=jnp.int32) < self.head_size)[None]


def power_of_two(size: int) -> int:
    """The next power of two, at least 16: the smallest extent that a product on matrix units takes."""
    return max(16, pl.next_power_of_2(size))


def load(ref, mask: Bool[Array, "..."]) -> Array:
    """What `ref` refers to; 0 where `mask` is off, and nothing is read there."""
    return plgpu.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))


def dot(left: Float[Array, "M K"], right: Float[Array, "K N"]) -> Float[Array, "M N"]:
    """The product in float32; operands of 16 bits meet in the matrix unit of their dtype."""
    return jax.lax.dot(left, right, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)


def compiler_params(num_warps: int = 4) -> plgpu.CompilerParams:
    """Pallas' Triton backend, for CUDA and ROCm."""
    return plgpu.CompilerParams(num_warps=num_warps, num_stages=1)
