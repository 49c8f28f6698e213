"""The command `bouquet`: up, down, status, restart, scale, pull, check."""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from services.config import (
    ModelConfig,
    RunConfig,
    ServiceConfig,
    find_config,
    load_config,
    load_run_dir,
    read_run_config,
)
from services.config_checks import ConfigError
from services.foreground import TICK_S, Foreground
from services.greeting import greeting
from services.model_checks import find_refusals
from services.placement import PlacementError
from services.programs import GATEWAY_GROUP
from services.replicas import ReplicasError, read_replicas
from services.rolling import Rolling, exclusive
from services.run_dir import StackError, check_run_dir, clean, is_claimed, take_lock
from services.sources import SourceError, resolve_source
from services.stack import (
    StartWatch,
    check_host,
    stack_programs,
    start_supervisord,
    stop_supervisord,
    stop_timeout_s,
    url,
    wait_for_port,
    write_stack,
)
from services.status import print_status
from services.supervisor_client import SupervisorClient, SupervisorGone, SupervisorRefused

ERRORS = (SourceError, StackError, PlacementError, ReplicasError, SupervisorRefused, OSError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code: 0 done, 1 refused or failed, 2 wrong usage."""
    given = build_parser().parse_args(arguments)
    try:
        return COMMANDS[given.command](given)
    except ConfigError as error:
        for problem in error.problems:
            print(f"bouquet: {problem}", file=sys.stderr)
    except ERRORS as error:
        print(f"bouquet: {error}", file=sys.stderr)
    except SupervisorGone as error:
        print(f"bouquet: {error}: the stack has died; `bouquet up` starts it again", file=sys.stderr)
    except KeyboardInterrupt:
        print("bouquet: interrupted", file=sys.stderr)
    return 1


def build_parser() -> argparse.ArgumentParser:
    common = argparse.ArgumentParser(add_help=False)
    where = "default: $BOUQUET_CONFIG, else ./bouquet.toml, else the project's"
    common.add_argument("--config", metavar="FILE", help=where)
    common.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides")
    common.add_argument("--run-dir", metavar="DIR", type=_directory, help="default: run_dir of the configuration")
    parser = argparse.ArgumentParser(prog="bouquet", description="Runs a stack that serves models for search.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, text: str) -> argparse.ArgumentParser:
        return commands.add_parser(name, parents=[common], help=text, description=text)

    up = add("up", "start the stack and wait until it serves")
    up.add_argument("--foreground", action="store_true", help="stay, show what happens, stop on Ctrl-C")
    add("down", "finish what is under way and stop the stack")
    add("status", "show every process and whether the stack serves; exit code 1 if it does not")
    restart = add(
        "restart",
        "restart replica by replica; with a single one, requests wait until it is back (gateway.replica_wait_ms)",
    )
    restart.add_argument("target", nargs="?", metavar="NAME|NAME/K|gateways", help="default: everything")
    scale = add("scale", "change the number of replicas without dropping a request, until the stack stops")
    scale.add_argument("target", metavar="NAME=K")
    pull = add("pull", "fetch the models' files, asking hub repositories for news")
    pull.add_argument("source", nargs="?", help="one source instead of those of the configuration")
    add(
        "check",
        "say what is wrong with the configuration, with the models' files (fetched if they are not there) and with "
        "both together, as far as it shows without loading a model",
    )
    return parser


def up(given: argparse.Namespace) -> int:
    config = _load(given)
    run_dir = Path(config.run_dir)
    check_host(config.gateway.host)
    lock_fd = take_lock(run_dir)
    directories = _fetch(config, refresh=False)
    wait_for_port(config.gateway.host, config.gateway.port)
    write_stack(config, directories)
    foreground = Foreground(config, _say)
    supervisord = start_supervisord(run_dir, lock_fd, with_parent=given.foreground)
    started = time.monotonic()
    code = _wait_until_ready(config, foreground, supervisord)
    if code is None:
        _say(f"\nready after {time.monotonic() - started:.1f} s\n{greeting(config)}")
        if not given.foreground:
            return 0
        _say("Ctrl-C stops.")
        foreground.watch(supervisord)
        code = 0
    code = _stop(config, foreground, supervisord) or code
    _clean_if_free(run_dir)
    return code


def _stop(config: ServiceConfig, foreground: Foreground, supervisord: "subprocess.Popen[bytes]") -> int:
    """Exit code 0 if everything ended in order, by our doing or by another's."""
    if supervisord.poll() is None:
        _say("stopping: finishing what is under way (Ctrl-C again kills)")
        ordered = foreground.stop(supervisord, stop_timeout_s(config))
        _say("stopped" if ordered else "killed")
        return 0 if ordered else 1
    if supervisord.returncode == 0:
        _say("stopped by another command")
        return 0
    print(
        f"bouquet: supervisord ended with code {supervisord.returncode}; its processes ended with it", file=sys.stderr
    )
    return 1


def _wait_until_ready(
    config: ServiceConfig, foreground: Foreground, supervisord: "subprocess.Popen[bytes]"
) -> int | None:
    """None once the stack serves, else the exit code: 0 if a stop was asked for."""
    programs = stack_programs(config, read_replicas(Path(config.run_dir)))
    watch = StartWatch(config, supervisord, programs)
    _say(f"starting {len(programs)} processes; logs in {config.run_dir}/logs")
    try:
        while not watch.ready():
            foreground.show_start()
            if reason := watch.news():
                _say(f"waiting: {reason}")
            if foreground.stop_asked(TICK_S / 3):
                return 0
    except StackError as error:
        foreground.show_start()
        print(f"bouquet: {error}", file=sys.stderr)
        return 1
    foreground.show_start()
    return None


def down(given: argparse.Namespace) -> int:
    run_dir, run = _running(given)
    timeout_s = stop_timeout_s(run.config) if run else 60.0
    stopped = False
    if is_claimed(run_dir):  # elsewhere both the files and a supervisord are somebody else's
        stopped = stop_supervisord(run_dir, timeout_s, _say)
        _clean_if_free(run_dir)
    _say("stopped" if stopped else f"no stack runs in {run_dir}")
    return 0


def status(given: argparse.Namespace) -> int:
    run_dir, run = _running(given)
    if run is None:
        _say(f"no stack runs in {run_dir}")
        return 1
    return print_status(run, _say)


def restart(given: argparse.Namespace) -> int:
    run_dir, run = _running(given)
    with exclusive(run_dir), SupervisorClient(run_dir) as client:
        rolling = Rolling(_need(run), client, _say)
        table = read_replicas(run_dir)
        config = _need(run).config
        chosen = [
            (model, replica)
            for model in config.models
            for replica in table.ids(model.name)
            if given.target in (None, model.name, replica)
        ]
        if not chosen and given.target != GATEWAY_GROUP:
            names = ", ".join([*(model.name for model in config.models), GATEWAY_GROUP])
            raise StackError(f"nothing here is called {given.target!r}; there are {names}, and replicas as NAME/K")
        for model, replica in chosen:
            rolling.restart_replica(model, replica)
        if given.target in (None, GATEWAY_GROUP):
            rolling.restart_gateways()
    return 0


def scale(given: argparse.Namespace) -> int:
    run_dir, run = _running(given)
    name, equals, count = given.target.rpartition("=")
    if not equals or not (count.isascii() and count.isdigit() and len(count) < 10):
        raise StackError(f"{given.target!r} is not NAME=K, for example all-minilm-l6-v2=2")
    with exclusive(run_dir), SupervisorClient(run_dir) as client:
        Rolling(_need(run), client, _say).scale(_model(_need(run).config, name), int(count))
    return 0


def pull(given: argparse.Namespace) -> int:
    config = _load(given)
    if given.source:
        print(resolve_source(given.source, Path(config.cache_dir), refresh=True, progress=_say))
    else:
        for name, directory in _fetch(config, refresh=True).items():
            print(f"{name}: {directory}")
    return 0


def check(given: argparse.Namespace) -> int:
    path = find_config(given.config)
    config = load_config(path, given.overrides, given.run_dir)
    check_host(config.gateway.host)
    check_run_dir(Path(config.run_dir))
    if refusals := find_refusals(config, _fetch(config, refresh=False)):
        raise ConfigError(refusals)
    models = ", ".join(f"{model.name} ({model.replicas}×)" for model in config.models)
    print(f"{path} is valid: {models} on {url(config)}")
    return 0


COMMANDS = {"up": up, "down": down, "status": status, "restart": restart, "scale": scale, "pull": pull, "check": check}


def _directory(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("is empty: name a directory")
    return Path(text)


def _load(given: argparse.Namespace) -> ServiceConfig:
    return load_config(find_config(given.config), given.overrides, given.run_dir)


def _running(given: argparse.Namespace) -> tuple[Path, RunConfig | None]:
    """The run directory meant, and what runs there; the file of the running stack counts, not today's."""
    try:
        run_dir = (given.run_dir or load_run_dir(find_config(given.config), given.overrides)).absolute()
    except ConfigError as error:
        raise ConfigError([*error.problems, "--run-dir DIR finds a running stack without that file"]) from None
    if not is_claimed(run_dir):
        return run_dir, None
    try:
        return run_dir, read_run_config(run_dir / "config.json")
    except ConfigError:
        return run_dir, None


def _need(run: RunConfig | None) -> RunConfig:
    if run is None:
        raise StackError("no stack runs there (`bouquet up` starts one)")
    return run


def _model(config: ServiceConfig, name: str) -> ModelConfig:
    try:
        return config.model(name)
    except KeyError:
        raise StackError(f"no model {name!r}; there are {', '.join(m.name for m in config.models)}") from None


def _fetch(config: ServiceConfig, *, refresh: bool) -> dict[str, Path]:
    """Every model's directory. Raises SourceError that names the key."""
    directories = {}
    for index, model in enumerate(config.models):
        try:
            directories[model.name] = resolve_source(
                model.source, Path(config.cache_dir), refresh=refresh, progress=_say
            )
        except SourceError as error:
            raise SourceError(f"models[{index}].source: {error}") from None
        except OSError as error:  # of the cache, or of files that may not be read
            where = f"{error.filename}: " if error.filename else ""
            raise SourceError(f"models[{index}].source: {where}{error.strerror}") from None
    return directories


def _clean_if_free(run_dir: Path) -> None:
    """Cleans unless somebody has already started the next stack there."""
    try:
        take_lock(run_dir, wait_s=0)
    except StackError:
        return
    clean(run_dir)  # the lock goes with this process


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
