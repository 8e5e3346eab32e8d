"""Generates text with SmolLM2-135M-Instruct through purepage's paged cache: `python -m examples.smollm2 [PROMPT ...]`."""

import argparse
import sys
import time

import jax
import jax.numpy as jnp
from gguf import GGUFReader

import purepage as pp
from purepage.functional.cache import format_bytes
from purepage.functional.fp8 import KV_CACHE_DTYPES
from purepage.functional.layout import CONTENTS, ORDERS

from .engine import BACKENDS, Engine
from .scheduler import Sequence
from .tokenizer import ChatTokenizer, read_tokenizer
from .weights import find_gguf, read_config, read_weights

PROMPTS = (
    "Why is the sky blue?",
    "Write a short poem about the sea at night.",
    "What is the capital of France?",
    "Explain how a bicycle stays upright when it moves.",
    "Tell me a story about a lighthouse keeper.",
    "Write a Python function that returns the n-th Fibonacci number.",
)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m examples.smollm2", description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="user messages, one reply each; without any: a few of our own")
    cache = parser.add_argument_group("attention and its cache")
    cache.add_argument("--backend", choices=list(BACKENDS), default="rocm_attn")
    cache.add_argument("--implementation", choices=["xla", "pallas", "triton", "aiter"], help="default: the best that can serve the call")
    cache.add_argument("--content", choices=list(CONTENTS), help="what lies in a block, and how; default: the backend's own")
    cache.add_argument("--order", choices=ORDERS, help="physical order of the axes; default: the backend's own")
    cache.add_argument(
        "--cache-dtype", choices=["auto", "fp8", "fp8_e4m3", *KV_CACHE_DTYPES], default="auto", help="auto: the model's dtype"
    )
    cache.add_argument("--block-size", type=int, help="tokens a block; default: the backend's own")
    cache.add_argument("--num-blocks", type=int, help="blocks of the cache; default: enough for all running sequences")
    model = parser.add_argument_group("model and scheduler")
    model.add_argument("--dtype", choices=["float32", "bfloat16", "float16"], default="float32", help="of weights and activations")
    model.add_argument("--max-seqs", type=int, default=4, help="sequences that run at once; others wait")
    model.add_argument("--chunk", type=int, default=64, help="tokens of a step that has prompts in it")
    model.add_argument("--max-seq-len", type=int, default=512, help="prompt and reply of one sequence")
    model.add_argument("--no-sharing", action="store_true", help="do not share the blocks of common prefixes")
    sampling = parser.add_argument_group("replies")
    sampling.add_argument("--max-tokens", type=int, default=80, help="most tokens of a reply")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, default=1.0, help="probability of the tokens to sample from")
    sampling.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


class Printer:
    """Streams replies in the order of their prompts: text of a later reply is held back until the replies before it are complete."""

    def __init__(self, sequences: list[Sequence], prompts: list[str], tokenizer: ChatTokenizer) -> None:
        self.sequences, self.prompts, self.tokenizer = sequences, prompts, tokenizer
        self.current, self.printed = 0, ""

    def show(self) -> None:
        while self.current < len(self.sequences):
            sequence = self.sequences[self.current]
            text = self.tokenizer.decode(sequence.reply)
            if not sequence.finished:
                text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # bytes of an incomplete character
            if not self.printed and sequence.reply:
                print(f"\n\033[1m> {self.prompts[self.current]}\033[0m" if sys.stdout.isatty() else f"\n> {self.prompts[self.current]}")
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text
            if not sequence.finished:
                return
            print("" if sequence.reply[-1] == sequence.stop_id else " ...")
            self.current, self.printed = self.current + 1, ""


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    prompts: list[str] = options.prompts or [*PROMPTS]
    start = time.perf_counter()
    reader = GGUFReader(find_gguf())
    tokenizer, config = read_tokenizer(reader), read_config(reader)
    weights = read_weights(reader, config, jnp.dtype(options.dtype))
    try:
        engine = Engine(
            config,
            weights,
            backend=options.backend,
            implementation=options.implementation,
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            cache_dtype=options.cache_dtype,
            content=options.content,
            order=options.order,
            max_seqs=options.max_seqs,
            max_tokens=options.chunk,
            max_seq_len=options.max_seq_len,
            share_prefixes=not options.no_sharing,
        )
        sequences = [
            Sequence(
                tuple(tokenizer.encode_chat(prompt)),
                options.max_tokens,
                stop_id=tokenizer.stop_id,
                temperature=options.temperature,
                top_p=options.top_p,
                seed=options.seed + i,
            )
            for i, prompt in enumerate(prompts)
        ]
        for sequence in sequences:
            engine.scheduler.add(sequence)
        where = jax.devices()[0].platform
        print(f"SmolLM2-135M-Instruct, {options.dtype}, {options.backend} on {where}, loaded in {time.perf_counter() - start:.1f} s")
        print(engine.cache)
        start = time.perf_counter()
        engine.warm_up()
    except (ValueError, pp.UnsupportedError) as error:
        sys.exit(f"these options don't fit together: {error}")
    print(f"two steps compiled in {time.perf_counter() - start:.1f} s")
    printer = Printer(sequences, prompts, tokenizer)
    start, steps = time.perf_counter(), 0
    for _ in engine.generate():
        steps += 1
        printer.show()
    report(engine, sequences, steps, time.perf_counter() - start)


def report(engine: Engine, sequences: list[Sequence], steps: int, seconds: float) -> None:
    """Speed and cache use of a finished run."""
    generated = sum(len(sequence.reply) for sequence in sequences)
    prompt = sum(len(sequence.prompt) for sequence in sequences)
    spec, pool = engine.cache.spec, engine.pool
    block = spec.nbytes // spec.num_blocks
    print(f"\n{generated} tokens in {seconds:.1f} s: {generated / seconds:.1f} tokens/s, {steps} steps of {seconds / steps * 1e3:.0f} ms")
    print(f"prompts: {prompt} tokens, {engine.scheduler.shared_tokens} of them found in shared blocks")
    print(
        f"cache: at most {pool.peak_used} of {pool.num_blocks} blocks of {pool.block_size} tokens used, "
        f"{format_bytes(pool.peak_used * block)} of {format_bytes(spec.nbytes)}; {pool.num_used} in use now; "
        f"{engine.scheduler.preemptions} sequences preempted"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
