"""The service's configuration. The only reader of the environment."""

import os
from pathlib import Path


def default_cache_dir() -> Path:
    """Where fetched models live unless the configuration says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "bouquet"
