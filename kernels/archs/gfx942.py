"""CDNA 3: Instinct MI300 series."""

from .configs import ANY, FP8, WAVES_2, DecodeConfig, PrefillConfig
from .facts import FNUZ, KIB, Arch

ARCH = Arch(
    name="gfx942",
    vendor="amd",
    products={"MI300X": 304, "MI300A": 228, "MI325X": 304},
    steppings=("gfx940", "gfx941"),
    num_cus=304,
    wave_size=64,
    shared_bytes=64 * KIB,
    matrix="mfma",
    hardware_fp8=FNUZ,
    vllm_e4m3="float8_e4m3fnuz",
    aiter_e4m3="float8_e4m3fnuz",
    aiter_hip=True,
    prefill={
        ANY: {
            64: PrefillConfig(64, 64, 4, 1, WAVES_2),
            128: PrefillConfig(128, 64, 4, 1, WAVES_2, masked_block_n=32),
            256: PrefillConfig(64, 32, 4, 1),
            512: PrefillConfig(32, 16, 4, 1),
        }
    },
    decode={
        ANY: {
            128: DecodeConfig(64, 2, 1, 4, masked_block_n=32, values_first=True),
            256: DecodeConfig(32, 4, 1, 2),
            512: DecodeConfig(16, 4, 1, 2, 32),
        },
        FP8: {128: DecodeConfig(32, 1, 1, 8, masked_block_n=16, values_first=True)},
    },
)
