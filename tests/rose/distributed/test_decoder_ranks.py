"""Generation by two ranks against one: the same tokens, whatever the plans; and ranks that do not hold the same."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from ipc.step import KIND_PREFILL
from ipc.types import SamplingParams
from services.sources import resolve_source
from tests.rose.decoder_driving import Driver, Row, Seq
from tests.rose.distributed.ranks import Ranks, RemoteRunner
from tests.rose.tiny_lm import VOCAB_SIZE, write_llama, write_qwen3

SETTINGS = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "kv_cache_bytes": 1 << 20}
WRITERS = {
    "llama": lambda directory: write_llama(directory),
    "qwen3": lambda directory: write_qwen3(directory),
    "biases, odd vocabulary": lambda directory: write_llama(
        directory, vocab_size=VOCAB_SIZE - 1, attention_bias=True, mlp_bias=True
    ),
}


class TwoRankDriver(Driver):
    """The same plans to both ranks."""

    def __init__(self, ranks: Ranks, directory: Path, **settings: object) -> None:
        self.remote = ranks.load(directory, **SETTINGS | settings)
        super().__init__(directory, runner=self.remote, rings=self.remote.slots)


@pytest.fixture(scope="module", params=WRITERS)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return WRITERS[request.param](tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(ranks: Ranks, directory: Path) -> Iterator[tuple[Driver, Driver]]:
    """Two ranks, and one to compare with."""
    one, two = Driver(directory, **SETTINGS), TwoRankDriver(ranks, directory)
    yield one, two
    two.close()
    one.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE - 1, length).tolist()


def on_both(pair: tuple[Driver, Driver], play: object) -> None:
    """What `play` returns is the same on both, token for token."""
    expected, found = (play(driver) for driver in pair)  # type: ignore[operator]
    assert found == expected


@pytest.mark.parametrize("chunk", [64, 7])
def test_greedy_tokens_of_chunked_prompts(pair: tuple[Driver, Driver], chunk: int) -> None:
    def play(driver: Driver) -> list[list[int]]:
        seqs = [Seq(prompt(length, length)) for length in (37, 5)]
        for seq in seqs:
            driver.prefill(seq, chunk)
        driver.decode(seqs, 24)
        driver.run([], release=seqs)
        driver.free_blocks += [block for seq in seqs for block in seq.blocks]
        return [seq.tokens for seq in seqs]

    on_both(pair, play)


def test_mixed_steps_prefix_hits_and_preemption(pair: tuple[Driver, Driver]) -> None:
    def play(driver: Driver) -> list[list[int]]:
        shared = prompt(32)
        first, second = Seq([*shared, 7, 8, 9]), Seq(prompt(20, 1))
        driver.prefill(first)
        driver.run([Row(first), Row(second, 12, KIND_PREFILL)], admit=[second])
        third = Seq([*shared, *prompt(9, 2)], num_computed=32, blocks=first.blocks[:2])
        driver.run([Row(third, 9, KIND_PREFILL), Row(first), Row(second, 8, KIND_PREFILL)], admit=[third])
        driver.decode([first, second, third], 5)
        back = Seq(list(second.tokens), num_prompt=20)
        driver.run([Row(first), Row(third)], release=[second])
        driver.run([Row(third), Row(back, 10, KIND_PREFILL)], admit=[back])
        driver.run([Row(back, len(back.tokens) - 10, KIND_PREFILL), Row(first)])
        driver.decode([back, first, third], 5)
        driver.run([], release=[first, third, back])
        return [seq.tokens for seq in (first, third, back)]

    on_both(pair, play)


def test_sampling_logprobs_and_penalties_are_the_leaders(pair: tuple[Driver, Driver]) -> None:
    found = []
    for driver in pair:
        params = SamplingParams(seed=5, temperature=0.8, top_p=0.9, presence_penalty=0.7, logprobs=3, prompt_logprobs=2)
        seq = Seq(prompt(12, 3), params)
        first = driver.run([Row(seq, 12, KIND_PREFILL)], admit=[seq])
        lines = [first["prompt_logprobs"][:11].copy()]
        for _ in range(12):
            arrays = driver.run([Row(seq)])
            lines.append(np.append(arrays["logprobs"][0, 0], arrays["top_logprobs"][0, 0, :3]))
        driver.run([], release=[seq])
        found.append((seq.tokens, np.concatenate(lines)))
    (expected_tokens, expected), (tokens, logprobs) = found
    assert tokens == expected_tokens
    np.testing.assert_allclose(logprobs, expected, atol=1e-4)


def test_the_ranks_agree_on_blocks_and_each_keeps_its_heads(pair: tuple[Driver, Driver]) -> None:
    one, two = pair
    assert isinstance(two.runner, RemoteRunner)
    facts = two.runner.facts_of_ranks
    assert facts[0] == facts[1]
    assert facts[0].tensor_parallel_size == 2
    assert facts[0].num_blocks == min(2 * (one.facts.num_blocks + 1) - 1, one.facts.max_num_seqs * 32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs Triton's interpreter")
def test_weights_made_from_a_seed_by_each_rank(ranks: Ranks, tmp_path: Path) -> None:
    directory = resolve_source("random:tiny", tmp_path)
    settings = SETTINGS | {"max_model_len": 128}
    one, two = Driver(directory, **settings), TwoRankDriver(ranks, directory, **settings)
    seqs = [Seq(prompt(37)), Seq(prompt(37))]
    for driver, seq in zip((one, two), seqs, strict=True):
        driver.prefill(seq)
        driver.decode([seq], 24)
        driver.close()
    assert seqs[0].tokens == seqs[1].tokens
    assert len(set(seqs[0].tokens[37:])) > 3


def test_the_gpus_way(ranks: Ranks, tmp_path: Path) -> None:
    """Decode graphs with the collectives in them, prompts without; a rank that differs is found out as a step lands."""
    directory = write_qwen3(tmp_path, num_hidden_layers=1)
    sizes = {"max_num_seqs": 3, "max_model_len": 80, "capture": "lazy", "max_graph_tokens": 0}
    one, two = Driver(directory, **SETTINGS | sizes), TwoRankDriver(ranks, directory, static=True, **sizes)
    params = SamplingParams(seed=3, temperature=0.7, top_k=20, logprobs=2)
    seqs = [[Seq(prompt(9)), Seq(prompt(20, 1), params)] for _ in range(2)]
    for driver, both in zip((one, two), seqs, strict=True):
        for seq in both:
            driver.prefill(seq)
        driver.decode(both, 4)
    assert [seq.tokens for seq in seqs[1]] == [seq.tokens for seq in seqs[0]]
    for figures in ranks.call("figures"):
        assert (figures["graph_captures_total"], figures["graph_replays_total"]) == (1, 3)
    ranks.tell(1, "forget_token", seqs[1][0].slot)
    with pytest.raises(AssertionError, match="Diverged: rank 0"):
        two.decode(seqs[1], 1)
    one.close()


def test_a_rank_that_holds_something_else_is_found_out(ranks: Ranks, tmp_path: Path) -> None:
    driver = TwoRankDriver(ranks, write_llama(tmp_path))
    seq = Seq(prompt(9))
    driver.prefill(seq)
    driver.decode([seq], 2)
    ranks.tell(1, "forget_token", seq.slot)
    with pytest.raises(AssertionError, match=r"Diverged: rank 0 at step 4: .*slots' lengths"):
        driver.run([Row(seq)])
