"""Only a start claims a directory, and only one that holds nothing; what is not claimed is never changed."""

import os
from pathlib import Path

import pytest

from services.run_dir import MARK, StackError, check_run_dir, claim, clean, is_claimed, take_lock


def test_a_directory_that_is_empty_or_not_there_is_claimed(tmp_path: Path) -> None:
    for path in (tmp_path / "new" / "deep", tmp_path / "empty"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        check_run_dir(path)
        assert not is_claimed(path)
        claim(path)
        assert is_claimed(path)
        assert [entry.name for entry in path.iterdir()] == [MARK]
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "logs").mkdir()
        claim(path)  # the next stack's start finds what the last one left


def test_a_directory_with_files_of_others_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "programs").mkdir()
    (tmp_path / "programs" / "mine.c").touch()
    tmp_path.chmod(0o755)
    for refused in (check_run_dir, claim, take_lock):
        with pytest.raises(StackError, match=r"not a stack's \('programs'; no bouquet.lock\).*choose another run_dir"):
            refused(tmp_path)
    with pytest.raises(StackError, match="nothing in it is removed"):
        clean(tmp_path)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine.c", "programs"]
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_directory_that_cannot_be_made_is_refused_before_a_start(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below", tmp_path / "file" / "far" / "below"):
        with pytest.raises(StackError, match=r"cannot be made.*; choose another run_dir"):
            check_run_dir(path)
    check_run_dir(tmp_path / "far" / "below")
    assert os.listdir(tmp_path) == ["file"]
