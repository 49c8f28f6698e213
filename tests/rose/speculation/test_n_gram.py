"""Drafts looked up in a sequence, against a plain search; and steps that change between drafts and none."""

import random
from pathlib import Path

import pytest
import torch

from ipc.types import ModelFacts
from rose.config import SpeculationConfig
from rose.sampling.params import Needs
from rose.slots import Slots
from rose.speculation.n_gram import MAX_TOKENS, MIN_TOKENS, NGram
from rose.speculation.protocol import DraftRows
from tests.rose.speculation.matrix import Matrix, make_runner
from tests.rose.speculation.whole_steps import Way, going
from tests.rose.tiny_lm import write_llama

FACTS = ModelFacts(
    name="", architecture="", task="generate", vocab_size=50, max_model_len=64, dimension=1, max_num_seqs=8,
    max_num_batched_tokens=64, num_blocks=40, max_draft_tokens=4,
)  # fmt: skip


def plain(ids: list[int], k: int) -> list[int]:
    """By search: the longest suffix, its last place before the end, and what follows there, round and round."""
    for size in range(MAX_TOKENS, MIN_TOKENS - 1, -1):
        for end in range(len(ids) - 1, size - 1, -1):
            if ids[end - size : end] == ids[-size:]:
                following = ids[end:]
                return [following[place % len(following)] for place in range(k)]
    return []


def propose(sequences: list[list[int]], k: int, limits: list[int]) -> list[list[int]]:
    """Slots from the last to the first; what lies behind a sequence's end is somebody else's."""
    slots = Slots(FACTS, FACTS.num_blocks, torch.device("cpu"))
    slots.ids[:] = 3
    places = [FACTS.max_num_seqs - 1 - row for row in range(len(sequences))]
    for slot, ids in zip(places, sequences, strict=True):
        slots.ids[slot, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
        slots.num_tokens[slot] = len(ids)
    rows = DraftRows(
        torch.tensor(places, dtype=torch.int32), torch.tensor(limits, dtype=torch.int32), k, 64, Needs()
    )  # fmt: skip
    drafts = NGram(slots).propose(rows)
    return [row[:count] for row, count in zip(drafts.tokens.tolist(), drafts.counts.tolist(), strict=True)]


@pytest.mark.parametrize("way", ["torch", "kernels"])
def test_against_a_plain_search(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels look at parts of a sequence, here several."""
    monkeypatch.setattr("rose.kernels.n_gram._PART", 16)
    with going(way):
        check_against_a_plain_search()


def check_against_a_plain_search() -> None:
    draw = random.Random(5)
    for vocab_size in (2, 3, 6, 40):
        sequences = [[draw.randrange(vocab_size) for _ in range(draw.randrange(1, 60))] for _ in range(8)]
        for k in (1, 3, 4):
            limits = [draw.randrange(k + 1) for _ in sequences]
            expected = [plain(ids, k)[:limit] for ids, limit in zip(sequences, limits, strict=True)]
            assert propose(sequences, k, limits) == expected


@pytest.mark.parametrize(
    ("ids", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1]),
        ([1, 2, 8, 7, 1, 2, 9, 6, 1, 2], [9, 6, 1]),  # the most recent
        ([5, 1, 2, 8, 7, 1, 2, 9, 5, 1, 2], [8, 7, 1]),  # the longest
        ([7, 8, 7, 8], [7, 8, 7]),
        ([4, 4, 4], [4, 4, 4]),
        ([1, 2, 3, 2], []),  # one token is no evidence
        ([1], []),
    ],
)
def test_what_follows(ids: list[int], drafts: list[int]) -> None:
    assert propose([ids], 3, [3]) == [drafts]


def test_drafts_come_and_go_with_the_batch(tmp_path: Path) -> None:
    """Many sequences: none; few: some; alone: more. Nobody's tokens change."""
    matrix = Matrix(write_llama(tmp_path, tokenizer=True))
    speculation = SpeculationConfig(proposer="n_gram", num_draft_tokens=4, draft_lengths=[(1, 4), (3, 2), (4, 0)])
    runner = make_runner(matrix.directory, speculation)
    replica = matrix.check_together(runner)
    assert len(replica.draft_lengths & {0, 2, 4}) == 3
    assert replica.figures.num_accepted_tokens > 0
    runner.close()
