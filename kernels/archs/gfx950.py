"""CDNA 4: Instinct MI350 series."""

from .configs import ANY, FP8, WAVES_2, DecodeConfig, PrefillConfig
from .facts import KIB, OCP, Arch

ARCH = Arch(
    name="gfx950",
    vendor="amd",
    products={"MI350X": 256, "MI355X": 256},
    num_cus=256,
    wave_size=64,
    shared_bytes=160 * KIB,
    shared_padding=1,
    matrix="mfma",
    hardware_fp8=OCP,
    aiter_e4m3="float8_e4m3fn",
    aiter_hip=True,
    prefill={
        ANY: {
            64: PrefillConfig(64, 64, 4, 2, WAVES_2, late_clamp=True),
            128: PrefillConfig(128, 64, 4, 2, masked_block_n=32, late_clamp=True),
            256: PrefillConfig(64, 32, 4, 1),
            512: PrefillConfig(32, 32, 4, 1),
        }
    },
    decode={
        ANY: {
            128: DecodeConfig(64, 2, 1, 4, masked_block_n=32, values_first=True),
            256: DecodeConfig(32, 4, 2, 2, late_clamp=True),
            512: DecodeConfig(32, 4, 1, 2, 32),
        },
        FP8: {128: DecodeConfig(64, 2, 2, 4, masked_block_n=32, late_clamp=True, values_first=True)},
    },
)
