"""Launches the kernels through the HIP launchers of the Tritons that ROCm's images have, older than the one that the tests use.

    python .ci/older_tritons.py [--all] [VERSION ...]

Each wheel is installed into .cache/tritons, which git ignores, and put before the installed Triton in processes of its own. A stub of the
runtime records what their launchers pass; see tests/kernels/launched_kernels.py. With --all every variant of the report on resources is
compiled and launched on every architecture, minutes a version; without it a few of each kernel.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "tests/kernels")]

from fake_hip.child import build_stub, has_emulator, run_child  # noqa: E402

CACHE = ROOT / ".cache" / "tritons"
VERSIONS = ("3.6.0", "3.7.1")
ARCHS = ("gfx942", "gfx950", "gfx1100", "gfx1201")
QUICK = {
    "gfx942": (
        "attention D64 native fp8",
        "attention D128 bf16 over 2^31 elements",
        "encoder D64 bf16",
        "write D128 native fp8",
        "rope D128",
        "rope+write D128 native fp8 xpacked",
        "qk-norm+mrope+write D128 native fp8",
        "merge D128",
    ),
    "gfx1100": ("decode D64 bf16", "write D128 bf16 xpacked"),
}
EXECUTED = {"gfx942": ("decode of an xpacked fp8 cache", "copy of pages", "merge"), "gfx1100": ("rotary",)}


def installed(version: str) -> Path:
    """The folder that has this Triton; it is installed there if it is not."""
    folder = CACHE / version
    if not (folder / "triton").exists():
        partial = CACHE / f"{version}.partial"
        shutil.rmtree(partial, ignore_errors=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(partial)]
        subprocess.run([*pip, f"triton=={version}"], check=True)
        partial.rename(folder)
    return folder


def failures(version: str, stub: Path, command: str, arch: str, names: tuple[str, ...]) -> list[str]:
    """What was wrong, one text each."""
    outcome = run_child(command, arch, *names, stub=stub, packages=installed(version))
    assert outcome.triton.startswith(version), f"Triton {outcome.triton} ran in place of {version}"
    assert names == () or set(names) == set(outcome.wrong), outcome
    wrong = [f"Triton {version}, {arch}, {name}: {text}" for name, text in outcome.wrong.items() if text is not None]
    print(f"Triton {version}, {command} on {arch}: {len(outcome.wrong) - len(wrong)} of {len(outcome.wrong)} as planned", flush=True)
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS, metavar="VERSION")
    parser.add_argument("--all", action="store_true", help="every variant on every architecture")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args()
    start = time.time()
    launched = dict.fromkeys(ARCHS, ()) if options.all else QUICK
    executed = dict.fromkeys(ARCHS, ()) if options.all else EXECUTED
    jobs = [("launch", arch, names) for arch, names in launched.items()]
    if has_emulator():
        jobs += [("execute", arch, names) for arch, names in executed.items()]
    else:
        print("the emulator of AMD GPUs is not here: nothing is executed")
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.processes) as pool:
        stubs = {}
        for version in options.versions:
            (Path(folder) / version).mkdir()
            stubs[version] = build_stub(Path(folder) / version, installed(version))
        found = pool.map(lambda job: failures(*job), [(*stub, *job) for stub in stubs.items() for job in jobs])
        wrong = [text for texts in found for text in texts]
    print("\n".join(wrong))
    print(f"{time.time() - start:.0f} s")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
