"""The service's configuration: one TOML file, typed, with every path made absolute.

The only module that reads the environment (BOUQUET_CONFIG, XDG_CACHE_HOME, CUDA_VISIBLE_DEVICES).
"""

import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gateway.config import GatewayConfig
from rose.config import RankConfig
from scheduler.config import SchedulerConfig
from services.config_checks import ConfigError, find_conflicts, find_problems
from services.files import write_private
from services.overrides import apply_overrides
from services.source_names import LocalSource, RandomSource, SourceError, parse_source
from services.user_paths import PathError, absolute_path

CONFIG_NAME = "bouquet.toml"
RUN_DIR = ".run"


class ModelConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One served model. Once loaded, `rank` and `scheduler` hold the defaults with this model's overrides."""

    name: str  # as clients say it
    source: str  # hf:owner/name[@revision] | pypi:name==version | random:shape[?seed=..] | a directory
    replicas: int = 1
    tensor_parallel_size: int = 1
    memory_fraction: float | None = None  # of each device; None: what [rank] says
    rank: RankConfig = RankConfig()
    scheduler: SchedulerConfig = SchedulerConfig()


class ServiceConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    models: list[ModelConfig]
    gateway: GatewayConfig = GatewayConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    rank: RankConfig = RankConfig()
    run_dir: str = RUN_DIR  # relative to the file
    cache_dir: str = ""  # fetched models; "": ~/.cache/bouquet

    def model(self, name: str) -> ModelConfig:
        """Raises KeyError for a name that is not served."""
        return next((model for model in self.models if model.name == name), None) or _raise_key(name)


class RunConfig(Struct, frozen=True):
    """What the processes of one run read: the configuration, and where each model's files are."""

    config: ServiceConfig
    directories: dict[str, str]  # model name → directory

    def paths(self) -> dict[str, Path]:
        return {name: Path(directory) for name, directory in self.directories.items()}


def load_config(path: Path, overrides: Sequence[str] = (), run_dir: Path | None = None) -> ServiceConfig:
    """The configuration in `path` with `overrides` (`gateway.port=9000`) on top. Raises ConfigError with all faults."""
    with _not_too_deep(path):
        return build_config(_read(path, overrides), path.resolve().parent, run_dir)


def load_run_dir(path: Path, overrides: Sequence[str] = ()) -> Path:
    """Where the stack of `path` runs, whatever else in it is wrong by now. Raises ConfigError."""
    with _not_too_deep(path):
        run_dir = _read(path, overrides).get("run_dir", RUN_DIR)
    if not isinstance(run_dir, str):
        raise ConfigError([f"run_dir: expected a string, got {run_dir!r}"])
    if not run_dir:
        raise ConfigError(["run_dir: is empty: name a directory"])
    try:
        return absolute_path(run_dir, path.resolve().parent)
    except PathError as error:
        raise ConfigError([f"run_dir: {error}"]) from None


@contextmanager
def _not_too_deep(path: Path) -> Iterator[None]:
    """Parsing and copying recurse: a nesting of some hundreds of levels is an error of the file."""
    try:
        yield
    except RecursionError:
        raise ConfigError([f"{path}: its tables or lists, or those of --set, are nested too deep"]) from None


def _read(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{path} cannot be read: {error.strerror} (name another with --config)"]) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError([f"{path} is not TOML: {error}"]) from None
    return apply_overrides(raw, overrides)


def build_config(raw: dict[str, Any], base: Path, run_dir: Path | None = None) -> ServiceConfig:
    """`raw` checked and typed; relative paths are relative to `base`. Raises ConfigError with all faults."""
    if problems := find_problems(raw, ServiceConfig):
        raise ConfigError(problems)
    config = msgspec.convert({**raw, "models": [_with_defaults(model, raw) for model in raw["models"]]}, ServiceConfig)
    resolve = _Resolver(base)
    config = msgspec.structs.replace(
        config,
        run_dir=str(run_dir.absolute()) if run_dir else resolve.path("run_dir", config.run_dir),
        cache_dir=resolve.path("cache_dir", config.cache_dir) if config.cache_dir else str(default_cache_dir()),
        models=[resolve.model(f"models[{index}]", model) for index, model in enumerate(config.models)],
    )
    if problems := resolve.problems + find_conflicts(config):
        raise ConfigError(problems)
    return config


def find_config(given: str | None) -> Path:
    """The file to read: as given, else $BOUQUET_CONFIG, else bouquet.toml here, else the one of the project."""
    if chosen := given or os.environ.get("BOUQUET_CONFIG"):
        return Path(chosen)
    here = Path(CONFIG_NAME)
    return here if here.is_file() else Path(__file__).parent.parent / CONFIG_NAME


def default_cache_dir() -> Path:
    """Where fetched models live unless the configuration says otherwise. Raises ConfigError."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    try:
        return Path(base).expanduser() / "bouquet"
    except RuntimeError:
        raise ConfigError(["cache_dir: missing, and this user has no home directory to have one in"]) from None


def visible_gpus() -> list[str]:
    """The GPUs this service may use, as CUDA_VISIBLE_DEVICES names them."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return [device.strip() for device in chosen.split(",") if device.strip() not in ("", "-1")]
    devices = (path.name.removeprefix("nvidia") for path in Path("/dev").glob("nvidia[0-9]*"))
    return sorted((name for name in devices if name.isdigit()), key=int)


def write_run_config(path: Path, run: RunConfig) -> None:
    write_private(path, msgspec.json.format(msgspec.json.encode(run)))


def read_run_config(path: Path) -> RunConfig:
    """Raises ConfigError for a file that is missing or of another version."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunConfig)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError([f"{path} cannot be read: {error} (`bouquet up` writes it)"]) from None


def _with_defaults(model: dict[str, Any], raw: dict[str, Any]) -> dict[str, Any]:
    """`model` with the file's [rank] and [scheduler] under its own."""
    merged = {**model}
    for section in ("rank", "scheduler"):
        merged[section] = {**raw.get(section, {}), **model.get(section, {})}
    if "memory_fraction" in model:
        merged["rank"]["memory_fraction"] = model["memory_fraction"]
    return merged


class _Resolver:
    """Makes paths absolute, and keeps by key what cannot be made so."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self.problems: list[str] = []

    def path(self, key: str, text: str) -> str:
        try:
            return str(absolute_path(text, self._base))
        except PathError as error:
            self.problems.append(f"{key}: {error}")
            return text

    def model(self, key: str, model: ModelConfig) -> ModelConfig:
        """With the paths in its source and of its drafts."""
        drafts = model.rank.speculation
        named = {"model": drafts.model, "draft_vocab_ids": drafts.draft_vocab_ids}
        paths = {
            name: self.path(f"{key}.rank.speculation.{name}", text) for name, text in named.items() if text is not None
        }
        rank = msgspec.structs.replace(model.rank, speculation=msgspec.structs.replace(drafts, **paths))
        return msgspec.structs.replace(model, source=self._source(key, model.source), rank=rank)

    def _source(self, key: str, text: str) -> str:
        try:
            source = parse_source(text, self._base)
        except SourceError as error:
            self.problems.append(f"{key}.source: {error}")
            return text
        if isinstance(source, LocalSource):
            return str(source.path)
        return source.spelling if isinstance(source, RandomSource) else text


def _raise_key(name: str) -> ModelConfig:
    raise KeyError(name)
