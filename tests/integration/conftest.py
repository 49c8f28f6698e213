"""Fixtures of the tests with whole stacks."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.fakes.rank import expected_vector


@pytest.fixture
def run_dir() -> Iterator[Path]:
    """A run directory with a path short enough for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="bq-"))
    yield path
    shutil.rmtree(path)


def fake_vector(row: list[int]) -> NDArray[np.float32]:
    return expected_vector(row, 384)
