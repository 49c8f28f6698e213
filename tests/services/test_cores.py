"""Cores are divided where several ranks compute on CPU, and only there."""

from pathlib import Path
from typing import Any

import pytest

from services.config import ServiceConfig, build_config
from services.cores import crowded, share_cores


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def build(*models: dict[str, Any]) -> ServiceConfig:
    named = [{"name": f"m{i}", "source": "/m", **model} for i, model in enumerate(models)]
    return build_config({"models": named}, Path("/"), Path("/run"))


def threads(config: ServiceConfig, num_cores: int) -> list[int | None]:
    return [model.rank.num_threads for model in share_cores(config, num_cores).models]


@pytest.mark.parametrize(
    ("models", "num_cores", "expected"),
    [
        ([{}], 2, [None]),  # alone: all cores
        ([{}, {}], 2, [1, 1]),
        ([{}, {}], 16, [8, 8]),
        ([{}, {}, {}], 2, [1, 1, 1]),
        ([{"replicas": 2}], 8, [4]),
        ([{"replicas": 3}, {}], 16, [4, 4]),
        ([{"rank": {"num_threads": 5}}, {}], 8, [5, 4]),  # who says it, has it
    ],
)
def test_shares(models: list[dict[str, Any]], num_cores: int, expected: list[int | None]) -> None:
    assert threads(build(*models), num_cores) == expected


def test_a_model_on_the_gpu_takes_no_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert threads(build({}, {}), 2) == [None, None]
    assert threads(build({}, {"rank": {"device": "cpu"}}), 2) == [None, None]


@pytest.mark.parametrize(
    ("models", "num_cores", "expected"),
    [
        ([{}], 2, False),
        ([{}, {}], 2, False),  # one thread each
        ([{}, {}, {}], 2, True),
        ([{"rank": {"num_threads": 2}}, {}], 2, True),
        ([{"rank": {"num_threads": 3}}], 2, True),
    ],
)
def test_crowded(models: list[dict[str, Any]], num_cores: int, expected: bool) -> None:
    assert crowded(share_cores(build(*models), num_cores), num_cores) is expected
