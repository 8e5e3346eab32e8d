"""A few seconds of the fuzzer with fixed seeds, and what it promises of itself."""

import pytest

import purepage as pp
from fuzz.cases import OPERATIONS, draw, run, smaller
from fuzz.loop import main, outcome
from purepage import UnsupportedError


@pytest.mark.parametrize("number", [number if number < 5 else pytest.param(number, marks=pytest.mark.slow) for number in range(60)])
def test_random_calls_give_the_oracles_result_or_a_refusal(number):
    case = draw(20260101, number)
    failure = outcome(case, "xla")
    assert failure is None, f"{failure}\n{case}"


@pytest.mark.slow
@pytest.mark.parametrize("number", range(30))
def test_random_calls_give_the_oracles_result_or_a_refusal_in_triton(number):
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    case = draw(20260102, number)
    failure = outcome(case, "triton")
    assert failure is None, f"{failure}\n{case}"


def test_a_case_is_a_function_of_its_seed_and_number_and_survives_printing():
    cases = [draw(3, number) for number in range(200)]
    assert cases == [eval(repr(draw(3, number))) for number in range(200)]
    assert len({repr(case) for case in cases}) == 200
    for operation, options in OPERATIONS.items():
        drawn = [case for case in cases if case["operation"] == operation]
        assert drawn and all(set(case) == {"operation", "data_seed", *options} for case in drawn)


def off_by_a_little(attend):
    def wrong(query, cache, metadata, **options):
        out, lse = attend(query, cache, metadata, **options)
        return (out * 1.01 if options["sliding_window"] else out), lse

    return wrong


def test_a_wrong_result_is_found_and_made_smaller(monkeypatch):
    monkeypatch.setattr(pp, "paged_attention", off_by_a_little(pp.paged_attention))
    monkeypatch.setattr("fuzz.cases.DATA_SEEDS", 1)
    plain = {name: choices[0] for name, choices in OPERATIONS["attention"].items()}
    case = {"operation": "attention", "data_seed": 5, **plain, "sliding_window": 16, "sinks": 0.0}
    with pytest.raises(AssertionError, match="out, data seed 5") as caught:
        run(case, "xla")
    small = smaller(case, caught.value, "xla")
    assert small["sliding_window"] == 16 and small["sinks"] is None


def test_the_command_prints_what_fails_with_its_smallest_case(monkeypatch, capsys):
    def fail(*_):
        raise AssertionError("3 of 8 elements are off")

    monkeypatch.setattr("fuzz.loop.run", fail)
    monkeypatch.setattr("fuzz.loop.smaller", lambda case, *_: {**case, "data_seed": -1})
    assert main(["--minutes", "100", "--failures", "2", "--seed", "7", "--first", "4"]) == 1
    printed = capsys.readouterr().out
    assert "FAILED seed 7 case 4: AssertionError: 3 of 8 elements are off" in printed and "smallest: {" in printed
    assert "2 failed; seed 7, cases 4 to 5" in printed


def test_a_refusal_is_no_failure(monkeypatch):
    def refuse(*_, **__):
        raise UnsupportedError("not here")

    monkeypatch.setattr(pp, "update_cache", refuse)
    plain = {name: choices[0] for name, choices in OPERATIONS["write"].items()}
    assert outcome({"operation": "write", "data_seed": 0, **plain}, "xla") is None
