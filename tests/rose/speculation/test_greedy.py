"""Drafts change no token: n-grams, and drafts right as often as a test wants, over two families and every company."""

from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ipc.types import SamplingParams
from rose.config import SpeculationConfig
from rose.kv_cache import BLOCK_SIZE
from rose.model_runner import ModelRunner
from rose.models.config import read_config
from rose.models.load import load_model
from rose.models.task import GenerateTask
from rose.speculation import registry
from scheduler.llm.sequence import Sequence
from tests.rose.speculation.checked import Batch, attend, positions_of
from tests.rose.speculation.hook import load_hook
from tests.rose.speculation.matrix import SMALL_CACHE, Matrix, make_runner
from tests.rose.speculation.replica import Answer, Replica
from tests.rose.tiny_lm import write_llama, write_qwen3

CPU = torch.device("cpu")
NGRAM, OFTEN = "n_gram", "hook"
LETTER_A = 3 + ord("a")  # in the tiny models' vocabulary
# more readings than a matcher may follow, from a few letters on
AMBIGUOUS = "start: x0\n" + "\n".join(
    f"x{i}: " + " | ".join(f"x{j} x{(i + j) % 40}" for j in range(0, 40, 2)) + ' | "a"' for i in range(40)
)


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def matrix(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Matrix:
    write = {"llama": write_llama, "qwen3": write_qwen3}[request.param]
    return Matrix(write(tmp_path_factory.mktemp(request.param), tokenizer=True))


@contextmanager
def runner_with(matrix: Matrix, proposer: str, k: int, **settings: int) -> Iterator[ModelRunner]:
    speculation = SpeculationConfig(proposer=proposer, num_draft_tokens=k)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        hook = load_hook(matrix.texts, 0.8)
        patch.setattr(registry, "PROPOSERS", {**registry.PROPOSERS, OFTEN: hook})
        runner = make_runner(matrix.directory, speculation, **settings)
    yield runner
    runner.close()


@pytest.mark.parametrize("k", [1, 2, 3, 4])
@pytest.mark.parametrize("proposer", [NGRAM, OFTEN])
def test_together(matrix: Matrix, proposer: str, k: int) -> None:
    """Batched, in chunks, preempted, over blocks of others, beside sequences that are given up."""
    with runner_with(matrix, proposer, k, blocks=SMALL_CACHE) as runner:
        replica = matrix.check_together(runner, aborts={0: 9, 3: 20})
        figures = replica.figures
        assert figures.num_preemptions > 0
        assert figures.num_prefix_hit_tokens > 0
        assert 0 < figures.num_accepted_tokens < figures.num_draft_tokens
        assert len(figures.num_accepted_at) == k
        assert sum(figures.num_accepted_at) == figures.num_accepted_tokens
        assert figures.num_accepted_at == sorted(figures.num_accepted_at, reverse=True)


@pytest.mark.parametrize("place", ["accepted", "prefill", "logprobs"])
def test_steps_that_do_not_fit(matrix: Matrix, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """Drafts that were taken in a step without memory to end are neither counted nor met by grammars."""
    with runner_with(matrix, OFTEN, 3) as runner:
        decoder = runner.device._decoder  # type: ignore[attr-defined]
        failing = decoder._residents.sampler if place == "logprobs" else decoder._proposer
        run, num_calls = getattr(failing, place), 0

        def run_out(*args: Any) -> Any:
            nonlocal num_calls
            num_calls += 1
            result = run(*args)
            if num_calls in (3, 7, 15):
                raise MemoryError
            return result

        monkeypatch.setattr(failing, place, run_out)
        replica = matrix.check_together(runner)
        assert replica.stats.step_failures["oom"] >= 3
        assert replica.figures.num_accepted_tokens > 0


def test_a_grammar_that_outgrows_a_limit_among_the_drafts_fails_alone(matrix: Matrix) -> None:
    """With its tokens drafted or one by one; the rank, and whoever is beside it, go on."""
    prompt = [LETTER_A] * 20
    with runner_with(matrix, NGRAM, 4) as runner:
        params = SamplingParams(temperature=0.0, max_tokens=30, grammar=AMBIGUOUS, logit_bias={LETTER_A: 60.0})
        replica = Replica(runner)
        other, failed = replica.run([matrix.jobs[0], (prompt, params)], Random(1), arrival=1.0)
        assert replica.figures.num_draft_tokens > 0
    assert failed.end == "invalid"
    assert other.same(matrix.answers[0])


def test_alone(matrix: Matrix) -> None:
    """Outputs end in the midst of accepted drafts, too."""
    with runner_with(matrix, OFTEN, 3) as runner:
        assert matrix.check_alone(runner) > 0


def test_blocks_reserved_for_drafts_are_given_back(matrix: Matrix, monkeypatch: pytest.MonkeyPatch) -> None:
    """Given up at every place of a block, drafts of the next one under way."""
    with runner_with(matrix, OFTEN, 4) as runner:
        replica = Replica(runner)
        residents, num_spare = replica.planner.residents, 0
        leave = residents.leave

        def watch(sequence: Sequence) -> None:
            nonlocal num_spare
            num_spare += len(sequence.blocks) > residents.num_blocks_for(len(sequence.ids))
            leave(sequence)

        monkeypatch.setattr(residents, "leave", watch)
        for count in range(1, BLOCK_SIZE + 1):
            answer = replica.run(matrix.jobs[1:2], Random(0), {0: count})[0]
            assert answer.end == "aborted"
            replica.check_nothing_left()
        assert num_spare > 1


def test_log_probabilities_are_the_models_own_at_every_place(matrix: Matrix) -> None:
    """Of accepted drafts, of what follows a rejection, up to an end in the midst of a step's tokens."""
    prompt, params = matrix.jobs[1]
    ends = [replace(params, stop_token_ids=(token,)) for token in matrix.answers[1].tokens[6:12]]
    jobs = [job for job in matrix.jobs if job[1].logprobs] + [(prompt, each) for each in ends]
    model = load_model(matrix.directory, read_config(matrix.directory), GenerateTask(()), CPU, torch.float32)
    num_rejected = num_cut = 0
    with runner_with(matrix, OFTEN, 3) as runner:
        for prompt, params in jobs:
            replica = Replica(runner)
            answer = replica.run([(prompt, params)], Random(0))[0]
            num_rejected += answer.num_draft_tokens - replica.figures.num_accepted_tokens
            num_cut += replica.figures.num_accepted_tokens - answer.num_accepted_tokens
            ids = torch.tensor([*prompt, *answer.tokens], dtype=torch.int32)
            logits = model.logits(model(Batch(ids, positions_of(ids)), attend))  # type: ignore[operator]
            expected = logits[len(prompt) - 1 : -1].log_softmax(1)
            own, top = expected[range(len(answer.tokens)), answer.tokens], expected.topk(params.logprobs or 0)
            tops = [
                list(zip(*each, strict=True)) for each in zip(top.indices.tolist(), top.values.tolist(), strict=True)
            ]
            assert answer.same(
                Answer(answer.tokens, own.tolist(), tops, answer.prompt_logprobs, answer.prompt_top, answer.end)
            )
    assert num_rejected > 0
    assert num_cut > 0


@pytest.mark.parametrize("proposer", [NGRAM, OFTEN])
def test_tokens_that_are_drawn(tmp_path_factory: pytest.TempPathFactory, proposer: str) -> None:
    """A draft that is no draw changes nothing of the target's draws: these follow from seed and position."""
    drawn = Matrix(write_llama(tmp_path_factory.mktemp("drawn"), tokenizer=True), temperature=0.6)
    with runner_with(drawn, proposer, 3, blocks=SMALL_CACHE) as runner:
        assert drawn.check_together(runner).figures.num_accepted_tokens > 0
