"""`--set`: paths, values and what is refused."""

from typing import Any

import pytest

from services.config_checks import ConfigError
from services.overrides import apply_overrides

RAW: dict[str, Any] = {"gateway": {"port": 1}, "models": [{"name": "a"}, {"name": "b-1.5"}]}


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("gateway.port=2", ("gateway", "port"), 2),
        ("gateway.host = 0.0.0.0", ("gateway", "host"), "0.0.0.0"),
        ('gateway.host="::1"', ("gateway", "host"), "::1"),
        ("gateway.x=true", ("gateway", "x"), True),
        ("gateway.x=0.5", ("gateway", "x"), 0.5),
        ("gateway.x=a=b", ("gateway", "x"), "a=b"),
        ("gateway.x=1\ny = 2", ("gateway", "x"), "1\ny = 2"),
        ("run_dir=/run/b", ("run_dir",), "/run/b"),
        ("rank.dtype=float16", ("rank", "dtype"), "float16"),
        ("models[1].replicas=3", ("models", 1, "replicas"), 3),
        ("models[b-1.5].rank.num_threads=1", ("models", 1, "rank", "num_threads"), 1),
    ],
)
def test_sets_one_value(override: str, path: tuple[str | int, ...], value: object) -> None:
    node: Any = apply_overrides(RAW, [override])
    for step in path:
        node = node[step]
    assert node == value


def test_later_ones_win_and_the_original_stays() -> None:
    assert apply_overrides(RAW, ["gateway.port=2", "gateway.port=3"])["gateway"]["port"] == 3
    assert RAW["gateway"] == {"port": 1}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("gateway.port", "write it as path=value"),
        ("=1", "not a path"),
        ("gateway..port=1", "not a path"),
        ("gateway.=1", "not a path"),
        ("gateway port=1", "not a path"),
        ("models[2].replicas=1", r"there is no models\[2\]"),
        ("models[c].replicas=1", r"there is no models\[c\]"),
        ("gateway[0].port=1", r"there is no gateway\[0\]"),
        ("models[0]=1", "name a key of"),
        ("gateway.port.x=1", "is not a table"),
        ("models.x=1", "models is not a table"),
    ],
)
def test_refuses_what_it_cannot_set(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_overrides(RAW, [override])
