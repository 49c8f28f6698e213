"""supervisord as this project runs it."""

import subprocess
import sys

CODE = """
from supervisor import loggers
from services.supervisord_main import survive_full_disk
survive_full_disk()
log = loggers.getLogger(loggers.LevelsByName.INFO)
loggers.handle_file(log, "/dev/full", fmt="%(message)s")
log.info("spawned")
log.info("exited")
print("alive")
"""


def test_a_full_disk_costs_log_lines_and_not_the_stack() -> None:
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", CODE]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=full, timeout=20, check=False)
    assert done.stdout == b"alive\n"
