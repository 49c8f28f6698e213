"""Texts cut to a number of tokens, with a tokenizer made here."""

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from bench.demo import load_passages
from bench.workloads import cut, natural_texts, num_tokens, texts_of


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Words and punctuation are tokens; [CLS] and [SEP] around them."""
    made = Tokenizer(WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2}, unk_token="[UNK]"))
    made.pre_tokenizer = Whitespace()
    made.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    return made


def test_cut_keeps_the_beginning_of_a_text(tokenizer: Tokenizer) -> None:
    assert cut(tokenizer, "one two, three four", 5) == "one two,"
    assert cut(tokenizer, "one two", 4) == "one two"
    assert cut(tokenizer, "one two", 5) is None  # too short
    assert cut(tokenizer, "one two", 2) is None  # nothing would be left


@pytest.mark.parametrize(("length", "count"), [(16, 100), (128, 512), (600, 20)])
def test_texts_have_the_length_asked_for_and_all_differ(tokenizer: Tokenizer, length: int, count: int) -> None:
    texts = texts_of(tokenizer, length, count)
    assert {num_tokens(tokenizer, text) for text in texts} == {length}
    assert len(set(texts)) == count


def test_too_many_texts_are_an_error(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"only \d+ different texts of 3 tokens"):
        texts_of(tokenizer, 3, 5, sources=["one two", "one three"])


def test_natural_texts_are_passages(tokenizer: Tokenizer) -> None:
    known = {passage["text"] for passage in load_passages()}
    texts = natural_texts(tokenizer, 120, 50)
    assert len(texts) == 50
    assert set(texts) <= known
    assert max(num_tokens(tokenizer, text) for text in texts) <= 120
