"""`python -m purepage.tune`: times configurations and implementations for your shapes on this GPU, and keeps the fastest.

What it finds goes into the device's record, a small file in the user's cache folder, which every later process reads. It may be stopped and
started again; it makes its own caches and touches no other. See docs/tuning.md.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def integers(text: str) -> tuple[int, ...]:
    """Positive numbers between commas."""
    found = tuple(int(part) for part in text.split(","))
    if min(found) < 1:
        raise ValueError(text)
    return found


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="python -m purepage.tune", description=(__doc__ or "").split("\n\n", 1)[1])
    model = made.add_argument_group("the model")
    model.add_argument("--heads", default="32/8", metavar="HQ/H", help="query heads and KV heads (of one device); default %(default)s")
    model.add_argument("--head-size", default="128", metavar="D[/DV]", help="channels of a key, and of a value; default %(default)s")
    model.add_argument("--dtype", default="bfloat16", help="of queries, new keys and values; default %(default)s")
    model.add_argument("--window", type=int, help="sliding window; default none")
    model.add_argument("--soft-cap", type=float, help="logits soft cap; default none")
    model.add_argument("--sinks", action="store_true", help="attention sinks")
    model.add_argument("--alibi", action="store_true", help="ALiBi slopes")
    model.add_argument("--model", type=Path, metavar="FILE", help="JSON or TOML with facts of models, in place of the flags above")
    cache = made.add_argument_group("the cache")
    cache.add_argument("--block-size", type=int, default=16, metavar="N", help="default %(default)s")
    cache.add_argument("--layout", default="packed", metavar="CONTENT[/ORDER]", help="see CacheSpec; default packed/LBHNC")
    cache.add_argument("--cache-dtype", help="default: --dtype")
    steps = made.add_argument_group("the steps")
    steps.add_argument("--kernels", default="decode,prefill,update,rope", help="and qk_norm; default %(default)s")
    steps.add_argument("--batch", type=integers, default=(1, 8, 64), metavar="S,...", help="sequences that decode; default 1,8,64")
    steps.add_argument("--context", type=integers, default=(8192,), metavar="N,...", help="tokens of such a sequence; default 8192")
    steps.add_argument("--prompt", type=integers, default=(2048,), metavar="N,...", help="new tokens of a prefill; default 2048")
    steps.add_argument("--prompt-batch", type=int, default=1, metavar="S", help="sequences of a prefill; default %(default)s")
    steps.add_argument("--chunk-context", type=integers, default=(), metavar="N,...", help="contexts of chunked prefills; default none")
    how = made.add_argument_group("how")
    how.add_argument("--effort", choices=("quick", "normal", "full"), default="normal", help="how many candidates; default %(default)s")
    how.add_argument("--most", type=int, default=1000, metavar="N", help="most candidates of a shape")
    how.add_argument("--again", action="store_true", help="also shapes that the record has")
    other = made.add_argument_group("instead of tuning").add_mutually_exclusive_group()
    other.add_argument("--probe", action="store_true", help="tries whether launches can be recorded into command buffers, and notes it")
    other.add_argument("--show", action="store_true", help="prints the record")
    other.add_argument("--forget", action="store_true", help="deletes the device's records, of all versions")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    made = parser()
    given = made.parse_args(arguments)
    if given.forget or given.show:
        return forget() if given.forget else show()
    if given.probe:
        return probe()
    from .bridges.tune.cases import Case, Steps, cases_of, layers_of_models
    from .bridges.tune.runner import Options, tune
    from .bridges.tune.worker import Child

    try:
        heads, kv_heads = map(int, given.heads.split("/"))
        head_size, _, value_size = given.head_size.partition("/")
        content, _, order = given.layout.partition("/")
        base = Case(
            kernel="decode",
            heads=heads,
            kv_heads=kv_heads,
            head_size=int(head_size),
            value_size=int(value_size) if value_size else None,
            block_size=given.block_size,
            content=content,
            order=order or "LBHNC",
            cache_dtype=given.cache_dtype or given.dtype,
            dtype=given.dtype,
            window=given.window,
            soft_cap=given.soft_cap,
            sinks=given.sinks,
            alibi=given.alibi,
        )
        layers, left_out = layers_of_models(given.model, base) if given.model else ((base,), ())
        steps = Steps(
            kernels=tuple(given.kernels.split(",")),
            batches=given.batch,
            contexts=given.context,
            prompts=given.prompt,
            chunk_contexts=given.chunk_context,
            prompt_batch=given.prompt_batch,
        )
        cases = cases_of(layers, steps)
    except (ValueError, TypeError, OSError) as error:
        made.error(str(error))
    for text in left_out:
        print(f"left out: {text}")
    return tune(cases, Child(), options=Options(effort=given.effort, again=given.again, most=given.most))


def forget() -> int:
    from .bridges.tune.worker import answer_once
    from .functional.record import Device, forget

    found = answer_once({"job": "device"})
    if "device" not in found:
        print(found["why"])
        return 1
    deleted = forget(Path(found["folder"]), Device(**found["device"]))
    print("\n".join(f"deleted {path}" for path in deleted) or "there is no record")
    return 0


def show() -> int:
    from .bridges.tune.worker import answer_once

    found = answer_once({"job": "record"})
    print(found.get("said") or found["why"])
    if found.get("path"):
        print(Path(found["path"]).read_text(), end="")
    return int("said" not in found)


def probe() -> int:
    from .bridges.tune.worker import answer_once

    found = answer_once({"job": "probe"})
    print(found["why"])
    return int(found["verdict"] != "ok")


if __name__ == "__main__":
    sys.exit(main())
