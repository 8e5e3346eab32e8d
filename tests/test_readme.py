"""The README is correct: its programs run, its tables are the capabilities and the measurements, its commands and files exist.

`PYTHONPATH=. python tests/test_readme.py` rewrites the tables.
"""

import importlib
import inspect
import json
import pkgutil
import re
from collections.abc import Callable
from pathlib import Path

import pytest

import purepage as pp
from benchmarks import summary
from purepage import Capabilities
from purepage.functional import backends
from purepage.functional.cache import CACHE_DTYPES
from purepage.functional.dispatch import IMPLEMENTATIONS

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TABLE = re.compile(r"(<!-- backends:.*?-->\n).*?(<!-- end -->)", re.DOTALL)
SPEED = re.compile(r"(<!-- speed:.*?-->\n).*?(<!-- end -->)", re.DOTALL)
CASES = {
    **dict.fromkeys(("decode 1 x 32768", "decode 8 x 4096", "decode 64 x 8192", "decode 256 x 2048", "decode 64 x 8192, block 16"), "B/s"),
    **dict.fromkeys(("decode 64 x 8192, fp8 cache", "decode 16 x 32768, window 4096", "decode ragged, mooncake_conversation"), "B/s"),
    **dict.fromkeys(("prefill 1 x 8192", "prefill 1 x 8192, fp8 cache", "prefill 4 x 4096", "chunked 16 x (512 of 2048)"), "FLOP/s"),
    "mixed 2048 + 63 x 4096": "",
}
"""Cases of the table of speeds, with the rate that limits each."""
PEERS = {"AITER Triton": "", "ejkernel Triton": "", "cuDNN paged (jax)": "cuDNN paged", "torch SDPA": "torch SDPA (dense)"}
MODULES = {
    found.name: module
    for found in pkgutil.iter_modules(backends.__path__)
    if hasattr(module := importlib.import_module(f"{backends.__name__}.{found.name}"), "CAPABILITIES")
}
BACKENDS = sorted((module.CAPABILITIES for module in MODULES.values()), key=lambda c: len(c.name))


def yes(field: str) -> Callable[[Capabilities], str]:
    def cell(capabilities: Capabilities) -> str:
        if getattr(capabilities, field):
            return "yes"
        return "yes, beyond the class" if capabilities.serves(field) else "no"

    return cell


def names(values: tuple) -> str:
    return ", ".join(str(getattr(value, "name", value)) for value in values) or "none"


ROWS: dict[str, Callable[[Capabilities], str]] = {
    "model dtypes": lambda c: names(c.dtypes) + (", float32" if "dtypes" in c.beyond else ""),
    "cache dtypes": lambda c: names(CACHE_DTYPES),
    "head sizes": lambda c: names(c.head_sizes) if c.head_sizes else f"any from {c.min_head_size}",
    "block sizes": lambda c: (
        f"multiples of {c.kernel_block_size_multiple}" + (f", best {c.preferred_block_size}" * bool(c.preferred_block_size))
    ),
    "cache contents": lambda c: names(c.contents),
    "cache orders": lambda c: names(c.layouts),
    "the same with a KV connector": lambda c: names(c.layouts_with_kv_connector),
    "attention types": lambda c: names(c.attn_types),
    "sliding window": yes("sliding_window"),
    "logits soft cap": yes("logits_soft_cap"),
    "ALiBi": yes("alibi"),
    "sinks": yes("sinks"),
    "not causal": yes("non_causal"),
    "multimodal prefix": yes("mm_prefix"),
    "fp8 queries from vLLM": yes("quant_query_input"),
    "fused fp8 output": lambda c: "static, per tensor",
    "fused rope + write": yes("fused_rope_kvcache"),
    "fused qk-norm + rope + write": yes("fused_qk_norm_rope_kvcache"),
    "fused qk-norm + mrope + write": yes("fused_qk_norm_mrope_kvcache"),
    "this step's tokens": lambda c: (
        "at full precision, from key and value, where a sequence has more than one" if c.full_precision_new_tokens else "from the cache"
    ),
}


def table() -> str:
    lines = [("", *(f"`{c.name}`" for c in BACKENDS)), ("---",) * (1 + len(BACKENDS))]
    lines += [(row, *(cell(c) for c in BACKENDS)) for row, cell in ROWS.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def speeds() -> str:
    """Our time and rate, and the time of the peers as a multiple, from the summary of the run on an H200."""
    rows = summary.rows_of(json.loads((summary.RESULTS / "h200.json").read_text()))
    times = {(row["case"], row["contender"]): row for row in rows if row["status"] == "ok"}
    lines = [("case", "purepage", *(shown or name for name, shown in PEERS.items())), ("---",) * (2 + len(PEERS))]
    for case, unit in CASES.items():
        ours = times[case, "purepage triton"]
        rate = {
            "B/s": f", {ours['bytes_per_s'] / 1e12:.2f} TB/s",
            "FLOP/s": f", {ours['flops_per_s'] / 1e12:.0f} TFLOP/s",
            "": "",
        }[unit]
        ratios = (f"{times[case, peer]['us'] / ours['us']:.2f}x" if (case, peer) in times else "" for peer in PEERS)
        lines.append((case, f"{ours['us']:.0f} us{rate}", *ratios))
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_tables(text: str) -> str:
    assert TABLE.search(text) and SPEED.search(text)
    text = SPEED.sub(lambda found: found[1] + speeds() + found[2], text)
    return TABLE.sub(lambda found: found[1] + table() + found[2], text)


@pytest.mark.parametrize("name", MODULES)
def test_every_backend_is_public(name):
    assert hasattr(pp, name), f"src/purepage/__init__.py does not import {name}"
    assert importlib.import_module(f"purepage.{name}").CAPABILITIES is MODULES[name].CAPABILITIES


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_the_readme_says_where_every_implementation_ran(name):
    assert f"\n| `{name}` |" in README.read_text() or f'`"{name}"` refuses every call' in README.read_text()


def test_the_tables_are_the_capabilities_and_what_was_measured():
    assert README.read_text() == with_tables(README.read_text())


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


def test_the_readme_has_programs():
    assert len(blocks("python")) >= 3


@pytest.mark.parametrize("program", blocks("python"), ids=range(len(blocks("python"))))
def test_a_program_of_the_readme_runs_and_prints_what_its_comment_says(program, capsys):
    exec(compile(program, "README.md", "exec"), {"__name__": "readme"})
    out = capsys.readouterr().out
    for expected in re.findall(r"^print\(.*\)  # (.*)$", program, re.MULTILINE):
        assert expected in out


def test_the_commands_of_the_readme_are_targets_of_the_makefile():
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    commands = re.findall(r"make ([a-z]+)", README.read_text())
    assert {"demo", "test"} <= set(commands) <= set(targets)


def test_files_and_names_of_the_readme_exist():
    text = README.read_text()
    for path in re.findall(r"`((?:docs|notebooks|benchmarks|\.ci)[/\w.]*)`", text):
        assert (ROOT / path).exists(), path
    functions = re.search(r"\| functions .*?\n\n", text, re.DOTALL)[0]
    listed = set(re.findall(r"`(\w+)`", functions))
    assert listed == {name for name in pp.__all__ if inspect.isfunction(getattr(pp, name))}


if __name__ == "__main__":
    README.write_text(with_tables(README.read_text()))
