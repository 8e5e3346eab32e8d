"""Pictures show what is there: layouts as the oracle's addresses, masks and weights as the oracle's attention."""

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402

import purepage as pp  # noqa: E402
from purepage import viz  # noqa: E402
from purepage.functional.html import table  # noqa: E402
from purepage.functional.layout import CONTENTS, ORDERS  # noqa: E402
from purepage.testing import random_batch, reference_address  # noqa: E402
from purepage.viz.memory import _owners  # noqa: E402


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("content", CONTENTS)
def test_a_picture_of_a_layout_has_each_element_at_the_oracles_address(content, order):
    spec = pp.CacheSpec(num_blocks=2, block_size=8, num_kv_heads=2, head_size=8, dtype=jnp.float32, content=content, order=order)
    owners = _owners(spec)
    extents = {"num_blocks": 2, "num_kv_heads": 2, "block_size": 8, "head_size": 8, "itemsize": 4}
    for side, block, head, token, dim in itertools.product(range(2), range(2), range(2), range(8), range(8)):
        at = reference_address(content, order, **extents, side=side, layer=0, block=block, head=head, token=token, dim=dim)
        assert owners[at] == (side, block, head, token, dim)


@pytest.mark.parametrize("content", ["packed", "shuffled"])
def test_a_layout_is_drawn_with_a_cell_for_each_element(content):
    spec = pp.CacheSpec(num_blocks=9, block_size=4, num_kv_heads=2, head_size=8, dtype=jnp.float32, content=content, num_layers=3)
    ax = viz.layout(pp.init_cache(spec))
    (image,) = ax.images
    assert image.get_array().size == 3 * 2 * 2 * 4 * 8 and len(ax.texts) == 2 * 2 * 4 * 8
    assert {text.get_text() for text in ax.texts} == {f"{side}{head}.{dim}" for side in "KV" for head in range(2) for dim in range(8)}
    assert len({tuple(color) for color in image.get_array().reshape(-1, 3)}) == 2 * 4  # a token's key and value
    ax.figure.canvas.draw()


MASKS = {"plain": {}, "window": {"sliding_window": 4}, "range": {"key_range": True}, "bias": {"qq_bias": "each"}}


