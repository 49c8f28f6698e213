"""Drafts on a real GPU: no token changes, graphs change nothing, nothing waits. Without one: test_cuda_drafts."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from ipc.step import StepPlan
from ipc.step_ring import Arrays
from ipc.types import SamplingParams
from rose.config import RankConfig, SpeculationConfig
from rose.decoder_loader import DecoderLoader
from rose.model_runner import ModelRunner
from rose.runner import LazyTensor
from rose.speculation import registry
from rose.speculation.protocol import Closing, DraftRows, Drafts, Proposer, ProposerParts, ProposerSource, Target
from tests.rose.speculation.matrix import BLOCK_BYTES, LARGE_CACHE, LIMITS, SMALL_CACHE, Matrix
from tests.rose.speculation.replica import Answer, Jobs, Replica
from tests.rose.speculation.test_models_that_draft import configure
from tests.rose.tiny_lm import write_llama

pytestmark = pytest.mark.gpu

KINDS = ["n_gram", "another model", "first layer", "mtp", "eagle"]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    return Matrix(write_llama(tmp_path_factory.mktemp("llama"), tokenizer=True))


@pytest.fixture(scope="module")
def jobs(matrix: Matrix) -> Jobs:
    """Without grammars, for which steps with drafts wait; greedy and drawn."""
    drawn = [(prompt, replace(params, temperature=0.8, top_p=0.9)) for prompt, params in matrix.jobs[:4]]
    return [job for job in matrix.jobs if job[1].grammar is None][:6] + drawn


def speculation(directory: Path, matrix: Matrix, kind: str, k: int, **settings: Any) -> SpeculationConfig:
    settings.setdefault("draft_lengths", [])  # always k
    if kind == "n_gram":
        return SpeculationConfig(proposer="n_gram", num_draft_tokens=k, **settings)
    return configure(directory, matrix.directory, kind, k, **settings)


class Polled:
    """A step that is waited for when it is asked for: there is nothing to sleep on."""

    def __init__(self, lazy: LazyTensor) -> None:
        self._lazy = lazy

    def ready(self) -> bool:
        while not self._lazy.ready():
            pass
        return True

    def fileno(self) -> int:
        return -1


@contextmanager
def gpu_runner(
    matrix: Matrix, config: SpeculationConfig, *, strict: bool = False, blocks: int = LARGE_CACHE, **settings: Any
) -> Iterator[ModelRunner]:
    """In float32. `strict`: a launch that waits for the device raises."""
    sizes = {"kv_cache_bytes": blocks * BLOCK_BYTES, "capture": "lazy", **LIMITS, **settings}
    runner = ModelRunner(
        DecoderLoader("tiny", matrix.directory, RankConfig(device="cuda", dtype="float32", speculation=config, **sizes))
    )
    runner.load()
    step: Callable[[StepPlan, Arrays], LazyTensor] = runner.step

    def polled(plan: StepPlan, arrays: Arrays) -> Polled:
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            return Polled(step(plan, arrays))
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.step = polled  # type: ignore[method-assign]
    yield runner
    runner.close()


def run(runner: ModelRunner, jobs: Jobs) -> tuple[list[Answer], list[int]]:
    """Answers, and how many drafts were accepted at each place."""
    replica = Replica(runner)
    return replica.run(jobs, random.Random(1), arrival=0.8), replica.figures.num_accepted_at


@pytest.mark.parametrize(
    ("kind", "k"), [(kind, 3) for kind in KINDS] + [("n_gram", 1), ("another model", 4), ("mtp", 1)]
)
def test_the_tokens_are_those_without_drafts(matrix: Matrix, tmp_path: Path, kind: str, k: int) -> None:
    """Every parameter, prompts in chunks, hits, preemptions, aborts, grammars; against a CPU without drafts."""
    blocks = 2 * SMALL_CACHE if kind == "another model" else SMALL_CACHE
    with gpu_runner(matrix, speculation(tmp_path, matrix, kind, k), blocks=blocks) as runner:
        replica = matrix.check_together(runner, aborts={0: 9, 3: 20})
        figures, graphs = replica.figures, runner.figures()
    assert figures.num_draft_tokens > 0
    assert figures.num_prefix_hit_tokens > 0
    assert graphs["graph_replays_total"] > graphs["graph_captures_total"] > 0
    if kind in KINDS[:3]:  # heads that have learnt nothing are hardly ever right
        assert 0 < figures.num_accepted_tokens < figures.num_draft_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_graphs_and_steps_in_flight_change_nothing(matrix: Matrix, jobs: Jobs, tmp_path: Path, kind: str) -> None:
    """Without graphs, with them, one step at a time; no launch waits for the device."""
    config, found = speculation(tmp_path, matrix, kind, 3), []
    for settings in ({"capture": "off"}, {}, {"num_steps_in_flight": 1}):
        with gpu_runner(matrix, config, strict=True, **settings) as runner:
            found.append(run(runner, jobs))
    for answers, accepted in found[1:]:
        for answer, expected in zip(answers, found[0][0], strict=True):
            assert answer.same(expected)
        if kind in KINDS[:3]:
            assert accepted[0] > 0


@pytest.mark.parametrize("kind", ["another model", "mtp"])
def test_drafts_pause_and_lapse_with_the_batch(matrix: Matrix, jobs: Jobs, tmp_path: Path, kind: str) -> None:
    """One sequence drafts, two and three keep their drafts' state, more do not."""
    config = speculation(tmp_path, matrix, kind, 2, draft_lengths=[(1, 2), (3, 0)])
    with gpu_runner(matrix, config, strict=True) as runner:
        replica = Replica(runner)
        found = replica.run(jobs, random.Random(1), arrival=0.4)
        assert replica.draft_lengths == {0, 2}
        names = {(key.q, key.backend.endswith("+lapse")) for key in runner.device.graphs.keys}  # type: ignore[attr-defined]
    assert {(3, False), (1, True), (1, False)} <= names
    for answer, expected in zip(found, matrix.answers[:4], strict=False):
        assert answer.same(expected)


