"""The candidate configurations of a kernel: those around the one that the tables give, within the limits of plan and compiler."""

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

from ...functional.errors import UnsupportedError
from ...kernels.archs import Arch
from ...kernels.archs.configs import WAVES_2, WriterConfig
from ...kernels.launch import Program
from ...kernels.plans.tuned import AnyConfig

Effort = Literal["quick", "normal", "full"]
EFFORTS: tuple[Effort, ...] = ("quick", "normal", "full")
"""`quick` changes one field at a time; `normal` also tries every tile with every number of warps and stages, `full` these with every
number of splits."""

Axes = Mapping[str, Sequence[Any]]

TOGETHER: Mapping[str, tuple[str, ...]] = {
    "decode": ("block_n", "num_warps", "num_stages"),
    "prefill": ("block_m", "block_n", "num_warps", "num_stages"),
    "write": ("block_tokens", "block_heads", "num_warps"),
}
"""Fields whose best values depend on each other."""


def axes_of(kind: str, config: AnyConfig, arch: Arch) -> Axes:
    """Values of each field that are tried for a kind of kernel on an architecture, the fields of `TOGETHER` among them."""
    amd = arch.vendor == "amd"
    if kind == "write":
        return {"block_tokens": (1, 2, 4, 8, 16, 32, 64), "block_heads": (1, 2, 4, 8), "num_warps": (1, 2, 4, 8)}
    half = max(16, int(getattr(config, "block_n", 32)) // 2)
    both: dict[str, Sequence[Any]] = {
        "masked_block_n": (0, half),
        "partial_sums": (0,) if amd else (0, 8, 16),
        "options": ((), WAVES_2) if amd else ((),),
        "late_clamp": (False, True) if amd else (False,),
    }
    if kind == "decode":
        return {
            **both,
            "block_n": (16, 32, 64, 128),
            "num_warps": (1, 2, 4, 8),
            "num_stages": (1, 2) if amd else (1, 2, 3, 4),
            "splits_per_cu": (1, 2, 4, 8),
            "values_first": (False, True) if amd else (False,),
            "reduce_num_warps": (1, 4),
            "one_loop": (False, True),
            "whole_tiles": (0, 4),
        }
    return {
        **both,
        "block_m": (16, 32, 64, 128),
        "block_n": (16, 32, 64, 128),
        "num_warps": (2, 4, 8),
        "num_stages": (1, 2) if amd else (2, 3, 4),
        "one_loop_tiles": (0, 4),
        "page_copy_from": (0, 1024),
        **({} if amd else {"kv_descriptor": (False, True), "optimistic": (False, True)}),
    }


def distance(config: AnyConfig, other: AnyConfig) -> int:
    """How many fields differ."""
    return sum(getattr(config, each.name) != getattr(other, each.name) for each in fields(config) if each.name != "measured")


def around(kind: str, config: AnyConfig, arch: Arch, effort: Effort) -> list[AnyConfig]:
    """Configurations around `config`, the nearest first, `config` itself not among them.

    Args:
      kind: "decode", "prefill" or "write".
      config: the incumbent.
      arch: the architecture.
      effort: see `EFFORTS`.
    """
    axes, made = axes_of(kind, config, arch), {}
    incumbent = replace(config, measured=None)
    for name, values in axes.items():
        for value in values:
            made[replace(incumbent, **{name: value})] = None
    together = TOGETHER[kind] if effort != "quick" else ()
    if effort == "full" and kind == "decode":
        together = (*together, "splits_per_cu")
    for chosen in itertools.product(*(axes[name] for name in together)) if together else ():
        made[replace(incumbent, **dict(zip(together, chosen, strict=True)))] = None
    made.pop(incumbent, None)
    return sorted(made, key=lambda each: distance(each, incumbent))


def within_limits(
    configs: Iterable[AnyConfig], incumbent: Program, plan: Callable[[AnyConfig], Program], *, single_head: bool = False
) -> tuple[list[AnyConfig], int]:
    """(Configurations whose programs differ from the incumbent's and from each other's, number of those that the plan's limits refuse).

    Args:
      configs: the candidates.
      incumbent: the program of the table's row.
      plan: the program of a configuration; raises ValueError where it passes a limit.
      single_head: leaves out writers of several heads.
    """
    kept, seen, refused = [], {incumbent}, 0
    for config in configs:
        if single_head and isinstance(config, WriterConfig) and config.block_heads > 1:
            continue
        try:
            program = plan(config)
        except (ValueError, UnsupportedError):
            refused += 1
            continue
        if program not in seen:
            seen.add(program)
            kept.append(config)
    return kept, refused


def refused_by_compiler(program: Program, arch: Arch, *, spills_allowed: int = 0) -> tuple[str | None, int]:
    """(Why a program's kernels should not be launched on AMD, registers that they spill). Triton keeps what it compiles, so it is not done
    twice. Of other vendors nothing is known without a launch.

    Args:
      program: the launches.
      arch: the architecture.
      spills_allowed: registers that the incumbent spills.
    """
    if arch.vendor != "amd":
        return None, 0
    from ...kernels.compile_check import jobs_of, usage_of

    spilled = 0
    for job in jobs_of(program, arch.name):
        usage = usage_of(job)
        spilled += usage.vgpr_spills
        if usage.lds_bytes > arch.shared_bytes:
            return f"{usage.kernel}: {usage.lds_bytes} bytes of LDS, {arch.name} has {arch.shared_bytes}", spilled
    return (f"spills {spilled} registers" if spilled > spills_allowed else None), spilled
