"""Whole generations driven step by step, against transformers computing every token anew from the whole text."""

import select
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers as hf

from ipc.step import KIND_PREFILL
from tests.rose.decoder_driving import Driver, Row, Seq
from tests.rose.tiny_lm import VOCAB_SIZE, write_llama, write_qwen3


class Model:
    """A tiny model in a directory, and what transformers says comes next."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._reference = hf.AutoModelForCausalLM.from_pretrained(directory).eval()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        return self._reference(torch.tensor([tokens])).logits[0]

    def greedy(self, prompt: list[int], num_tokens: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(num_tokens):
            tokens.append(int(self.logits(tokens)[-1].argmax()))
        return tokens


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    write = {"llama": write_llama, "qwen3": write_qwen3}[request.param]
    return Model(write(tmp_path_factory.mktemp(request.param)))


@pytest.fixture
def driver(model: Model) -> Iterator[Driver]:
    driver = Driver(model.directory)
    yield driver
    driver.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("chunk", [64, 16, 7, 1])
def test_alone(model: Model, driver: Driver, chunk: int) -> None:
    seq = Seq(prompt(37))
    driver.prefill(seq, chunk)
    driver.decode([seq], 19)
    assert seq.tokens == model.greedy(prompt(37), 20)


def test_batched_with_prompts_among_decoding_rows(model: Model, driver: Driver) -> None:
    lengths = (5, 37, 16, 1)
    seqs = [Seq(prompt(length, seed)) for seed, length in enumerate(lengths)]
    first, second, third, fourth = seqs
    driver.run([Row(first, 5, KIND_PREFILL)], admit=[first])
    driver.run([Row(second, 20, KIND_PREFILL), Row(first)], admit=[second])
    driver.run(
        [Row(first), Row(fourth, 1, KIND_PREFILL), Row(second, 17, KIND_PREFILL), Row(third, 9, KIND_PREFILL)],
        admit=[third, fourth],
    )
    driver.run([Row(fourth), Row(third, 7, KIND_PREFILL), Row(second), Row(first)])
    driver.decode(seqs, 8)
    for seed, (seq, length) in enumerate(zip(seqs, lengths, strict=True)):
        assert seq.tokens == model.greedy(prompt(length, seed), len(seq.tokens) - length)


def test_prefix_hits_read_the_blocks_of_another(model: Model, driver: Driver) -> None:
    shared = prompt(32)
    first = Seq([*shared, *prompt(5, 1)])
    driver.prefill(first)
    driver.decode([first], 3)
    second = Seq([*shared, *prompt(9, 2)], num_computed=32, blocks=first.blocks[:2])
    driver.prefill(second, 4)
    driver.decode([first, second], 6)
    assert first.tokens == model.greedy([*shared, *prompt(5, 1)], 10)
    assert second.tokens == model.greedy([*shared, *prompt(9, 2)], 7)


def test_preempted_and_admitted_again(model: Model, driver: Driver) -> None:
    seq, other = Seq(prompt(21)), Seq(prompt(30, 1))
    driver.prefill(seq)
    driver.prefill(other)
    driver.decode([seq, other], 5)
    back = Seq(list(seq.tokens), num_prompt=21)
    driver.run([Row(other)], release=[seq])
    driver.free_blocks += seq.blocks
    driver.run([Row(other), Row(back, 10, KIND_PREFILL)], admit=[back])
    driver.run([Row(back, 17, KIND_PREFILL), Row(other)])
    driver.decode([back, other], 5)
    assert back.tokens == model.greedy(prompt(21), len(back.tokens) - 21)
    assert other.tokens == model.greedy(prompt(30, 1), len(other.tokens) - 30)


def test_two_steps_in_flight(model: Model, driver: Driver) -> None:
    """The second is planned without the first one's token, and a slot changes hands between them."""
    seqs = [Seq(prompt(9)), Seq(prompt(12, 1))]
    rows = [Row(seq, len(seq.tokens), KIND_PREFILL) for seq in seqs]
    steps = [(rows, driver.launch(rows, admit=seqs))]
    third = Seq(prompt(10, 2))
    for number in range(8):
        rows = [Row(seq) for seq in seqs]
        changes = {}
        if number == 4:
            driver.free_blocks += seqs[1].blocks
            changes = {"release": [seqs[1]], "admit": [third]}
            rows = [Row(seqs[0]), Row(third, 10, KIND_PREFILL)]
            seqs = [seqs[0], third]
        steps.append((rows, driver.launch(rows, **changes)))
        older_rows, (lazy, arrays) = steps.pop(0)
        while not lazy.ready():  # asked as the main loop asks: the other step goes on
            select.select([lazy.fileno()], [], [], 1.0)
        driver.apply(older_rows, arrays)
    rows, (lazy, arrays) = steps.pop()
    driver.wait(lazy)
    driver.apply(rows, arrays)
    first, second, third = seqs[0], rows[1].seq, third
    assert second is third
    assert third.slot == 1
    assert first.tokens == model.greedy(prompt(9), 9)
    assert third.tokens == model.greedy(prompt(10, 2), 4)


def test_rows_past_the_end_of_a_sequence_touch_nobody(model: Model) -> None:
    """Steps already sent when a sequence reached max_model_len: no block, nothing that is used."""
    driver = Driver(model.directory, max_model_len=32)
    seq, other = Seq(prompt(30)), Seq(prompt(16, 1))
    driver.prefill(seq)
    driver.prefill(other)
    blocks = list(seq.blocks)
    driver.decode([seq, other], 1)
    for _ in range(2):  # at 32 tokens the scheduler learns that it is over
        past = Seq([0], slot=seq.slot, generation=seq.generation, blocks=blocks)
        lazy, arrays = driver.launch([Row(past), Row(other)])
        driver.wait(lazy)
        other.tokens.append(int(arrays["tokens"][1, 0]))
    driver.decode([other], 5)
    assert seq.tokens == model.greedy(prompt(30), 2)
    assert other.tokens == model.greedy(prompt(16, 1), 9)
    driver.close()


def test_another_scheduler_finds_every_slot_empty(model: Model, driver: Driver) -> None:
    seqs = [Seq(prompt(9, seed)) for seed in range(8)]
    for seq in seqs:
        driver.prefill(seq)
    driver.runner.drain()
    driver.runner.attach(None)
    driver.free_slots = list(range(8))
    again = Seq(prompt(40, 3))
    driver.prefill(again, 32)
    driver.decode([again], 4)
    assert again.tokens == model.greedy(prompt(40, 3), 5)
