"""The shapes a model's steps had graphs for, kept on disk for the next start."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

from rose.graph_policy import GraphKey

MAX_SHAPES = 1024


def read_shapes(path: Path) -> list[GraphKey]:
    """Most useful first; empty where there is no list, or one that cannot be read: it only saves time."""
    try:
        return [GraphKey(*entry) for entry in json.loads(path.read_bytes())][:MAX_SHAPES]
    except (OSError, ValueError, TypeError):
        return []


def write_shapes(path: Path, keys: Iterable[GraphKey]) -> None:
    """`keys` in front of what the list held before. Replaces the file in one go."""
    merged = list(dict.fromkeys([*keys, *read_shapes(path)]))[:MAX_SHAPES]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(merged))
    temporary.replace(path)
