"""Token ids equal those of transformers and sentence-transformers; special tokens spelled in a text are text."""

import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from gateway.tokenize import TextTokenizer, TokenizerError, cut_text, longest_first
from tests.gateway.conftest import tiny_tokenizer

TEXTS = [
    "tulips from Amsterdam",
    "a",
    " ",
    " \t\n ",
    "Wie hoch ist der Eiffelturm? Il est haut de 330 mètres. 東京タワーより低い。",
    "🌷🌹🌿 emoji, a family 👩‍👩‍👧 and naïve café — “quotes”",
    "سلام دنیا · Здравствуй, мир · नमस्ते दुनिया · สวัสดี",
    "nul\x00 and \x7f, \u200b and \ufeff",
    "supercalifragilisticexpialidocious" * 10,
    "1234567890.5e-3 a_b-c/d\\e",
]
SPECIAL = ["The text [CLS] spells [SEP] special [PAD] tokens [MASK] and [UNK].", "[CLS]", "[SEP][SEP]"]


def bpe_tokenizer() -> Tokenizer:
    """A byte-level BPE in the manner of Qwen's: no frame, added special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3 + ["what is a red tulip, and what is it not?"] * 5, trainer)
    return tokenizer


def unigram_tokenizer() -> Tokenizer:
    """A SentencePiece-like tokenizer in the manner of XLM-RoBERTa's, framed with <s> and </s>."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]  # type: ignore[arg-type]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<s>", "<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 5 + ["what is a red tulip, and what is it not?"] * 5, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    return tokenizer


MAKERS = {"wordpiece": tiny_tokenizer, "bpe": bpe_tokenizer, "unigram": unigram_tokenizer}


FILES = {kind: make().to_str() for kind, make in MAKERS.items()}  # training is not repeatable
TOKENIZERS = {kind: TextTokenizer(Tokenizer.from_str(file)) for kind, file in FILES.items()}


@pytest.fixture(scope="module", params=MAKERS)
def pair(request: pytest.FixtureRequest) -> tuple[TextTokenizer, PreTrainedTokenizerFast]:
    """Ours and transformers' of the same file."""
    theirs = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(FILES[request.param]))
    return TOKENIZERS[request.param], theirs


Pair = tuple[TextTokenizer, PreTrainedTokenizerFast]


def test_texts_equal_transformers(pair: Pair) -> None:
    ours, theirs = pair
    for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert ours.frame(ids) == theirs(text)["input_ids"], text


def test_pairs_equal_transformers_cut_or_not(pair: Pair) -> None:
    ours, theirs = pair
    rng = random.Random(0)
    for _ in range(200):
        first, second = (" ".join(rng.choices(TEXTS, k=rng.randint(1, 3))) for _ in range(2))
        limit = rng.choice([8, 17, 32, 100, 10_000])
        expected = theirs(first, second, truncation=True, max_length=limit, return_token_type_ids=True)
        a, b = ours.encode([first, second])
        num_a, num_b = longest_first(len(a), len(b), limit - ours.pair.num_tokens)
        ids, type_start = ours.frame_pair(a[:num_a], b[:num_b])
        assert ids == expected["input_ids"]
        if ours.pair.type_start is not None:
            assert type_start == expected["token_type_ids"].index(1)


@pytest.mark.parametrize("kind", MAKERS)
def test_special_tokens_in_a_text_are_text(kind: str) -> None:
    tokenizer = Tokenizer.from_str(FILES[kind])
    special = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    unknown = {special.get("[UNK]"), special.get("<unk>")}  # what letters not in the vocabulary become
    for name in special:
        for text in (name, f"a {name} b", f"a{name}{name}b"):
            (ids,) = TOKENIZERS[kind].encode([text])
            assert len(ids) > 1 or unknown.intersection(ids)
            assert not (set(special.values()) - unknown).intersection(ids), text


def test_template_text_does_have_special_tokens() -> None:
    text = "<|im_start|>user\nwhat is it<|im_end|>\n<|im_start|>assistant\n"
    theirs = Tokenizer.from_str(FILES["bpe"])
    assert TOKENIZERS["bpe"].special_ids(text) == theirs.encode(text, add_special_tokens=False).ids
    assert theirs.token_to_id("<|im_start|>") not in TOKENIZERS["bpe"].encode([text])[0]


def test_the_files_truncation_and_padding_do_not_apply() -> None:
    ours = TextTokenizer(tiny_tokenizer())  # of which 8 tokens are left, and 8 made of less
    assert len(ours.encode(["red " * 50])[0]) == 50
    assert len(ours.encode(["red"])[0]) == 1


words = st.sampled_from(
    ["tulip", "red", " ", "  ", "\n", "\n\n", ".", "!!!", "...", "東京", "🌷", "mètre", "a", "1", "-", "\t"]
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(words, min_size=1, max_size=400).map("".join),
    st.integers(1, 40),
    st.sampled_from(sorted(MAKERS)),
)
def test_cutting_before_encoding_changes_nothing(text: str, num_tokens: int, kind: str) -> None:
    ours = TOKENIZERS[kind]
    assert ours.encode_cut([text], num_tokens) == [ours.encode([text])[0][:num_tokens]]


