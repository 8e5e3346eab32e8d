"""Tables of docs/rocm.md: who serves what is what the rules and the plans answer, the times are those of a result file.

`python tests/test_rocm_docs.py` rewrites both.
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import purepage as pp

pytest.importorskip("torch")
pytest.importorskip("triton")
from purepage.bridges import triton as bridge
from purepage.bridges.aiter import rules as aiter_rules
from purepage.functional.attention import paged_attention_call
from purepage.functional.calls import QkNormRopeUpdateCall, RopeUpdateCall, UpdateCacheCall
from purepage.functional.dispatch import Plan
from purepage.functional.target import Settings, named_target
from purepage.kernels.archs import amd_archs

PAGE = Path(__file__).parents[1] / "docs/rocm.md"
RESULTS = PAGE.parents[1] / "benchmarks/results/h200_aiter_in_jit.json"


def cache_of(content, dtype):
    spec = pp.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=8, head_size=128, dtype=dtype, content=content)
    return jax.eval_shape(lambda: pp.init_cache(spec))


def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(content="packed", dtype="bfloat16", new=4, per_head=False):
    metadata = pp.make_metadata([new] * 2, [20, 20], [[0, 1], [2, 3]], block_size=16)
    scale = jnp.ones((1, 8)) if per_head else 1.0
    cache = pp.init_cache(cache_of(content, dtype).spec, k_scale=scale, v_scale=scale)
    return paged_attention_call(jnp.zeros((2 * new, 32, 128), jnp.bfloat16), cache, metadata)


def write(content="packed", dtype="bfloat16"):
    new = array((8, 8, 128))
    slots = array((8,), jnp.int32)
    return UpdateCacheCall(cache=cache_of(content, dtype), key=new, value=new, slot_mapping=slots, layer=array((), jnp.int32))


def rope(content="packed"):
    given = {name: getattr(write(content), name) for name in ("cache", "key", "value", "slot_mapping", "layer")}
    return RopeUpdateCall(
        query=array((8, 32, 128)), positions=array((8,), jnp.int32), cos_sin_cache=array((64, 128)), is_neox=True, **given
    )


def qk_norm(section=None):
    return QkNormRopeUpdateCall(
        qkv=array((8, 48 * 128)),
        q_weight=array((128,)),
        k_weight=array((128,)),
        positions=array((3, 8) if section else (8,), jnp.int32),
        cos_sin_cache=array((64, 128)),
        cache=cache_of("packed", "bfloat16"),
        slot_mapping=array((8,), jnp.int32),
        layer=array((), jnp.int32),
        num_heads=32,
        eps=1e-6,
        is_neox=True,
        mrope_section=section,
        is_interleaved=False,
    )


ROWS = {
    "attention, packed or flash": ("paged_attention", attention),
    "attention, x-packed": ("paged_attention", lambda: attention("xpacked")),
    "attention, shuffled": ("paged_attention", lambda: attention("shuffled")),
    "attention, float8_e4m3fnuz cache": ("paged_attention", lambda: attention(dtype="float8_e4m3fnuz")),
    "attention, float8_e4m3fn cache": ("paged_attention", lambda: attention(dtype="float8_e4m3fn")),
    "attention, float8_e5m2 cache": ("paged_attention", lambda: attention(dtype="float8_e5m2")),
    "attention, float8_e4m3fn cache, a scale per KV head": ("paged_attention", lambda: attention(dtype="float8_e4m3fn", per_head=True)),
    "decode, float8_e4m3fn cache, a scale per KV head": (
        "paged_attention",
        lambda: attention(dtype="float8_e4m3fn", new=1, per_head=True),
    ),
    "write, packed": ("update_cache", write),
    "write, flash, x-packed or shuffled": ("update_cache", lambda: write("flash")),
    "write, float8_e4m3fn cache": ("update_cache", lambda: write(dtype="float8_e4m3fn")),
    "rope + write, packed or flash": ("rope_and_update_cache", rope),
    "rope + write, x-packed": ("rope_and_update_cache", lambda: rope("xpacked")),
    "rope + write, shuffled": ("rope_and_update_cache", lambda: rope("shuffled")),
    "qk-norm + rope + write": ("qk_norm_rope_and_update_cache", qk_norm),
    "qk-norm + mrope + write": ("qk_norm_mrope_and_update_cache", lambda: qk_norm((24, 20, 20))),
}


def table():
    archs = amd_archs(configured_alone=True)
    lines = ["| call | " + " | ".join(archs) + " |", "|---" * (len(archs) + 1) + "|"]
    for name, (operation, make) in ROWS.items():
        call, cells = make(), []
        for arch in archs:
            serving = []
            target = named_target(arch, Settings())
            if isinstance(bridge.plan_launches(operation, call, target), Plan):
                serving.append("triton")
            if not aiter_rules.unsupported_reasons(operation, call, target, explicit=True):
                serving.append("aiter")
            cells.append(", ".join(serving) or "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def times():
    """The table of the run of `benchmarks/aiter_in_jit.py` on an H200."""
    if not RESULTS.is_file():
        return "Not run yet.\n"
    content = json.loads(RESULTS.read_text())
    versions = content["machine"]["versions"]
    cells: dict[str, dict[str, str]] = {}
    for row in content["rows"]:
        column = row["contender"] if row["contender"] != "purepage aiter" else f"AITER, {row['switches']}"
        shown = f"{row['us']:.0f}" + "*" * (row.get("recorded") in ("no", "in part")) if row["status"] == "ok" else row["status"]
        cells.setdefault(row["case"], {})[column.replace("purepage triton", "ours")] = shown
    columns = list(dict.fromkeys(column for row in cells.values() for column in row if column != "all"))
    named = ", ".join(f"{name} {versions[name]}" for name in ("jax", "torch", "triton", "amd-aiter") if name in versions)
    lines = [f"`{content['command'].strip()}`, {content['machine']['device']}, {named}:", ""]
    lines += ["| us a call | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    lines += [f"| {case} | " + " | ".join(row.get(c, row.get("all", "")) for c in columns) + " |" for case, row in cells.items()]
    return "\n".join(lines) + "\n"


GENERATED = {"who serves what": table, "times": times}


def with_generated(page):
    for name, generate in GENERATED.items():
        before, rest = page.split(f"<!-- generated: {name} -->\n")
        _, after = rest.split("<!-- end -->", 1)
        page = f"{before}<!-- generated: {name} -->\n{generate()}<!-- end -->{after}"
    return page


def test_the_tables_of_the_page_are_what_rules_and_plans_answer_and_what_was_measured():
    assert PAGE.read_text() == with_generated(PAGE.read_text())


def test_a_call_that_python_made_is_marked_and_one_that_failed_has_no_time(tmp_path, monkeypatch):
    ours = {"case": "decode", "contender": "purepage triton", "switches": "", "status": "ok", "us": 9.6, "recorded": "yes"}
    aiter = {"case": "decode", "contender": "purepage aiter", "us": 31.2, "recorded": "no"}
    rows = [ours, {**aiter, "switches": "none", "status": "ok"}, {**aiter, "switches": "finite", "status": "wrong"}]
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"command": "python", "machine": {"device": "X", "versions": {"jax": "1"}}, "rows": rows}))
    monkeypatch.setitem(globals(), "RESULTS", path)
    assert times().splitlines()[2:] == [
        "| us a call | ours | AITER, none | AITER, finite |",
        "|---|---|---|---|",
        "| decode | 10 | 31* | wrong |",
    ]


if __name__ == "__main__":
    PAGE.write_text(with_generated(PAGE.read_text()))