@pytest.mark.parametrize("kind", ["mixed", "cross"])
@pytest.mark.parametrize("name", MASKS)
def test_the_keys_of_a_mask_are_those_whose_values_the_oracle_reads(name, kind):
    batch = random_batch(3, kind=kind, max_seq_len=20, max_query_len=6, **MASKS[name])
    for s in range(len(batch.seq_lens)):
        keep = viz.visible_keys(batch.metadata, s, **batch.masks)
        rows = slice(*np.asarray(batch.metadata.query_start_loc)[s : s + 2])
        table = np.asarray(batch.metadata.block_table)[s]
        assert keep.shape == (batch.query_lens[s], batch.seq_lens[s])
        for k in range(int(batch.seq_lens[s])):
            values = np.nan_to_num(batch.value_cache[0], nan=0.0)
            values[table[k // 16], k % 16] = 1e30
            keys = np.nan_to_num(batch.key_cache[0], nan=0.0)
            out, _ = reference(batch, keys, values)
            np.testing.assert_array_equal(np.abs(out[rows]).max((1, 2)) > 1e9, keep[:, k])


def reference(batch, keys, values):
    return replace(batch, key_cache=keys[None], value_cache=values[None]).reference(**batch.options)


def test_weights_are_the_softmax_of_the_oracles_scores():
    batch = random_batch(3, query_lens=[4, 9], seq_lens=[40, 9], sinks=True, sliding_window=30, unused="zero", head_size=16, num_layers=2)
    options = {"sinks": batch.sinks, "sliding_window": 30, "implementation": "xla"}
    weights = viz.attention_weights(batch.query, batch.cache(content="flash"), batch.metadata, layer=1, **options)
    assert weights.shape == (4, 4, 40)
    table = np.asarray(batch.metadata.block_table)[0]
    k = np.arange(40)
    keys = batch.key_cache[1, table[k // 16], k % 16].repeat(2, axis=1).astype(np.float64)
    scores = np.einsum("qhd,khd->qhk", batch.query[:4].astype(np.float64), keys) / 4
    scores[~np.broadcast_to(viz.visible_keys(batch.metadata, 0, sliding_window=30)[:, None], scores.shape)] = -np.inf
    exact = np.exp(scores)
    exact /= exact.sum(-1, keepdims=True) + np.exp(batch.sinks)[None, :, None]
    np.testing.assert_allclose(weights, exact, atol=1e-6)
    ax = viz.attention_map(batch.query, batch.cache(), batch.metadata, head=3, layer=1, **options)
    np.testing.assert_allclose(np.ma.filled(ax.collections[0].get_array().reshape(4, 40), 0), exact[:, 3], atol=1e-6)


def test_a_pool_is_drawn_with_each_token_where_the_table_says():
    metadata = pp.make_metadata([1, 5], [9, 5], [[3, 1, -1], [3, 0, 2]], block_size=4)
    with pytest.raises(ValueError, match=r"block_table\[0, 2\] is -1.*num_blocks = 6"):
        viz.block_table(metadata, pp.CacheSpec(num_blocks=6, block_size=4, num_kv_heads=1, head_size=32))
    metadata = pp.make_metadata([1, 5], [6, 5], [[3, 1], [3, 0]], block_size=4)
    ax = viz.block_table(metadata, pp.CacheSpec(num_blocks=6, block_size=4, num_kv_heads=1, head_size=32), columns=3)
    assert ax.get_title() == "3 of 6 blocks of 4 tokens, 7 of 24 slots in use"
    assert len(ax.patches) == 6 + 6 + 5 and [text.get_text() for text in ax.texts] == list("012345")
    lanes = [patch for patch in ax.patches if 0 <= patch.get_x() < 1 and patch.get_y() > 1 and patch.get_width() < 0.5]
    assert {round(patch.get_height(), 2) for patch in lanes} == {0.44}  # block 3 has both sequences
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["sequence 0: 1 new of 6", "sequence 1: 5 new of 5", "free"]


def test_occupancy_counts_a_shared_block_once():
    metadata = pp.make_metadata([1, 5], [6, 5], [[3, 1], [3, 0]], block_size=4)
    ax = viz.occupancy([metadata, [1, 0, 2]], num_blocks=6)
    tops = [max(path.vertices[:, 1].max() for path in part.get_paths()) for part in ax.collections]
    assert tops == [2, 3, 3]


def test_a_plan_lists_every_reason_and_launch():
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    batch = random_batch(0)
    found = pp.explain(pp.paged_attention, batch.query, batch.cache(), batch.metadata, arch="MI300X")
    ax = viz.plan(found)
    text = " ".join(cell.get_text().get_text() for cell in ax.tables[0].get_celld().values())
    for choice in found.choices:
        assert choice.implementation == "triton" and choice.program is not None
        assert all(name in text for name in choice.unsupported_reasons)
        assert all(launch.kernel.partition(":")[2] in text for launch in choice.program.launches)
    with pytest.raises(TypeError, match="explanation"):
        viz.plan("plan")


def test_a_roofline_gives_each_point_its_share_of_its_limit():
    ax = viz.roofline({"decode": (1e9, 1e9, 5e-4), "prefill": (2e12, 1e9, 4e-3)}, flops_per_s=7e14, bytes_per_s=4e12)
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["decode: 50%", "prefill: 71%"]
    ax.figure.canvas.draw()


def test_pictures_draw_into_given_axes_and_refuse_what_is_not_there():
    _, ax = pyplot.subplots()
    metadata = pp.make_metadata([2], [6], [[3, 1]], block_size=4)
    assert viz.mask(metadata, ax=ax, sliding_window=3) is ax and "6 of 12 pairs" in ax.get_title()
    with pytest.raises(ValueError, match=r"sequence is 4: it must be in \[0, 1\)"):
        viz.mask(metadata, 4)
    with pytest.raises(TypeError, match="spec is 'packed'"):
        viz.layout("packed")


# --- HTML of notebooks


def test_values_have_tables_of_html_in_notebooks():
    batch = random_batch(0, cache_dtype="float8_e4m3fn", num_layers=2, scales="head")
    cache = batch.cache(content="xpacked")
    html = cache._repr_html_()
    assert html.count("<table") == html.count("</table>") == 2 and "L B 2 H DN" in html and "xpacked, LBHNC" in html and "k_scale" in html
    assert cache.spec._repr_html_() in html
    html = batch.metadata._repr_html_()
    for s, (q, n) in enumerate(zip(batch.query_lens, batch.seq_lens, strict=True)):
        assert all(f">{cell}<" in html for cell in (s, q, n))
    assert "max_query_len 12" in html and ">padding<" in html
    found = pp.explain(pp.paged_attention, batch.query, cache, batch.metadata, arch="gfx942")
    assert "paged_attention on gfx942" in found._repr_html_() and "serves it" in found._repr_html_()


def test_html_of_traced_values_shows_their_shapes():
    batch = random_batch(0)
    seen = []

    @jax.jit
    def step(cache, metadata):
        seen.extend([cache._repr_html_(), metadata._repr_html_()])
        return cache.data

    step(batch.cache(), batch.metadata)
    assert "block_table" in seen[1] and "int32 [6, 6]" in seen[1] and "float32" in seen[0]


def test_html_escapes_what_it_shows():
    assert table("a < b", [("<script>", "x & y")]).count("<script>") == 0
