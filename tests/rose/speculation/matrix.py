"""What a proposer must not change: a token, an end, a log probability, whatever the parameters and the company.

`Matrix` has the answers without drafts; `check` compares a proposer's with them. Jobs are greedy unless said otherwise:
a proposer whose drafts are drawn gives other draws (of the same distribution).
"""

import random
from pathlib import Path

from llguidance import LLMatcher

from ipc.types import SamplingParams
from rose.config import RankConfig, SpeculationConfig
from rose.decoder_loader import DecoderLoader
from rose.model_runner import ModelRunner
from tests.rose.speculation.replica import Answer, Jobs, Replica
from tests.rose.tiny_lm import EOS_TOKEN_ID, VOCAB_SIZE

LIMITS = {"max_num_seqs": 6, "max_num_batched_tokens": 48, "max_model_len": 112}
SMALL_CACHE, LARGE_CACHE = 16, 80  # blocks: the former makes sequences yield to each other
BLOCK_BYTES = 2 * 2 * 16 * 2 * 16 * 4  # of the tiny models
GRAMMAR = LLMatcher.grammar_from_regex("([a-c]{1,3}[0-9]{2}-)*end")


def make_runner(
    directory: Path, speculation: SpeculationConfig | None = None, blocks: int = LARGE_CACHE, **settings: int
) -> ModelRunner:
    """One of the tiny models. A proposer with a cache of its own has fewer blocks."""
    config = RankConfig(
        device="cpu", dtype="float32", num_threads=1, kv_cache_bytes=blocks * BLOCK_BYTES,
        speculation=speculation or SpeculationConfig(), **LIMITS, **settings,
    )  # fmt: skip
    runner = ModelRunner(DecoderLoader("tiny", directory, config))
    runner.load()
    return runner


def make_jobs(seed: int = 3, temperature: float = 0.0) -> Jobs:
    """Prompts with common beginnings and repetitions, some longer than a step; every parameter that touches tokens."""
    draw = random.Random(seed)
    base = [draw.randrange(5, VOCAB_SIZE) for _ in range(12)] * 5
    kinds = [
        {},
        {"logprobs": 3},
        {"frequency_penalty": 0.6, "presence_penalty": 0.2, "logprobs": 0},
        {"repetition_penalty": 1.3},
        {"logit_bias": {7: 4.0, 9: 3.5, 12: -100.0}},
        {"grammar": GRAMMAR, "max_tokens": 30},
        {"grammar": GRAMMAR, "frequency_penalty": 0.4, "logprobs": 1, "max_tokens": 30},
        {"min_tokens": 12, "logit_bias": {EOS_TOKEN_ID: 9.0}, "ignore_eos": False},
        {"min_tokens": 7, "logit_bias": {EOS_TOKEN_ID: 30.0}, "ignore_eos": False, "logprobs": 2},
        {"max_tokens": 3},
        {"max_tokens": 1},
        {"prompt_logprobs": 2, "logprobs": 1},
    ]
    jobs: Jobs = []
    for index, kind in enumerate(kinds):
        prompt = base[: draw.randrange(3, 58)] + [draw.randrange(5, VOCAB_SIZE) for _ in range(1 + index % 3)]
        fields = {"max_tokens": draw.randrange(25, 50), "temperature": temperature, "seed": index, "ignore_eos": True}
        jobs.append((prompt, SamplingParams(**(fields | kind))))
    params = SamplingParams(temperature=temperature, seed=len(jobs), max_tokens=7, ignore_eos=True, prompt_logprobs=0)
    return [*jobs, (base[:56], params)]


def check_numbers(prompt: list[int], params: SamplingParams, answer: Answer) -> None:
    """As many log probabilities as were asked for, with each token; the first of a prompt has none."""
    for num_top, tokens, logprobs, top in (
        (params.logprobs, answer.tokens, answer.logprobs, answer.top),
        (params.prompt_logprobs, prompt[1:], answer.prompt_logprobs, answer.prompt_top),
    ):
        assert len(logprobs) == (0 if num_top is None else len(tokens))
        assert [len(each) for each in top] == [num_top] * (len(tokens) if num_top else 0)


class Matrix:
    """Answers of a model without drafts, each job alone; jobs with stop ids are made from what the first ones said."""

    def __init__(self, directory: Path, temperature: float = 0.0) -> None:
        self.directory = directory
        self._runner = make_runner(directory)
        self.jobs = make_jobs(temperature=temperature)
        self.answers = [self._alone(job) for job in self.jobs]
        for index in range(4):  # ends in the midst of an output, at the first such token from a minimum on
            prompt = self.jobs[index][0]
            stop, least = self.answers[index].tokens[14 + index], 5 + index
            fields = {"stop_token_ids": (stop,), "min_tokens": least, "max_tokens": 45, "logprobs": index}
            self.jobs.append((prompt, SamplingParams(temperature=temperature, seed=index, ignore_eos=True, **fields)))
            self.answers.append(self._alone(self.jobs[-1]))
        assert {answer.end for answer in self.answers} == {"stop", "length"}
        for job, answer in zip(self.jobs, self.answers, strict=True):
            check_numbers(*job, answer)
        self._runner.close()

    def _alone(self, job: tuple[list[int], SamplingParams]) -> Answer:
        return Replica(self._runner).run([job], random.Random(0))[0]

    @property
    def texts(self) -> list[list[int]]:
        """Prompts with their answers."""
        return [prompt + answer.tokens for (prompt, _), answer in zip(self.jobs, self.answers, strict=True)]

    def check_together(self, runner: ModelRunner, *, aborts: dict[int, int] | None = None) -> Replica:
        """All at once; those with `aborts` have been given up after so many tokens."""
        replica = Replica(runner)
        found = replica.run(self.jobs, random.Random(1), aborts, arrival=0.8)
        for index, (answer, expected) in enumerate(zip(found, self.answers, strict=True)):
            self._check(index, answer, expected)
        replica.check_nothing_left()
        return replica

    def check_alone(self, runner: ModelRunner) -> int:
        """One after the other; how many accepted drafts stood behind the end of an output."""
        num_cut = 0
        for index, job in enumerate(self.jobs):
            replica = Replica(runner)
            answer = replica.run([job], random.Random(0))[0]
            self._check(index, answer, self.answers[index])
            num_cut += replica.figures.num_accepted_tokens - answer.num_accepted_tokens
            replica.check_nothing_left()
        return num_cut

    def _check(self, index: int, answer: Answer, expected: Answer) -> None:
        if answer.end == "aborted":
            assert answer.tokens == expected.tokens[: len(answer.tokens)], f"job {index}"
            return
        assert answer.same(expected), f"job {index} of {self.jobs[index][1]}: {answer} instead of {expected}"
        assert answer.num_accepted_tokens <= min(answer.num_draft_tokens, len(answer.tokens))
