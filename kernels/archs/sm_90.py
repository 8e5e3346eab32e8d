"""Hopper: H100 and H200. The sweeps were run on an H200."""

from collections.abc import Mapping
from typing import Any

from .configs import ANY, FP8, KV_DESCRIPTOR, DecodeConfig, PrefillConfig
from .facts import KIB, OCP, Arch

OPTIMISTIC: Mapping[str, Any] = {"optimistic": True, "frozen_max": True, "partial_sums": 8, "one_loop_tiles": 4, "phase_bytes": 16 << 20}
DECODE: Mapping[str, Any] = {"one_loop": True, "whole_tiles": 4, "unsplit_keys": 1024, "reduce_num_warps": 1}
FETCHED: Mapping[str, Any] = {**OPTIMISTIC, "kv_descriptor": True, "page_copy_from": 1024}

ARCH = Arch(
    name="sm_90",
    vendor="nvidia",
    products={"H100": 132, "H200": 132},
    num_cus=132,
    wave_size=32,
    shared_bytes=227 * KIB,
    matrix="wgmma",
    hardware_fp8=OCP,
    prefill={
        ANY: {
            64: PrefillConfig(64, 64, 4, 4, **OPTIMISTIC, page_copy_from=1024, measured="H200: best of twelve at 1x8192, D 64, bf16"),
            128: PrefillConfig(128, 64, 8, 3, **OPTIMISTIC, page_copy_from=1024, measured="H200: best of three at 1x8192, x-packed, bf16"),
            256: PrefillConfig(128, 64, 8, 2, **OPTIMISTIC, page_copy_from=1024),
            512: PrefillConfig(64, 32, 8, 2),
        },
        KV_DESCRIPTOR: {
            64: PrefillConfig(128, 64, 4, 3, **FETCHED, measured="H200: best of six at 4x4096, 64/8/64, bf16"),
            128: PrefillConfig(64, 64, 4, 3, **FETCHED, measured="H200: best of forty at 1x8192, 4x4096 and 16 x 512 of 2048, bf16"),
            256: PrefillConfig(128, 64, 8, 2, **FETCHED, measured="H200: best of eight at 1x8192, D 256, bf16"),
        },
        FP8: {128: PrefillConfig(128, 128, 8, 3, **OPTIMISTIC, page_copy_from=1024, measured="H200: best of twenty-five at 1x8192, D 128")},
    },
    decode={
        ANY: {
            64: DecodeConfig(64, 2, 3, 4, 128, **DECODE, measured="H200: best of twelve at 64x8192, D 64, bf16"),
            128: DecodeConfig(64, 4, 3, 2, 128, **DECODE, measured="H200: within 1 % of the best of thirty at 64x8192 and 256x2048, bf16"),
            256: DecodeConfig(32, 4, 3, 2, 64, **DECODE),
            512: DecodeConfig(32, 8, 2, 1, 64, **DECODE),
        },
        FP8: {
            128: DecodeConfig(
                64, 2, 3, 4, 64, partial_sums=16, **{**DECODE, "one_loop": False}, measured="H200: best of thirty at 64x8192, D 128"
            )
        },
    },
)
