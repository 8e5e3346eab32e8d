"""Eager exchange of arrays between JAX and torch through DLPack: shared memory, ordered on the right stream, alive as long as either side
needs it.

A shared buffer is one memory with two names, and JAX takes its arrays for immutable: never write through a tensor that shares memory with
an array that is still used; ask for `copy=True` instead. For functions inside `jax.jit` see `callback.py`.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array

from ..functional.cache import CacheSpec, KVCache, check_cache
from ..functional.errors import UnsupportedError, bad_type, bad_value, describe

DEVICE_TYPES = {"cpu": 1, "cuda": 2, "cuda_host": 3, "rocm": 10, "rocm_host": 11, "cuda_managed": 13}
"""DLPack's device codes (`DLDeviceType`). torch names its ROCm devices "cuda", but exports them as kDLROCM."""

_TORCH_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 10: "cuda", 11: "cpu", 13: "cuda"}
_ROCM_INVALID_STREAMS = (1, 2)

_WIDE = {"int64": "int32", "uint64": "uint32", "float64": "float32", "complex128": "complex64"}
"""What JAX makes of 64-bit dtypes without jax_enable_x64."""


def torch_device(device_type: int, ordinal: int = 0) -> str:
    """torch's name of a DLPack device: (10, 1), GPU 1 under ROCm, is "cuda:1"."""
    if device_type not in _TORCH_DEVICES:
        bad_value("device_type", device_type, f"one of {DEVICE_TYPES}")
    name = _TORCH_DEVICES[device_type]
    return name if name == "cpu" else f"{name}:{ordinal}"


def stream_argument(device_type: int, stream: int | None) -> int | None:
    """What `__dlpack__(stream=...)` wants for a raw stream handle of the consumer.

    On CUDA the default stream (handle 0) is spelled 1, 0 being ambiguous there; on ROCm it is 0, and 1 and 2 are invalid. -1, on either,
    asks for no synchronisation; a CPU has no streams.

    Raises:
      ValueError: a stream on a CPU, or 1 or 2 on ROCm.
    """
    if device_type == DEVICE_TYPES["cuda"] or device_type == DEVICE_TYPES["cuda_managed"]:
        return stream or 1
    if device_type == DEVICE_TYPES["rocm"]:
        if stream in _ROCM_INVALID_STREAMS:
            bad_value("stream", stream, "0 (the default stream), -1 (no synchronisation) or a hipStream_t on ROCm; 1 and 2 are CUDA's")
        return stream or 0
    if stream is not None:
        bad_value("stream", stream, "None on a CPU")
    return None


def to_torch(array: Array, *, copy: bool | None = None) -> Any:
    """A torch tensor of a JAX array, on the same device, ordered after the work that makes the array.

    Args:
      array: a concrete array on one device.
      copy: None or False share the memory (which always works); True gives the tensor memory of its own, safe to write.

    Raises:
      TypeError: a tracer, or a dtype that torch lacks.
      ValueError: spread over several devices, or already deleted (donated).
    """
    import torch

    _check_copy(copy)
    if isinstance(array, Tracer):
        bad_type("array", array, "a concrete array; inside jax.jit use purepage.bridges.callback.call_torch")
    if not isinstance(array, jax.Array):
        bad_type("array", array, "a jax.Array")
    if array.is_deleted():
        raise ValueError(f"array {array.dtype}[{','.join(map(str, array.shape))}] was deleted: its buffer was donated")
    devices = array.sharding.device_set
    if len(devices) != 1:
        bad_value("array", array, f"on one device, not spread over {len(devices)}: convert each of its addressable_shards")
    if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
        bad_type("array", array, "of a plain dtype: convert jax.random.key_data(key)")
    kind, ordinal = array.__dlpack_device__()  # pyright: ignore[reportAttributeAccessIssue]: jax declares less than it has
    stream = None
    if torch_device(kind).startswith("cuda"):
        stream = stream_argument(int(kind), torch.cuda.current_stream(ordinal).cuda_stream)
    else:
        array.block_until_ready()
    try:
        tensor = torch.from_dlpack(array.__dlpack__(stream=stream))  # pyright: ignore[reportCallIssue]
    except (BufferError, jax.errors.JaxRuntimeError) as err:
        raise TypeError(f"array is {describe(array)}: torch {torch.__version__} has no dtype {array.dtype} ({err})") from err
    return tensor.clone() if copy else tensor


def to_jax(tensor: Any, *, copy: bool | None = None) -> Array:
    """A JAX array of a torch tensor (or of any array that speaks DLPack), on the same device, ordered after the tensor's work.

    Args:
      tensor: dense and not overlapping, in any order of its axes; no gradient.
      copy: None shares the memory, but copies where XLA on a CPU can't (not aligned to 64 bytes); False raises there; True always copies,
        and takes strided and read-only sources too.

    Raises:
      TypeError: not an array, or a dtype that JAX lacks.
      ValueError: can't be shared (the message says what to do), or would lose bits: 64-bit dtypes need jax_enable_x64.
    """
    _check_copy(copy)
    if isinstance(tensor, jax.Array):
        bad_type("tensor", tensor, "a torch tensor or another library's array, not a jax.Array")
    if isinstance(tensor, np.ndarray):
        source = _checked_numpy(tensor, copy)
    elif hasattr(tensor, "data_ptr") and hasattr(tensor, "requires_grad"):
        source = _checked_torch(tensor, copy)
    elif hasattr(tensor, "__dlpack__") and hasattr(tensor, "__dlpack_device__"):
        source = tensor
    else:
        bad_type("tensor", tensor, "a torch tensor, a NumPy array or another array that speaks DLPack")
    try:
        array = jax.dlpack.from_dlpack(source, copy=False if copy is False else None)
    except ValueError as err:
        if "aligned" in str(err):
            bad_value("tensor", tensor, "aligned to 64 bytes to be shared with XLA on a CPU: pass copy=None or copy=True")
        raise
    except (BufferError, RuntimeError) as err:  # JaxRuntimeError is a RuntimeError
        raise TypeError(f"tensor is {describe(tensor)}: it can't be shared through DLPack ({err})") from err
    if copy is not False and not _is_cuda(source):
        array.block_until_ready()  # a copy that is still running would read what the producer writes next
    return array


