"""Whether two servers compute the same: smallest cosine of their vectors, largest difference of their scores."""

import base64
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bench.client import Address, Connection
from bench.peers import Endpoint
from bench.tables import Case, ask, target
from bench.token_inputs import TokenInputs

MIN_COSINE = 0.999
MAX_SCORE_DIFFERENCE = 0.02  # of probabilities, both in bf16


class Agreement(Struct):
    """Between ours and one peer. `spread`: the largest cosine between different inputs, which must differ."""

    peer: str
    min_cosine: float
    spread: float
    max_score_difference: float | None
    score_range: tuple[float, float] | None

    @property
    def holds(self) -> bool:
        scores = self.max_score_difference is None or self.max_score_difference <= MAX_SCORE_DIFFERENCE
        return self.min_cosine >= MIN_COSINE and scores and self.spread < MIN_COSINE


def compare(ours: Endpoint, peer: Endpoint, inputs: TokenInputs) -> Agreement:
    """The same inputs, of the lengths that are timed, to both."""
    embeds = [(Case("", "", "embed", count, n, 1), inputs.take_ids(n, count)) for n, count in LENGTHS]
    embeds.append((Case("", "", "embed", 4, 512, 1, form="text"), inputs.take_texts(512, 4)))
    vectors = [(embed(ours, *work), embed(peer, *work)) for work in embeds]
    difference, span = None, None
    if peer.score_url:
        score = Case("", "", "score", 8, 512, 1), inputs.take_ids(512, 8)
        scores = scores_of(ours, *score)
        difference = float(np.abs(scores - scores_of(peer, *score)).max())
        span = (float(scores.min()), float(scores.max()))
    return Agreement(
        peer=peer.name,
        min_cosine=min(cosine(a, b) for a, b in vectors),
        spread=max(_largest_between(a) for a, _ in vectors),
        max_score_difference=difference,
        score_range=span,
    )


LENGTHS = ((128, 16), (512, 16), (4096, 4))


def embed(endpoint: Endpoint, case: Case, batch: list[Any]) -> NDArray[np.float32]:
    """float32 [batch, dimension]."""
    url, path, body = target(endpoint, case)
    with Connection(Address.of(url)) as connection:
        answer = ask(connection, url, path, body(batch))
    rows = sorted(answer["data"], key=lambda row: row["index"])
    return np.stack([np.frombuffer(base64.b64decode(row["embedding"]), "<f4") for row in rows])


def scores_of(endpoint: Endpoint, case: Case, batch: list[Any]) -> NDArray[np.float64]:
    """float64 [batch]."""
    url, path, body = target(endpoint, case)
    with Connection(Address.of(url)) as connection:
        answer = ask(connection, url, path, body(batch))
    rows = sorted(answer["data"], key=lambda row: row["index"])
    return np.array([row["score"] if "score" in row else row["probs"][-1] for row in rows])


def cosine(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    """The smallest of corresponding rows; NaN counts as -1."""
    norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
    return float(np.nan_to_num((a * b).sum(1) / norms, nan=-1.0).min())


def _largest_between(vectors: NDArray[np.float32]) -> float:
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    products = unit @ unit.T
    np.fill_diagonal(products, -1)
    return float(products.max())
