"""Drafts on the GPU's way, in Triton's interpreter: no token changes, drafts are what their model says, and steps are
graphs. With a GPU: test_gpu_drafts."""

import random
from collections.abc import Iterator
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
from rose.cuda_decoder import COMMON_NEEDS, CudaDecoder
from rose.cuda_decoder_load import load_cuda_decoder, load_source
from rose.decoder_loader import DecoderLoader
from rose.distributed.group import ALONE
from rose.kernels.sampling import TritonOps
from rose.kv_cache import KVShape
from rose.largest_steps import Trial, most_drafts, run_largest_prompts, run_largest_verify
from rose.layers.kernel_layers import use_kernels
from rose.model_runner import Loaded, ModelRunner
from rose.models.config import read_config
from rose.models.load import load_model
from rose.models.task import GenerateTask
from rose.runner import LazyTensor, OutOfMemory
from rose.sampling.params import Needs
from rose.sampling.sampler import Sampler
from rose.shape_list import write_shapes
from rose.speculation import registry
from rose.speculation.protocol import Closing
from rose.static_decoder import decode_key, keeps_draft
from tests.rose.host_stream import HostStream
from tests.rose.speculation.checked import Checked, check_drafts
from tests.rose.speculation.matrix import GRAMMAR
from tests.rose.speculation.replica import Answer, Jobs, Replica
from tests.rose.speculation.test_models_that_draft import configure
from tests.rose.speculation.whole_steps import going
from tests.rose.tiny_lm import EOS_TOKEN_ID, VOCAB_SIZE, write_llama

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter and a stream on the host")

CPU = torch.device("cpu")
SIZES: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "num_threads": 1, "max_num_seqs": 4, "max_num_batched_tokens": 24,
    "max_model_len": 56, "kv_cache_bytes": 1 << 20, "capture": "lazy", "max_graph_tokens": 0,
}  # fmt: skip
OTHERS = ["first layer", "eagle"]


def make_jobs() -> Jobs:
    """Prompts that begin alike and repeat themselves, one longer than a step; most of what touches tokens."""
    draw = random.Random(5)
    base = [draw.randrange(5, VOCAB_SIZE) for _ in range(7)] * 4
    kinds = [
        (18, {"logprobs": 2}),
        (25, {"frequency_penalty": 0.6, "presence_penalty": 0.2, "logprobs": 0}),
        (4, {"min_tokens": 4, "logit_bias": {EOS_TOKEN_ID: 30.0}}),
        (3, {"temperature": 0.7, "top_p": 0.9, "seed": 4}),
        (19, {"max_tokens": 2}),
    ]
    fields = {"max_tokens": 8, "temperature": 0.0}
    return [(base[:length] + [length], SamplingParams(**fields | kind)) for length, kind in kinds]


class Target:
    """A model's files, some jobs, and their answers on a CPU without drafts, each job alone."""

    def __init__(self, directory: Path, jobs: Jobs) -> None:
        self.directory, self.jobs = directory, jobs
        runner = ModelRunner(DecoderLoader("tiny", directory, RankConfig(**SIZES)))
        runner.load()
        self.answers = [Replica(runner).run([job], random.Random(0))[0] for job in jobs]
        self.texts = [prompt + answer.tokens for (prompt, _), answer in zip(jobs, self.answers, strict=True)]
        runner.close()

    def check(self, answers: list[Answer]) -> None:
        """Of the first jobs."""
        for index, (answer, expected) in enumerate(zip(answers, self.answers, strict=False)):
            assert answer.same(expected), f"job {index}: {answer} instead of {expected}"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    directory = write_llama(tmp_path_factory.mktemp("target"), tokenizer=True, num_hidden_layers=2)
    return Target(directory, make_jobs())


def speculation(directory: Path, target: Target, kind: str, k: int, **settings: Any) -> SpeculationConfig:
    settings.setdefault("draft_lengths", [])  # always k
    if kind == "n_gram":
        return SpeculationConfig(proposer="n_gram", num_draft_tokens=k, **settings)
    return configure(directory, target.directory, kind, k, **settings)


