"""What the benchmark of sums over ranks makes of its figures, and of a rank that fails; the figures need GPUs."""

import multiprocessing
from typing import Any

import pytest

from bench.micro import all_reduce
from bench.micro.all_reduce import best, next_line, text
from rose.distributed.shared_sums import Ways

KIB = 1024


def line(kib: int, nccl: float, one_shot: Any = None, two_shot: Any = None) -> dict[str, Any]:
    found = {"kib": kib, "nccl": nccl, "one_shot": one_shot, "two_shot": two_shot}
    return {name: value for name, value in found.items() if value is not None}


def test_the_quickest_way_up_to_where_it_is_one_no_more() -> None:
    lines = [line(4, 9.6, 6.8, 7.5), line(64, 11.0, 7.1, 7.5), line(128, 11.1, 8.0, 7.7), line(512, 13.8, 10.3, 8.1)]
    assert best(lines) == Ways(64 * KIB, 512 * KIB)
    assert best([*lines, line(1024, 9.0, 20.0, 10.0), line(2048, 30.0, 1.0, 1.0)]) == Ways(64 * KIB, 512 * KIB)
    assert best([*lines, line(16384, 79.6)]) == Ways(64 * KIB, 512 * KIB)
    assert best(lines[:2]) == Ways(64 * KIB, 64 * KIB)
    assert best([line(4, 9.6, "RuntimeError: no peers", 7.5)]) == Ways(0, 0)
    assert best([]) == Ways(0, 0)


def test_a_line_of_the_table_has_a_cell_for_every_column() -> None:
    assert text(line(16384, 79.6)) == "| 16384 | 79.6 |  |  |  |  |  |  |"
    assert text({"shared": False}).startswith("group: {'shared': False}\n| KiB | nccl |")


def test_a_rank_that_fails_or_hangs_ends_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(all_reduce, "ANSWER_SECONDS", 0.05)
    (leader, say), (other, answer) = multiprocessing.Pipe(), multiprocessing.Pipe()
    say.send({"kib": 4})
    answer.send({"kib": 4})
    assert next_line([leader, other]) == {"kib": 4}
    say.send({"kib": 8})
    answer.send({"error": "Traceback …\nRuntimeError: no peer access"})
    assert next_line([leader, other]) is None
    assert "rank 1: RuntimeError: no peer access" in capsys.readouterr().out
    say.send({"kib": 8})
    assert next_line([leader, other]) is None
    assert "rank 1 has said nothing" in capsys.readouterr().out
    say.close()
    assert next_line([leader, other]) is None
    assert "rank 0 has died" in capsys.readouterr().out
