"""What a benchmark compares: ours and others behind one small protocol. A new peer is a file and a line here."""

from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

PEERS = {
    "ours": "bench.peers.ours:Ours",
    "sentence-transformers": "bench.peers.sentence_transformers:SentenceTransformers",
    "onnxruntime": "bench.peers.onnxruntime:OnnxRuntime",
}


class Setup(Struct, frozen=True):
    """The same for every peer of a run."""

    model: str
    model_dir: Path
    max_length: int  # tokens of a sequence
    num_threads: int


class Peer(Protocol):
    """`label` is for people, with the version; `batch_sizes` are the settings worth trying for many texts."""

    label: str
    batch_sizes: tuple[int, ...]

    def launch(self, setup: Setup) -> AbstractContextManager[None]:
        """Ready to encode inside the block; everything it started is gone after it."""

    def encode(self, texts: list[str], batch_size: int) -> NDArray[np.float32]:
        """Normalised vectors, float32 [texts, dimension], in order."""


def make_peer(name: str) -> Peer:
    """Raises KeyError for an unknown name and ImportError for one whose packages are missing."""
    module, _, attribute = PEERS[name].partition(":")
    peer: Peer = getattr(import_module(module), attribute)()
    return peer
