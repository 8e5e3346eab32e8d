"""Which releases of JAX's ROCm plugin go with which JAX and ROCm, and which torch with which Triton, as their wheels say it.

    python -m pip download --no-deps --dest wheels jax==0.11.2 jax-rocm7-plugin==0.11.2 jax-rocm7-pjrt==0.11.2     # for each release
    python -m pip install --dry-run --no-deps --ignore-installed --report wheels/torch-2.13.0.json torch==2.13.0   # no download of torch
    python .ci/rocm_pairs.py --record wheels     # writes docs/rocm_pairs.json, which needs objdump
    python .ci/rocm_pairs.py                     # writes the table of docs/rocm.md from it

Nothing is guessed: what no wheel says is "unknown".
"""

import argparse
import json
import re
import subprocess
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from email.parser import Parser
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "docs/rocm_pairs.json"
PAGE = ROOT / "docs/rocm.md"
BEGIN, END = "<!-- generated: pairs -->\n", "<!-- end -->"

Metadata = Mapping[str, Any]


def metadata_of(path: Path) -> Metadata:
    """name, version, summary, requires_python and requires_dist of a wheel, or of a report of `pip install --dry-run`."""
    if path.suffix == ".json":
        return json.loads(path.read_text())["install"][0]["metadata"]
    with zipfile.ZipFile(path) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        found = Parser().parsestr(wheel.read(name).decode())
    return {
        "name": found["Name"],
        "version": found["Version"],
        "summary": found["Summary"],
        "requires_python": found["Requires-Python"],
        "requires_dist": found.get_all("Requires-Dist", []),
    }


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def rocm_of(summary: str) -> str | None:
    """The ROCm that a plugin was built with: "JAX Plugin for AMD GPUs (ROCm:7.14.0)"."""
    found = re.search(r"\(ROCm:([\d.]+)\)", summary)
    return found and found[1]


def needed_libraries(wheel: Path) -> list[str]:
    """Names of ROCm's shared libraries that the plugin of a wheel is linked to."""
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        (name,) = (name for name in archive.namelist() if name.endswith("xla_rocm_plugin.so"))
        text = subprocess.run(["objdump", "-p", archive.extract(name, folder)], capture_output=True, text=True, check=True).stdout
    return libraries_in(text)


def libraries_in(text: str) -> list[str]:
    """The ROCm libraries among the NEEDED entries that objdump prints."""
    needed = re.findall(r"^\s*NEEDED\s+(\S+)", text, re.MULTILINE)
    return sorted(name for name in needed if re.match(r"lib(?:amd|hip|roc|rccl|MIOpen|hsa)", name))


def record(folder: Path) -> dict[str, Any]:
    """What the wheels and reports of a folder say."""
    paths = sorted([*folder.glob("*.whl"), *folder.glob("*.json")])
    all_of: dict[str, list[tuple[Path, Metadata]]] = {}
    for path in paths:
        found = metadata_of(path)
        all_of.setdefault(normal(found["name"]), []).append((path, found))
    libraries = {found["version"]: needed_libraries(path) for path, found in all_of.get("jax-rocm7-pjrt", ())}
    jax_of = [(found["version"], requirement) for _, found in all_of.get("jax", ()) for requirement in found["requires_dist"]]
    plugins = []
    for _, found in sorted(all_of.get("jax-rocm7-plugin", ()), key=lambda pair: release(pair[1]["version"])):
        pjrt = next((_version_in(text) for text in found["requires_dist"] if normal(text).startswith("jax-rocm7-pjrt")), None)
        plugins.append(
            {
                "plugin": found["version"],
                "pjrt": pjrt,
                "jax": [version for version, text in jax_of if _asks_for(text, found["version"])],
                "python": found["requires_python"],
                "rocm": rocm_of(found["summary"]),
                "libraries": libraries.get(pjrt or ""),
            }
        )
    torches = [
        {"torch": found["version"], "triton": next((_version_in(t) for t in found["requires_dist"] if re.match(r"triton\b", t)), None)}
        for _, found in sorted(all_of.get("torch", ()), key=lambda pair: release(pair[1]["version"]))
    ]
    return {"plugins": plugins, "torch": torches}


def release(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def _version_in(requirement: str) -> str | None:
    found = re.search(r"[=~]=\s*([\w.]+)", requirement)
    return found and found[1]


def _asks_for(requirement: str, plugin: str) -> bool:
    """Whether jax's extra for an installed ROCm asks for this release of the plugin."""
    found = re.match(r"jax-rocm7-plugin==([\d.]+)\.\*;", requirement)
    return found is not None and f"{plugin}.".startswith(f"{found[1]}.")


def _lines(data: Mapping[str, Any]) -> Iterator[str]:
    yield "| jax | jax-rocm7-plugin | jax-rocm7-pjrt | Python | built with ROCm | torch for ROCm | its Triton |"
    yield "|---|---|---|---|---|---|---|"
    for row in data["plugins"]:
        cells = (", ".join(row["jax"]) or None, row["plugin"], row["pjrt"], row["python"], row["rocm"], None, None)
        yield f"| {' | '.join(cell or 'unknown' for cell in cells)} |"
    yield ""
    before: list[str] = []
    for row in data["plugins"]:
        libraries = row["libraries"]
        if libraries is not None:
            fresh, gone = [name for name in libraries if name not in before], [name for name in before if name not in libraries]
            if fresh or gone:
                yield f"- The plugin {row['plugin']} {_linked(fresh, gone, first=not before)}."
            before = libraries
    yield ""
    pairs = ", ".join(f"torch {row['torch']} with Triton {row['triton'] or 'unknown'}" for row in data["torch"])
    yield f"torch's wheels on PyPI, which are those for CUDA, ask for: {pairs}."


def _linked(fresh: Iterable[str], gone: Iterable[str], *, first: bool) -> str:
    said = [f"is {'' if first else 'also '}linked to {', '.join(f'`{name}`' for name in fresh)}"] if fresh else []
    said += [f"{'' if said else 'is '}no longer {'' if said else 'linked '}to {', '.join(f'`{name}`' for name in gone)}"] if gone else []
    return ", ".join(said)


def table(data: Mapping[str, Any]) -> str:
    """The recorded pairs as Markdown."""
    return "\n".join(_lines(data)) + "\n"


def with_table(page: str, data: Mapping[str, Any]) -> str:
    """The text of docs/rocm.md with the table of the recorded pairs."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}{table(data)}{END}{rest.split(END, 1)[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Pairs of JAX, its ROCm plugin and ROCm, from the wheels' metadata.")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="write docs/rocm_pairs.json from the wheels in a folder")
    given = parser.parse_args()
    if given.record:
        DATA.write_text(json.dumps(record(given.record), indent=1) + "\n")
    PAGE.write_text(with_table(PAGE.read_text(), json.loads(DATA.read_text())))


if __name__ == "__main__":
    main()
