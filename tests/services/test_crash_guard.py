"""The crash guard, on a clock of its own."""

from pathlib import Path

import pytest

from services.crash_guard import MAX_DELAY_S, WINDOW_S, CrashGuard, read_history


class Clock:
    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "starts" / "rank-0.json"


def life(path: Path, clock: Clock, seconds: float, jitter: float = 0.5) -> float:
    """One life of a program that dies after `seconds`; what it waited before."""
    waited = CrashGuard(path, clock, clock.sleep, lambda: jitter).begin()
    clock.now += seconds
    return waited


def test_the_first_deaths_are_free_and_then_delays_double(path: Path, clock: Clock) -> None:
    waits = [life(path, clock, 1.0) for _ in range(10)]
    assert waits == [0, 0, 0, 0, 2, 4, 8, 16, MAX_DELAY_S, MAX_DELAY_S]


def test_delays_are_jittered_but_bounded(path: Path, clock: Clock) -> None:
    for _ in range(4):
        life(path, clock, 1.0)
    assert life(path, clock, 1.0, jitter=0.0) == 1.5
    assert life(path, clock, 1.0, jitter=1.0) == 5.0
    for _ in range(4):
        assert life(path, clock, 1.0, jitter=1.0) <= MAX_DELAY_S


def test_a_program_dead_at_once_starts_at_most_ten_times_a_minute(path: Path, clock: Clock) -> None:
    start, starts = clock.now, 0
    while clock.now - start < 60:
        life(path, clock, 1.0, jitter=0.0)
        clock.now += 1.0  # supervisord's own reaction
        starts += 1
    assert starts <= 10


def test_long_lives_are_no_crash_loop(path: Path, clock: Clock) -> None:
    assert [life(path, clock, 16.0) for _ in range(8)] == [0] * 8


def test_old_deaths_are_forgotten(path: Path, clock: Clock) -> None:
    for _ in range(5):
        life(path, clock, 1.0)
    clock.now += WINDOW_S
    assert life(path, clock, 1.0) == 0


def test_ordered_stops_count_for_nothing(path: Path, clock: Clock) -> None:
    for _ in range(10):
        guard = CrashGuard(path, clock, clock.sleep)
        assert guard.begin() == 0
        guard.forgive()
    assert read_history(path).num_starts == 10
    assert read_history(path).young_deaths == []


def test_a_bad_configuration_waits_the_full_time_at_once(path: Path, clock: Clock) -> None:
    guard = CrashGuard(path, clock, clock.sleep, lambda: 0.5)
    assert guard.begin() == 0
    guard.refuse("no such architecture")
    assert read_history(path).boot_error == "no such architecture"
    assert life(path, clock, 1.0) == MAX_DELAY_S
    assert read_history(path).boot_error == ""  # the new life may fare better


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"started": "x"}'])
def test_a_damaged_file_is_an_empty_history(content: bytes, path: Path, clock: Clock) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    assert life(path, clock, 1.0) == 0
    assert read_history(path).num_starts == 1


def test_a_history_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "starts").touch()  # a file where the directory should be: as good as a full disk
    guard = CrashGuard(tmp_path / "starts" / "rank.json")
    assert guard.begin() == 0.0
    guard.refuse("bad")
    guard.forgive()
