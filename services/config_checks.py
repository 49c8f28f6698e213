"""Finds everything wrong with a configuration and says it by key. Knows types and ranges, not files."""

import difflib
import re
import shlex
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from ipc.addresses import AddressError, gateway_endpoint, membership_path, rank_endpoint, replica_id
from rose.config import SpeculationConfig
from rose.speculation.lengths import MAX_DRAFT_TOKENS, find_table_problem
from services.programs import RESERVED_NAMES, slug
from services.source_names import names_scheme

if TYPE_CHECKING:
    from services.config import ServiceConfig

MAX_REPLICAS = 64
DEVICES = ("auto", "cpu", "cuda")
_DAY_MS = 86_400_000
_BIG = 2**31 - 1

# (lowest, highest) by key; the first pattern that matches holds
_RANGES: list[tuple[str, float, float]] = [
    ("port", 1, 65_535),
    ("replicas", 1, MAX_REPLICAS),
    ("tensor_parallel_size", 1, 64),
    ("memory_fraction", 0.01, 1.0),
    ("bulk_share", 0.0, 1.0),
    ("num_gateways", 1, 64),
    ("num_steps_in_flight", 1, 8),
    ("num_draft_tokens", 1, MAX_DRAFT_TOKENS),
    ("num_.*", 1, 1024),
    ("max_body_bytes", 1024, _BIG),
    ("kv_cache_bytes", 1, 2**50),
    ("max_.*", 1, _BIG),
    ("replica_wait_ms", 0, _DAY_MS),
    ("gateway_heartbeat_ms", 4_000, _DAY_MS),  # gateways say one every 500 ms, and notice a standstill of 3 s
    ("rank_heartbeat_ms", 3_000, _DAY_MS),  # ranks say one every second
    ("canary_interval_ms", 100, 10_000),  # readiness means a recent forward pass
    ("hello_deadline_ms", 2_000, _DAY_MS),  # supervisord tells ages in whole seconds
    (".*_ms", 1, _DAY_MS),
    ("spin_us", 0, 1_000_000),
]
# by key: what an empty string would mean is an accident, the file's own directory or every address
_NEVER_EMPTY = {
    "run_dir": "name a directory of its own, which is made",
    "host": "give an address of this machine, 0.0.0.0 for all",
    "model": "name a directory, or remove it",
    "draft_vocab_ids": "name a file, or remove it",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,95}")
_TCP = re.compile(r"tcp://[A-Za-z0-9._*-]+:[0-9]{1,5}")
_PLAIN_PATH = re.compile(r"[A-Za-z0-9._/@+=,~ -]+")


