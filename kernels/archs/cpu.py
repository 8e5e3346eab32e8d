"""Triton's interpreter on a CPU."""

from .configs import ANY, DecodeConfig, PrefillConfig
from .facts import Arch

ARCH = Arch(
    name="cpu",
    vendor="cpu",
    num_cus=4,
    wave_size=1,
    shared_bytes=1 << 30,
    matrix=None,
    prefill={ANY: {4096: PrefillConfig(16, 16, 1, 1)}},
    decode={ANY: {4096: DecodeConfig(16, 1, 1, 2, 128)}},
)
