"""One owner at a time, whatever the order of taking, letting go and dying."""

import threading
from pathlib import Path

import pytest

from ipc.endpoint_lock import EndpointInUse, EndpointLock
from tests.ipc.processes import Child, num_fds


def test_one_owner_at_a_time(tmp_path: Path) -> None:
    before = num_fds()
    lock = EndpointLock(tmp_path / "x.sock")
    with pytest.raises(EndpointInUse, match=r"x\.sock belongs to a live process"):
        EndpointLock(tmp_path / "x.sock")
    other = EndpointLock(tmp_path / "y.sock")
    lock.release()
    lock.release()
    EndpointLock(tmp_path / "x.sock").release()
    other.release()
    assert list(tmp_path.iterdir()) == []
    assert num_fds() == before


def test_the_file_of_a_killed_owner_is_taken_over(tmp_path: Path) -> None:
    code = """
        import sys
        from pathlib import Path
        from ipc.endpoint_lock import EndpointLock
        lock = EndpointLock(Path(sys.argv[1]))
        print("mine", flush=True)
        sys.stdin.readline()
    """
    with Child(code, tmp_path / "x.sock") as owner:
        assert owner.line() == "mine"
        with pytest.raises(EndpointInUse):
            EndpointLock(tmp_path / "x.sock")
        owner.kill()
    assert (tmp_path / "x.sock.lock").exists()
    EndpointLock(tmp_path / "x.sock").release()


def test_children_do_not_inherit_it(tmp_path: Path) -> None:
    lock = EndpointLock(tmp_path / "x.sock")
    with Child("import sys; sys.stdin.readline()"):
        lock.release()
        EndpointLock(tmp_path / "x.sock").release()


def test_takers_racing_with_a_release_never_both_hold_it(tmp_path: Path) -> None:
    """A taker may open the file that its owner is about to remove: it must not believe in that one."""
    holders, most, taken = 0, 0, 0
    guard = threading.Lock()

    def take_often() -> None:
        nonlocal holders, most, taken
        for _ in range(2000):
            try:
                lock = EndpointLock(tmp_path / "x.sock")
            except EndpointInUse:
                continue
            with guard:
                holders, taken = holders + 1, taken + 1
                most = max(most, holders)
            with guard:
                holders -= 1
            lock.release()

    threads = [threading.Thread(target=take_often) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    assert taken > 100