class ConfigError(ValueError):
    """A configuration that cannot be used; `problems` says what is wrong, one line each, by key."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def find_problems(raw: dict[str, Any], schema: type[Struct]) -> list[str]:
    """Unknown and missing keys, wrong types, values out of range and empty ones, of the file as written."""
    return list(_table_problems(raw, schema, ""))


def find_conflicts(config: "ServiceConfig") -> list[str]:
    """What is wrong between keys: names used twice, paths too long, limits that contradict each other."""
    problems = list(_model_problems(config))
    if not _PLAIN_PATH.fullmatch(config.run_dir):
        problems.append(f"run_dir: {config.run_dir!r} may hold only letters, digits, spaces and ._/@+=,~-")
    for index, model in enumerate(config.models):
        try:
            replica = replica_id(model.name, MAX_REPLICAS)
            for address in (gateway_endpoint, rank_endpoint, membership_path):
                address(Path(config.run_dir), replica)
        except AddressError as error:
            problems.append(f"run_dir: {error}")
        limit, asked = model.scheduler.max_pending_tokens, config.gateway.max_request_tokens
        if asked > limit:
            problems.append(
                f"models[{index}].scheduler.max_pending_tokens: {limit} is less than "
                f"gateway.max_request_tokens ({asked}), so the largest request could never be served"
            )
    return problems


def _model_problems(config: "ServiceConfig") -> Iterator[str]:
    seen: dict[str, int] = {}
    listening: dict[str, int] = {}
    if not config.models:
        yield "models: none given; add a [[models]] table with name and source"
    for index, model in enumerate(config.models):
        key = f"models[{index}]"
        if not _NAME.fullmatch(model.name):
            yield f"{key}.name: {model.name!r} must be 1 to 96 letters, digits and ._/- and begin with one of the first"
        if model.name in RESERVED_NAMES:
            yield f"{key}.name: {model.name!r} is what the commands call the gateways; choose another"
        first = seen.setdefault(slug(model.name).lower(), index)
        if first != index:
            yield f"{key}.name: {model.name!r} is too like models[{first}].name ({config.models[first].name!r})"
        if model.rank.device not in DEVICES:
            yield f"{key}.rank.device: must be {', '.join(DEVICES[:-1])} or {DEVICES[-1]}, got {model.rank.device!r}"
        yield from _speculation_problems(model.rank.speculation, f"{key}.rank.speculation")
        if model.scheduler.listen is not None:
            if not _TCP.fullmatch(model.scheduler.listen):
                yield f"{key}.scheduler.listen: must be tcp://address:port, got {model.scheduler.listen!r}"
            if model.replicas > 1:
                yield f"{key}.scheduler.listen: one endpoint cannot serve {model.replicas} replicas; set replicas = 1"
            first = listening.setdefault(model.scheduler.listen, index)
            if first != index:
                yield f"{key}.scheduler.listen: models[{first}] listens there; give each model an endpoint of its own"


def _speculation_problems(speculation: SpeculationConfig, key: str) -> Iterator[str]:
    if speculation.proposer == "draft_model" and (speculation.model is None) == (speculation.num_layers is None):
        wrong = "missing" if speculation.model is None else "not together with num_layers"
        yield f"{key}.model: {wrong}; a draft model has a directory, or num_layers of the target's own first layers"
    if speculation.proposer == "mtp" and speculation.model is None:
        yield f"{key}.model: missing; a head has a directory of its own"
    if speculation.proposer == "none" and speculation.num_draft_tokens != SpeculationConfig().num_draft_tokens:
        yield f"{key}.num_draft_tokens: proposer 'none' drafts nothing; remove it"
    if speculation.proposer == "none" and speculation.draft_lengths is not None:
        yield f"{key}.draft_lengths: proposer 'none' drafts nothing; remove it"
    if speculation.proposer != "draft_model" and speculation.num_layers is not None:
        yield f"{key}.num_layers: only proposer 'draft_model' has layers; remove it"
    if speculation.proposer in ("none", "n_gram") and speculation.model is not None:
        yield f"{key}.model: proposer {speculation.proposer!r} has no model; remove it"
    if speculation.proposer in ("none", "n_gram") and speculation.draft_sampling != "greedy":
        yield f"{key}.draft_sampling: proposer {speculation.proposer!r} draws no drafts; remove it"
    if speculation.proposer in ("none", "n_gram") and speculation.draft_vocab is not None:
        yield f"{key}.draft_vocab: proposer {speculation.proposer!r} has no head; remove it"
    if speculation.draft_vocab is None and speculation.draft_vocab_ids is not None:
        yield f"{key}.draft_vocab: missing; how many of draft_vocab_ids draft"
    if speculation.draft_vocab is not None and speculation.draft_vocab < 1:
        yield f"{key}.draft_vocab: must be at least 1, got {speculation.draft_vocab}"
    if speculation.proposer != "mtp" and speculation.head_tokens != "auto":
        yield f"{key}.head_tokens: only proposer 'mtp' has a head; remove it"
    if speculation.proposer != "mtp" and speculation.head_ranks != "all":
        yield f"{key}.head_ranks: only proposer 'mtp' has a head; remove it"
    table = tuple((batch, length) for batch, length in speculation.draft_lengths or ())
    if problem := find_table_problem(table, speculation.num_draft_tokens):
        yield f"{key}.draft_lengths: {problem}"


def _table_problems(raw: Any, schema: type[Struct], path: str) -> Iterator[str]:
    if not isinstance(raw, dict):
        yield f"{path}: expected a table, got {_shown(raw)}"
        return
    fields = {field.name: field for field in msgspec.structs.fields(schema)}
    for key in raw.keys() - fields.keys():
        near = difflib.get_close_matches(key, fields, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(fields)}"
        yield f"{_join(path, key)}: unknown key; {hint}"
    for name, field in fields.items():
        if name in raw:
            yield from _value_problems(raw[name], field.type, _join(path, name))
        elif field.required:
            yield f"{_join(path, name)}: missing"


def _value_problems(value: Any, kind: Any, path: str) -> Iterator[str]:
    parts = [part for part in typing.get_args(kind) if part is not type(None)]
    if isinstance(kind, types.UnionType) and len(parts) == 1:
        kind = parts[0]  # a file cannot say None
    if isinstance(kind, type) and issubclass(kind, Struct):
        yield from _table_problems(value, kind, path)
    elif typing.get_origin(kind) is list and isinstance(value, list):
        for index, item in enumerate(value):
            yield from _value_problems(item, typing.get_args(kind)[0], f"{path}[{index}]")
    else:
        try:
            msgspec.convert(value, kind)
        except msgspec.ValidationError:
            yield f"{path}: expected {_named(kind)}, got {_shown(value)}"
            return
        if value == "" and (hint := _NEVER_EMPTY.get(path.rpartition(".")[2])):
            yield f"{path}: is empty: {hint}"
        if path.endswith("speculation.model") and names_scheme(value):
            yield f"{path}: must be a directory, got {value!r}: `bouquet pull {shlex.quote(value)}` prints one for it"
        yield from _range_problems(value, path)


def _range_problems(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return
    name = path.rpartition(".")[2]
    for pattern, low, high in _RANGES:
        if re.fullmatch(pattern, name):
            if not low <= value <= high:  # also catches NaN
                yield f"{path}: must be {low}..{high}, got {value}"
            return


def _named(kind: Any) -> str:
    """A type in a reader's words."""
    if typing.get_origin(kind) is typing.Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(kind))
    if isinstance(kind, types.UnionType):
        return " or ".join(_named(part) for part in typing.get_args(kind) if part is not type(None))
    if typing.get_origin(kind) is tuple:
        return f"a list of {' and '.join(_named(part) for part in typing.get_args(kind))}"
    words = {str: "a string", int: "a whole number", float: "a number", bool: "true or false", list: "a list"}
    return words.get(typing.get_origin(kind) or kind, str(kind))


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key
