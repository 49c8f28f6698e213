"""Fixtures shared by every package's tests."""

import os
from pathlib import Path

import pytest

# Triton reads this once, when it is imported: without a GPU its kernels run in its interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from services.config import default_cache_dir
from services.sources import DEFAULT_CHAT_SOURCE, DEFAULT_SOURCE, resolve_source


@pytest.fixture(scope="session")
def minilm_dir() -> Path:
    """The real default model (all-MiniLM-L6-v2) in Hugging Face layout; fetched on first use."""
    return resolve_source(DEFAULT_SOURCE, default_cache_dir())


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The real default chat model (SmolLM2-135M-Instruct, a GGUF file) in Hugging Face layout; fetched on first use."""
    return resolve_source(DEFAULT_CHAT_SOURCE, default_cache_dir())
