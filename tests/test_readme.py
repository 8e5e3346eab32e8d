"""The README tells the truth: its programs run, its table is the capabilities, its commands exist.

`python tests/test_readme.py` writes the table anew.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import purepage as pp
from purepage import Capabilities
from purepage.functional.cache import CACHE_DTYPES

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TABLE = re.compile(r"(<!-- backends:.*?-->\n).*?(<!-- end -->)", re.DOTALL)
BACKENDS = (pp.rocm_attn.CAPABILITIES, pp.rocm_aiter_unified_attn.CAPABILITIES)


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
    "this step's tokens": lambda c: "at full precision, from key and value" if c.full_precision_new_tokens else "from the cache",
}


def table() -> str:
    lines = [("", *(f"`{c.name}`" for c in BACKENDS)), ("---",) * 3]
    lines += [(row, *(cell(c) for c in BACKENDS)) for row, cell in ROWS.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(text: str) -> str:
    assert TABLE.search(text)
    return TABLE.sub(lambda found: found[1] + table() + found[2], text)


def test_the_table_of_backends_is_their_capabilities():
    assert README.read_text() == with_table(README.read_text())


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
    for name in re.findall(r"`(\w+)`", functions):
        assert callable(getattr(pp, name)), name


if __name__ == "__main__":
    README.write_text(with_table(README.read_text()))
