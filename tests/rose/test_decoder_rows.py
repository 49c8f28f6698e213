"""What rows may ask for, rows that fail alone, and steps that fail whole."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ipc.step import KIND_PREFILL, STATUS_BAD_PARAMS, STATUS_BAD_TOKEN, STATUS_NON_FINITE, STATUS_OK, StepPlan
from ipc.types import SamplingParams
from rose.models.config import ModelError
from rose.runner import OutOfMemory
from tests.rose.decoder_driving import GREEDY, Driver, Row, Seq
from tests.rose.test_decoder import Model, prompt
from tests.rose.tiny_lm import EOS_TOKEN_ID, SPECIALS, VOCAB_SIZE, write_llama


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(write_llama(tmp_path_factory.mktemp("llama"), tokenizer=True))


@pytest.fixture
def driver(model: Model) -> Iterator[Driver]:
    driver = Driver(model.directory)
    yield driver
    driver.close()


def generate(driver: Driver, seq: Seq, num_tokens: int, chunk: int = 64) -> list[int]:
    """The tokens that come after the sequence's own."""
    known = len(seq.tokens)
    driver.prefill(seq, chunk)
    driver.decode([seq], num_tokens - 1)
    return seq.tokens[known:]


# --- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad_id", [VOCAB_SIZE, -1, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("place", [0, 7, 8], ids=["first", "last", "of the next chunk"])
def test_a_bad_token_fails_its_row_alone(model: Model, driver: Driver, bad_id: int, place: int) -> None:
    bad, good = Seq(prompt(9)), Seq(prompt(12, 1))
    bad.tokens[place] = bad_id
    rows = [Row(bad, 8, KIND_PREFILL), Row(good, 12, KIND_PREFILL)]
    lazy, arrays = driver.launch(rows, admit=[bad, good])
    driver.wait(lazy)
    assert arrays["status"][:2].tolist() == [STATUS_BAD_TOKEN, STATUS_OK]
    assert arrays["num_tokens"][:2].tolist() == [0, 1]
    good.tokens.append(int(arrays["tokens"][1, 0]))
    driver.run([Row(good)], release=[bad])
    assert good.tokens == model.greedy(prompt(12, 1), 2)


def test_a_non_finite_row_fails_alone_and_leaves_nothing(model: Model, tmp_path: Path) -> None:
    for file in model.directory.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][5] = torch.nan
    save_file(weights, tmp_path / "model.safetensors")
    driver = Driver(tmp_path)
    ids = [token for token in prompt(80, 7) if token != 5]
    bad, good = Seq([*ids[:9], 5, *ids[9:15]]), Seq(ids[20:45])
    lazy, arrays = driver.launch([Row(bad, 16, KIND_PREFILL), Row(good, 25, KIND_PREFILL)], admit=[bad, good])
    driver.wait(lazy)
    assert arrays["status"][:2].tolist() == [STATUS_NON_FINITE, STATUS_OK]
    assert arrays["num_tokens"][:2].tolist() == [0, 1]
    assert arrays["lengths"][:2].tolist() == [17, 26]
    good.tokens.append(int(arrays["tokens"][1, 0]))
    driver.free_blocks += bad.blocks  # its NaN keys and values are next to come
    after = Seq(ids[50:60])
    driver.run([Row(after, 10, KIND_PREFILL), Row(good)], release=[bad], admit=[after])
    driver.decode([after, good], 8)
    assert set(after.blocks) & set(bad.blocks)
    assert after.tokens == model.greedy(ids[50:60], 9)
    assert good.tokens == model.greedy(ids[20:45], 10)
    driver.close()


