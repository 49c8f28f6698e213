"""Fixtures shared by every package's tests."""

from pathlib import Path

import pytest

from services.sources import default_model_dir


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The real default model (all-MiniLM-L6-v2) in Hugging Face layout; fetched on first use."""
    return default_model_dir()
