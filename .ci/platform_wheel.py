"""Makes a wheel for this platform of a wheel of pure Python files, with the native bridge's library in it.

    python .ci/platform_wheel.py dist/purepage-0.2.0-py3-none-any.whl

Needs a C++ compiler, objdump, and jaxlib, whose headers it compiles with: take the oldest that the package supports, since XLA accepts what
was built for an older version of its interface. The library is built so that it loads where glibc and libstdc++ are as old as jaxlib's own
wheels allow; one that needs more is refused with the symbol's name. The new wheel lies beside the given one.
"""

import base64
import hashlib
import platform
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import jax

from purepage.bridges.native import library

GLIBC = (2, 27)
"""What jaxlib's wheels need, and the platform tag says."""

NEWEST = {"GLIBC": GLIBC, "GLIBCXX": (3, 4, 24), "CXXABI": (1, 3, 11), "GCC": (7, 0, 0)}
"""Newest version of a symbol, by family, that a system with that glibc has: PEP 600 and auditwheel's policy of the tag."""

SYSTEM = {"libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6", "libstdc++.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
"""Libraries that every system of the tag has."""

OPTIONS = ("-DPUREPAGE_PORTABLE", "-s", "-Wl,--no-as-needed", "-l:libdl.so.2", "-Wl,--as-needed")
FOLDER = "purepage/bridges/native"


def too_new(dump: str) -> list[str]:
    """What a system of the tag lacks, of a library of which objdump -p -T says this: libraries and versions of symbols."""
    found = [name for name in re.findall(r"NEEDED\s+(\S+)", dump) if name not in SYSTEM]
    for family, version in re.findall(r"\b([A-Z]+)_((?:\d+\.)+\d+)\b", dump):
        if family not in NEWEST or tuple(map(int, version.split("."))) > NEWEST[family]:
            found.append(f"{family}_{version}")
    return sorted(set(found))


def digest(content: bytes) -> str:
    """A file's hash as a wheel's RECORD has it."""
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def with_library(wheel: Path, name: str, content: bytes, tag: str) -> Path:
    """A wheel like `wheel`, with one more file in the native bridge's folder, for the platform of `tag`."""
    made = wheel.with_name(wheel.name.replace("-none-any.whl", f"-none-{tag}.whl"))
    if made == wheel:
        raise SystemExit(f"{wheel} is no wheel of pure Python files (-none-any.whl)")
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as target:
        record = ""
        for item in source.infolist():
            text = source.read(item)
            if item.filename.endswith(".dist-info/RECORD"):
                record = item.filename
                continue
            if item.filename.endswith(".dist-info/WHEEL"):
                text = text.replace(b"Root-Is-Purelib: true", b"Root-Is-Purelib: false").replace(b"-none-any", f"-none-{tag}".encode())
            target.writestr(item, text)
        target.writestr(f"{FOLDER}/{name}", content)
        lines = [f"{each},{digest(target_bytes)},{len(target_bytes)}" for each, target_bytes in _contents(target)]
        target.writestr(record, "\n".join([*lines, f"{record},,", ""]))
    return made


def _contents(archive: zipfile.ZipFile) -> list[tuple[str, bytes]]:
    return [(name, archive.read(name)) for name in archive.namelist() if not name.endswith("/")]


def main() -> None:
    (wheel,) = map(Path, sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        built = library.build(Path(folder) / "library.so", OPTIONS)
        dump = subprocess.run(["objdump", "-p", "-T", str(built)], capture_output=True, text=True, check=True).stdout
        if lacking := too_new(dump):
            raise SystemExit(f"the library needs {', '.join(lacking)}, which systems with glibc {'.'.join(map(str, GLIBC))} do not have")
        name = library.prebuilt_name(library.header_version(jax.ffi.include_dir()))
        tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{platform.machine()}"
        print(with_library(wheel, name, built.read_bytes(), tag))


if __name__ == "__main__":
    main()
