"""Drafts from the most frequent tokens alone: a head with some rows of the vocabulary, whose other logits are -inf.

A head's rows are much of what a draft reads: 128 k of them take as long as two layers of Llama 8B, or four of the 1B.
What a smaller head cannot say is not drafted, and no worse: drafts are accepted by the distribution that they were
drawn from, which is zero elsewhere (Zhao et al., "FR-Spec", 2025).
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rose.config import SpeculationConfig
from rose.distributed.group import Group
from rose.models.config import ModelError
from rose.speculation import kernels

Logits = Callable[[Tensor], Tensor]  # hidden [N, H] -> float32 [N, V]


class DraftVocab:
    """Logits of hidden states [N, H]: float32 [N, vocab_size], -inf but for `ids`', whose rows [n, H] the head has."""

    def __init__(self, rows: Tensor, ids: Tensor, vocab_size: int) -> None:
        self._rows, self._ids = rows, ids
        self._places = torch.full((vocab_size,), -1, dtype=torch.int32, device=rows.device)
        self._places[ids] = torch.arange(len(ids), dtype=torch.int32, device=rows.device)

    def __call__(self, hidden: Tensor) -> Tensor:
        if kernels.has_kernels(hidden):
            from rose.kernels.draft_rows import spread_logits
            from rose.kernels.few_rows import linear

            return spread_logits(linear(hidden, self._rows), self._places)
        said = F.linear(hidden, self._rows)
        logits = torch.full((len(said), len(self._places)), float("-inf"), device=said.device)
        logits[:, self._ids] = said.float()
        return logits


def draft_logits(
    model: Any, config: SpeculationConfig, vocab_size: int, group: Group, directory: Path, *, keeps_head: bool = True
) -> Logits:
    """What drafts are drawn by: of `model` (in `directory`), whose head is all there. `keeps_head`: it stays there,
    whatever is drafted, and rows of it need no memory of their own. Raises ModelError.
    """
    ids = read_draft_ids(config, vocab_size, group.size, directory)
    if ids is None:
        logits: Logits = model.logits
        return logits
    weight: Tensor = model.lm_head.weight
    places = torch.tensor(ids, device=weight.device)
    if not isinstance(ids, range):
        rows = weight.detach()[places]
    elif keeps_head and isinstance(weight, nn.Parameter):
        rows = weight.detach()[: len(ids)]
    else:  # a layer for CPUs has made it for this
        rows = weight.detach()[: len(ids)].clone()
    return DraftVocab(rows, places, vocab_size)


def read_draft_ids(config: SpeculationConfig, vocab_size: int, num_ranks: int, directory: Path) -> Sequence[int] | None:
    """The tokens that may be drafted by the head in `directory`, which is divided among `num_ranks`; None: all.

    Raises ModelError.
    """
    count = config.draft_vocab
    if count is None:
        if config.draft_vocab_ids is not None:
            raise ModelError("speculation.draft_vocab_ids needs speculation.draft_vocab: how many of its ids draft")
        return None
    if num_ranks > 1:
        raise ModelError(
            f"speculation.draft_vocab: {directory} is divided among {num_ranks} ranks, each with a part of the "
            "vocabulary: not together with tensor_parallel_size > 1. A draft head (mtp) may be whole on one rank, "
            'speculation.head_ranks = "leader"; else remove one of them'
        )
    if not 1 <= count <= vocab_size:
        raise ModelError(f"speculation.draft_vocab must be 1..{vocab_size} with {directory}, got {count}")
    if config.draft_vocab_ids is None:
        return range(count)
    return _read_ids(Path(config.draft_vocab_ids), count, vocab_size)


def _read_ids(path: Path, count: int, vocab_size: int) -> list[int]:
    """The first `count`. Raises ModelError."""
    where = f"speculation.draft_vocab_ids: {path}"
    try:
        ids = json.loads(path.read_bytes())
    except OSError as error:
        raise ModelError(f"{where} cannot be read: {error}") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not JSON ({error}): a list of token ids, most frequent first") from None
    if not isinstance(ids, list) or any(type(token) is not int for token in ids):
        raise ModelError(f"{where} is not a list of token ids, most frequent first")
    ids = ids[:count]
    if len(ids) < count:
        raise ModelError(f"{where} has {len(ids)} ids, speculation.draft_vocab is {count}: lower it")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside or len(set(ids)) < count:
        wrong = f"names token {outside[0]}, the vocabulary has {vocab_size}" if outside else "names a token twice"
        raise ModelError(f"{where} {wrong}: it belongs to another model, or is damaged")
    return ids
