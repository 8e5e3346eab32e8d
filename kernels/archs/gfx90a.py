"""CDNA 2: Instinct MI200 series."""

from .configs import ANY, WAVES_2, DecodeConfig, PrefillConfig
from .facts import KIB, Arch

ARCH = Arch(
    name="gfx90a",
    vendor="amd",
    products={"MI210": 104, "MI250": 104, "MI250X": 110},  # of one of the two dies, which is one device
    num_cus=104,
    wave_size=64,
    shared_bytes=64 * KIB,
    matrix="mfma",
    prefill={
        ANY: {
            64: PrefillConfig(64, 64, 4, 1, WAVES_2),
            128: PrefillConfig(128, 32, 4, 1),
            256: PrefillConfig(64, 32, 4, 1),
            512: PrefillConfig(32, 16, 4, 1),
        }
    },
    decode={
        ANY: {
            128: DecodeConfig(64, 4, 1, 2),
            256: DecodeConfig(32, 4, 1, 2),
            512: DecodeConfig(16, 4, 1, 2, 32),
        }
    },
)
