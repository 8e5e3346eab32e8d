"""RDNA 3: Radeon RX 7900 series."""

from .configs import ANY, DecodeConfig, PrefillConfig
from .facts import KIB, Arch

ARCH = Arch(
    name="gfx1100",
    vendor="amd",
    products={"RX 7900 XTX": 48, "RX 7900 XT": 42, "PRO W7900": 48},
    num_cus=48,
    wave_size=32,
    shared_bytes=64 * KIB,
    matrix="wmma",
    prefill={
        ANY: {
            64: PrefillConfig(64, 32, 4, 1),
            128: PrefillConfig(32, 16, 8, 1),
            256: PrefillConfig(16, 16, 8, 1, reload_query=128),
            512: PrefillConfig(16, 16, 8, 1, reload_query=128),
        }
    },
    decode={
        ANY: {
            64: DecodeConfig(32, 4, 1, 4, 32),
            128: DecodeConfig(16, 8, 1, 4, 16, reload_query=64),
            256: DecodeConfig(16, 8, 1, 4, 16, reload_query=128),
            512: DecodeConfig(16, 16, 1, 4, 16, reload_query=128),
        }
    },
)
