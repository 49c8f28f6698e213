"""The shapes a model's steps had graphs for, kept on disk for the next start."""

import json
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from rose.distributed.group import Group
from rose.graph_policy import GraphKey

MAX_SHAPES = 1024


def read_shapes(path: Path) -> list[GraphKey]:
    """Most useful first; empty where there is no list, or one that cannot be read: it only saves time."""
    try:
        return [GraphKey(*entry) for entry in json.loads(path.read_bytes())][:MAX_SHAPES]
    except (OSError, ValueError, TypeError):
        return []


def from_leader(group: Group, keys: list[GraphKey], device: torch.device) -> list[GraphKey]:
    """The leader's `keys`, on every rank: which shapes idle steps capture must be the same everywhere."""
    if group.size == 1:
        return keys
    text = json.dumps(keys).encode() if group.leads else b""
    length = int(group.broadcast(torch.tensor([len(text)], device=device)))
    told = torch.tensor(list(text) or [0] * length, dtype=torch.uint8, device=device)
    return [GraphKey(*entry) for entry in json.loads(bytes(group.broadcast(told).tolist()))]


def write_shapes(path: Path, keys: Iterable[GraphKey]) -> None:
    """`keys` in front of what the list held before. Replaces the file in one go."""
    merged = list(dict.fromkeys([*keys, *read_shapes(path)]))[:MAX_SHAPES]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(merged))
    temporary.replace(path)
