"""RDNA 4: Radeon RX 9070 series."""

from .configs import ANY, DecodeConfig, PrefillConfig
from .facts import KIB, OCP, Arch

ARCH = Arch(
    name="gfx1201",
    vendor="amd",
    products={"RX 9070 XT": 32, "RX 9070": 28, "AI PRO R9700": 32},
    num_cus=32,
    wave_size=32,
    shared_bytes=64 * KIB,
    matrix="wmma",
    hardware_fp8=OCP,
    prefill={
        ANY: {
            64: PrefillConfig(64, 32, 4, 1),
            128: PrefillConfig(64, 32, 8, 1),
            256: PrefillConfig(32, 16, 8, 1),
            512: PrefillConfig(16, 16, 8, 1, reload_query=128),
        }
    },
    decode={
        ANY: {
            64: DecodeConfig(32, 4, 1, 4, 32),
            128: DecodeConfig(32, 8, 1, 4, 32),
            256: DecodeConfig(16, 8, 1, 4, 16),
            512: DecodeConfig(16, 8, 1, 4, 16, reload_query=128),
        }
    },
)
