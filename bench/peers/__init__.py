"""What a benchmark compares: ours and others behind one small protocol. A new peer is a file and a line here.

Three kinds: peers that encode texts when asked to (`Peer`), servers that load is sent to (`HttpPeer`), and peers that
generate (`GeneratingPeer`).
"""

from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bench.load import LoadResult
    from bench.servers import ServerSpec

PEERS = {
    "ours": "bench.peers.ours:Ours",
    "sentence-transformers": "bench.peers.sentence_transformers:SentenceTransformers",
    "onnxruntime": "bench.peers.onnxruntime:OnnxRuntime",
}
HTTP_PEERS = {
    "ours": "bench.peers.bouquet:Bouquet",
    "vllm": "bench.peers.vllm:one_api_server",
    "vllm-api4": "bench.peers.vllm:four_api_servers",
    "vllm-default": "bench.peers.vllm:defaults",
}
GENERATING_PEERS = {
    "ours": "bench.peers.ours_generating:OursGenerating",
    "ours-in-process": "bench.peers.ours_in_process:OursInProcess",
    "transformers": "bench.peers.transformers:float32",
    "transformers-bf16": "bench.peers.transformers:bfloat16",
    "vllm": "bench.peers.vllm_generating:VllmGenerating",
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


class HttpSetup(Struct, frozen=True):
    """The same for every server of a run."""

    models: Path  # what bench.random_model wrote
    state: Path  # logs, process ids, caches
    peer_site: Path | None = None  # packages of a peer that is not installed
    device: str = "auto"  # of our ranks


class Endpoint(Struct, frozen=True):
    """How a running peer is asked; every one embeds at /v1/embeddings and calls its models embed and score."""

    name: str
    label: str  # for people, with the version
    embed_url: str
    score_url: str  # "": it does not score
    score_path: str
    score_field: str  # under which that route takes lists of token ids


class HttpPeer(Protocol):
    name: str
    label: str

    def servers(self, setup: HttpSetup) -> "list[ServerSpec]":
        """What has to run."""

    def endpoint(self) -> Endpoint:
        """How to ask it once it does."""


def make_http_peer(name: str) -> HttpPeer:
    """Raises KeyError for an unknown name."""
    module, _, attribute = HTTP_PEERS[name].partition(":")
    peer: HttpPeer = getattr(import_module(module), attribute)()
    return peer


class GeneratingSetup(Struct, frozen=True):
    """The same for every peer of a run of the suite `generation`."""

    model: str
    model_dir: Path
    num_threads: int
    state: Path  # logs and the like
    max_model_len: int
    memory_fraction: float  # of the GPU, for each
    device: str = "cpu"
    peer_site: Path | None = None


class GeneratingPeer(Protocol):
    """Greedy, and never ended by an eos token, so that every peer does the same work."""

    name: str
    label: str

    def launch(self, setup: GeneratingSetup) -> AbstractContextManager[None]:
        """Ready inside the block; everything it started is gone after it."""

    def generate(self, prompts: list[list[int]], num_tokens: int, in_flight: int, num_warmup: int) -> "LoadResult":
        """`num_tokens` for each prompt but the first `num_warmup`, timed token by token."""

    def complete(self, prompt: list[int], num_tokens: int) -> str:
        """The text after `prompt`."""


def make_generating_peer(name: str) -> GeneratingPeer:
    """Raises KeyError for an unknown name and ImportError for one whose packages are missing."""
    module, _, attribute = GENERATING_PEERS[name].partition(":")
    peer: GeneratingPeer = getattr(import_module(module), attribute)()
    return peer