def shares_memory(array: Array, tensor: Any) -> bool:
    """Whether an array and a tensor are the same memory; both on one device. Empty ones share nothing."""
    if array.size == 0 or math.prod(tensor.shape) == 0:
        return False
    address = tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor.ctypes.data
    return array.unsafe_buffer_pointer() == address


def _check_copy(copy: Any) -> None:
    if copy not in (None, True, False):
        bad_value("copy", copy, "None, True or False")


def _is_cuda(source: Any) -> bool:
    return bool(getattr(source, "is_cuda", False))


def _refuse_narrowing(tensor: Any, dtype: str) -> None:
    if dtype in _WIDE and not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        raise ValueError(
            f"tensor is {describe(tensor)}: JAX would cut it to {_WIDE[dtype]} in silence; "
            f"convert it to {_WIDE[dtype]} first if its values fit, or set jax_enable_x64"
        )


def _checked_numpy(array: np.ndarray, copy: bool | None) -> np.ndarray:
    _refuse_narrowing(array, array.dtype.name)
    if copy:
        return np.array(array, order="C", copy=True)
    if not array.flags.writeable:
        bad_value("tensor", array, "writeable to be shared, and this NumPy array is read-only: pass copy=True")
    if not _is_dense(array.shape, tuple(stride // array.itemsize for stride in array.strides)):
        bad_value("tensor", array, "contiguous to be shared: pass numpy.ascontiguousarray(array), or copy=True")
    return array


def _checked_torch(tensor: Any, copy: bool | None) -> Any:
    import torch

    if tensor.requires_grad:
        bad_value("tensor", tensor, "without requires_grad: pass tensor.detach()")
    if tensor.layout != torch.strided:
        bad_value("tensor", tensor, "dense: pass tensor.to_dense()")
    if tensor.is_conj() or tensor.is_neg():
        bad_value("tensor", tensor, "without a lazy conjugate or negation: pass tensor.resolve_conj().resolve_neg()")
    if tensor.device.type not in ("cpu", "cuda"):
        bad_value("tensor", tensor, f"on a CPU or a GPU, not on {tensor.device}")
    _refuse_narrowing(tensor, str(tensor.dtype).removeprefix("torch."))
    if copy:
        # JAX's own copy=True shares a torch tensor on a CPU; a clone of it is a real copy.
        clone = tensor.clone(memory_format=torch.contiguous_format)
        if clone.is_cuda:
            torch.cuda.current_stream(clone.device).synchronize()
        return clone
    if not _is_dense(tuple(tensor.shape), tuple(tensor.stride())):
        bad_value(
            "tensor",
            tensor,
            f"dense to be shared, and its strides {tuple(tensor.stride())} skip or repeat memory: pass tensor.contiguous(), or copy=True",
        )
    return tensor


def _is_dense(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether the elements fill one stretch of memory, in any order of the axes; what XLA can express as a layout."""
    if 0 in shape:
        return True
    step = 1
    for stride, size in sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size != 1):
        if stride != step:
            return False
        step *= size
    return True


def cache_to_torch(cache: KVCache, *, native: bool = False) -> tuple[Any, Any]:
    """Key and value of a cache as torch views of its one buffer, typed, no copy; see `side_views`.

    While a view is alive, a donation of the cache copies it instead of updating it in place.
    """
    check_cache(cache)
    return side_views(to_torch(cache.data), cache.local_spec, native=native)


def side_views(data: Any, spec: CacheSpec, *, native: bool = False) -> tuple[Any, Any]:
    """Strided views of key and value in a torch tensor that holds `KVCache.data`.

    Args:
      data: tensor of shape `spec.shape`, in the storage dtype or the cache's own.
      spec: the cache's spec (inside `shard_map`: `cache.local_spec`).
      native: False: both as `[L, B, N, H, D]`, which a layout that splits D or N in vectors can't express. True: the layout's own axes
        without the key/value one, layer and block first, e.g. `[L, B, H, D/x, N, x]`.

    Raises:
      UnsupportedError: `native=False` with a layout that splits an axis.
    """
    import torch

    typed = data.view(getattr(torch, spec.dtype.name))
    views = []
    for side, axes in enumerate(spec.side_axes):
        view = typed.view(spec.extents.shape(axes)).select(axes.index("2"), side)
        names = [axis for axis in axes if axis != "2"]
        if native:
            wanted = ["L", "B", *(axis for axis in names if axis not in ("L", "B"))]
        else:
            wanted = ["L", "B", "N", "H", "D"]
            if set(names) != set(wanted):
                raise UnsupportedError(
                    f"content {spec.content!r} splits an axis in vectors ({' '.join(names)}): "
                    "no strided [L, B, N, H, D] view; pass native=True"
                )
        views.append(view.permute([names.index(axis) for axis in wanted]))
    return views[0], views[1]