def load(directory: Path, config: RankConfig, shapes: Path | None = None) -> ModelRunner:
    """A runner that goes the GPU's way."""
    runner = ModelRunner(DecoderLoader("tiny", directory, config))
    loader = runner.loader
    assert isinstance(loader, DecoderLoader)
    model = load_model(directory, loader._model_config, loader._task, CPU, torch.float32)
    decoder, loader.facts = load_cuda_decoder(
        model, loader._model_config, loader.facts, config, device=CPU, dtype=torch.float32,
        tokenizer=directory / "tokenizer.json", shapes=shapes, stream=HostStream(),
    )  # fmt: skip
    runner.facts = loader.facts
    runner.use(Loaded(decoder, decoder.generate))
    return runner


def decoder_of(runner: ModelRunner) -> CudaDecoder:
    assert isinstance(runner.device, CudaDecoder)
    return runner.device


@contextmanager
def checked_runner(target: Target, config: SpeculationConfig, **sizes: Any) -> Iterator[tuple[ModelRunner, Checked]]:
    """Whose greedy drafts are compared with what their model says of the whole sequence."""
    opened: list[Checked] = []
    with pytest.MonkeyPatch.context() as patch:
        loads = {name: check_drafts(load, opened, target.texts) for name, load in registry.PROPOSERS.items()}
        patch.setattr(registry, "PROPOSERS", {**loads, "n_gram": registry.PROPOSERS["n_gram"]})
        runner = load(target.directory, RankConfig(speculation=config, **SIZES | sizes))
    with going("kernels"):
        yield runner, opened[-1] if opened else None
    runner.close()


@pytest.mark.parametrize(
    "kind",
    ["mtp", *(pytest.param(kind, marks=pytest.mark.long) for kind in ("n_gram", "another model", *OTHERS))],
)
def test_together(target: Target, tmp_path: Path, kind: str) -> None:
    """In chunks, over blocks of others, two steps in flight; captured and replayed."""
    with checked_runner(target, speculation(tmp_path, target, kind, 3)) as (runner, checked):
        replica = Replica(runner)
        target.check(replica.run(target.jobs, random.Random(1), arrival=0.8))
        figures, graphs = replica.figures, runner.figures()
    assert 0 < figures.num_accepted_tokens < figures.num_draft_tokens
    assert graphs["graph_captures_total"] > 0
    assert graphs["graph_replays_total"] > 0
    assert kind == "n_gram" or checked.num_checked > 0


@pytest.mark.long
@pytest.mark.parametrize("kind", ["another model", "mtp"])
def test_drafts_pause_and_lapse_with_the_batch(target: Target, tmp_path: Path, kind: str) -> None:
    """One sequence drafts, two keep their drafts' state, more do not: graphs of each."""
    config = speculation(tmp_path, target, kind, 2, draft_lengths=[(1, 2), (2, 0)])
    with checked_runner(target, config) as (runner, checked):
        replica = Replica(runner)
        target.check(replica.run(target.jobs[:3], random.Random(1), arrival=1.0))
        assert replica.draft_lengths == {0, 2}
        target.check([replica.run([job], random.Random(2))[0] for job in target.jobs[:1]])
        keys = [(key.kind, key.q, key.backend.endswith("+lapse")) for key in decoder_of(runner).graphs.keys]
    assert checked.num_checked > 0
    assert {("verify", 3, False), ("decode", 1, True)} <= set(keys)


