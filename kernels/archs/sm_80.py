"""Ampere: A100."""

from .configs import ANY, DecodeConfig, PrefillConfig
from .facts import KIB, Arch

ARCH = Arch(
    name="sm_80",
    vendor="nvidia",
    products={"A100": 108},
    num_cus=108,
    wave_size=32,
    shared_bytes=163 * KIB,
    matrix="mma",
    prefill={
        ANY: {
            64: PrefillConfig(128, 64, 4, 3),
            128: PrefillConfig(128, 64, 8, 2),
            256: PrefillConfig(64, 32, 4, 2),
            512: PrefillConfig(32, 32, 4, 1),
        }
    },
    decode={
        ANY: {
            128: DecodeConfig(64, 4, 3, 2, 64),
            256: DecodeConfig(32, 4, 2, 2, 64),
            512: DecodeConfig(16, 4, 2, 1, 32),
        }
    },
)
