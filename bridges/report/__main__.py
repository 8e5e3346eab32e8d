"""A child of a report: `python -m purepage.bridges.report TASK JSON [TRACE]`. Rows go to standard output, see `children`.

TRACE is a file for the Python stack of a crash.
"""

import faulthandler
import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from .children import Stream

Options = Mapping[str, Any]


def facts(stream: Stream, options: Options) -> None:
    """The devices as JAX and torch see them, and the libraries that are mapped before and after torch is imported."""
    from . import facts

    stream.begin("JAX's devices")
    for row in facts.jax_devices():
        stream.row({"jax": row})
    stream.row({"libraries": {"before_torch": facts.own_libraries()}})
    if "torch" in facts.distributions():
        stream.begin("import torch")
        stream.row({"torch": _or_error(facts.torch_build)})
        stream.row({"libraries": {"after_torch": facts.own_libraries()}})
        stream.begin("torch's devices")
        stream.row({"torch_devices": _or_error(lambda: list(facts.torch_devices()))})
    stream.begin("the target")
    stream.row({"target": _or_error(_target)})
    stream.done()


def _or_error(ask: Callable[[], Any]) -> Any:
    try:
        return ask()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def _target() -> dict[str, Any]:
    from dataclasses import asdict

    from ...functional.dispatch import AITER_FIRST, IMPLEMENTATIONS
    from ...functional.target import current_target
    from ..selfcheck import default_implementations

    target = current_target()
    order = AITER_FIRST if target.settings.prefer_aiter else tuple(IMPLEMENTATIONS)
    return {**asdict(target), "order": order, "implementations": default_implementations(target)}


def probe(stream: Stream, options: Options) -> None:
    """One probe, by its name."""
    from . import probes

    chosen = next(each for each in probes.PROBES if each.name == options["name"])
    stream.begin(chosen.name)
    try:
        for row in probes.run(chosen):
            stream.row({"found": row})
    except probes.Skipped as why:
        stream.row({"verdict": "skipped", "detail": str(why)})
    except Exception as error:
        stream.row({"verdict": "failed", "detail": f"{type(error).__name__}: {error}"})
    else:
        stream.row({"verdict": "passed", "detail": ""})
    stream.done()


def cases(stream: Stream, options: Options) -> None:
    """The self-check's cases through one implementation."""
    from . import measurements

    for row in measurements.cases(options["implementation"], options["only"], options["after"], stream.begin):
        stream.row(row)
        stream.done()


def kernels(stream: Stream, options: Options) -> None:
    """Resources and hashes of the kernels for an architecture, or for this machine's GPU."""
    from ...functional.target import current_target, named_target
    from . import measurements

    target = named_target(options["arch"]) if options.get("arch") else current_target()
    for row in measurements.kernels(target, stream.begin):
        stream.row(row)
    stream.done()


def speeds(stream: Stream, options: Options) -> None:
    """Speeds of a few shapes, beside a copy."""
    from ...functional.target import current_target
    from . import measurements

    for row in measurements.speeds(current_target(), stream.begin, options["implementations"]):
        stream.row(row)
    stream.done()


TASKS: Mapping[str, Callable[[Stream, Options], None]] = {
    "facts": facts,
    "probe": probe,
    "cases": cases,
    "kernels": kernels,
    "speeds": speeds,
}


def main(arguments: list[str]) -> None:
    stream = Stream()
    task, options, *trace = arguments
    if trace:
        faulthandler.enable(open(trace[0], "w"))  # open until the process ends
    TASKS[task](stream, json.loads(options))


if __name__ == "__main__":
    main(sys.argv[1:])
