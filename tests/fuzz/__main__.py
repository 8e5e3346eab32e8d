"""`python -m tests.fuzz --minutes 10 --seed 1`: random calls against the oracle; a failure is made smaller and printed."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # read when a kernel is defined
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]  # as pytest has it

if __name__ == "__main__":
    from fuzz.loop import main

    sys.exit(main())
