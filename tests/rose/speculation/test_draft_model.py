"""A second language model as a proposer: the target itself, draws of its own, the real default model's first layers."""

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from ipc.types import SamplingParams
from rose import cpu_decoder
from rose.attention.paged import PagedKV
from rose.config import RankConfig, SpeculationConfig
from rose.decoder_loader import DecoderLoader
from rose.kv_cache import BLOCK_SIZE, KVShape, allocate
from rose.model_runner import ModelRunner
from rose.models.config import ModelError, read_config
from rose.models.llama import LlamaForCausalLM
from rose.models.load import load_model
from rose.models.task import GenerateTask
from rose.speculation.passes import LACKS_LAST, WHOLE
from tests.goldens import NUM_TOKENS, read_goldens
from tests.rose.speculation.checked import Batch, attend, positions_of
from tests.rose.speculation.replica import Jobs, Replica
from tests.rose.speculation.whole_steps import SLOTS, K, Way, World, going, write_models
from tests.rose.tiny_lm import write_llama, write_relative

PROMPT = [40, 41, 42, 43, 44, 45, 46]
TOP_K = 5
LEAST_EXPECTED = 5  # of a cell, for chi-square


@contextmanager
def runner_of(directory: Path, speculation: SpeculationConfig, **settings: Any) -> Iterator[ModelRunner]:
    limits = {"num_threads": 1, "max_model_len": 96, "max_num_seqs": 4, "kv_cache_bytes": 1 << 20} | settings
    runner = ModelRunner(DecoderLoader("tiny", directory, RankConfig(device="cpu", speculation=speculation, **limits)))
    runner.load()
    yield runner
    runner.close()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("target"), tokenizer=True)


def allocate_damaged(shape: KVShape, num_blocks: int, device: torch.device) -> Sequence[PagedKV]:
    """What failed rows may have left in every block."""
    caches = allocate(shape, num_blocks, device)
    for part in (part for cache in caches for part in cache):
        part.fill_(float("nan"))
    return caches


