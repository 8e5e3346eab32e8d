"""The bounds on paper: the main loop is found in assembly that was made up, and counted and timed as a hand does it."""

import json
from dataclasses import replace

import pytest

from benchmarks import amd_loop, amd_paper, amd_paper_text, cases
from benchmarks.amd_loop import Instruction
from purepage.kernels.compile_check import ResourceUsage

ASSEMBLY = """
\t.text
kernel:
\ts_load_dwordx2 s[0:1], s[4:5], 0x0
.LBB0_1:                                ; =>This Loop Header: Depth=1
\tv_mov_b32_e32 v0, 0
.LBB0_2:                                ; =>  This Inner Loop Header: Depth=2
\t.loc\t1 10 3                           ; a.py:10:3
\tglobal_load_dword v9, v8, s[2:3]
\tbuffer_load_dwordx4 v[10:13], v1, s[8:11], 0 offen
\tbuffer_load_dwordx4 v[14:17], v2, s[8:11], 0 offen
\ts_waitcnt vmcnt(1)
\tds_write_b128 v3, v[10:13]
\ts_waitcnt vmcnt(0) lgkmcnt(0)
\ts_barrier
\tds_read2_b64 v[18:21], v4 offset1:16
.LBB0_3:                                ; a waterfall
\tv_readfirstlane_b32 s4, v5
\ts_cbranch_execnz .LBB0_3
\tv_mfma_f32_32x32x8_bf16 v[32:47], v[18:19], v[20:21], 0
\tv_exp_f32_e32 v6, v32
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_pk_mul_f32 v[48:49], v[48:49], v[6:7]
\ts_cbranch_scc1 .LBB0_2
\ts_cbranch_scc0 .LBB0_5
.LBB0_4:                                ; the same, with masks
\tv_mfma_f32_32x32x8_bf16 v[32:47], v[18:19], v[20:21], 0
\tbuffer_load_dwordx4 v[10:13], v1, s[8:11], 0 offen
\tv_cmp_gt_i32_e32 vcc, v1, v2
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\tv_cndmask_b32_e32 v6, v6, v7, vcc
\ts_cbranch_scc1 .LBB0_4
.LBB0_5:
\ts_cbranch_scc1 .LBB0_1
\ts_endpgm
"""


def test_the_main_loop_is_the_innermost_one_with_matrix_instructions_that_masks_least():
    body = amd_loop.main_loop(ASSEMBLY)
    assert body[0] == Instruction(".LBB0_2", label=True)
    assert body[-1] == Instruction("s_cbranch_scc1", ".LBB0_2")
    assert len(body) == 17


def test_a_kernel_without_matrix_instructions_has_no_main_loop():
    assert amd_loop.main_loop(ASSEMBLY.replace("v_mfma_f32_32x32x8_bf16", "v_pk_fma_f32")) == []


def test_a_loop_body_holds_what_a_hand_counts():
    counts = amd_loop.count(amd_loop.main_loop(ASSEMBLY))
    assert counts == amd_loop.Counts(
        matrix=(("v_mfma_f32_32x32x8_bf16", 1),),
        loads=((128, 2), (32, 1)),
        vector=4,
        transcendental=1,
        selects=1,
        lane_moves=1,
        lds_read=16,
        lds_write=16,
        lds_ops=2,
        scratch=0,
        barriers=1,
        inner_loops=1,
        scalar_loads=0,
    )
    assert (counts.load_bytes, counts.bytes_per_load) == (36, 16)


@pytest.mark.parametrize(
    ("name", "flops", "cycles"),
    [
        ("v_mfma_f32_32x32x8_bf16", 16384, 32),
        ("v_mfma_f32_16x16x16_f16", 8192, 16),
        ("v_mfma_f32_32x32x16_bf16", 32768, 32),
        ("v_mfma_f32_16x16x32_fp8_fp8", 16384, 16),
        ("v_mfma_f32_16x16x4_f32", 2048, 32),
        ("v_mfma_f32_16x16x128_f8f6f4", 65536, 32),
    ],
)
def test_matrix_instructions_at_their_published_rate_make_the_parts_published_peak(name, flops, cycles):
    line = Instruction(name)
    assert (amd_loop.matrix_flops(line), amd_loop.matrix_cycles(line)) == (flops, cycles)