def remainder_first_tokenizer(split: bool) -> Tokenizer:
    """A Unigram that divides a run of `a` by threes, what is left over at its beginning: a cut inside is noticed."""
    pieces = [("<unk>", 0.0), ("▁", -3.0), ("a", -4.0), ("aa", -6.0), ("aaa", -7.5)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    return tokenizer


@pytest.mark.parametrize("split", [True, False])
def test_a_unigrams_word_is_not_cut(split: bool) -> None:
    ours = TextTokenizer(remainder_first_tokenizer(split))
    for length in (20_000, 20_001, 20_002):
        for space in ("", " ", "\n", "。", ". "):
            text = "a" * length + space + "a" * length
            (whole,) = ours.encode([text])
            assert ours.encode_cut([text], 200) == [whole[:200]], (length, space)


def counted(ours: TextTokenizer) -> list[int]:
    """Lengths of the texts that it encodes from now on."""
    seen: list[int] = []
    encode = ours.encode

    def counting(texts: list[str]) -> list[list[int]]:
        seen.extend(map(len, texts))
        return encode(texts)

    ours.encode = counting  # type: ignore[method-assign]
    return seen


def test_a_unigrams_book_costs_its_first_page() -> None:
    ours = TextTokenizer(unigram_tokenizer())
    encode, seen = ours.encode, counted(ours)
    book = "what is a red tulip, and what is it not? " * 50_000
    assert ours.encode_cut([book], 30) == [encode([book[:1000]])[0][:30]]
    assert sum(seen) < 2000


def test_cutting_does_not_encode_what_is_cut_off() -> None:
    ours = TextTokenizer(tiny_tokenizer())
    encode, seen = ours.encode, counted(ours)
    book = "the tulip is red . " * 100_000
    assert ours.encode_cut([book], 30) == [encode([book[:1000]])[0][:30]]
    assert sum(seen) < 2000
    blank = " " * 100_000 + "tulip"
    assert ours.encode_cut([blank], 30) == encode(["tulip"])


letters = st.text(st.sampled_from("東京は大阪abcdeé한국어มปा"), min_size=1, max_size=40)


@settings(max_examples=60, deadline=None)
@given(st.lists(letters, min_size=1, max_size=8), st.integers(1, 40), st.sampled_from(sorted(MAKERS)))
def test_cutting_text_without_spaces_and_punctuation_changes_nothing(
    words: list[str], num_tokens: int, kind: str
) -> None:
    text = "".join(random.Random(len(words)).choices(words, k=400))[:6000]
    ours = TOKENIZERS[kind]
    assert ours.encode_cut([text], num_tokens) == [ours.encode([text])[0][:num_tokens]]


def test_a_book_of_chinese_without_punctuation_costs_its_first_page(minilm_dir: Path) -> None:
    ours = TextTokenizer.from_file(minilm_dir / "tokenizer.json")
    rng = random.Random(0)
    text = "".join(chr(rng.randint(0x4E00, 0x9FA5)) for _ in range(50_000))
    encode, seen = ours.encode, counted(ours)
    assert ours.encode_cut([text], 254) == [encode([text])[0][:254]]
    assert sum(seen) < 4000


def test_cut_text_joins_nothing() -> None:
    assert cut_text("short", 100) == "short"
    assert cut_text("one two three four", 9) == "one two"
    assert cut_text("x" * 50, 10) is None  # no place to cut
    assert cut_text("one two! three", 9) == "one"
    assert cut_text("東京は。大阪は、京都は。", 9) == "東京は。大阪は"
    assert cut_text("東京は大阪は。、京都", 7) == "東京は大阪は"
    assert cut_text("aa b東京は大阪は。京都", 9) == "aa"  # a space is safer still


@pytest.mark.parametrize(
    ("first", "second", "limit", "expected"),
    [
        (3, 4, 10, (3, 4)),
        (3, 20, 10, (3, 7)),
        (20, 3, 10, (7, 3)),
        (20, 20, 11, (5, 6)),
        (6, 20, 10, (5, 5)),
        (5, 5, 0, (0, 0)),
    ],
)
def test_longest_first(first: int, second: int, limit: int, expected: tuple[int, int]) -> None:
    assert longest_first(first, second, limit) == expected


def test_the_default_model_equals_sentence_transformers(minilm_dir: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(str(minilm_dir))
    ours = TextTokenizer.from_file(minilm_dir / "tokenizer.json")
    long = "tulips, lilies and roses in a garden " * 200
    for text, ids in zip([*TEXTS, long], ours.encode([*TEXTS, long]), strict=True):
        assert ours.frame(ids) == theirs(text, truncation=False)["input_ids"], text
    room = 256 - ours.single.num_tokens
    assert ours.frame(ours.encode_cut([long], room)[0]) == theirs(long, truncation=True, max_length=256)["input_ids"]
    for ids in ours.encode(SPECIAL):
        assert not {0, 101, 102, 103}.intersection(ids)
    assert ours.encode(["[CLS]"]) == [theirs.convert_tokens_to_ids(["[", "cl", "##s", "]"])]


def test_what_is_no_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"nowhere\.json"):
        TextTokenizer.from_file(tmp_path / "nowhere.json")
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"bad\.json"):
        TextTokenizer.from_file(tmp_path / "bad.json")
