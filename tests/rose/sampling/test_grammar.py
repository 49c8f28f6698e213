"""Grammars with a real byte-level tokenizer: random logits give valid output, errors stay in their row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from ipc.types import SamplingParams
from rose.sampling.grammar import GrammarError, Grammars
from rose.sampling.sampler import Sampler
from tests.rose.sampling import drawing

EOS = (0, 1)
VOCAB = 420  # more than the tokenizer has, as padded heads do
WORDS = (VOCAB + 31) // 32
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = LLMatcher.grammar_from_json_schema(SCHEMA, {"whitespace_flexible": False})
AB = LLMatcher.grammar_from_regex("(ab){2,3}")
# text that begins with a has more readings than a matcher may follow
_MANY = "\n".join(
    f"x{i}: " + " | ".join(f"x{j} x{(i + j) % 40}" for j in range(0, 40, 2)) + ' | "a"' for i in range(40)
)
AMBIGUOUS = f'start: x0 | "b"+\n{_MANY}'


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Tokenizer]:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(['{"name":"Ann","age":12,"tags":["red","green"]}', "the quick fox é ü"] * 20, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(made.to_str(), encoding="utf-8")
    return path, made


@pytest.fixture
def grammars(tokenizer: tuple[Path, Tokenizer]) -> Grammars:
    return Grammars(tokenizer[0], VOCAB, EOS)


def allowed(grammars: Grammars, slot: int) -> set[int]:
    mask = np.zeros((1, WORDS), np.int32)
    assert grammars.fill(mask, [slot]) == {}
    return tokens_of(mask)[0]


def allowed_behind(grammars: Grammars, slot: int, drafts: list[int]) -> list[set[int]]:
    """Before the drafts, and behind each."""
    mask = np.full((len(drafts) + 1, WORDS), -1, np.int32)
    assert grammars.fill(mask[:1], [slot]) == {}
    grammars.fill_ahead(mask, slot, drafts)
    return tokens_of(mask)


def tokens_of(mask: NDArray[np.int32]) -> list[set[int]]:
    return [set(np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")).tolist()) for line in mask]


def test_random_logits_make_valid_json(grammars: Grammars, tokenizer: tuple[Path, Tokenizer]) -> None:
    """Eight sequences at temperature 1, and one without a grammar between them."""
    num_rows, free = 9, 4
    sampler = Sampler(
        max_num_seqs=num_rows, vocab_size=VOCAB, max_logprobs=0, eos_token_ids=EOS, device=torch.device("cpu")
    )
    for slot in range(num_rows):
        sampler.admit(slot, SamplingParams(seed=slot))
        if slot != free:
            grammars.admit(slot, JSON)
    slots = list(range(num_rows))
    outputs: dict[int, list[int]] = {slot: [] for slot in slots}
    running = set(slots) - {free}
    mask = np.zeros((num_rows, WORDS), np.int32)
    for position in range(200):
        assert grammars.fill(mask, slots) == {}
        logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(position))
        logits[:, list(EOS)] += 3.0
        rows = (torch.full((num_rows,), value, dtype=torch.int32) for value in (position, position))
        drawn = drawing.sample(
            sampler, logits, torch.tensor(slots, dtype=torch.int32), *rows, needs=sampler.needs(slots),
            bitmask=torch.from_numpy(mask),
        )  # fmt: skip
        for slot, token in enumerate(drawn.tokens.tolist()):
            grammars.accept(slot, [token])
            if slot in running and token in EOS:
                running.discard(slot)
            elif slot in running or slot == free:
                outputs[slot].append(token)
        if not running:
            break
    assert not running
    for slot in set(slots) - {free}:
        found = json.loads(tokenizer[1].decode(outputs[slot]))
        assert list(found) == ["name", "age", "tags"]
        assert isinstance(found["name"], str)
        assert len(found["name"]) <= 12
        assert 0 <= found["age"] <= 150
        assert len(found["tags"]) <= 3
        assert set(found["tags"]) <= {"red", "green"}
    assert len({tuple(output) for output in outputs.values()}) == num_rows


def test_end_of_a_grammar(grammars: Grammars, tokenizer: tuple[Path, Tokenizer]) -> None:
    a, b = (tokenizer[1].token_to_id(letter) for letter in "ab")
    grammars.admit(0, AB)
    assert allowed(grammars, 0) == {a}
    grammars.accept(0, [a, b, a, b])
    assert allowed(grammars, 0) == {a, *EOS}  # complete, and may go on
    grammars.accept(0, [a, b])
    assert allowed(grammars, 0) == set(EOS)
    grammars.accept(0, [1, 1, 0])  # a sequence that ignores its end
    assert allowed(grammars, 0) == set(EOS)


def test_drafts_are_tried_and_not_put_out(grammars: Grammars, tokenizer: tuple[Path, Tokenizer]) -> None:
    a, b = (tokenizer[1].token_to_id(letter) for letter in "ab")
    grammars.admit(0, AB)
    grammars.accept(0, [a])
    assert allowed_behind(grammars, 0, [b, a, b, a, b]) == [{b}, {a}, {b}, {a, *EOS}, {b}, set(EOS)]
    assert allowed_behind(grammars, 0, [b, a, b, 1, 0]) == [{b}, {a}, {b}, {a, *EOS}, set(EOS), set(EOS)]
    everything = set(range(32 * WORDS))
    assert allowed_behind(grammars, 0, [b, b, a]) == [{b}, {a}, everything, everything]
    grammars.accept(0, [b, a, b])
    assert allowed(grammars, 0) == {a, *EOS}


def test_a_draft_that_is_not_taken_fails_nobody(grammars: Grammars, tokenizer: tuple[Path, Tokenizer]) -> None:
    """A grammar that outgrows a limit at a draft has not done so at what comes instead."""
    a, b = (tokenizer[1].token_to_id(letter) for letter in "ab")
    grammars.admit(0, AMBIGUOUS)
    first, *behind = allowed_behind(grammars, 0, [a] * 8)
    assert {a, b} <= first
    assert behind[-1] == set(range(32 * WORDS))
    grammars.accept(0, [b])
    assert b in allowed(grammars, 0)
    grammars.admit(0, AMBIGUOUS)
    with pytest.raises(GrammarError, match="Current row has"):
        grammars.accept(0, [a] * 8)


def test_what_is_not_allowed_fails_alone(grammars: Grammars, tokenizer: tuple[Path, Tokenizer]) -> None:
    a, b = (tokenizer[1].token_to_id(letter) for letter in "ab")
    for slot in (0, 1, 2):
        grammars.admit(slot, AB)
    with pytest.raises(GrammarError, match=r"token … doesn't satisfy the grammar…$"):
        grammars.accept(1, [a, a])
    with pytest.raises(GrammarError):
        grammars.accept(1, [b])
    grammars.accept(0, [a])
    mask = np.zeros((3, WORDS), np.int32)
    assert set(grammars.fill(mask, [0, 1, 7])) == {1}
    assert mask[0, b // 32] == np.array(1 << b % 32, np.uint32).view(np.int32)
    assert (mask[2] == -1).all()


def test_slots_without_a_grammar(grammars: Grammars) -> None:
    grammars.accept(3, [1, 2])
    assert 3 not in grammars
    grammars.admit(3, AB)
    assert 3 in grammars
    grammars.release(3)
    assert allowed(grammars, 3) == set(range(32 * WORDS))


def test_a_slot_begins_anew(grammars: Grammars, tokenizer: tuple[Path, Tokenizer]) -> None:
    a = tokenizer[1].token_to_id("a")
    grammars.admit(0, AB)
    grammars.accept(0, [a])
    grammars.admit(1, AB)  # shares what was compiled, not the place in it
    assert allowed(grammars, 1) == {a}
    grammars.admit(0, AB)
    assert allowed(grammars, 0) == {a}


def test_grammars_that_cannot_be_used(grammars: Grammars, tmp_path: Path, tokenizer: tuple[Path, Tokenizer]) -> None:
    with pytest.raises(GrammarError, match="Expected token"):
        grammars.admit(0, "start: /a/ (((")
    assert 0 not in grammars
    with pytest.raises(GrammarError, match="cannot be used for structured output"):
        Grammars(tmp_path / "tokenizer.json", VOCAB, EOS).admit(0, AB)
    with pytest.raises(GrammarError, match="vocab size too small"):
        Grammars(tokenizer[0], 200, EOS).admit(0, AB)
