"""gfx1250, after LLVM's AMDGPU usage page: waves of 32 threads, and 320 KiB of LDS for a workgroup. Its compute units are assumed."""

from .configs import ANY, DecodeConfig, PrefillConfig
from .facts import KIB, OCP, Arch

ARCH = Arch(
    name="gfx1250",
    vendor="amd",
    num_cus=256,
    wave_size=32,
    shared_bytes=320 * KIB,
    shared_padding=6,
    matrix="wmma",
    hardware_fp8=OCP,
    aiter_splits_decode=True,
    prefill={
        ANY: {
            64: PrefillConfig(128, 64, 4, 2),
            128: PrefillConfig(128, 32, 8, 2),
            256: PrefillConfig(64, 32, 8, 2),
            512: PrefillConfig(32, 16, 8, 2),
        }
    },
    decode={
        ANY: {
            128: DecodeConfig(64, 4, 2, 2),
            256: DecodeConfig(64, 4, 2, 2),
            512: DecodeConfig(16, 8, 2, 2, 32),
        }
    },
)
