"""The engine beside transformers' own `generate`: same weights, same machine, one run. `python -m examples.smollm2.compare`.

Both are greedy and generate a fixed number of tokens for each prompt, in float32. Rounds alternate, so that a busy machine slows both; the
median of the rounds is printed. The engine shares no blocks between prompts here, since `generate` does not either.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from gguf import GGUFReader

from .__main__ import PROMPTS
from .engine import Engine
from .scheduler import Sequence
from .tokenizer import read_tokenizer
from .weights import Weights, find_gguf, read_config, read_weights

READ_BYTES = 256 * 2**20


def load_transformers(path: Path) -> Any:
    """transformers' model of the same file, in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    return AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()


def generate(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """Greedy tokens of transformers' `generate`, prompts padded on the left."""
    import torch

    longest = max(map(len, prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=mask,
            do_sample=False,
            min_new_tokens=count,
            max_new_tokens=count,
            pad_token_id=0,
            eos_token_id=None,
        )
    return out[:, longest:].tolist()


def serve(engine: Engine, prompts: list[list[int]], count: int) -> tuple[list[list[int]], int]:
    """Greedy tokens of the engine, and its number of steps."""
    sequences = [Sequence(tuple(prompt), count) for prompt in prompts]
    steps = sum(1 for _ in engine.generate(sequences))
    return [sequence.reply for sequence in sequences], steps


def seconds_of(call: Callable[[], Any]) -> tuple[float, Any]:
    """How long a call takes, and its result."""
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def read_bandwidth() -> float:
    """Bytes a second of one pass over an array that no cache holds, by XLA with all its threads."""
    data = jnp.ones(READ_BYTES // 4, jnp.float32)
    total = jax.jit(jnp.sum)
    total(data).block_until_ready()
    return READ_BYTES / min(seconds_of(lambda: total(data).block_until_ready())[0] for _ in range(5))


def weight_bytes(weights: Weights) -> int:
    """Bytes of weights that a decode step reads: all of them, once."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(weights))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m examples.smollm2.compare", description="The engine beside transformers' own generate.")
    parser.add_argument("--prompts", type=int, nargs="+", default=[1, 4], help="prompts at once")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each reply")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    reader = GGUFReader(find_gguf())
    tokenizer, config = read_tokenizer(reader), read_config(reader)
    weights = read_weights(reader, config)
    model = load_transformers(find_gguf())
    bandwidth, size = read_bandwidth(), weight_bytes(weights)
    print(
        f"float32, {size / 2**20:.0f} MiB of weights; reading them once at the {bandwidth / 1e9:.1f} GB/s measured here takes "
        f"{size / bandwidth * 1e3:.0f} ms"
    )
    print("| prompts | purepage, tokens/s | transformers, tokens/s | ratio | ms a step | equal tokens |")
    print("|---|---|---|---|---|---|")
    for count in options.prompts:
        prompts = [tokenizer.encode_chat(text) for text in (PROMPTS * (1 + count // len(PROMPTS)))[:count]]
        engine = Engine(config, weights, max_seqs=count, share_prefixes=False)
        engine.warm_up()
        ours: list[float] = []
        theirs: list[float] = []
        replies: list[list[int]] = []
        expected: list[list[int]] = []
        steps = 1
        for _ in range(options.rounds):
            taken, (replies, steps) = seconds_of(partial(serve, engine, prompts, options.tokens))
            ours.append(taken)
            taken, expected = seconds_of(partial(generate, model, prompts, options.tokens))
            theirs.append(taken)
        same = sum(a == b for mine, other in zip(replies, expected, strict=True) for a, b in zip(mine, other, strict=True))
        mine, other = statistics.median(ours), statistics.median(theirs)
        tokens = count * options.tokens
        print(
            f"| {count} | {tokens / mine:.1f} | {tokens / other:.1f} | {other / mine:.2f}x | {mine / steps * 1e3:.0f} "
            f"| {same} of {tokens} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