@pytest.mark.parametrize(
    ("draft_lengths", "least"), [([], 100), ([(2, 3), (4, 0)], 40)], ids=["always", "pausing"]
)  # fmt: skip
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drafts_of_the_target_itself_are_all_accepted(
    target: Path, temperature: float, draft_lengths: list[tuple[int, int]], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also as draws: p / q is 1, but for rounding. So every step with drafts leaves an entry to be made up for: by the
    next one, by one without drafts, by one with prompts."""
    monkeypatch.setattr(cpu_decoder, "allocate", allocate_damaged)
    fields = {"temperature": temperature, "max_tokens": 33, "ignore_eos": True, "frequency_penalty": 0.3}
    jobs: Jobs = [(PROMPT[:size], SamplingParams(seed=size, **fields)) for size in range(1, 8)]
    speculation = SpeculationConfig(
        proposer="draft_model", model=str(target), num_draft_tokens=3, draft_sampling="sampled",
        draft_lengths=draft_lengths,
    )  # fmt: skip
    with runner_of(target, speculation) as runner:
        replica = Replica(runner)
        answers = replica.run(jobs, random.Random(0))
        assert [len(answer.tokens) for answer in answers] == [33] * len(jobs)
        assert replica.figures.num_accepted_tokens == replica.figures.num_draft_tokens > least
        assert replica.draft_lengths == {0, 3}


@pytest.mark.parametrize("way", ["torch", "kernels"])
def test_whole_steps_make_up_for_the_last_drafts_entry(tmp_path: Path, way: Way) -> None:
    """The target's own drafts by the GPU's way too: all accepted, also behind a step without. A block is known to lack
    its last entry until that is made."""
    write_relative(tmp_path / "another model", write_models(tmp_path), noise=0.0)
    with going(way):
        world = World(tmp_path, "another model", way=way, device=torch.device("cpu"))
        slots, num_lacking = world.residents.slots, 0
        for k in (3, 2, 0, 3, 0, 0, 1, 3):
            drafts, _, num_new = world.step(k)
            counts = num_new[:-1] - 1
            assert torch.equal(counts, torch.zeros_like(counts) if drafts is None else drafts.counts[:-1])
            for slot, count in zip(SLOTS, counts.tolist(), strict=False):
                num_computed = int(slots.num_computed[slot])
                states = [WHOLE] * -(-num_computed // BLOCK_SIZE)
                if num_computed % BLOCK_SIZE == 0 and count == k > 0:
                    states[-1] = LACKS_LAST
                    num_lacking += 1
                own = slots.block_table[slot, : len(states)]
                assert world.proposer._kept._whole[own].tolist() == states  # type: ignore[attr-defined]
        assert num_lacking > 0


@pytest.mark.parametrize("way", ["torch", "kernels"])
def test_so_many_drafts_are_so_many_passes(tmp_path: Path, way: Way) -> None:
    """The first of a loop is over two tokens a row; closing a step with drafts takes none, one without another row."""
    write_models(tmp_path)
    num_rows, runs = len(SLOTS), []
    with going(way):
        world = World(tmp_path, "another model", way=way, device=torch.device("cpu"))
        world.proposer._model.register_forward_pre_hook(lambda _, args: runs.append(len(args[0].input_ids)))  # type: ignore[attr-defined]
        for k in range(1, K + 1):
            runs.clear()
            world.step(k)
            assert runs == [2 * num_rows, *[num_rows] * (k - 1)]
        runs.clear()
        world.step(0)
        assert runs == [2 * num_rows]
        runs.clear()
        world.step(0, keep_draft=False)
        assert not runs


class Expected(NamedTuple):
    """Ways for an output to go on, and their probabilities."""

    outputs: list[tuple[int, ...]]
    probabilities: list[float]


def expected_outputs(target: Path, num_tokens: int) -> Expected:
    """Every output at TOP_K and temperature 1, worked out from the model's own logits."""
    config = read_config(target)
    model = load_model(target, config, GenerateTask(()), torch.device("cpu"), torch.float32)
    assert isinstance(model, LlamaForCausalLM)
    ways: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(num_tokens):
        ways = {
            (*output, token): chance * probability
            for output, chance in ways.items()
            for token, probability in _following(model, torch.tensor([*PROMPT, *output], dtype=torch.int32))
        }
    return Expected(list(ways), list(ways.values()))


def _following(model: LlamaForCausalLM, ids: Tensor) -> list[tuple[int, float]]:
    logits = model.logits(model(Batch(ids, positions_of(ids)), attend)[-1:])[0]
    best = logits.topk(TOP_K)
    return list(zip(best.indices.tolist(), best.values.softmax(0).tolist(), strict=True))


@pytest.mark.parametrize("draft", ["relative", "first layer"])
def test_draws_keep_the_targets_distribution(target: Path, tmp_path: Path, draft: str) -> None:
    """Of whole outputs, first token to last: drafts are drawn from another distribution and some are accepted."""
    num_jobs, num_tokens = 1500, 4
    files = {"model": str(write_relative(tmp_path, target, noise=0.05))} if draft == "relative" else {"num_layers": 1}
    speculation = SpeculationConfig(proposer="draft_model", num_draft_tokens=2, draft_sampling="sampled", **files)  # type: ignore[arg-type]
    fields = {"temperature": 1.0, "top_k": TOP_K, "max_tokens": num_tokens, "ignore_eos": True}
    jobs: Jobs = [(PROMPT, SamplingParams(seed=seed, **fields)) for seed in range(num_jobs)]
    limits = {"max_num_seqs": 128, "max_num_batched_tokens": 1024, "kv_cache_bytes": 1 << 23}
    with runner_of(target, speculation, **limits) as runner:
        replica = Replica(runner)
        answers = [answer for begin in range(0, num_jobs, 128)
                   for answer in replica.run(jobs[begin : begin + 128], random.Random(0), arrival=1.0)]  # fmt: skip
        figures = replica.figures
    assert 0.1 < figures.num_accepted_tokens / figures.num_draft_tokens < 0.9
    counts = Counter(tuple(answer.tokens) for answer in answers)
    expected = expected_outputs(target, num_tokens)
    assert set(counts) <= set(expected.outputs)
    likely = [(o, p * num_jobs) for o, p in zip(*expected, strict=True) if p * num_jobs >= LEAST_EXPECTED]
    found = [counts[output] for output, _ in likely]
    wanted = [number for _, number in likely]
    rest = num_jobs - sum(wanted)
    assert chisquare([*found, num_jobs - sum(found)], [*wanted, rest]).pvalue > 1e-3


def test_smollm2_drafts_with_its_first_layers(smollm2_dir: Path) -> None:
    """The real default model: tokens are those that transformers gives without drafts."""
    speculation = SpeculationConfig(proposer="draft_model", num_layers=26, num_draft_tokens=2)
    prompts = read_goldens("smollm2")[::6]
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    settings = {"num_threads": 2, "max_model_len": 512, "kv_cache_bytes": 1 << 28}
    with runner_of(smollm2_dir, speculation, **settings) as runner:
        replica = Replica(runner)
        answers = replica.run([(prompt.prompt_ids, params) for prompt in prompts], random.Random(2))
        for prompt, answer in zip(prompts, answers, strict=True):
            assert len(answer.tokens) == NUM_TOKENS
            prompt.check(answer.tokens)
        assert replica.figures.num_accepted_tokens > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "set one of them"),
        ({"model": "anywhere", "num_layers": 1}, "set one of them"),
        ({"num_layers": 2}, r"num_layers must be 1\.\.1 with this target, got 2"),
        ({"model": "nowhere"}, r"nowhere/config\.json is missing"),
    ],
)
def test_settings_that_make_no_draft_model(target: Path, fields: dict[str, Any], message: str) -> None:
    with (
        pytest.raises(ModelError, match=message),
        runner_of(target, SpeculationConfig(proposer="draft_model", **fields)),
    ):
        pass


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 321}, r"another vocabulary than .* \(321 tokens, 320\)"),
        ({"max_position_embeddings": 95}, "has 95 positions, the target is served up to max_model_len = 96"),
    ],
)
def test_models_that_cannot_draft_for_the_target(
    target: Path, tmp_path: Path, changes: dict[str, int], message: str
) -> None:
    draft = write_llama(tmp_path, **changes)
    speculation = SpeculationConfig(proposer="draft_model", model=str(draft))
    with pytest.raises(ModelError, match=message), runner_of(target, speculation):
        pass


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is damaged"),
        ("[]", "is damaged"),
        ('{"model": null}', "is damaged"),
        ('{"model": {"vocab": 5}}', "is damaged"),
        ('{"model": {"vocab": []}}', "another vocabulary"),
        ('{"model": {"vocab": {}}}', "another vocabulary"),
        ('{"model": {"vocab": [["a", 0.5]]}}', "another vocabulary"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_a_draft_model_with_a_damaged_tokenizer(tmp_path: Path, text: str, message: str) -> None:
    target, draft = (write_llama(tmp_path / name, tokenizer=True) for name in ("target", "draft"))
    (draft / "tokenizer.json").write_text(text)
    speculation = SpeculationConfig(proposer="draft_model", model=str(draft))
    with pytest.raises(ModelError, match=f"draft.*{message}"), runner_of(target, speculation):
        pass


def test_a_draft_model_with_another_tokenizer(target: Path, tmp_path: Path) -> None:
    draft = write_llama(tmp_path, tokenizer=True)
    path = draft / "tokenizer.json"
    path.write_text(path.read_text().replace('"ing": ', '"ong": '))
    speculation = SpeculationConfig(proposer="draft_model", model=str(draft))
    with pytest.raises(ModelError, match="another vocabulary"), runner_of(target, speculation):
        pass
