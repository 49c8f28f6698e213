"""Every kernel of generation compiles for Hopper: the interpreter, in which they are tested, forgives more."""

import os
import subprocess
import sys

import pytest


@pytest.mark.long
def test_kernels_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-W", "ignore", "-m", "bench.micro.decode_compile"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, "\n".join(line for line in done.stdout.splitlines() if "FAILED" in line) or done.stderr
    assert "spill ops   0" in done.stdout
