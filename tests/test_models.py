"""`docs/models.md`: attention layers of published models, each run at a reduced length against the float64 oracle, or refused and why.

`PYTHONPATH=. python tests/test_models.py` rewrites the page.
"""

import inspect
import tomllib
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import purepage as pp
from purepage.testing import assert_close, random_batch, reference_encoder_attention

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/models.md"
MODELS = tomllib.loads((ROOT / "docs/models.toml").read_text())["model"]
SERVED = [model for model in MODELS if "refused" not in model]
BACKENDS = (pp.rocm_attn, pp.rocm_aiter_unified_attn)
RANGED = ("chunk", "prefix", "images")
WINDOW, CHUNK, PREFIX, IMAGE = 7, 8, 9, (5, 12)
"""Sizes of the masks at the reduced length; a window of one key on both sides of an encoder's token stays one."""


def is_encoder(model):
    return model.get("type") in ("encoder", "encoder_only")


def masks_of(kind):
    return [part for part in RANGED if kind.startswith(part)]


def scores(model, rng):
    """Options of the scores: the published scalars, and vectors that are drawn."""
    heads = model["heads"][0]
    options = {"scale": model.get("scale"), "logits_soft_cap": model.get("cap")}
    if model.get("sinks"):
        options["sinks"] = rng.standard_normal(heads).astype(np.float32)
    if model.get("alibi"):
        options["alibi_slopes"] = (2.0 ** -np.linspace(0.25, 8, heads)).astype(np.float32)
    return {name: value for name, value in options.items() if value is not None}


def config_of(model, kind, options):
    size, value_size = model["size"], model.get("value_size")
    window = WINDOW if kind.startswith("window") else None
    return pp.AttentionConfig(
        num_heads=model["heads"][0],
        num_kv_heads=model["heads"][1],
        head_size=size,
        head_size_v=value_size,
        attn_type=model.get("type", "decoder"),
        sliding_window=window,
        **options,
    )


def spec_of(model, backend):
    """The backend's cache of a model, or why it has none."""
    try:
        return backend.cache_spec(
            num_blocks=9,
            num_kv_heads=model["heads"][1],
            head_size=model["size"],
            head_size_v=model.get("value_size"),
            block_size=16,
            dtype=jnp.float32,
        )
    except pp.UnsupportedError as error:
        return str(error)


def refusal(model, backend):
    """Why a backend does not serve a model; empty where it does."""
    if "refused" in model:
        return model["refused"]
    if any(map(masks_of, model["kinds"])):
        return "`forward` has no `key_range`; `paged_attention` has"
    spec = spec_of(model, backend)
    if isinstance(spec, str):
        return spec
    reasons = [reason for kind in model["kinds"] for reason in backend.supports(config_of(model, kind, {}), spec)]
    return "; ".join(dict.fromkeys(reasons))


def batch_of(model, seed=1, **changes):
    cross = model.get("type") == "encoder_decoder"
    return random_batch(
        seed,
        kind="cross" if cross else "mixed",
        num_seqs=3,
        max_query_len=4,
        max_seq_len=30,
        padding_tokens=1,
        num_heads=model["heads"][0],
        num_kv_heads=model["heads"][1],
        head_size=model["size"],
        head_size_v=model.get("value_size"),
        dtype=np.float32,
        **changes,
    )


def run_layer(model, kind, attend):
    """One layer of a kind: `attend(batch, options)` against the oracle."""
    options = scores(model, np.random.default_rng(0))
    if kind.startswith("window"):
        options["sliding_window"] = WINDOW
    whole = kind in ("prefix", "images")
    batch = batch_of(model, **({"causal": False} if whole else {}))
    position, given = np.asarray(batch.positions), dict(options)
    if kind.startswith("chunk"):
        options["key_range"] = position // CHUNK * CHUNK, (position // CHUNK + 1) * CHUNK
        given["key_range"] = pp.key_ranges.chunked(position, CHUNK)
    if kind == "prefix":
        options["key_range"] = 0 * position, np.maximum(position + 1, PREFIX)
        given["key_range"] = pp.key_ranges.prefix(position, PREFIX)
    if kind == "images":
        inside = (position >= IMAGE[0]) & (position < IMAGE[1])
        options["key_range"] = 0 * position, np.where(inside, IMAGE[1], position + 1)
        given["key_range"] = pp.key_ranges.spans(position, [IMAGE[0]], [IMAGE[1]])
    expected, _ = batch.reference(**options)
    assert_close(attend(batch, given), expected, dtype=np.float32, what=f"{model['name']}, {kind}")