@pytest.mark.parametrize(("arch", "name"), [("gfx942", "v_mfma_f32_32x32x8_bf16"), ("gfx950", "v_mfma_f32_32x32x16_bf16")])
def test_the_parts_peak_is_every_matrix_unit_at_the_rate_of_the_widest_instruction(arch, name):
    part, line = amd_paper.PARTS[arch], Instruction(name)
    peak = amd_loop.matrix_flops(line) / amd_loop.matrix_cycles(line) * 4 * part.compute_units * part.hertz
    assert peak == pytest.approx(part.flops_per_s, rel=0.01)


def test_a_wave_alone_waits_as_its_loop_says():
    timed = amd_loop.alone(amd_loop.main_loop(ASSEMBLY), wide_latency=1000, narrow_latency=400, transcendental=16)
    # Three loads take 12 cycles to issue. The first wide one left at 4 and has its value at 1004, which is 992 cycles' wait: the narrow one
    # was there before. The LDS write takes the 4 that the second load needs more, and is done 64 after it began: 1068. Then barrier, LDS
    # read, readfirstlane and branch, the matrix product: 16 to issue until it starts, 32 until the exponential has its operand; that, two
    # more and the branch.
    assert timed.cycles == 1068 + 16 + 32 + 16 + 4 + 4 + 4
    assert timed.stalled == 992
    assert timed.in_flight == 32


CASE = cases.Case("decode 64 x 8192", cases.decode(64, 8192))


def made_up(**usage) -> amd_paper.Kernel:
    needed = ResourceUsage("kernel", "gfx942", 4, vgprs=128, lds_bytes=16384)
    body = tuple(amd_loop.main_loop(ASSEMBLY))
    return amd_paper.Kernel("purepage", CASE, replace(needed, **usage), 16, 64, 1, 304 * 8, body)


@pytest.mark.parametrize(
    ("usage", "busy", "expected"),
    [
        ({}, 10**6, (4, 4, 4)),  # 128 registers of 512: 4 waves a SIMD, and as much LDS as 4 workgroups have
        ({}, 304 * 2, (4, 2, 2)),  # the grid fills half
        ({"vgprs": 129}, 10**6, (3, 3, 3)),  # 136 of them, in steps of 8
        ({"vgprs": 40, "num_warps": 2, "lds_bytes": 0}, 10**6, (16, 16, 8)),  # 8 waves at most
        ({"vgprs": 256, "lds_bytes": 40000}, 10**6, (1, 1, 1)),
    ],
    ids=["registers", "grid", "granule", "wave slots", "LDS"],
)
def test_residency_by_hand(usage, busy, expected):
    found = amd_paper.residency(made_up(**usage).usage, amd_paper.PARTS["gfx942"], busy)
    assert (found.fitting, found.resident, found.waves_per_simd) == expected


def test_bounds_by_hand():
    kernel, part = made_up(), amd_paper.PARTS["gfx942"]
    waves = amd_paper.residency(kernel.usage, part, kernel.busy)
    derived = amd_paper.paper(kernel, amd_loop.count(kernel.body), part, waves)
    assert derived.kv_bytes == 2 * 64 * 128 * 2
    assert derived.flops == 4 * 16 * 64 * 128
    assert derived.matrix_flops == 4 * 16384
    # One wave a SIMD and workgroup: 3 plain vector instructions, one transcendental, one matrix instruction's issue.
    assert derived.cycles == {"matrix": 32, "vector": 3 * 4 + 16 + 4, "lds": 256 * 32 / 128, "cache": 256 * 36 / 64}
    assert derived.bounds["memory"] == 5.3e12
    assert derived.bounds["matrix cycles"] == pytest.approx(32768 / 32 * 304 * 2.1e9)
    assert derived.bounds["bytes in flight"] == pytest.approx(4 * 256 * 32 * 304 / 800e-9)
    assert derived.bounds["waves alone"] == pytest.approx(4 * 32768 * 304 * 2.1e9 / derived.alone.cycles)
    assert derived.limit == "memory"


def test_the_document_calls_every_derived_number_a_bound_on_paper():
    row = json.loads(json.dumps(amd_paper.record(made_up(), "gfx942")))
    other = {**row, "contender": "AITER", "kernel": "theirs"}
    text = amd_paper_text.document([row, other], [row], [], {"triton": "3.9"}, {"gfx942": {"name": "MI300X"}})
    (summary,) = (line for line in text.splitlines() if line.startswith("| decode 64 x 8192 | 5.30 TB/s | memory"))
    assert summary.count("5.30 TB/s") == 2
    assert "| kernel | kernel | theirs |" in text
    for line in text.splitlines():
        if "TB/s" in line and "Parts:" not in line and line != summary:
            assert line.startswith("| bound on paper:")
    assert "| bound on paper | purepage |" in text
