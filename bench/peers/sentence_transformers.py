"""sentence-transformers in this process: torch, float32, its own batching, which sorts by length."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import sentence_transformers
import torch
from numpy.typing import NDArray

from bench.peers import Setup


class SentenceTransformers:
    label = f"sentence-transformers {sentence_transformers.__version__}"
    batch_sizes = (32, 64, 128)  # 32 is its default

    @contextmanager
    def launch(self, setup: Setup) -> Iterator[None]:
        torch.set_num_threads(setup.num_threads)
        self._model = sentence_transformers.SentenceTransformer(str(setup.model_dir), device="cpu")
        self._model.max_seq_length = setup.max_length
        yield
        del self._model

    def encode(self, texts: list[str], batch_size: int) -> NDArray[np.float32]:
        vectors = self._model.encode(
            texts, batch_size=batch_size, normalize_embeddings=True, convert_to_numpy=True, show_progress_bar=False
        )
        return np.asarray(vectors, np.float32)
