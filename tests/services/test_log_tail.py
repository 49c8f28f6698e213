"""Following log files: whole lines, each once, over rotation."""

from pathlib import Path

from services.log_tail import LogTail, describe, last_lines, parse_line


def texts(tail: LogTail) -> list[str]:
    return [f"{line.program}: {line.text}" for line in tail.lines()]


def test_only_what_is_new_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("old\n")
    (tmp_path / "supervisord.log").write_text("not a program\n")
    tail = LogTail(tmp_path)
    assert texts(tail) == []
    with path.open("a") as file:
        file.write("one\ntw")
        file.flush()
        assert texts(tail) == ["a: one"]
        file.write("o\n")
        file.flush()
        assert texts(tail) == ["a: two"]
    (tmp_path / "b.log").write_text("new file\n")
    assert texts(tail) == ["b: new file"]


def test_a_rotated_file_is_read_from_its_start(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("a long first line\n")
    tail = LogTail(tmp_path)
    path.rename(tmp_path / "a.log.1")
    path.write_text("after\n")
    assert texts(tail) == ["a: after"]
    path.write_text("cut\n")  # shorter than what was read
    assert texts(tail) == ["a: cut"]


def test_lines_of_ours_and_others() -> None:
    line = parse_line("a", '{"ts":"t","level":"info","process":"a","event":"ready","up_ms":5,"load_ms":3}')
    assert (line.event, line.level, describe(line)) == ("ready", "info", "ready  load_ms=3")
    for text in ("Segmentation fault", "[1, 2]", '{"no": "event"}', ""):
        line = parse_line("a", text)
        assert (line.fields, line.event, describe(line)) == ({}, "", text)


def test_the_end_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    assert last_lines(path) == []
    path.write_text("".join(f"line {i}\n" for i in range(20_000)))
    assert last_lines(path, 2) == ["line 19998", "line 19999"]