def test_parameters_that_cannot_be_honoured_fail_their_row_alone(
    model: Model, driver: Driver, caplog: pytest.LogCaptureFixture
) -> None:
    """The log tells why, without what was asked for."""
    bad = Seq(prompt(9), SamplingParams(temperature=0.0, logit_bias={VOCAB_SIZE: 1.0}))
    worse = Seq(prompt(9), SamplingParams(temperature=0.0, grammar="start: <|no_such_token|>"))
    good = Seq(prompt(9))
    rows = [Row(seq, 9, KIND_PREFILL) for seq in (bad, good, worse)]
    lazy, arrays = driver.launch(rows, admit=[bad, good, worse])
    driver.wait(lazy)
    assert arrays["status"][:3].tolist() == [STATUS_BAD_PARAMS, STATUS_OK, STATUS_BAD_PARAMS]
    assert [record.getMessage() for record in caplog.records] == [
        "slot 0, by step 1: logit_bias names token 320; the model's vocabulary has 320",
        "slot 2, by step 1: at 1(8): unknown special token: …; following special tokens are available: "
        "⟦≺EOS≻‧<|endoftext|>⟧",
    ]
    again = Seq(prompt(9))
    driver.run([Row(again, 9, KIND_PREFILL)], release=[bad], admit=[again])
    assert again.slot == bad.slot
    assert again.tokens == model.greedy(prompt(9), 1)


def fail_once(driver: Driver, monkeypatch: pytest.MonkeyPatch, error: BaseException, layer: int = 1) -> None:
    """The next forward pass ends in its second layer."""
    attention = driver.runner.device._decoder._attention
    paged = type(attention).paged

    def failing(self: Any, rows: Any, caches: Any) -> Any:
        monkeypatch.setattr(type(attention), "paged", paged)
        calls, attend = iter(range(99)), paged(self, rows, caches)

        def call(*args: Any) -> Any:
            if next(calls) == layer:
                raise error
            return attend(*args)

        return call

    monkeypatch.setattr(type(attention), "paged", failing)


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory")]
)
def test_out_of_memory_keeps_the_tables_and_moves_no_row(
    model: Model, driver: Driver, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """The failed step admits one sequence; the step behind it, planned on top, fails likewise."""
    params = SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4)
    expected = generate(driver, Seq(prompt(9), params), 8)
    first, second = Seq(prompt(9), params), Seq(prompt(12, 1))
    driver.prefill(first)
    driver.decode([first], 2)
    fail_once(driver, monkeypatch, error)
    lost = [
        driver.launch([Row(first), Row(second, 12, KIND_PREFILL)], admit=[second])[0],
        driver.launch([Row(first), Row(second)])[0],
    ]
    driver.runner.drain()
    for lazy in lost:
        with pytest.raises(OutOfMemory):
            lazy.ready()
    driver.last_applied = driver.num_steps  # the scheduler knows now
    second.num_computed = 0
    first.max_known, second.max_known = len(first.tokens), len(second.tokens)
    driver.run([Row(second, 12, KIND_PREFILL), Row(first)])
    driver.decode([first, second], 4)
    assert first.tokens[9:] == expected
    assert second.tokens == model.greedy(prompt(12, 1), 5)


