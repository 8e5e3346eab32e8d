"""Generates text with SmolLM2-135M-Instruct through purepage's paged cache: `python -m examples.smollm2 [PROMPT ...]`."""

import argparse
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import jax
import jax.numpy as jnp
from gguf import GGUFReader

import purepage as pp
from purepage.functional.cache import format_bytes
from purepage.functional.fp8 import KV_CACHE_DTYPES
from purepage.functional.layout import CONTENTS, ORDERS

from .cache_map import CacheMap
from .chat import Conversation
from .engine import BACKENDS, Engine
from .parallel import parse_mesh
from .scheduler import Sequence
from .tokenizer import SYSTEM_PROMPT, ChatTokenizer, read_tokenizer
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
    parser.add_argument("--prompt-file", metavar="FILE", help="more user messages, one a line; - is the standard input")
    parser.add_argument(
        "--chat",
        action="store_true",
        help="a conversation: reads messages from the standard input until its end or /exit; it is one sequence, on one device of `data`",
    )
    parser.add_argument("--system", default=SYSTEM_PROMPT, help="the system message")
    parser.add_argument("--stats", action="store_true", help="show which sequence owns which block of the cache, while they run")
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
    model.add_argument(
        "--mesh", default="", help="devices of each axis, such as model=2,data=2 (axes data, context, model); default: one device"
    )
    model.add_argument("--no-sharing", action="store_true", help="do not share the blocks of common prefixes")
    sampling = parser.add_argument_group("replies")
    sampling.add_argument("--max-tokens", type=int, default=80, help="most tokens of a reply")
    sampling.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    sampling.add_argument("--top-p", type=float, default=1.0, help="probability of the tokens to sample from")
    sampling.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def read_prompts(name: str) -> list[str]:
    """The lines of a file, or of the standard input, that are not empty.

    Raises:
      ValueError: there is no such file, or it has no message.
    """
    try:
        text = sys.stdin.read() if name == "-" else Path(name).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--prompt-file is {name!r}: it must be a text file ({error})") from None
    prompts = [line.strip() for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"--prompt-file is {name!r}: it must have a message, one a line")
    return prompts


def show_loading(share: float) -> None:
    """Progress on a terminal's error output, one line that is removed at the end."""
    if sys.stderr.isatty():
        print(f"\rreading weights {share:4.0%}" if share < 1 else "\r\033[K", end="", file=sys.stderr, flush=True)


class Printer:
    """Streams replies in the order of their prompts: text of a later reply is held back until the replies before it are complete.

    Args:
      sequences, prompts: what runs, and the user messages.
      tokenizer: turns replies into text.
      whole: prints a reply when it is complete.
      repeat: prints the user message before its reply.
    """

    def __init__(
        self, sequences: list[Sequence], prompts: list[str], tokenizer: ChatTokenizer, *, whole: bool = False, repeat: bool = True
    ) -> None:
        self.sequences, self.prompts, self.tokenizer, self.whole, self.repeat = sequences, prompts, tokenizer, whole, repeat
        self.current, self.printed = 0, ""

    def show(self) -> None:
        while self.current < len(self.sequences):
            sequence = self.sequences[self.current]
            if self.whole and not sequence.finished:
                return
            text = self.tokenizer.decode(sequence.reply)
            if not sequence.finished:
                text = text.rstrip("\N{REPLACEMENT CHARACTER}")  # bytes of an incomplete character
            if self.repeat and not self.printed and sequence.reply:
                print(f"\n\033[1m> {self.prompts[self.current]}\033[0m" if sys.stdout.isatty() else f"\n> {self.prompts[self.current]}")
            print(text[len(self.printed) :], end="", flush=True)
            self.printed = text
            if not sequence.finished:
                return
            print("" if sequence.reply[-1] == sequence.stop_id else " ...")
            self.current, self.printed = self.current + 1, ""


