"""Which configuration serves a call: looked up by head size, adjusted for what needs more registers, made smaller until it fits."""

from dataclasses import replace

from ...functional.errors import UnsupportedError
from .configs import ANY, Config, ConfigTable, DecodeConfig, PrefillConfig
from .facts import Arch


def over_limits(arch: Arch, *, shared_bytes: int, num_warps: int) -> str | None:
    """Why a workgroup of this size can't run on `arch`, or None. It is asked before compilation, since no compiler checks it."""
    if shared_bytes > arch.shared_bytes:
        return f"{shared_bytes} bytes of shared memory, {arch.name} has {arch.shared_bytes}"
    if num_warps * arch.wave_size > arch.max_threads:
        return f"{num_warps} warps of {arch.wave_size} threads, {arch.name} takes {arch.max_threads} threads"
    return None


def config_for(arch: Arch, table: ConfigTable[Config], head_pad: int, *, kind: str = ANY) -> Config:
    """The configuration of the smallest head size that is not below `head_pad`.

    Args:
      arch: the architecture, for the error.
      table: `arch.prefill` or `arch.decode`.
      head_pad: the head size, rounded up to a power of two.
      kind: kind of cache; where it has no configuration for this head size, that of any cache is taken.

    Raises:
      UnsupportedError: no configuration is as wide as `head_pad`.
    """
    for sizes in (table.get(kind, {}), table[ANY]):
        wide = [size for size in sizes if size >= head_pad]
        if wide:
            return sizes[min(wide)]
    raise UnsupportedError(f"triton: head sizes up to {max(table[ANY])} on {arch.name}, not {head_pad}: no tile fits the registers")


def narrowed(
    config: Config, arch: Arch, *, float32: bool, has_bias: bool = False, crowded: bool = False, decoded_fp8: bool = False
) -> Config:
    """The configuration for calls that need more registers than those that the tables are for.

    Args:
      config: that of the table.
      arch: the architecture.
      float32: the products are float32. There is hardly a matrix unit for them, and none on RDNA: the operands fill the registers.
      has_bias: a bias between query tokens is added, which on AMD takes a tile of pointers.
      crowded: on AMD the call needs more registers than an option for two waves leaves.
      decoded_fp8: integer operations decode fp8, which on AMD takes more registers than the widest heads leave.
    """
    if float32:
        most, warps = (16, 8) if arch.matrix == "wmma" else (32, 1)
        config = replace(config, block_n=min(config.block_n, most), num_warps=max(config.num_warps, warps), measured=None)
        if arch.vendor == "amd":
            config = replace(config, reload_query=64 if arch.matrix == "wmma" else 128)
        if isinstance(config, PrefillConfig):
            return replace(config, block_m=min(config.block_m, most), num_stages=1, optimistic=False, partial_sums=0)
        return replace(config, max_block_m=min(config.max_block_m, most), num_stages=min(config.num_stages, 2), partial_sums=0)
    if arch.vendor != "amd":
        return config
    if decoded_fp8:
        config = replace(config, reload_query=min(config.reload_query or 256, 256), measured=None)
    if crowded or has_bias:
        config = replace(config, options=(), measured=None)
    if has_bias:
        return replace(config, block_n=max(16, config.block_n // 2), measured=None)
    return config


def smaller(config: Config) -> Config | None:
    """The next configuration that needs less shared memory: fewer stages, then fewer keys, then fewer rows; None after the last."""
    if config.num_stages > 1:
        return replace(config, num_stages=config.num_stages - 1, measured=None)
    if config.block_n > 16:
        return replace(config, block_n=config.block_n // 2, measured=None)
    if isinstance(config, PrefillConfig) and config.block_m > 16:
        return replace(config, block_m=config.block_m // 2, measured=None)
    if isinstance(config, DecodeConfig) and config.max_block_m > 16:
        return replace(config, max_block_m=config.max_block_m // 2, measured=None)
    return None