@pytest.mark.parametrize("place", ["adjust", "choose", "logprobs"])
def test_out_of_memory_behind_the_forward_pass_is_undone(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Neither penalties nor grammars meet a token twice, be it of an earlier life or just drawn."""
    params = SamplingParams(
        temperature=0.0, frequency_penalty=1.5, presence_penalty=0.5, logprobs=1, grammar="start: /[xyz]{30}/"
    )
    expected = generate(driver, Seq(prompt(12), params), 10)
    back, other = Seq([*prompt(12), *expected[:5]], params, num_prompt=12), Seq(prompt(12), params)
    driver.prefill(other)

    def try_twice(first: int, second: int, admit: list[Seq]) -> None:
        num_computed = back.num_computed
        with monkeypatch.context() as patch:
            patch.setattr(driver.runner.device._decoder._residents.sampler._ops, place, no_memory)
            lazy, _ = driver.launch([Row(back, first, KIND_PREFILL), Row(other)], admit=admit)
            driver.runner.drain()
            with pytest.raises(OutOfMemory):
                lazy.ready()
        driver.last_applied = driver.num_steps
        back.num_computed = num_computed
        back.max_known, other.max_known = len(back.tokens), len(other.tokens)
        driver.run([Row(back, second, KIND_PREFILL), Row(other)])

    try_twice(16, 14, [back])
    try_twice(3, 3, [])
    driver.decode([back, other], 4)
    assert back.tokens[12:] == expected
    assert other.tokens[12:] == expected[: len(other.tokens) - 12]


def test_out_of_memory_for_penalties_fails_a_sequence_alone(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the tables of a plan, which must hold whatever happens."""
    driver = Driver(model.directory)
    bad, good = Seq(prompt(9), PENALISED), Seq(prompt(12, 1))
    with monkeypatch.context() as patch:
        patch.setattr(driver.runner.device._decoder._residents.sampler.state, "_allocate", no_memory)
        rows = [Row(bad, 9, KIND_PREFILL), Row(good, 12, KIND_PREFILL)]
        lazy, arrays = driver.launch(rows, admit=[bad, good])
        driver.wait(lazy)
    assert arrays["status"][:2].tolist() == [STATUS_BAD_PARAMS, STATUS_OK]
    good.tokens.append(int(arrays["tokens"][1, 0]))
    driver.decode([good], 3)
    assert good.tokens == model.greedy(prompt(12, 1), 4)
    again = Seq(prompt(9), PENALISED)
    driver.run([Row(again, 9, KIND_PREFILL)], release=[bad], admit=[again])
    driver.close()


def no_memory(*_: object, **__: object) -> None:
    raise MemoryError


def test_any_other_fault_is_not_out_of_memory(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_once(driver, monkeypatch, RuntimeError("illegal address"))
    seq = Seq(prompt(4))
    lazy, _ = driver.launch([Row(seq, 4, KIND_PREFILL)], admit=[seq])
    driver.runner.drain()
    with pytest.raises(RuntimeError, match="illegal address"):
        lazy.ready()


def test_a_row_of_another_generation_is_a_fault(driver: Driver) -> None:
    seq = Seq(prompt(4))
    driver.prefill(seq)
    seq.generation += 1
    lazy, _ = driver.launch([Row(seq)])
    driver.runner.drain()
    with pytest.raises(AssertionError, match=r"rows \[0\] are for generations"):
        lazy.ready()


def test_an_idle_step_does_nothing(model: Model, driver: Driver) -> None:
    seq = Seq(prompt(9))
    driver.prefill(seq)
    lazy = driver.runner.step(StepPlan(epoch=1, step=99, slot=0, kind="idle"), driver.rings[0])
    driver.wait(lazy)
    driver.decode([seq], 2)
    assert seq.tokens == model.greedy(prompt(9), 3)


def test_a_plan_of_another_kind_is_a_fault(driver: Driver) -> None:
    with pytest.raises(AssertionError, match="sent a step to encode, this model's generate"):
        driver.runner.step(StepPlan(epoch=1, step=1, slot=0, kind="encode"), driver.rings[0])


# --- log probabilities --------------------------------------------------------------------------------------


def test_logprobs_are_those_of_the_raw_distribution(model: Model, driver: Driver) -> None:
    params = SamplingParams(temperature=0.0, logprobs=3, logit_bias={7: 100.0})
    seq, other = Seq(prompt(11), params), Seq(prompt(5, 1))
    driver.prefill(other)
    arrays = driver.run([Row(other), Row(seq, 11, KIND_PREFILL)], admit=[seq])
    assert seq.tokens[-1] == 7
    expected = model.logits(prompt(11))[-1].log_softmax(-1)
    top = expected.topk(driver.facts.max_logprobs)
    np.testing.assert_allclose(arrays["logprobs"][1, 0], expected[7], atol=1e-4)
    assert arrays["top_ids"][1, 0].tolist() == top.indices.tolist()
    np.testing.assert_allclose(arrays["top_logprobs"][1, 0], top.values, atol=1e-4)


@pytest.mark.parametrize("chunk", [64, 10])
def test_prompt_logprobs(model: Model, driver: Driver, chunk: int) -> None:
    """One line a prompt token, in the order of rows; rows that do not ask have none."""
    params = SamplingParams(temperature=0.0, prompt_logprobs=2)
    ids = prompt(25)
    silent, seq = Seq(prompt(20, 1)), Seq(list(ids), params)
    expected = model.logits(ids).log_softmax(-1)
    driver.run([Row(silent, 5, KIND_PREFILL)], admit=[silent])
    admit, position = [seq], 0
    while position < 25:
        count = min(chunk, 25 - position)
        rows = [Row(silent, 3, KIND_PREFILL), Row(seq, count, KIND_PREFILL)]
        arrays = driver.run(rows, admit=admit)
        lines = min(count, 24 - position)  # what comes after the last one is no prompt token
        wanted = expected[position : position + lines]
        following = torch.tensor(ids[position + 1 : position + lines + 1])
        np.testing.assert_allclose(
            arrays["prompt_logprobs"][:lines], wanted.gather(1, following[:, None])[:, 0], atol=1e-4
        )
        assert (arrays["prompt_logprobs"][count:] == -7).all()
        top = wanted.topk(2)
        assert arrays["prompt_top_ids"][:lines, :2].tolist() == top.indices.tolist()
        np.testing.assert_allclose(arrays["prompt_top_logprobs"][:lines, :2], top.values, atol=1e-4)
        position, admit = position + count, []


# --- sampling, as far as it depends on what rows did before -------------------------------------------------

SAMPLED = SamplingParams(temperature=1.5, top_p=0.95, seed=11)
PENALISED = SamplingParams(temperature=0.0, presence_penalty=1.5, frequency_penalty=0.5, repetition_penalty=1.4)


@pytest.mark.parametrize("params", [SAMPLED, PENALISED, GREEDY], ids=["sampled", "penalised", "greedy"])
def test_tokens_do_not_depend_on_how_they_were_planned(driver: Driver, params: SamplingParams) -> None:
    """Alone; in chunks among others; with prefix hits; preempted amid its output."""
    ids = prompt(37)
    alone = Seq(list(ids), params)
    expected = generate(driver, alone, 12)
    if params is not GREEDY:
        assert expected != generate(driver, Seq(list(ids)), 12)

    others = [Seq(prompt(9, 3), SAMPLED), Seq(prompt(4, 4), PENALISED)]
    for other in others:
        driver.prefill(other)
    among = Seq(list(ids), params)
    for begin in (0, 15, 30):
        rows = [Row(others[0]), Row(among, min(15, 37 - begin), KIND_PREFILL), Row(others[1])]
        driver.run(rows, admit=[among] if begin == 0 else [])
    driver.decode([others[1], among, others[0]], 11)
    assert among.tokens[37:] == expected

    hit = Seq(list(ids), params, num_computed=32, blocks=alone.blocks[:2])
    assert generate(driver, hit, 12) == expected

    cut = Seq(list(ids), params)
    generate(driver, cut, 6)
    driver.run(release=[cut])
    back = Seq(list(cut.tokens), params, num_prompt=37, num_computed=16, blocks=alone.blocks[:1])
    generate(driver, back, 6, chunk=9)
    assert back.tokens[37:] == expected


def test_min_tokens_count_output_alone(model: Model, driver: Driver) -> None:
    """The likeliest token ends the text: masked until there are enough, those of an earlier life included."""
    ids = prompt(10)
    unless = int(model.logits(ids)[-1].argmax())
    params = SamplingParams(temperature=0.0, min_tokens=3, logit_bias={EOS_TOKEN_ID: 100.0})
    tokens = generate(driver, Seq(list(ids), params), 5)
    assert tokens[0] == unless
    assert EOS_TOKEN_ID not in tokens[:3]
    assert tokens[3:] == [EOS_TOKEN_ID, EOS_TOKEN_ID]
    back = Seq([*ids, *tokens[:2]], params, num_prompt=10)
    assert generate(driver, back, 3) == tokens[2:]


# --- grammars -----------------------------------------------------------------------------------------------


def letters(model: Model, tokens: list[int]) -> str:
    vocabulary = json.loads((model.directory / "tokenizer.json").read_text())["model"]["vocab"]
    pieces = {i: piece for piece, i in vocabulary.items()}
    return "".join(pieces[token] for token in tokens)


def test_output_follows_its_grammar(model: Model, driver: Driver) -> None:
    params = SamplingParams(temperature=2.0, seed=3, grammar="start: /[xyz]{4}(left|right)/")
    seq, other = Seq(prompt(12), params), Seq(prompt(9, 1))
    driver.prefill(other)
    driver.run([Row(other), Row(seq, 12, KIND_PREFILL)], admit=[seq])
    while seq.tokens[-1] != EOS_TOKEN_ID:
        assert len(seq.tokens) < 12 + 12
        driver.run([Row(seq), Row(other)])
    text = letters(model, seq.tokens[12:-1])
    assert set(text[:4]) <= set("xyz")
    assert text[4:] in ("left", "right")
    assert other.tokens == model.greedy(prompt(9, 1), len(other.tokens) - 9)
    assert SPECIALS[EOS_TOKEN_ID] not in text

    for num_kept in (1, 5):  # preempted amid the grammar
        back = Seq(seq.tokens[: 12 + num_kept], params, num_prompt=12)
        driver.prefill(back, 9)
        driver.decode([back], len(seq.tokens) - len(back.tokens))
        assert back.tokens == seq.tokens

    free = Seq(prompt(12))  # a slot's next sequence has no grammar
    driver.run([Row(free, 12, KIND_PREFILL)], release=[seq], admit=[free])
    assert free.slot == seq.slot
    assert free.tokens == model.greedy(prompt(12), 1)


def test_loading_reads_the_tokenizer(tmp_path: Path) -> None:
    """It takes a while, in which every stream would wait."""
    driver = Driver(write_llama(tmp_path, tokenizer=True))
    (tmp_path / "tokenizer.json").unlink()
    seq = Seq(prompt(9), SamplingParams(temperature=0.0, grammar="start: /[xyz]{3}/"))
    assert set(generate(driver, seq, 3)) <= {token_of(letter) for letter in "xyz"}
    driver.close()


def token_of(letter: str) -> int:
    return len(SPECIALS) + ord(letter)


def test_a_model_without_a_tokenizer_can_do_without_grammars(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    driver = Driver(write_llama(tmp_path))
    assert "cannot be used for structured output" in caplog.text
    assert len(generate(driver, Seq(prompt(9)), 3)) == 3
    driver.close()


# --- limits -------------------------------------------------------------------------------------------------


def test_facts_come_from_files_and_settings(model: Model) -> None:
    driver = Driver(model.directory, max_model_len=100, kv_cache_bytes=1 << 18, num_steps_in_flight=3)
    facts = driver.facts
    assert (facts.task, facts.architecture, facts.dtype) == ("generate", "LlamaForCausalLM", "float32")
    assert (facts.vocab_size, facts.max_model_len, facts.block_size) == (VOCAB_SIZE, 100, 16)
    assert (facts.max_num_seqs, facts.max_num_batched_tokens, facts.num_steps_in_flight) == (8, 64, 3)
    assert (facts.eos_token_ids, facts.dimension, facts.max_draft_tokens) == ((EOS_TOKEN_ID,), 1, 0)
    assert facts.num_blocks == (1 << 18) // (2 * 2 * 16 * 2 * 16 * 4) - 1
    driver.close()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"max_model_len": 513}, "513 is over the model's 512 positions"),
        ({"max_num_batched_tokens": 7}, "max_num_batched_tokens 7 is below max_num_seqs 8"),
        ({"kv_cache_bytes": 1 << 12}, "raise rank.kv_cache_bytes or lower rank.max_model_len"),
        ({"task": "embed"}, 'set task = "generate"'),
    ],
)
def test_limits_that_contradict_each_other(model: Model, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Driver(model.directory, **settings)
