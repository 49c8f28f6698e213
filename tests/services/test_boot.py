"""The frame around every process, in real processes: titles, exit codes, and death with the parent."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ipc.addresses import crash_file
from services.config import RunConfig, build_config, write_run_config
from services.crash_guard import read_history

CHILD = """
import os, sys, time
from pathlib import Path
from services.boot import CannotBoot, run_program
from services.programs import gateway_program
from services.signals import stop_descriptor

def body(run, log):
    what = sys.argv[2]
    if what == "crash":
        raise RuntimeError("broken")
    if what == "refuse":
        raise CannotBoot("models[0]: no such architecture")
    if what == "title":
        log("title", title=Path("/proc/self/cmdline").read_bytes().rstrip(b"\\0").decode())
        log("limits", mask=oct(os.umask(0o077)))
    if what == "wait":
        import select
        fd = stop_descriptor()
        log("waiting")
        select.select([fd], [], [])
    return 0

sys.exit(run_program(gateway_program(0), Path(sys.argv[1]), body))
"""

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
print(child.pid, flush=True)
time.sleep(60)
"""


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    config = build_config({"models": [{"name": "m", "source": "/m"}]}, Path("/"), tmp_path)
    write_run_config(tmp_path / "config.json", RunConfig(config, {"m": "/m"}))
    return tmp_path


def run(run_dir: Path, what: str) -> tuple[int, list[dict[str, object]]]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(run_dir), what], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.stderr == ""
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()]


def test_title_and_mask(run_dir: Path) -> None:
    code, lines = run(run_dir, "title")
    assert code == 0
    assert [line["event"] for line in lines] == ["started", "title", "limits", "exit"]
    assert (lines[1]["title"], lines[2]["mask"]) == ("bouquet: ivy 0", "0o77")
    assert read_history(crash_file(run_dir, "gateway-0")).started == 0


def test_a_crash_is_logged_and_counted(run_dir: Path) -> None:
    code, lines = run(run_dir, "crash")
    assert code == 1
    assert (lines[-1]["event"], lines[-1]["error"]) == ("crashed", "RuntimeError: broken")
    assert read_history(crash_file(run_dir, "gateway-0")).started > 0


def test_a_configuration_that_cannot_work_has_an_exit_code_of_its_own(run_dir: Path) -> None:
    code, lines = run(run_dir, "refuse")
    assert code == 78
    assert lines[-1]["message"] == "models[0]: no such architecture"
    assert read_history(crash_file(run_dir, "gateway-0")).boot_error == "models[0]: no such architecture"


def test_a_missing_run_configuration_is_one(tmp_path: Path) -> None:
    code, lines = run(tmp_path, "title")
    assert code == 78
    assert "config.json cannot be read" in str(lines[-1]["message"])


def test_a_signal_is_an_ordered_stop(run_dir: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", CHILD, str(run_dir), "wait"], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    with child.stdout:
        assert any("waiting" in line for line in child.stdout)
        child.terminate()
        assert child.wait(10) == 0
    assert read_history(crash_file(run_dir, "gateway-0")).started == 0


def test_nothing_outlives_a_killed_parent(run_dir: Path) -> None:
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(run_dir), "wait"], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    with parent.stdout:
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        assert any("waiting" in line for line in parent.stdout)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert select.select([pidfd], [], [], 5)[0], "the child still runs 5 s after its parent was killed"
        os.close(pidfd)


def test_a_child_of_a_dead_supervisord_does_not_start(run_dir: Path) -> None:
    (run_dir / "supervisord.pid").write_text("999999999\n")
    code, lines = run(run_dir, "title")
    assert code == 1
    assert [line["event"] for line in lines] == ["orphan"]
