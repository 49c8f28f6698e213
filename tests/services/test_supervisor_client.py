"""The client against a real supervisord with a program that only waits."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import ANY

import pytest
from msgspec.structs import replace

from services import supervisor_client
from services.programs import rank_program
from services.render import main_config
from services.run_dir import StackError, take_lock
from services.scheduler_main import end_late_rank
from services.stack import logs_dir, start_supervisord, stop_supervisord
from services.supervisor_client import ProcessInfo, SupervisorClient, SupervisorGone, SupervisorHangs, SupervisorRefused

GROUP = """[group:{name}]
programs={name}-waiter
[program:{name}-waiter]
process_name=waiter
command={python} -c "import time; time.sleep(60)"
startsecs=10
"""


def add_file(run_dir: Path, name: str) -> None:
    (run_dir / "programs" / f"{name}.conf").write_text(GROUP.format(name=name, python=sys.executable))


def wait_for(done: Callable[[], bool]) -> None:
    """For what must come, however busy the machine is."""
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def run_dir(tmp_path: Path) -> Iterator[Path]:
    fd = take_lock(tmp_path)
    for name in ("programs", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "supervisord.conf").write_text(main_config(tmp_path))
    add_file(tmp_path, "a")
    process = start_supervisord(tmp_path, fd, with_parent=True)
    try:
        wait_for((tmp_path / "supervisord.pid").is_file)
        yield tmp_path
    finally:
        process.kill()
        process.wait()


def find(client: SupervisorClient, full_name: str) -> ProcessInfo | None:
    return next((info for info in client.processes() if info.full_name == full_name), None)


def started(client: SupervisorClient, full_name: str) -> bool:
    return (info := find(client, full_name)) is not None and info.pid > 0


def answers(run_dir: Path) -> bool:
    """Its socket has its name before anybody listens there."""
    try:
        with SupervisorClient(run_dir) as client:
            return client.pid() > 0
    except SupervisorGone:
        return False


def add_slow_program(run_dir: Path, client: SupervisorClient, stop_s: float) -> None:
    """`s:waiter`, which takes that long to stop. Returns once it will."""
    prepared = run_dir / "prepared"
    code = (
        f"import pathlib, signal, time; signal.signal(15, lambda *_: (time.sleep({stop_s}), exit(0))); "
        f"pathlib.Path('{prepared}').touch(); time.sleep(60)"
    )
    (run_dir / "programs" / "s.conf").write_text(
        f'[group:s]\nprograms=s-waiter\n[program:s-waiter]\nprocess_name=waiter\ncommand={sys.executable} -c "{code}"\n'
    )
    client.add_group("s")
    wait_for(prepared.is_file)


def gone(pid: int) -> bool:
    """Whether a process has ended, reaped or not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_groups_come_and_go(run_dir: Path) -> None:
    with SupervisorClient(run_dir) as client:
        wait_for(lambda: started(client, "a:waiter"))
        add_file(run_dir, "b")
        client.add_group("b")
        client.add_group("b")
        wait_for(lambda: started(client, "b:waiter"))
        with pytest.raises(SupervisorRefused, match="removeProcessGroup b: STILL_RUNNING"):
            client.remove_group("b")
        client.stop("b:waiter")
        client.stop("b:waiter")
        info = find(client, "b:waiter")
        assert info is not None
        assert (info.statename, info.pid, info.uptime_s) == ("STOPPED", 0, 0)
        client.start("b:waiter")
        client.start("b:waiter")
        client.stop("b:waiter")
        (run_dir / "programs" / "b.conf").unlink()
        client.remove_group("b")
        client.remove_group("b")
        assert find(client, "b:waiter") is None
        with pytest.raises(SupervisorRefused, match="startProcess b:waiter False: BAD_NAME"):
            client.start("b:waiter")


def test_a_start_waits_for_a_stop_that_is_under_way(run_dir: Path) -> None:
    with SupervisorClient(run_dir) as client, SupervisorClient(run_dir) as other:
        add_slow_program(run_dir, client, 0.5)
        before = find(client, "s:waiter")
        assert before is not None
        other._call("stopProcess", "s:waiter", False)
        client.start("s:waiter")
        after = find(client, "s:waiter")
        assert after is not None
        assert after.pid not in (0, before.pid)


def test_an_interrupted_call_does_not_spoil_the_next(run_dir: Path) -> None:
    with SupervisorClient(run_dir) as client:
        wait_for(lambda: started(client, "a:waiter"))

        def interrupt(number: int, frame: object) -> None:
            raise KeyboardInterrupt

        previous = signal.signal(signal.SIGALRM, interrupt)
        pid = client.pid()
        os.kill(pid, signal.SIGSTOP)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                client.processes()
        finally:
            os.kill(pid, signal.SIGCONT)
            signal.signal(signal.SIGALRM, previous)
        assert client.pid() == pid