def encode(model, kind, implementation):
    rng, tokens = np.random.default_rng(0), 20
    sizes = ((h, model["size"]) for h in (model["heads"][0], model["heads"][1], model["heads"][1]))
    query, key, value = (rng.standard_normal((tokens, *size)).astype(np.float32) for size in sizes)
    metadata = pp.make_metadata([13, 7], [13, 7], np.zeros((2, 0), np.int64), block_size=16, causal=False)
    window = WINDOW if kind.startswith("window") else None
    expected, _ = reference_encoder_attention(query, key, value, metadata.query_start_loc, sliding_window=window)
    sides = tuple(map(jnp.asarray, (query, key, value)))
    out = pp.encoder_attention(*sides, metadata, sliding_window=window, implementation=implementation)
    assert_close(out, expected, dtype=np.float32)
    for backend in BACKENDS if implementation == "xla" else ():
        assert_close(backend.forward(*sides, None, metadata, config_of(model, kind, {})), expected, dtype=np.float32)


ALWAYS = {
    "xla": ("Llama 4 Scout", "Gemma 3 4B", "PaliGemma 3B", "MPT 7B", "MiniCPM3 4B", "BERT base", "ModernBERT base"),
    "triton": ("PaliGemma 3B",),
    "backends": ("SmolLM2 135M", "PaliGemma 3B", "MiniCPM3 4B", "Whisper large v3, cross attention"),
}
"""Models that `make test` runs; the others are slow."""


def layers(path, models=SERVED):
    """(model, kind) of every layer that is served."""
    return [
        pytest.param(model, kind, id=f"{model['name']}, {kind}", marks=[] if model["name"] in ALWAYS[path] else pytest.mark.slow)
        for model in models
        for kind in model["kinds"]
    ]


def direct(model, kind, implementation):
    if is_encoder(model):
        encode(model, kind, implementation)
        return

    def attend(batch, options):
        return pp.paged_attention(jnp.asarray(batch.query), batch.cache(), batch.metadata, implementation=implementation, **options)

    run_layer(model, kind, attend)


@pytest.mark.parametrize(("model", "kind"), layers("xla"))
@pytest.mark.parametrize("implementation", ["xla"])
def test_every_layer_is_the_oracles_in_plain_jax(model, kind, implementation):
    direct(model, kind, implementation)


@pytest.mark.parametrize(("model", "kind"), layers("triton"))
@pytest.mark.parametrize("implementation", ["triton"])
def test_every_layer_is_the_oracles_in_kernels(model, kind, implementation):
    direct(model, kind, implementation)


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda backend: backend.CAPABILITIES.name)
@pytest.mark.parametrize(("model", "kind"), layers("backends", [model for model in SERVED if not is_encoder(model)]))
def test_every_layer_runs_through_a_backend_or_is_refused_by_name(model, kind, backend):
    """Encoders run through both beside `encoder_attention`."""
    if any(map(masks_of, model["kinds"])):
        assert "key_range" not in inspect.signature(backend.forward).parameters
        return
    spec = spec_of(model, backend)
    if isinstance(spec, str):
        assert "head_size_v" in spec
        return

    def attend(batch, options):
        cache = batch.cache(content=spec.content, order=spec.order)
        config = config_of(model, kind, {name: value for name, value in options.items() if name != "sliding_window"})
        return backend.forward(jnp.asarray(batch.query), None, None, cache, batch.metadata, config, implementation="xla")

    if refusal(model, backend):
        with pytest.raises(pp.UnsupportedError, match="attn_type"):
            run_layer(model, kind, attend)
    else:
        run_layer(model, kind, attend)


def page() -> str:
    """The Markdown of the table."""
    lines = [
        "# Models",
        "",
        "<!-- made by tests/test_models.py from docs/models.toml -->",
        "",
        f"{len(MODELS)} attention layers of published models, entered by hand; corrections are welcome. {len(PUBLISHED)} of them are",
        "compared with the configurations of `transformers` whose defaults describe them. Each kind of layer that is served",
        "runs in the tests, at a reduced length and with random numbers, through `xla`, Triton's interpreter and the backends that",
        "serve it, against the float64 oracle. Heads are query and KV heads; a size with a slash is that of keys and values. Where kinds",
        "differ, `sliding_window` may be data, so that one `lax.scan` runs over all layers; chunks, prefixes and images are",
        "[key ranges](api/key-ranges.md).",
        "",
        "Ten families as whole models (Llama, Qwen3, Gemma 2 and 3, gpt-oss, Llama 4, MPT, Whisper, BERT, PaliGemma) are in",
        "[examples/families](../examples/families/model.py), one block whose differences are data. The tests compare logits and 50 greedy",
        "tokens with `transformers`' own models of the same random weights: `python -m examples.families` prints the differences.",
        "",
        "| model | layers | heads | size | kinds of layers | scores | positions | norm | functions | ROCM_ATTN | ROCM_AITER_UNIFIED_ATTN |",
        "|---" * 11 + "|",
    ]
    for model in MODELS:
        size = f"{model['size']}/{model['value_size']}" if "value_size" in model else str(model["size"])
        found = {"cap": f"cap {model.get('cap')}", "sinks": "sinks", "alibi": "ALiBi", "scale": f"scale {model.get('scale', 0):.4g}"}
        options = ", ".join(text for name, text in found.items() if name in model)
        kind = {"encoder": "encoder: ", "encoder_only": "encoder: ", "encoder_decoder": "cross: "}.get(model.get("type", ""), "")
        ours = f"refused: {model['refused']}" if "refused" in model else "yes"
        sides = ["yes" if not why else f"no: {why}" for why in (refusal(model, backend) for backend in BACKENDS)]
        heads = "/".join(map(str, model["heads"]))
        cells = [model["name"], str(model["layers"]), heads, size, kind + ", ".join(model["kinds"]), options, model["position"]]
        lines.append(f"| {' | '.join([*cells, model.get('norm', ''), ours, *sides])} |")
    lines += [
        "",
        "Not served, and what each would take: MLA's latent cache (a content whose value is the first channels of the key, and kernels",
        "that load a tile once for both products); int8, int4 and nvfp4 caches and scales of each token (a scale buffer beside the",
        "blocks, read with each tile); scales of each sequence (an index of the scale by sequence); a bias for each head and distance",
        "(a table beside `alibi_slopes`).",
    ]
    return "\n".join(lines) + "\n"


