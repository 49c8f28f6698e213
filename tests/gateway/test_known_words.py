"""Ids by way of known words are the library's, or there are none."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from gateway import known_words
from gateway.call import Call
from gateway.config import GatewayConfig
from gateway.encode import encode_embed
from gateway.handlers import _encode
from gateway.known_words import KnownWords
from gateway.metrics import Metrics
from gateway.models import ServedModel
from gateway.state import Gateway
from gateway.tasks import EmbedTask
from gateway.template import Prompts
from gateway.tokenize import KNOWN_WORDS_CHARS, TextTokenizer
from tests.gateway.conftest import tiny_tokenizer
from tests.gateway.fake_scheduler import facts

QWEN, LLAMA = known_words._PATTERNS
SPECIAL = AddedToken("<|end|>", special=True)


def byte_level(*, use_regex: bool = False, add_prefix_space: bool = False) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=use_regex)


def split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def bpe(*parts: pre_tokenizers.PreTokenizer, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """Its merges reach across all kinds of characters: whatever is divided in another way shows."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    corpus = ["Tulips aren't red, they'll be 1234 in 2026!\n\n  Ça va?  naïve café... x-y 's S'T мир 12  \t. — “a”"] * 3
    tokenizer.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(parts))
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_tokens([AddedToken("<tag>", lstrip=True)])
    tokenizer.add_special_tokens([SPECIAL])
    tokenizer.encode_special_tokens = True
    return tokenizer


TOKENIZERS: dict[str, Tokenizer] = {
    "qwen": bpe(split(QWEN), byte_level(), normalizer=normalizers.NFC()),
    "llama": bpe(split(LLAMA), byte_level()),
}


def library(name: str, text: str) -> list[int]:
    ids: list[int] = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    return ids


def known(name: str) -> KnownWords:
    made = KnownWords.of(TOKENIZERS[name])
    assert made is not None
    return made


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_character_is_judged_as_the_library_does(name: str) -> None:
    ours = known(name)
    for c in known_words._ALIKE:
        text = f"a{c}b {c} {c}{c}1{c}2 '{c} a'{c}e, {c}!  {c}\n{c}\n\n {c}  {c}. {c}\t{c}tulip"
        assert ours.encode(text) == library(name, text), repr(c)
    assert len(known_words._ALIKE) > 1300


words = st.sampled_from(
    ["Tulips", "aren't", "THEY'LL", "'", "'s", "re", "D", " red", " ", " ", "  ", " \n", "\r\n", "\n\n", "\t",
     "\xa0", "\x85", "\x1c", "\x0b", ".", "...", "!", "1", "1234", "²", "½", "é", "ß", "Ł", "İ", "мир", "Я", "—", "“",
     "€", "<|end|>", "<ta", "x-y", "_", "\x00"]
)  # fmt: skip


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_order_of_words_gives_the_librarys_ids(name: str) -> None:
    ours = known(name)

    @settings(max_examples=400, deadline=None, derandomize=True)
    @given(st.lists(words, max_size=60).map("".join))
    def check(text: str) -> None:
        assert ours.encode(text) == library(name, text)

    check()


@pytest.mark.parametrize("text", ["東京", "e\u0301", "'\u017f", "🌷", "a <tag> b", "\u212b", "\u200d", "\u2028"])
def test_other_texts_are_the_librarys(text: str) -> None:
    assert known("qwen").encode(f"red {text} tulip") is None
    ours = TextTokenizer(Tokenizer.from_str(TOKENIZERS["qwen"].to_str()))
    texts = ["red tulips", f"red {text} tulip", "a tulip"]
    assert ours.encode(texts) == [library("qwen", each) for each in texts]
    assert [ours.is_quick(each) for each in texts] == [True, False, True]


def test_long_calls_are_the_librarys(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = TextTokenizer(Tokenizer.from_str(TOKENIZERS["qwen"].to_str()))
    seen: list[str] = []
    monkeypatch.setattr(KnownWords, "encode", lambda self, text: seen.append(text))
    text = "tulip " * (KNOWN_WORDS_CHARS // 6)
    for texts in ([text], [text] * 2):
        assert ours.encode(texts) == [library("qwen", text)] * len(texts)
    assert seen == [text]


def test_a_full_table_begins_anew_under_whoever_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(known_words, "MAX_WORDS", 20)
    ours = known("llama")
    texts = [f"tulip number{i} is {i * 37} or {'x' * i}" for i in range(200)] * 5
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(ours.encode, texts))
    assert found == [library("llama", text) for text in texts]
    assert len(ours._table) <= 40


def test_words_are_learned_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = known("qwen")
    ours.encode("red tulips are red")
    learned: list[list[str]] = []
    monkeypatch.setattr(ours, "_learn", lambda table, words: learned.append(words))
    assert ours.encode("red are tulips tulips") == library("qwen", "red are tulips tulips")
    assert learned == []


class CountingPool(ThreadPoolExecutor):
    num_calls = 0

    def submit(self, *args: Any, **kwargs: Any) -> "Future[Any]":
        self.num_calls += 1
        return super().submit(*args, **kwargs)


async def test_texts_that_are_looked_up_take_no_thread() -> None:
    tokenizer = TextTokenizer(Tokenizer.from_str(TOKENIZERS["qwen"].to_str()))
    model = ServedModel("m", tokenizer, None, Prompts(), False)
    limits = facts(max_model_len=5000, vocab_size=1000)
    with CountingPool(1) as pool:
        gateway = SimpleNamespace(config=GatewayConfig(), metrics=Metrics(), pool=pool)
        call = Call(cast(Gateway, gateway), model, limits, "interactive", 0.0)
        for text, num_calls in (("tulip " * 400, 0), ("tulip " * 600, 1), ("東" + "tulip " * 400, 2), ("東京", 2)):
            encoded = await _encode(call, encode_embed, EmbedTask("m", [text, [1, 2]]), [("input", [text, [1, 2]])])
            assert encoded.sequences == [library("qwen", text), [1, 2]]
            assert pool.num_calls == num_calls


UNPROVED: dict[str, Callable[[], Tokenizer]] = {
    "no BPE": tiny_tokenizer,
    "no bytes": lambda: bpe(split(QWEN)),
    "no pattern": lambda: bpe(byte_level()),
    "another pattern": lambda: bpe(split(QWEN + "|x"), byte_level()),
    "GPT-2's pattern": lambda: bpe(byte_level(use_regex=True)),
    "two patterns": lambda: bpe(split(QWEN), byte_level(use_regex=True)),
    "a space in front": lambda: bpe(split(QWEN), byte_level(add_prefix_space=True)),
    "digits apart": lambda: bpe(pre_tokenizers.Digits(), split(QWEN), byte_level()),
    "another normalizer": lambda: bpe(split(QWEN), byte_level(), normalizer=normalizers.NFKC()),
}


@pytest.mark.parametrize("reason", UNPROVED)
def test_what_is_not_proved_is_left_to_the_library(reason: str) -> None:
    assert KnownWords.of(UNPROVED[reason]()) is None
