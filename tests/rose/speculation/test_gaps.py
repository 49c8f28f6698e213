"""Blocks of the prefix cache that lack entries of a draft's: found by a hit, they are completed, or not drafted upon.

What no pass has written is NaN: a draft that reads such an entry is none that its model would say.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ipc.types import SamplingParams
from rose.attention.paged import PagedKV
from rose.config import SpeculationConfig
from rose.kv_cache import BLOCK_SIZE
from rose.model_runner import ModelRunner
from rose.speculation import registry
from tests.rose.speculation.checked import Checked, check_drafts
from tests.rose.speculation.matrix import make_runner
from tests.rose.speculation.replica import Answer, Replica
from tests.rose.speculation.test_models_that_draft import configure
from tests.rose.tiny_lm import write_llama, write_relative

PROMPT = list(range(40, 60))  # a block and a quarter
OTHER = list(range(90, 99))
GREEDY = {"temperature": 0.0, "ignore_eos": True}
MANY = 200  # blocks: nothing is overwritten


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("target"), tokenizer=True)


class Session:
    """A replica whose every draft is compared, and what a model without drafts says."""

    def __init__(self, runner: ModelRunner, checked: Checked, plain: ModelRunner, texts: list[list[int]]) -> None:
        self.replica, self.checked = Replica(runner), checked
        self._plain, self._texts = plain, texts

    def together(self, *jobs: tuple[list[int], int]) -> list[Answer]:
        """Prompts and numbers of tokens."""
        made = [(prompt, SamplingParams(max_tokens=count, **GREEDY)) for prompt, count in jobs]
        return self._run(made)

    def alone(self, prompt: list[int], **params: Any) -> tuple[int, int, int]:
        """Tokens that were hit, drafts that were compared, rows that had none."""
        figures, proposer = self.replica.figures, self.checked
        hit, proposer.num_checked, proposer.num_lapsed = figures.num_prefix_hit_tokens, 0, 0
        self._run([(prompt, SamplingParams(max_tokens=12, **GREEDY, **params))])
        return figures.num_prefix_hit_tokens - hit, proposer.num_checked, proposer.num_lapsed

    def lacking(self) -> list[int]:
        """Places in blocks that can be hit which have no entry."""
        blocks = list(self.replica.planner.residents.blocks._digest_of)
        return caches_of(self.checked)[0].k[blocks].isnan().any(-1).any(-1).nonzero()[:, 1].tolist()

    def _run(self, jobs: list[tuple[list[int], SamplingParams]]) -> list[Answer]:
        expected = [Replica(self._plain).run([job], random.Random(0))[0] for job in jobs]
        self._texts[:] = [prompt + answer.tokens for (prompt, _), answer in zip(jobs, expected, strict=True)]
        found = self.replica.run(jobs, random.Random(0), arrival=1.0)
        assert all(answer.same(other) for answer, other in zip(found, expected, strict=True))
        return found


def caches_of(checked: Checked) -> Sequence[PagedKV]:
    """The proposer's own."""
    return checked._proposer._parts.caches  # type: ignore[attr-defined,no-any-return]


@contextmanager
def session(target: Path, speculation: SpeculationConfig, **settings: Any) -> Iterator[Session]:
    opened: list[Checked] = []
    texts: list[list[int]] = []
    with pytest.MonkeyPatch.context() as patch:
        loads = {name: check_drafts(load, opened, texts) for name, load in registry.PROPOSERS.items()}
        patch.setattr(registry, "PROPOSERS", loads)
        runner = make_runner(target, speculation, MANY, **settings)
    (checked,) = opened
    checked.each = 1
    for cache in caches_of(checked):  # after the warm-up
        cache.k.fill_(float("nan"))
        cache.v.fill_(float("nan"))
    plain = make_runner(target)
    yield Session(runner, checked, plain, texts)
    runner.close()
    plain.close()


@pytest.mark.parametrize("kind", ["another model", "mtp", "eagle"])
def test_behind_a_block_that_a_crowd_left_with_a_gap_nothing_is_drafted(
    target: Path, tmp_path: Path, kind: str
) -> None:
    """Two run, and only one is drafted for: of their outputs a draft has no entries. It does of prompts."""
    with session(target, configure(tmp_path, target, kind, 2, draft_lengths=[(1, 2)])) as served:
        first, second = served.together((PROMPT, 30), (OTHER, 36))
        assert len(second.tokens) > len(first.tokens)  # so the first was never alone
        assert served.replica.figures.num_drafts < len(second.tokens) - len(first.tokens)
        known = [*PROMPT, *first.tokens][:-1]
        hit, num_checked, num_lapsed = served.alone([*known, 70])
        assert hit == 3 * BLOCK_SIZE
        assert (num_checked, num_lapsed > 5) == (0, True)
        hit, num_checked, num_lapsed = served.alone([*PROMPT, 70])  # but for the prompt's own block
        assert hit == BLOCK_SIZE
        assert (num_checked > 5, num_lapsed) == (True, 0)
        hit, num_checked, num_lapsed = served.alone([*known, 70], prompt_logprobs=0)  # the first, computed anew
        assert hit == 0
        assert (num_checked > 5, num_lapsed) == (True, 0)


def of_target_itself(target: Path, directory: Path) -> SpeculationConfig:
    """Whose three drafts are always accepted."""
    model = write_relative(directory, target, noise=0.0)
    return SpeculationConfig(proposer="draft_model", model=str(model), num_draft_tokens=3, draft_lengths=[])


def test_a_block_without_its_last_entry_is_completed(target: Path, tmp_path: Path) -> None:
    """A sequence ends with an accepted draft at the end of a block, no step behind it: one step in flight."""
    with session(target, of_target_itself(target, tmp_path), num_steps_in_flight=1) as served:
        (first,) = served.together((PROMPT, 13))  # one of the prompt, then three times four
        known = [*PROMPT, *first.tokens]
        assert len(known) == 2 * BLOCK_SIZE + 1
        assert served.lacking() == [BLOCK_SIZE - 1]
        hit, num_checked, num_lapsed = served.alone([*known, 70])
        assert hit == 2 * BLOCK_SIZE
        assert (num_checked > 5, num_lapsed) == (True, 0)
        assert served.lacking() == []


def test_a_block_without_its_last_entry_before_one_of_another_sequence(target: Path, tmp_path: Path) -> None:
    """Two say the same, of which one ends as above: a hit finds its block first, then one of the other's."""
    with session(target, of_target_itself(target, tmp_path), num_steps_in_flight=1) as served:
        _, longer = served.together((PROMPT, 13), (PROMPT, 40))
        known = [*PROMPT, *longer.tokens]
        assert served.lacking() == [BLOCK_SIZE - 1]
        hit, num_checked, num_lapsed = served.alone([*known, 70])
        assert hit == 3 * BLOCK_SIZE
        assert (num_checked, num_lapsed > 5) == (0, True)
        hit, num_checked, num_lapsed = served.alone([*known[:33], 70])  # who goes on right behind it completes it
        assert hit == 2 * BLOCK_SIZE
        assert (num_checked > 5, num_lapsed) == (True, 0)
        assert served.lacking() == []
