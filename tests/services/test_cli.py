"""The command line: its options are a promise, and its failures say what to do."""

import argparse
import os
import socket
from functools import partial
from pathlib import Path

import pytest

from services.cli import build_parser, main
from services.run_dir import take_lock

COMMON = {"--config", "--set", "--run-dir", "--help", "-h"}


def test_the_commands_and_options_are_these() -> None:
    (commands,) = (action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction))
    found = {
        name: {option for action in parser._actions for option in action.option_strings or [action.dest]}
        for name, parser in commands.choices.items()
    }
    assert found == {
        "up": {*COMMON, "--foreground"},
        "down": COMMON,
        "status": COMMON,
        "restart": {*COMMON, "target"},
        "scale": {*COMMON, "target"},
        "pull": {*COMMON, "source"},
        "check": COMMON,
    }


@pytest.fixture
def config(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (model / name).write_text("{}")
    (model / "model.safetensors").touch()
    file = tmp_path / "bouquet.toml"
    file.write_text('run_dir = "run"\n[[models]]\nname = "m"\nsource = "./model"\n')
    return file


def test_check_says_what_is_served(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["gateway.port=9000", "models[0].source=random:tiny", f"cache_dir={config.parent}", "rank.device=cpu"]
    assert main(["check", "--config", str(config), *(f"--set={setting}" for setting in settings)]) == 0
    assert "is valid: m (1×) on http://127.0.0.1:9000" in capsys.readouterr().out


def test_check_lists_every_problem(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["check", "--config", str(config), "--set", "gateway.port=0", "--set", "models[0].replicas=0"]
    assert main(given) == 1
    errors = capsys.readouterr().err.splitlines()
    assert sorted(errors) == [
        "bouquet: gateway.port: must be 1..65535, got 0",
        "bouquet: models[0].replicas: must be 1..64, got 0",
    ]


def test_check_looks_at_the_models_files(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (config.parent / "model" / "model.safetensors").unlink()
    assert main(["check", "--config", str(config)]) == 1
    assert "models[0].source: " in capsys.readouterr().err


def test_check_finds_what_would_stop_a_start(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["models[0].source=random:tiny", f"cache_dir={config.parent}", "rank.device=cpu"]
    given = ["check", "--config", str(config), *(f"--set={setting}" for setting in settings)]
    assert main([*given, "--set", "rank.kv_cache_bytes=1000"]) == 1
    assert "bouquet: models[0] (m): the key-value cache may take 1000 bytes" in capsys.readouterr().err
    for command in ("check", "up"):
        assert main([command, *given[1:], "--set", "gateway.host=999.1.1.1"]) == 1
        assert "gateway.host: this machine cannot listen on '999.1.1.1'" in capsys.readouterr().err


def test_a_cache_that_is_no_directory_is_named(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ["models[0].source=random:tiny", f"cache_dir={config}", "rank.device=cpu"]
    assert main(["check", "--config", str(config), *(f"--set={setting}" for setting in settings)]) == 1
    assert f"cache_dir: {config} cannot be used: Not a directory; choose another" in capsys.readouterr().err


def test_pull_prints_where_the_files_are(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pull", "--config", str(config)]) == 0
    assert capsys.readouterr().out == f"m: {config.parent}/model\n"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["status"], 1, "no stack runs in"),
        (["down"], 0, "no stack runs in"),
        (["restart"], 1, "no stack runs in"),
        (["scale", "m=2"], 1, "no stack runs in"),
        (["scale", "m"], 1, "'m' is not NAME=K"),
        (["scale", "m=-1"], 1, "'m=-1' is not NAME=K"),
        (["scale", "m=²"], 1, "'m=²' is not NAME=K"),
        (["scale", "m=" + "9" * 5000], 1, "is not NAME=K"),
    ],
)
def test_without_a_stack(
    arguments: list[str], code: int, text: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--config", str(config)]) == code
    captured = capsys.readouterr()
    assert text in captured.out + captured.err


@pytest.mark.parametrize("command", ["down", "status"])
def test_a_file_that_has_become_invalid_does_not_hide_its_stack(
    command: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text('run_dir = "elsewhere"\nmodels = 5\nnonsense = 1\n')
    main([command, "--config", str(config)])
    assert f"no stack runs in {config.parent}/elsewhere" in capsys.readouterr().out
    config.write_text("run_dir = [")
    assert main([command, "--config", str(config)]) == 1
    assert "is not TOML" in (told := capsys.readouterr().err)
    assert "--run-dir DIR finds a running stack without that file" in told
    assert main([command, "--config", str(config), "--run-dir", str(config.parent / "run")]) == (command == "status")


def test_a_twin_is_refused_before_anything_is_touched(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.cli.take_lock", partial(take_lock, wait_s=0.0))
    run_dir = config.parent / "run"
    lock = take_lock(run_dir)
    (run_dir / "replicas.json").write_text("kept")
    assert main(["up", "--config", str(config)]) == 1
    assert "already running" in capsys.readouterr().err
    assert (run_dir / "replicas.json").read_text() == "kept"
    os.close(lock)


FOREIGN = ("programs/mine.c", "replicas/x", "starts/y", "config.json", "supervisord.conf", "a.tmp", "replicas.json")


def tree(directory: Path) -> dict[str, str | None]:
    """Path → content of everything below; None: a directory."""
    return {
        str(path.relative_to(directory)): path.read_text() if path.is_file() else None for path in directory.rglob("*")
    }


@pytest.mark.parametrize("arguments", [["down"], ["status"], ["restart"], ["scale", "m=2"], ["up"], ["check"]])
@pytest.mark.parametrize("by_option", [True, False])
def test_a_directory_of_others_is_left_as_it_is(
    arguments: list[str], by_option: bool, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = config.parent / "home"
    for name in FOREIGN:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(name)
    home.chmod(0o755)
    before = tree(home)
    where = ["--run-dir", str(home)] if by_option else ["--set", f"run_dir={home}"]
    assert main([*arguments, "--config", str(config), *where]) == (arguments != ["down"])
    captured = capsys.readouterr()
    assert "no stack runs in" in captured.out + captured.err or "choose another run_dir" in captured.err
    assert tree(home) == before
    assert home.stat().st_mode & 0o777 == 0o755


def test_another_supervisord_is_not_stopped(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = config.parent / "home"
    home.mkdir()
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(home / "supervisor.sock"))
        other.listen()
        other.settimeout(0)
        assert main(["down", "--config", str(config), "--run-dir", str(home)]) == 0
        with pytest.raises(BlockingIOError):  # nobody has come
            other.accept()
    assert capsys.readouterr().out == f"no stack runs in {home}\n"


def test_an_empty_run_dir_is_refused(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = tree(config.parent)
    for command in ("up", "check", "down", "status"):
        assert main([command, "--config", str(config), "--set", 'run_dir=""']) == 1
        assert "bouquet: run_dir: is empty: name a directory" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main([command, "--config", str(config), "--run-dir", ""])
        assert "--run-dir: is empty: name a directory" in capsys.readouterr().err
    assert tree(config.parent) == before


def test_check_says_of_a_run_dir_what_a_start_would(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for run_dir in (config, Path("/dev/null/x"), config.parent):
        assert main(["check", "--config", str(config), "--run-dir", str(run_dir)]) == 1
        assert "choose another run_dir" in capsys.readouterr().err


def test_wrong_usage_is_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fly"])
    assert caught.value.code == 2
    assert "invalid choice: 'fly'" in capsys.readouterr().err
