"""Runs a `Program` on torch tensors, without JAX: for benchmarks and checks of kernels by themselves."""

import importlib
from collections.abc import Mapping
from typing import Any

from ..launch import Arg, Descriptor, Launch, Program


def kernel_of(launch: Launch) -> Any:
    """The `@triton.jit` function of a launch."""
    module, _, name = launch.kernel.partition(":")
    return getattr(importlib.import_module(module), name)


def empty_tensor(shape: tuple[int, ...], dtype: str, device: Any) -> Any:
    """Uninitialised; filled with NaN (or the largest byte) so that an element that no kernel writes shows."""
    import torch

    kind = getattr(torch, dtype)
    if kind.itemsize == 1:
        return torch.full(shape, 0xFF, dtype=torch.uint8, device=device).view(kind)
    return (
        torch.full(shape, float("nan"), dtype=kind, device=device)
        if kind.is_floating_point
        else torch.empty(shape, dtype=kind, device=device)
    )


def tensor_descriptor(base: Any, descriptor: Descriptor) -> Any:
    """Triton's own; `base` is a tensor, or has the `dtype` and the `data_ptr` of one."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(base, list(descriptor.shape), [descriptor.shape[1], 1], list(descriptor.block))


def argument(arg: Arg, tensors: Mapping[str, Any]) -> Any:
    """What a kernel gets for an argument of its launch; fp8 tensors go in as bytes, which is how the kernels read them."""
    import torch

    if isinstance(arg, Descriptor):
        return tensor_descriptor(tensors[arg.buffer].view(getattr(torch, arg.dtype)).view(arg.shape), arg)
    value = tensors[arg] if isinstance(arg, str) else arg
    return value.view(torch.uint8) if isinstance(value, torch.Tensor) and value.dtype.itemsize == 1 else value


def compile_options(launch: Launch, target: Any) -> dict[str, Any]:
    """The launch's options that the backend of a `GPUTarget` has; those for another vendor are dropped.

    Whether a product and a sum may fuse is always said, so that two ways of compiling a kernel give the same bits: Triton's own default
    changes in 3.10.
    """
    from triton.compiler.compiler import make_backend

    known = vars(make_backend(target).parse_options({"enable_fp_fusion": True}))
    return {"enable_fp_fusion": True} | {name: value for name, value in launch.options if name in known}


def launch_torch(launch: Launch, tensors: Mapping[str, Any], *, interpreted: bool = False) -> None:
    """One launch."""
    from triton.runtime import driver

    args = [argument(arg, tensors) for arg in launch.args]
    kernel = kernel_of(launch)
    options = {} if interpreted else compile_options(launch, driver.active.get_current_target())
    names = dict(zip(kernel.arg_names, args, strict=False))
    kernel[launch.grid](**names, **dict(launch.constants), num_warps=launch.num_warps, num_stages=launch.num_stages, **options)


def run_program_torch(program: Program, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Runs every launch in order; returns the outputs and updated inputs by name.

    Args:
      tensors: the program's inputs by name, on one device; on a CPU the kernels must have been imported with TRITON_INTERPRET=1.
    """
    device = next(iter(tensors.values())).device
    fresh = {name: empty_tensor(buffer.shape, buffer.dtype, device) for name, buffer in (*program.outputs, *program.scratch)}
    everything = {**tensors, **fresh}
    for launch in program.launches:
        launch_torch(launch, everything, interpreted=device.type == "cpu")
    return {name: everything[name] for name in (*(name for name, _ in program.outputs), *program.updates)}
