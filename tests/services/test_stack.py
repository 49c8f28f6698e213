"""A stack's run directory: one at a time, cleaned of what a dead one left, and why a start fails."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ipc.addresses import crash_file
from services import stack
from services.config import ServiceConfig, build_config
from services.crash_guard import CrashGuard
from services.listening import listens
from services.programs import gateway_program
from services.run_dir import MARK, StackError, clean, take_lock
from services.stack import StartWatch, check_programs, wait_for_port, write_stack


def build(run_dir: Path) -> ServiceConfig:
    return build_config({"models": [{"name": "m", "source": "/m", "rank": {"device": "cpu"}}]}, Path("/"), run_dir)


def test_a_second_stack_on_one_directory_is_refused(tmp_path: Path) -> None:
    fd = take_lock(tmp_path / "run")
    with pytest.raises(StackError, match=r"already running in .*bouquet down"):
        take_lock(tmp_path / "run", wait_s=0.1)
    os.close(fd)
    os.close(take_lock(tmp_path / "run", wait_s=0))


def test_the_lock_outlives_us_in_the_process_that_has_it(tmp_path: Path) -> None:
    fd = take_lock(tmp_path)
    holder = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], pass_fds=[fd])
    os.close(fd)
    with pytest.raises(StackError):
        take_lock(tmp_path, wait_s=0)
    holder.kill()
    holder.wait()
    os.close(take_lock(tmp_path, wait_s=0))


def test_cleaning_keeps_logs_and_nothing_else(tmp_path: Path) -> None:
    write_stack(build(tmp_path), {"m": Path("/m")})
    for name in ("supervisord.pid", "supervisor.sock", "supervisor.sock.123", "logs/gateway-0.log", "replicas.tmp"):
        (tmp_path / name).touch()
    (tmp_path / "replicas" / "m@0").mkdir()
    clean(tmp_path)
    clean(tmp_path)
    assert {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")} == {"logs", "logs/gateway-0.log", MARK}


def test_a_new_stack_starts_from_its_configuration(tmp_path: Path) -> None:
    write_stack(build(tmp_path), {"m": Path("/m")})
    stale = tmp_path / "programs" / "m-7.conf"
    stale.touch()
    CrashGuard(crash_file(tmp_path, "gateway-0")).begin()
    write_stack(build(tmp_path), {"m": Path("/m")})
    assert not stale.exists()
    assert not crash_file(tmp_path, "gateway-0").exists()


def test_a_port_in_use_is_refused_even_if_it_could_be_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stack, "PORT_WAIT_S", 0.1)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        port = other.getsockname()[1]
        other.listen()
        assert listens(os.getpid(), port)
        assert not listens(1, port)
        with pytest.raises(StackError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            wait_for_port("127.0.0.1", port)
    assert not listens(os.getpid(), port)
    wait_for_port("127.0.0.1", port)


def test_a_program_that_cannot_boot_is_named(tmp_path: Path) -> None:
    program = gateway_program(0)
    guard = CrashGuard(crash_file(tmp_path, program.name))
    guard.begin()
    check_programs(tmp_path, [program])
    guard.refuse("gateway: the tokenizer is broken")
    with pytest.raises(StackError, match="gateway-0 cannot boot: gateway: the tokenizer is broken"):
        check_programs(tmp_path, [program])


def test_a_program_that_keeps_dying_shows_its_log(tmp_path: Path) -> None:
    program = gateway_program(0)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "gateway-0.log").write_text("first\nSegmentation fault\n")
    for _ in range(3):
        CrashGuard(crash_file(tmp_path, program.name), sleep=lambda seconds: None).begin()
        check_programs(tmp_path, [program])
    CrashGuard(crash_file(tmp_path, program.name), sleep=lambda seconds: None).begin()
    with pytest.raises(StackError, match=r"(?s)died 3 times while starting.*Segmentation fault"):
        check_programs(tmp_path, [program])


def test_a_supervisord_that_ended_shows_why(tmp_path: Path) -> None:
    write_stack(build(tmp_path), {"m": Path("/m")})
    (tmp_path / "logs" / "supervisord.err").write_text("Error: no such option\n")
    ended = subprocess.Popen(["true"])
    ended.wait()
    with pytest.raises(StackError, match=r"(?s)supervisord ended.*no such option"):
        StartWatch(build(tmp_path), ended, []).ready()


def test_a_run_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StackError, match=r"file.* cannot be made: .*; choose another run_dir"):
            take_lock(path)


def test_what_a_start_waits_for_is_said_once_per_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = StartWatch(build(tmp_path), subprocess.Popen(["true"]), [])
    watch._reason = "its last forward pass was 17 s ago"
    assert watch.news() == ""  # it may still be quick
    monkeypatch.setattr(stack, "PATIENCE_S", 0.0)
    assert watch.news() == "its last forward pass was 17 s ago"
    watch._reason = "its last forward pass was 18 s ago"
    assert watch.news() == ""
    watch._reason = "no replica is ready"
    assert watch.news() == "no replica is ready"
    watch._supervisord.wait()


def test_every_file_is_its_owners_alone(tmp_path: Path) -> None:
    write_stack(build(tmp_path), {"m": Path("/m")})
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) >= 5
    assert [path.name for path in files if path.stat().st_mode & 0o077] == []