PUBLISHED = {
    "Llama 2 7B": "LlamaConfig",
    "Llama 4 Scout": "Llama4TextConfig",
    "Llama 4 Maverick": "Llama4TextConfig",
    "Mistral 7B v0.1": "MistralConfig",
    "Mixtral 8x7B": "MixtralConfig",
    "Gemma 7B": "GemmaConfig",
    "Gemma 2 2B": "Gemma2Config",
    "gpt-oss 120B": "GptOssConfig",
    "Falcon 7B": "FalconConfig",
    "GPT-2": "GPT2Config",
    "GPT-J 6B": "GPTJConfig",
    "GPT-NeoX 20B": "GPTNeoXConfig",
    "Command R 35B": "CohereConfig",
    "OLMo 2 7B": "Olmo2Config",
    "GLM-4 9B": "GlmConfig",
    "MiniCPM3 4B": "MiniCPM3Config",
    "DeepSeek-V3, keys and values expanded": "DeepseekV3Config",
    "BERT base": "BertConfig",
    "ModernBERT base": "ModernBertConfig",
    "MiMo-V2-Flash, full layers": "MiMoV2FlashConfig",
    "MiMo-V2-Flash, window layers": "MiMoV2FlashConfig",
}
"""Rows whose model is the one that the defaults of a configuration of `transformers` describe."""


def published(name):
    """Facts of a row as `transformers` has them; a fact that the configuration does not state is left out."""
    config = getattr(pytest.importorskip("transformers"), PUBLISHED[name])()

    def get(*names):
        return next((getattr(config, each) for each in names if getattr(config, each, None) is not None), None)

    heads, size = get("num_attention_heads"), get("head_dim") or get("hidden_size") // get("num_attention_heads")
    kv_heads = get("num_key_value_heads") or (1 if get("multi_query") else heads)
    kinds, window = list(get("layer_types") or ()), get("sliding_window")
    facts = {"layers": get("num_hidden_layers"), "heads": [heads, kv_heads], "size": size, "cap": get("attn_logit_softcapping")}
    if get("qk_nope_head_dim"):  # keys have channels with and without a position
        facts["size"] = get("qk_nope_head_dim") + get("qk_rope_head_dim")
    if get("v_head_dim"):
        facts["value_size"] = get("v_head_dim")
    if PUBLISHED[name] == "ModernBertConfig":
        window += 1  # the row counts the key itself, on both sides
    if PUBLISHED[name] == "MiMoV2FlashConfig":  # its windows have twice the KV heads and sinks, and the class adds the query to the window
        is_window = "window" in name
        kinds = [kind for kind in kinds if (kind == "sliding_attention") == is_window]
        facts |= {"layers": len(kinds), "heads": [heads, kv_heads * 2 if is_window else kv_heads]}
        window -= 1
    spelt = {"full_attention": "full", "sliding_attention": f"window {window}", "chunked_attention": f"chunk {get('attention_chunk_size')}"}
    facts["kinds"] = sorted({spelt[kind] for kind in kinds} or {f"window {window}" if window else "full"})
    return {name: fact for name, fact in facts.items() if fact is not None}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_row_has_the_heads_sizes_and_masks_that_transformers_has(name):
    (row,) = (model for model in MODELS if model["name"] == name)
    facts = published(name)
    assert {fact: sorted(row[fact]) if fact == "kinds" else row.get(fact) for fact in facts} == facts


def test_the_page_is_made_of_the_table():
    assert PAGE.read_text() == page()
    assert len(MODELS) >= 40 and len({model["name"] for model in MODELS}) == len(MODELS)


if __name__ == "__main__":
    PAGE.write_text(page())