def test_two_stops_at_once_are_one(run_dir: Path) -> None:
    with SupervisorClient(run_dir) as client:
        add_slow_program(run_dir, client, 1)
        client.shutdown()
    assert stop_supervisord(run_dir, 10, print)
    os.close(take_lock(run_dir, wait_s=0))  # and it has really ended


def test_an_ordered_stop_frees_the_directory(run_dir: Path) -> None:
    with pytest.raises(StackError, match="already running"):
        take_lock(run_dir, wait_s=0)
    with SupervisorClient(run_dir) as client:
        wait_for(lambda: started(client, "a:waiter"))
        info = find(client, "a:waiter")
    assert info is not None
    assert stop_supervisord(run_dir, 10, print)
    assert gone(info.pid)
    os.close(take_lock(run_dir, wait_s=1))
    assert not stop_supervisord(run_dir, 10, print)
    with pytest.raises(SupervisorGone, match="does not answer"), SupervisorClient(run_dir) as client:
        client.pid()


def test_reloading_keeps_the_directory_locked(run_dir: Path) -> None:
    with SupervisorClient(run_dir) as client:
        pid = client.pid()
        wait_for(lambda: started(client, "a:waiter"))
        before = find(client, "a:waiter")
    os.kill(pid, signal.SIGHUP)

    def restarted() -> bool:
        try:
            with SupervisorClient(run_dir) as client:
                return started(client, "a:waiter") and find(client, "a:waiter") != before
        except (SupervisorGone, SupervisorRefused):  # it stops, or is not back yet
            return False

    wait_for(restarted)
    with pytest.raises(StackError, match="already running"):
        take_lock(run_dir, wait_s=0)


def test_supervisord_stops_when_its_parent_is_killed(run_dir: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from services.run_dir import take_lock\n"
        "from services.stack import start_supervisord\n"
        "run_dir = Path(sys.argv[1]); print(start_supervisord(run_dir, take_lock(run_dir), with_parent=True).pid)\n"
        "sys.stdout.flush(); time.sleep(60)"
    )
    assert stop_supervisord(run_dir, 10, print)
    parent = subprocess.Popen([sys.executable, "-c", code, str(run_dir)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent.stdout:
        pid = int(parent.stdout.readline())
    wait_for(lambda: answers(run_dir))
    with SupervisorClient(run_dir) as client:
        wait_for(lambda: started(client, "a:waiter"))
    parent.kill()
    parent.wait()
    wait_for(lambda: gone(pid))


def test_a_late_rank_is_killed_and_named_and_a_young_one_is_not(run_dir: Path) -> None:
    told: list[tuple[str, object]] = []

    def end(late_ms: int) -> list[tuple[str, object]]:
        told.clear()
        end_late_rank(run_dir, "m/0", 0, late_ms, lambda event, **fields: told.append((event, fields["program"])))
        return told

    rank = rank_program("m/0", 0)
    (run_dir / "programs" / "m.conf").write_text(
        f"[group:m-0]\nprograms={rank.name}\n[program:{rank.name}]\nprocess_name=rank-0\nstartretries=100\n"
        f'command={sys.executable} -c "import time; time.sleep(60)"\n'
    )
    with SupervisorClient(run_dir) as client:
        client.add_group("m-0")
        wait_for(lambda: started(client, rank.full_name))
        before = find(client, rank.full_name)
        assert before is not None
        assert end(1_000_000) == []
        wait_for(lambda: (info := find(client, rank.full_name)) is not None and info.uptime_s > 1)
        assert find(client, rank.full_name) == replace(before, now=ANY, statename=ANY)
        assert end(2000) == [("rank_ended", "m-0-rank-0")]
        wait_for(lambda: (info := find(client, rank.full_name)) is not None and info.pid not in (0, before.pid))
    assert stop_supervisord(run_dir, 10, print)
    assert end(2000) == [("rank_not_ended", "m-0-rank-0")]


def test_logs_are_private(run_dir: Path) -> None:
    log = logs_dir(run_dir) / "supervisord.log"
    wait_for(log.is_file)
    assert log.stat().st_mode & 0o077 == 0


def test_a_supervisord_that_stands_still_is_an_error_and_no_wait(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = int((run_dir / "supervisord.pid").read_text())
    with SupervisorClient(run_dir) as client:
        client.pid()
    monkeypatch.setattr(supervisor_client, "TIMEOUT_S", 0.2)
    os.kill(pid, signal.SIGSTOP)
    try:
        with SupervisorClient(run_dir) as client, pytest.raises(SupervisorHangs, match=r"within 0\.2 s"):
            client.processes()
        with pytest.raises(StackError, match=r"supervisord\.pid: kill -9"):
            stop_supervisord(run_dir, 1, print)
    finally:
        os.kill(pid, signal.SIGCONT)
    monkeypatch.setattr(supervisor_client, "TIMEOUT_S", 10.0)
    with SupervisorClient(run_dir) as client:
        assert client.pid() == pid
