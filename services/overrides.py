"""`--set a.b=c` on top of a parsed TOML file. Knows paths and values, not what they mean."""

import copy
import re
import tomllib
from collections.abc import Sequence
from typing import Any

from services.config_checks import ConfigError

_STEP = re.compile(r"(?P<key>[A-Za-z_][A-Za-z0-9_-]*)(?:\[(?P<item>[^\]]+)\])?(?:\.|$)")


def apply_overrides(raw: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """A copy of `raw` with each `path=value` set.

    A path is `gateway.port`, `models[0].replicas` or `models[NAME].replicas`; a value is TOML, and what is not
    TOML is a string. Raises ConfigError.
    """
    result = copy.deepcopy(raw)
    for override in overrides:
        path, equals, value = override.partition("=")
        if not equals:
            raise ConfigError([f"--set {override}: write it as path=value, for example gateway.port=9000"])
        _set(result, path.strip(), _parse_value(value.strip()))
    return result


def _set(node: Any, path: str, value: Any) -> None:
    """Walks down to the last step of `path`, making tables on the way, and sets it."""
    steps = list(_STEP.finditer(path))
    if "".join(step[0] for step in steps) != path or not steps or path.endswith("."):
        raise ConfigError([f"--set {path}: not a path such as gateway.port or models[0].replicas"])
    *parents, last = steps
    for step in parents:
        node = _enter(node, step, path)
    if last["item"] is not None:
        raise ConfigError([f"--set {path}: name a key of {last[0]}, for example {path}.replicas"])
    node[last["key"]] = value


def _enter(node: Any, step: re.Match[str], path: str) -> dict[str, Any]:
    child = node.setdefault(step["key"], {})
    if step["item"] is not None:
        child = _item(child, step, path)
    if not isinstance(child, dict):
        raise ConfigError([f"--set {path}: {step[0].rstrip('.')} is not a table"])
    return child


def _item(items: Any, step: re.Match[str], path: str) -> Any:
    """The item at that index, or of that name."""
    wanted = step["item"]
    for index, item in enumerate(items if isinstance(items, list) else []):
        if str(index) == wanted or (isinstance(item, dict) and item.get("name") == wanted):
            return item
    raise ConfigError([f"--set {path}: there is no {step['key']}[{wanted}]"])


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if len(parsed) == 1 else text
