"""One cache over the devices of two processes, through `jax.distributed` on loopback; and what is left when one is killed."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

from processes import HANG_GUARD_S, ROOT

PROGRAM = Path(__file__).parents[1] / "two_processes.py"


def both(steps):
    """(exit status, what it printed) of each of the two processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    running = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), str(port), str(number), str(steps)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for number in range(2)
    ]
    try:
        printed = [process.communicate(timeout=HANG_GUARD_S)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    return [process.returncode for process in running], printed


def test_a_killed_process_ends_the_other_with_an_error_after_a_step_that_was_right():
    codes, printed = both(2)
    assert all("step 0 right" in text for text in printed), printed
    assert codes[1] == -signal.SIGKILL
    assert codes[0] not in (0, -signal.SIGKILL), printed[0]
    assert "step 1 right" not in printed[0]
    assert any(word in printed[0] for word in ("Connection closed by peer", "heartbeat", "Connection reset by peer", "UNAVAILABLE")), (
        printed[0]
    )