@pytest.mark.long
def test_drafts_that_are_drawn(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alone a sequence is drafted for at the same places, so draw for draw it is what a CPU gives; all by kernels."""
    config = speculation(tmp_path, target, "another model", 3, draft_sampling="sampled")
    job = target.jobs[0][0], SamplingParams(temperature=1.0, seed=9, max_tokens=12, ignore_eos=True)
    cpu = ModelRunner(DecoderLoader("tiny", target.directory, RankConfig(speculation=config, **SIZES)))
    cpu.load()
    expected = Replica(cpu)
    answer = expected.run([job], random.Random(0))[0]
    cpu.close()
    monkeypatch.setattr("rose.sampling.sampler._default_ops", lambda _: TritonOps())
    with going("kernels"):
        replica = Replica(load(target.directory, RankConfig(speculation=config, **SIZES)))
        assert replica.run([job], random.Random(0))[0].same(answer)
    assert replica.figures.num_accepted_at == expected.figures.num_accepted_at
    assert 0 < replica.figures.num_accepted_tokens < replica.figures.num_draft_tokens


def test_steps_with_a_grammar(target: Target, tmp_path: Path) -> None:
    """Their graphs end at the logits; whoever is beside them waits, too. Logits stay for graphs alone."""
    ruled = SamplingParams(temperature=0.0, max_tokens=8, grammar=GRAMMAR, frequency_penalty=0.4, logprobs=1)
    both = Target(target.directory, [(target.jobs[0][0][:9], ruled), target.jobs[0]])
    with checked_runner(both, speculation(tmp_path, both, "mtp", 2), max_graphs=1) as (runner, _):
        replica, decoder = Replica(runner), decoder_of(runner)
        both.check(replica.run(both.jobs, random.Random(1), arrival=1.0))
        assert replica.figures.num_accepted_tokens > 0
        assert list(decoder._static._forwarded) == decoder.graphs.keys
        both.check(replica.run(both.jobs[:1], random.Random(1)))
        assert list(decoder._static._forwarded) == decoder.graphs.keys
        assert decoder.graphs.counters.evictions > 0


def test_a_row_that_is_not_finite_fails_alone(target: Target) -> None:
    """Both rows fill their step up beyond their only block, where what one writes the other reads."""
    beginning = [
        (target.jobs[0][0][:length], SamplingParams(temperature=0.0, max_tokens=16 - length)) for length in (13, 14)
    ]
    good = Target(target.directory, beginning[:1])
    bad = beginning[1][0], replace(beginning[1][1], logit_bias={7: 100.0})
    config = SpeculationConfig(proposer="n_gram", num_draft_tokens=3)
    with checked_runner(good, config, max_num_batched_tokens=32) as (runner, _):
        decoder_of(runner)._static._model.model.embed_tokens.weight[7] = float("nan")  # type: ignore[attr-defined]
        answer, failed = Replica(runner).run([good.jobs[0], bad], random.Random(1), arrival=1.0)
    good.check([answer])
    assert failed.tokens == [7]
    assert failed.end not in ("stop", "length")


class Failed:
    """A step that raised before it was launched, told as the worker tells it: when it is asked for."""

    def __init__(self, error: OutOfMemory) -> None:
        self._error = error

    def ready(self) -> bool:
        raise self._error


def test_a_step_without_memory_to_close_did_nothing(target: Target, tmp_path: Path) -> None:
    """Its tokens are not counted, and no slot knows them."""
    with checked_runner(target, speculation(tmp_path, target, "mtp", 2), capture="off") as (runner, checked):
        accepted, step, num_calls = checked.accepted, runner.step, 0

        def run_out(closing: Closing) -> None:
            nonlocal num_calls
            num_calls += 1
            accepted(closing)
            if num_calls == 2:
                raise torch.OutOfMemoryError("no room")

        def try_step(plan: StepPlan, arrays: Arrays) -> LazyTensor | Failed:
            try:
                return step(plan, arrays)
            except OutOfMemory as error:
                return Failed(error)

        checked.accepted = run_out  # type: ignore[method-assign]
        runner.step = try_step  # type: ignore[method-assign,assignment]
        replica = Replica(runner)
        answer = replica.run(target.jobs[1:2], random.Random(1))[0]
        assert replica.stats.step_failures["oom"] > 0
        assert replica.figures.num_accepted_tokens > 0
    assert answer.same(target.answers[1])


def test_graphs_ahead_of_the_first_step(target: Target, tmp_path: Path) -> None:
    """Of every batch size with its own draft length; those of an earlier start that can be again."""
    shapes = tmp_path / "shapes.json"
    old = [decode_key(2, "triton", Needs(), draft_length=length) for length in (5, 2, 1)]
    write_shapes(shapes, [*old, decode_key(1, "triton", Needs(penalties=True), draft_length=2, keep_draft=False)])
    config = SpeculationConfig(proposer="n_gram", num_draft_tokens=2, draft_lengths=[(1, 2), (2, 1)])
    rank = RankConfig(speculation=config, **SIZES | {"capture": "list"})
    decoder = decoder_of(load(target.directory, rank, shapes))
    waiting = list(decoder.graphs._policy._waiting)
    assert waiting == old[1:], "longer drafts than there are; a state to lapse, where n-grams have none"
    decoder.idle()
    assert decoder.graphs.keys == old[1:2]


@pytest.mark.parametrize(
    ("kind", "table", "tokens", "expected"),
    [
        ("n_gram", [(1, 2), (2, 1)], 24, {(1, 3, True), (2, 2, True), (4, 1, True)}),
        ("mtp", [(1, 2), (3, 0)], 24, {(1, 3, True), (2, 1, True), (4, 1, True), (4, 1, False)}),
        ("mtp", [], 9, {(1, 3, True), (2, 3, True), (4, 3, True), (4, 2, True)}),
    ],
)
def test_graphs_ahead_are_those_that_steps_use(
    target: Target, tmp_path: Path, kind: str, table: list[tuple[int, int]], tokens: int, expected: set[Any]
) -> None:
    """(padded rows, tokens of each, whether the drafts' state is kept); n-grams have none to lapse."""
    config = speculation(tmp_path, target, kind, 2, draft_lengths=table)
    sizes = SIZES | {"max_num_batched_tokens": tokens, "capture": "list"}
    decoder = decoder_of(load(target.directory, RankConfig(speculation=config, **sizes)))
    ahead = decoder._policy(RankConfig(capture="eager"))
    keys = list(ahead._waiting)
    assert {(key.num_seqs, key.q, keeps_draft(key)) for key in keys} == expected
    assert len(keys) == len(COMMON_NEEDS) * len(expected)


@pytest.mark.parametrize("kind", ["n_gram", "another model", "mtp"])
def test_the_largest_steps_run_before_there_is_a_cache(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    facts, seen = ModelRunner(DecoderLoader("tiny", target.directory, RankConfig(**SIZES))).facts, []
    facts = replace(facts, max_draft_tokens=3, max_num_batched_tokens=20)
    model_config = read_config(target.directory)
    model = load_model(target.directory, model_config, GenerateTask(()), CPU, torch.float32)
    parts = model_config, facts, RankConfig(speculation=speculation(tmp_path, target, kind, 3))
    source = load_source(model, *parts, target.directory, CPU, torch.float32, ALONE)
    use_kernels(model)
    kept, adjusted, copies = model.logits, Sampler.adjusted, []

    def adjust(self: Sampler, logits: Tensor, *args: Any, **options: Any) -> Tensor:
        changed = adjusted(self, logits, *args, **options)
        copies.append(changed is not logits)
        return changed

    monkeypatch.setattr(Sampler, "adjusted", adjust)
    model.logits = lambda hidden: seen.append(len(hidden)) or kept(hidden)  # type: ignore[method-assign]
    shape = KVShape.of(model_config, torch.float32)
    trial = Trial(model, source, shape, facts, CPU, target.directory / "tokenizer.json", ALONE)
    run_largest_verify(trial)
    assert seen[-1] == facts.max_num_seqs * 4
    assert copies[-1], "of logits, for log probabilities"
    run_largest_prompts(trial)
    assert facts.max_num_seqs in seen


@pytest.mark.parametrize(
    ("table", "most", "tokens", "expected"),
    [
        ((), 6, 99, (6, 3)),
        ((), 6, 12, (4, 3)),
        ((), 256, 512, (256, 2)),
        (((1, 3), (5, 2), (40, 0)), 64, 99, (8, 2)),
        (((1, 3), (4, 0)), 4, 99, (1, 3)),
    ],
)
def test_the_step_with_most_drafts(
    target: Target, table: tuple[tuple[int, int], ...], most: int, tokens: int, expected: tuple[int, int]
) -> None:
    facts = ModelRunner(DecoderLoader("tiny", target.directory, RankConfig(**SIZES))).facts
    facts = replace(facts, max_num_seqs=most, max_num_batched_tokens=tokens, draft_lengths=table, max_draft_tokens=3)
    assert most_drafts(facts) == expected
