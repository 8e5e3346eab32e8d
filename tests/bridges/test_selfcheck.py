"""The self-check: passes what is right, says why something is refused, and fails loudly on a wrong result."""

import sys
import types

import jax.numpy as jnp
import pytest
from processes import run

import purepage as pp
from purepage.bridges import selfcheck
from purepage.functional import dispatch


def one_value_off(call):
    from purepage.kernels import xla

    out, lse = xla.paged_attention(call)
    return out.at[0, 0, 0].add(1), lse


def nan_in_padding(call):
    from purepage.kernels import xla

    out, lse = xla.paged_attention(call)
    return out.at[-1].set(jnp.nan), lse


def forgets_the_layer(call):
    from dataclasses import replace

    from purepage.kernels import xla

    return xla.update_cache(replace(call, layer=jnp.zeros_like(call.layer)))


@pytest.fixture
def implementation(monkeypatch):
    """Stands in for "pallas" with functions of the test's."""

    def stand_in(**functions):
        from purepage.kernels import xla

        def plan(operation, call, target, *, explicit):
            return dispatch.Plan(functions[operation]) if operation in functions else dispatch.Unsupported(("does no rotation",))

        module = types.SimpleNamespace(SERVES=xla.SERVES, plan=plan)
        monkeypatch.setitem(sys.modules, dispatch.IMPLEMENTATIONS["pallas"], module)

    return stand_in


def grid(*names):
    found = [case for case in selfcheck.cases(selfcheck.current_target()) if case.name in names]
    assert len(found) == len(names)
    return found


@pytest.mark.parametrize("wrong", [one_value_off, nan_in_padding], ids=lambda f: f.__name__)
def test_a_wrong_attention_fails(implementation, wrong):
    implementation(paged_attention=wrong)
    lines = []
    assert selfcheck.check(implementations=["pallas"], grid=grid("attention, mixed"), write=lines.append) == 1
    assert "failed" in lines[1]


def test_a_writer_of_the_wrong_layer_fails(implementation):
    implementation(update_cache=forgets_the_layer)
    assert selfcheck.check(implementations=["pallas"], grid=grid("write, packed"), write=lambda line: None) == 1


def test_a_refusal_is_no_failure_and_says_why(implementation):
    implementation()
    (result,) = selfcheck.outcomes(grid("rope and write"), ["pallas"])
    assert (result.verdict, result.detail) == (selfcheck.REFUSED, "does no rotation")


def test_each_reason_of_a_refusal_is_one_line_with_the_number_of_its_cases(implementation):
    implementation()
    lines, names = [], ("rope and write", "rope and write, xpacked", "rope and write, float16")
    selfcheck.check(implementations=["pallas"], grid=grid(*names), write=lines.append)
    refused = [line for line in lines if "does no rotation" in line]
    assert len(refused) == 1 and "3 cases, the first rope and write" in refused[0] and len(lines) == 3
    assert lines[-1] == "0 passed, 0 failed, 3 refused"


def test_a_machine_where_nothing_passes_is_not_fine(implementation):
    implementation()
    assert selfcheck.check(implementations=["pallas"], grid=grid("rope and write"), write=lambda line: None) == 1


def test_a_kernel_that_does_not_compile_fails(implementation):
    def broken(call):
        raise RuntimeError("out of resources: shared memory")

    implementation(paged_attention=broken)
    (result,) = selfcheck.outcomes(grid("attention, decode"), ["pallas"])
    assert result.verdict == selfcheck.FAILED and "shared memory" in result.detail


def test_the_command_passes_with_xla_and_knows_its_implementations():
    command = [sys.executable, "-m", "purepage.selfcheck", "xla", "--cases", "write"]
    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert sum(line.startswith("xla     passed") for line in lines) == sum(
        "write" in case.name for case in selfcheck.cases(selfcheck.current_target())
    )
    assert pp.__version__ and "0 failed" in lines[-1]
    with pytest.raises(SystemExit):
        from purepage.selfcheck import main

        main(["cutlass"])