def main(arguments: list[str]) -> None:
    options = parse(arguments)
    start = time.perf_counter()
    try:
        if options.chat and (options.prompts or options.prompt_file):
            raise ValueError("--chat reads its messages from the standard input: it takes no PROMPT and no --prompt-file")
        prompts: list[str] = [*options.prompts, *(read_prompts(options.prompt_file) if options.prompt_file else ())]
        reader = GGUFReader(find_gguf())
        tokenizer, config = read_tokenizer(reader), read_config(reader)
        weights = read_weights(reader, config, jnp.dtype(options.dtype), show_loading)
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
            shardings=parse_mesh(options.mesh),
        )
        prompts = prompts or ([] if options.chat else [*PROMPTS])
        sequences = [sequence_of(options, tokenizer, tokenizer.encode_chat(prompt, options.system), i) for i, prompt in enumerate(prompts)]
        for sequence in sequences:
            engine.add(sequence)
        where = jax.devices()[0].platform if engine.shardings is None else f"{options.mesh} of {jax.devices()[0].platform}"
        print(f"SmolLM2-135M-Instruct, {options.dtype}, {options.backend} on {where}, loaded in {time.perf_counter() - start:.1f} s")
        print(engine.cache)
        start = time.perf_counter()
        engine.warm_up()
    except (ValueError, pp.UnsupportedError) as error:
        sys.exit(f"these options don't fit together: {error}")
    print(f"two steps compiled in {time.perf_counter() - start:.1f} s")
    if options.chat:
        chat(engine, tokenizer, options)
        return
    start = time.perf_counter()
    steps = run(engine, sequences, Printer(sequences, prompts, tokenizer, whole=options.stats), stats=options.stats)
    report(engine, sequences, steps, time.perf_counter() - start)


def sequence_of(options: argparse.Namespace, tokenizer: ChatTokenizer, ids: Iterable[int], index: int) -> Sequence:
    """A reply to come, sampled as the options say; sequences of one run have different seeds."""
    return Sequence(
        tuple(ids),
        options.max_tokens,
        stop_id=tokenizer.stop_id,
        temperature=options.temperature,
        top_p=options.top_p,
        seed=options.seed + index,
    )


def run(engine: Engine, sequences: list[Sequence], printer: Printer, *, stats: bool) -> int:
    """Runs all queued sequences, shows their replies and, with `stats`, the cache; returns the number of steps."""
    steps, cache_map = 0, CacheMap(engine, sequences)
    for _ in engine.generate():
        steps += 1
        cache_map.clear()
        printer.show()
        if stats:
            cache_map.draw()
    cache_map.clear()
    return steps


def shared_tokens(engine: Engine) -> int:
    """Tokens of all prompts so far that were found in shared blocks."""
    return sum(scheduler.shared_tokens for scheduler in engine.schedulers)


def chat(engine: Engine, tokenizer: ChatTokenizer, options: argparse.Namespace) -> None:
    """Replies to messages from the standard input until it ends, or a message is /exit."""
    conversation = Conversation(tokenizer, options.max_seq_len - options.max_tokens, options.system)
    asks = "\n> " if sys.stdin.isatty() else ""
    turn = 0
    while True:
        try:
            message = input(asks).strip()
        except (EOFError, KeyboardInterrupt):
            break
        if message == "/exit":
            break
        if not message:
            continue
        try:
            sequence = sequence_of(options, tokenizer, conversation.prompt(message), turn)
            engine.add(sequence)
        except ValueError as error:
            print(error)
            continue
        found, dropped, start = shared_tokens(engine), conversation.dropped, time.perf_counter()
        printer = Printer([sequence], [message], tokenizer, whole=options.stats, repeat=not sys.stdin.isatty())
        steps = run(engine, [sequence], printer, stats=options.stats)
        seconds = time.perf_counter() - start
        conversation.add(message, sequence.reply)
        turn += 1
        print(
            f"[{len(sequence.prompt)} prompt tokens, {shared_tokens(engine) - found} found in the cache, "
            f"{len(sequence.reply)} generated, {steps} steps, {len(sequence.reply) / seconds:.1f} tokens/s]"
        )
        if dropped:
            print(f"[the conversation is too long: its {dropped} oldest exchanges are left out]")


def report(engine: Engine, sequences: list[Sequence], steps: int, seconds: float) -> None:
    """Speed and cache use of a finished run."""
    generated = sum(len(sequence.reply) for sequence in sequences)
    prompt = sum(len(sequence.prompt) for sequence in sequences)
    spec, schedulers = engine.cache.spec, engine.schedulers
    used, now = (sum(getattr(each.pool, name) for each in schedulers) for name in ("peak_used", "num_used"))
    shared, preempted = (sum(getattr(each, name) for each in schedulers) for name in ("shared_tokens", "preemptions"))
    block = spec.nbytes // spec.num_blocks
    print(f"\n{generated} tokens in {seconds:.1f} s: {generated / seconds:.1f} tokens/s, {steps} steps of {seconds / steps * 1e3:.0f} ms")
    print(f"prompts: {prompt} tokens, {shared} of them found in shared blocks")
    print(
        f"cache: at most {used} of {spec.num_blocks} blocks of {spec.block_size} tokens used, "
        f"{format_bytes(used * block)} of {format_bytes(spec.nbytes)}; {now} in use now; "
        f"{preempted} sequences preempted"
    )


if __name__ == "__main__":
    main(sys.argv[1:])
