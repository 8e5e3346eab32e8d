"""The launch of compiled kernels, with a driver that records instead of a GPU."""

import json
import textwrap

import bridge_kernels as kernels
import pytest
from processes import run_python

from purepage.bridges import launcher
from purepage.kernels.launch import Launch

pytest.importorskip("torch")

SETUP = """
import contextlib, json, os, sys
import bridge_kernels as kernels
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from purepage.bridges import launcher
from purepage.kernels.launch import Buffer, Launch, Program

calls = []

class Utils:
    def load_binary(self, *_): return 1, "function", 32, 0, 1024
    def get_device_properties(self, _): return {"max_shared_mem": 1 << 18}
    def unload_module(self, _): pass

class Launcher:
    def __init__(self, src, metadata): self.src, self.metadata = src, metadata
    def __call__(self, *args): calls.append((self.src, self.metadata, args))

class Driver:
    utils, launcher_cls = Utils(), Launcher
    def __init__(self, target): self.target = target
    def get_current_target(self): return self.target
    def get_current_device(self): return 0
    def get_current_stream(self, device): raise_or_zero = 0; return raise_or_zero

torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.current_stream = lambda: None
"""


def run_recorded(script):
    out = run_python(SETUP + textwrap.dedent(script), environment={"TRITON_INTERPRET": "0"})
    return json.loads(out.splitlines()[-1])


def test_a_launch_passes_addresses_and_numbers_in_the_kernels_order_on_the_given_stream():
    recorded = run_recorded(
        """
        driver.set_active(Driver(GPUTarget("cuda", 90, 32)))
        for program in (kernels.scatter_program(2, 64, 24, 5), kernels.total_program(6, 10)):
            names = launcher.buffer_names(program)
            launches = launcher.compiled(program, 0, (True,) * len(names))
            assert launches is launcher.compiled(program, 0, (True,) * len(names))
            for launch in launches:
                launch(1234, [4096 * (i + 1) for i in range(len(names))])
        print(json.dumps([[list(args[:5]), list(args[6:9]), list(args[9:])] for _, _, args in calls]))
        """
    )
    none = [None, None, None]
    assert recorded == [
        [[5, 1, 1, 1234, "function"], none, [4096, 8192, 12288, 16384, 64, 24, 32]],
        [[6, 1, 1, 1234, "function"], none, [4096, 12288, 10, 0.5, 16]],
        [[1, 1, 1, 1234, "function"], none, [12288, 8192, 6, 8]],
    ]


def test_a_descriptor_is_made_of_the_address_of_each_run_and_left_out_where_it_is_not_aligned():
    recorded = run_recorded(
        """
        driver.set_active(Driver(GPUTarget("cuda", 90, 32)))
        import bridge_descriptors
        program = bridge_descriptors.fetch_program()
        for aligned in (True, False):
            (launch,) = launcher.compiled(program, 0, (aligned, True))
            for address in (4096, 8192):
                launch(7, [address, 64])
        found = []
        for src, _, args in calls:
            matrix, other = args[9], args[10]
            found.append([other, None if matrix is None else [matrix.base.data_ptr(), matrix.shape, matrix.strides, matrix.block_shape]])
        print(json.dumps([found, list(calls[0][0].signature.values())[:2]]))
        """
    )
    made = [[16, 128], [128, 1], [8, 64]]
    assert recorded[0] == [[64, [4096, *made]], [64, [8192, *made]], [64, None], [64, None]]
    assert recorded[1] == ["tensordesc<bf16[8, 64]>", "*bf16"]


def test_alignment_and_size_of_a_buffer_decide_what_the_compiler_may_assume():
    recorded = run_recorded(
        """
        driver.set_active(Driver(GPUTarget("hip", "gfx942", 64)))
        found = []
        for slots, aligned in ((64, True), (64, False), (1 << 26, True)):
            program = kernels.scatter_program(2, slots, 24, 5)
            launcher.compiled(program, 0, (aligned, True, True, True))[0](0, [0, 0, 0, 0])
            attributes = dict(map(tuple, calls[-1][0].attrs[(0,)])) if (0,) in calls[-1][0].attrs else {}
            found.append(sorted(attributes))
        print(json.dumps(found))
        """
    )
    assert recorded == [["tt.divisibility", "tt.pointer_range"], ["tt.pointer_range"], ["tt.divisibility"]]


def test_options_of_another_vendor_are_dropped_and_fusion_is_always_said():
    recorded = run_recorded(
        """
        launch = Launch("bridge_kernels:add_kernel", (1, 1, 1), ("x", "y", "out", 16), ("out",), (("BLOCK", 16),),
                        options=(("waves_per_eu", 2), ("maxnreg", 128)))
        targets = GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
        print(json.dumps([launcher.compile_options(launch, target) for target in targets]))
        """
    )
    assert recorded == [{"enable_fp_fusion": True, "maxnreg": 128}, {"enable_fp_fusion": True, "waves_per_eu": 2}]


@pytest.mark.parametrize(
    ("args", "constants"),
    [
        pytest.param(("x", "y", "out"), (("BLOCK", 16),), id="an argument too few"),
        pytest.param(("x", "y", "out", 16, 17), (("BLOCK", 16),), id="an argument too many"),
        pytest.param(("x", "y", "out", 16), (), id="a constant too few"),
        pytest.param(("x", "y", "out", 16), (("BLOCK", 16), ("OTHER", 1)), id="a constant too many"),
    ],
)
def test_a_launch_that_does_not_fit_its_kernel_shows_both(args, constants):
    launch = Launch("bridge_kernels:add_kernel", (1, 1, 1), args, ("out",), constants)
    with pytest.raises(TypeError, match=r"takes \(x_ptr, y_ptr, out_ptr, size, BLOCK: constexpr\): the launch has"):
        launcher.bind(launch, kernels.add_kernel, args)
