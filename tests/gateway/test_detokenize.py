"""Text that comes token by token is the text that tokenizers' own decode gives for all of them; bytes are exact."""

import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from gateway.detokenize import Detokenizer, TokenBytes
from gateway.tokenize import TokenizerError
from tests.gateway.pieces import cut, cuts
from tests.gateway.test_tokenize import FILES, TEXTS


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece's BPE with byte fallback, in the manner of Llama 2's."""
    words = ["▁", "▁the", "▁tulip", "s", "▁red", "!", "é", "▁東", "京", *"abcdefgh"]
    vocab = {
        token: i for i, token in enumerate(["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *words])
    }
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def with_decoder(kind: str, decoder: object) -> Tokenizer:
    tokenizer = Tokenizer.from_str(FILES[kind])
    tokenizer.decoder = decoder
    return tokenizer


def bpe_with_tags() -> Tokenizer:
    tokenizer = Tokenizer.from_str(FILES["bpe"])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("a tag é", normalized=False)])
    return tokenizer


TOKENIZERS = {
    "byte-level BPE": bpe_with_tags(),
    "byte fallback": byte_fallback_tokenizer(),
    "Metaspace": with_decoder("unigram", decoders.Metaspace()),
    "WordPiece": with_decoder("wordpiece", decoders.WordPiece()),
    "no decoder": with_decoder("wordpiece", None),
}
BYTES = {name: TokenBytes(tokenizer) for name, tokenizer in TOKENIZERS.items()}
kinds = st.sampled_from(sorted(TOKENIZERS))


def streamed(name: str, pieces: list[list[int]], **options: bool) -> str:
    detokenizer = Detokenizer(BYTES[name], **options)
    return "".join(detokenizer.add(piece) for piece in pieces) + detokenizer.finish()


@st.composite
def token_ids(draw: st.DrawFn, name: str) -> list[int]:
    """Any ids, some beyond the vocabulary, and ids of real texts."""
    tokenizer = TOKENIZERS[name]
    any_ids = st.lists(st.integers(0, tokenizer.get_vocab_size() + 5), max_size=30)
    texts = st.lists(st.sampled_from([*TEXTS[:8], "🌷", "the tulip", " "]), max_size=3).map(" ".join)
    of_texts = texts.map(lambda text: tokenizer.encode(text).ids[:60])
    return draw(st.lists(any_ids | of_texts, max_size=3).map(lambda parts: [i for part in parts for i in part]))


@settings(deadline=None)
@given(st.data(), kinds, st.booleans(), cuts)
def test_pieces_add_up_to_the_whole_text(data: st.DataObject, name: str, skip: bool, at: list[int]) -> None:
    ids = data.draw(token_ids(name))
    whole = TOKENIZERS[name].decode(ids, skip_special_tokens=skip)
    places = iter(cut("x" * len(ids), at))
    rest = iter(ids)
    pieces = [[next(rest) for _ in piece] for piece in places]
    text = streamed(name, pieces, skip_special_tokens=skip)
    if name == "byte fallback" and "\ufffd" in whole:
        # tokenizers replaces every byte of a run that has a bad one; here the good characters of it stay
        assert len(text) <= len(whole)
        later = iter(text)
        assert all(char in later for char in whole if char != "\ufffd")  # each behind the one before
    else:
        assert text == whole


@settings(deadline=None, max_examples=60)
@given(st.text(max_size=30), st.sampled_from(["byte-level BPE", "byte fallback"]))
def test_any_text_comes_through_and_no_character_comes_in_halves(text: str, name: str) -> None:
    ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(BYTES[name])
    pieces = [detokenizer.add([i]) for i in ids]
    assert detokenizer.finish() == ""
    assert "".join(pieces) == TOKENIZERS[name].decode(ids)
    assert "\ufffd" not in "".join(pieces).replace("\ufffd", "", text.count("\ufffd"))
    if name == "byte-level BPE":
        assert "".join(pieces) == text
        # as early as can be: after each token, all characters whose bytes have come
        num_bytes, sent = 0, ""
        for i, piece in zip(ids, pieces, strict=True):
            num_bytes += len(BYTES[name].token_text(i)[1])
            sent += piece
            assert sent == text.encode()[:num_bytes].decode("utf-8", "ignore")


def test_an_unfinished_character_is_replaced_at_the_end_only() -> None:
    byte_of = {BYTES["byte-level BPE"].token_text(i)[1]: i for i in range(600)}
    first, second, third, fourth = (byte_of[bytes([byte])] for byte in "🌿".encode())
    detokenizer = Detokenizer(BYTES["byte-level BPE"])
    assert [detokenizer.add([i]) for i in (byte_of[b"a"], first, second, third)] == ["a", "", "", ""]
    assert detokenizer.finish() == "\ufffd"
    detokenizer = Detokenizer(BYTES["byte-level BPE"])
    assert [detokenizer.add(ids) for ids in ([first, second], [third], [fourth])] == ["", "", "🌿"]
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**31 - 1, 2**40])
@pytest.mark.parametrize("name", TOKENIZERS)
def test_unknown_ids_are_nothing(name: str, token_id: int) -> None:
    (known,) = TOKENIZERS[name].encode("a", add_special_tokens=False).ids[-1:]
    assert streamed(name, [[token_id], [known], [token_id]]) == TOKENIZERS[name].decode([known])
    assert BYTES[name].token_text(token_id) == ("", b"")


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = TOKENIZERS["byte-level BPE"]
    ids = tokenizer.encode("a<|im_end|>b<think>").ids
    assert streamed("byte-level BPE", [ids]) == "ab<think>"  # added, but not special
    assert streamed("byte-level BPE", [ids], skip_special_tokens=False) == "a<|im_end|>b<think>"
    end = tokenizer.token_to_id("<|im_end|>")
    assert BYTES["byte-level BPE"].token_text(end) == ("<|im_end|>", b"<|im_end|>")


def test_the_space_before_a_first_word_depends_on_what_stands_before() -> None:
    ids = [TOKENIZERS["byte fallback"].token_to_id(token) for token in ("▁the", "▁tulip")]
    assert streamed("byte fallback", [ids]) == "the tulip"
    assert streamed("byte fallback", [ids], starts_text=False) == " the tulip"


def test_bytes_of_single_tokens_are_exact() -> None:
    tokens = BYTES["byte fallback"]
    assert tokens.token_text(TOKENIZERS["byte fallback"].token_to_id("<0xE4>")) == ("\ufffd", b"\xe4")
    assert tokens.token_text(TOKENIZERS["byte fallback"].token_to_id("▁東")) == (" 東", " 東".encode())
    for text in TEXTS:
        ids = TOKENIZERS["byte-level BPE"].encode(text).ids
        assert b"".join(BYTES["byte-level BPE"].token_text(i)[1] for i in ids) == text.encode()
    alphabet = [BYTES["byte-level BPE"].token_text(i)[1] for i in range(600)]
    assert {part for part in alphabet if len(part) == 1} == {bytes([b]) for b in range(256)}


def test_a_decoder_that_looks_at_neighbours_is_refused() -> None:
    with pytest.raises(TokenizerError, match="BPEDecoder"):
        TokenBytes(with_decoder("bpe", decoders.BPEDecoder()))


def test_the_default_model(minilm_dir: Path) -> None:
    tokenizer = Tokenizer.from_file(str(minilm_dir / "tokenizer.json"))
    assert json.loads(tokenizer.to_str())["decoder"]["type"] == "WordPiece"
    tokens = TokenBytes(tokenizer)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        detokenizer = Detokenizer(tokens)
        assert "".join(detokenizer.add([i]) for i in ids) + detokenizer.finish() == tokenizer.decode(ids)


def test_the_ten_thousandth_token_costs_what_the_first_does() -> None:
    """Also where no character is ever finished: every byte is one that only goes on."""
    byte = next(i for i in range(600) if BYTES["byte-level BPE"].token_text(i)[1] == b"\x80")
    detokenizer = Detokenizer(BYTES["byte-level BPE"])
    start = time.process_time()
    assert sum(len(detokenizer.add([byte])) for _ in range(100_000)) == 100_000
    assert time.process_time() - start < 5
