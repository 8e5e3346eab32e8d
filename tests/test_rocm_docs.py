"""docs/rocm.md says what is so: its table is what the rules and the plans answer. `python tests/test_rocm_docs.py` rewrites it."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import purepage as pp

pytest.importorskip("torch")
pytest.importorskip("triton")
from purepage.bridges import aiter_rules
from purepage.bridges import triton as bridge
from purepage.bridges.arch import Arch
from purepage.functional.attention import paged_attention_call
from purepage.functional.calls import QkNormRopeUpdateCall, RopeUpdateCall, UpdateCacheCall

PAGE = Path(__file__).parents[1] / "docs/rocm.md"
START, END = "<!-- table: tests/test_rocm_docs.py -->\n", "<!-- end of table -->"
ARCHS = {"gfx90a": (104, 64), "gfx942": (304, 64), "gfx950": (256, 64), "gfx1100": (96, 32), "gfx1201": (64, 32), "gfx1250": (256, 32)}


def cache_of(content, dtype):
    spec = pp.CacheSpec(num_blocks=8, block_size=16, num_kv_heads=8, head_size=128, dtype=dtype, content=content)
    return jax.eval_shape(lambda: pp.init_cache(spec))


def array(shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(content="packed", dtype="bfloat16"):
    metadata = pp.make_metadata([4, 4], [20, 20], [[0, 1], [2, 3]], block_size=16)
    return paged_attention_call(jnp.zeros((8, 32, 128), jnp.bfloat16), pp.init_cache(cache_of(content, dtype).spec), metadata)


def write(content="packed", dtype="bfloat16"):
    new = array((8, 8, 128))
    slots = array((8,), jnp.int32)
    return UpdateCacheCall(cache=cache_of(content, dtype), key=new, value=new, slot_mapping=slots, layer=array((), jnp.int32))


def rope():
    given = {name: getattr(write(), name) for name in ("cache", "key", "value", "slot_mapping", "layer")}
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
    "write, packed": ("update_cache", write),
    "write, flash, x-packed or shuffled": ("update_cache", lambda: write("flash")),
    "write, float8_e4m3fn cache": ("update_cache", lambda: write(dtype="float8_e4m3fn")),
    "rope + write": ("rope_and_update_cache", rope),
    "qk-norm + rope + write": ("qk_norm_rope_and_update_cache", qk_norm),
    "qk-norm + mrope + write": ("qk_norm_mrope_and_update_cache", lambda: qk_norm((24, 20, 20))),
}


def table():
    lines = ["| call | " + " | ".join(ARCHS) + " |", "|---" * (len(ARCHS) + 1) + "|"]
    for name, (operation, make) in ROWS.items():
        call, cells = make(), []
        for arch, (units, wave) in ARCHS.items():
            serving = []
            if not aiter_rules.rule_refusals(operation, call, True, Arch("rocm", arch, units, wave)):
                serving.append("aiter")
            if not bridge.plan_refusals(operation, call, arch):
                serving.append("triton")
            cells.append(", ".join(serving) or "-")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def parts():
    before, rest = PAGE.read_text().split(START)
    found, after = rest.split(END)
    return before, found, after


def test_the_table_of_the_page_is_what_rules_and_plans_answer():
    assert parts()[1] == table()


if __name__ == "__main__":
    before, _, after = parts()
    PAGE.write_text(before + START + table() + END + after)