def test_drafts_that_are_drawn(matrix: Matrix, tmp_path: Path) -> None:
    """The same with graphs and without; greedy rows beside them are as ever."""
    config = speculation(tmp_path, matrix, "another model", 3, draft_sampling="sampled")
    hot = [
        (prompt, SamplingParams(temperature=1.0, seed=9, max_tokens=40, ignore_eos=True)) for prompt, _ in matrix.jobs
    ]
    found = []
    for capture in ("off", "lazy"):
        with gpu_runner(matrix, config, strict=True, capture=capture) as runner:
            found.append(run(runner, [*matrix.jobs[:3], *hot[3:6]]))
    (plain, plain_accepted), (captured, accepted) = found
    assert accepted == plain_accepted
    assert accepted[0] > 0
    for answer, expected in zip(captured, plain, strict=True):
        assert answer.same(expected)
    for answer, expected in zip(captured, matrix.answers[:3], strict=False):
        assert answer.same(expected)


class Told:
    """A proposer whose drafts are replaced by one text's, each fifth of them spoilt."""

    def __init__(self, proposer: Proposer, parts: ProposerParts, text: Tensor) -> None:
        self._proposer, self._slots, self._text = proposer, parts.residents.slots, text

    def propose(self, rows: DraftRows) -> Drafts:
        found = self._proposer.propose(rows)
        ahead = torch.arange(rows.length, device=self._text.device)
        places = (self._slots.num_tokens[rows.slots][:, None] + ahead).clamp(max=len(self._text) - 1)
        return Drafts(self._text[places], found.counts)

    def accepted(self, step: Closing) -> None:
        self._proposer.accepted(step)

    def prefill(self, step: Closing) -> None:
        self._proposer.prefill(step)


@pytest.mark.parametrize("kind", ["mtp", "eagle", "another model"])
def test_rejected_and_accepted_drafts_in_graphs(
    matrix: Matrix, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each job alone, four of five drafts right."""
    text = torch.zeros(LIMITS["max_model_len"], dtype=torch.int32, device="cuda")

    class Source:
        def __init__(self, source: ProposerSource) -> None:
            self._source, self.kv_shape = source, source.kv_shape

        def open(self, parts: ProposerParts) -> Told:
            return Told(self._source.open(parts), parts, text)

    def told(config: SpeculationConfig, target: Target) -> Source:
        return Source(loads[config.proposer](config, target))

    loads = registry.PROPOSERS
    monkeypatch.setattr(registry, "PROPOSERS", dict.fromkeys(loads, told))
    with gpu_runner(matrix, speculation(tmp_path, matrix, kind, 3)) as runner:
        for job, expected, known in zip(matrix.jobs, matrix.answers, matrix.texts, strict=True):
            spoilt = [token if place % 5 else (token + 1) % 320 for place, token in enumerate(known)]
            text[: len(spoilt)] = torch.tensor(spoilt, dtype=torch.int32)
            replica = Replica(runner)
            assert replica.run([job], random.Random(0))[0].same(expected)
            if len(expected.tokens) > 20 and job[1].grammar is None:
                assert 1.5 < 1 + replica.figures.num_accepted_tokens / replica.figures.num_drafts < 4
        assert runner.figures()["graph_replays_total"] > 20


@pytest.mark.parametrize("kind", ["n_gram", "another model", "mtp"])
def test_memory_is_left_for_the_largest_steps(matrix: Matrix, tmp_path: Path, kind: str) -> None:
    """The cache takes the rest of the device; all common graphs are captured ahead."""
    settings = {"kv_cache_bytes": None, "capture": "eager", "max_num_seqs": 4, "max_num_batched_tokens": 512}
    with gpu_runner(matrix, speculation(tmp_path, matrix, kind, 3), **settings) as runner:
        assert runner.facts.num_blocks == 4 * 7  # all sequences at full length
        assert runner.figures()["graphs"] == 9  # of 1, 2 and 4 rows: greedy, drawn, and with truncation
        matrix.check_together(runner)
