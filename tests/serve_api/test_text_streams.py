"""Streams of text against the plain decoding of all tokens."""

from __future__ import annotations

import pytest
from api_kit import make_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from dualpath.serve.text import StopMatcher, text_stream
from dualpath.serve.tokenizer import TextTokenizer

CORPUS = [
    "hello world, grüße 世界 🌍🌍 done",
    "the other the other 12345 naïve café",
    "שלום 한국어",
]


def trained_byte_level() -> TextTokenizer:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|end|>", "<|a b|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS * 3, trainer)
    return TextTokenizer(backend)


def byte_fallback() -> TextTokenizer:
    """As sentencepiece models: "▁" for a space, and tokens for single bytes."""
    pieces = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", *"abcdefgh", "▁a", "ab", "▁hello"]
    backend = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=[("▁", "a"), ("a", "b")],
            byte_fallback=True,
        )
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    return TextTokenizer(backend)


BYTE_LEVEL = [make_tokenizer(), trained_byte_level()]
SENTENCE_LIKE = byte_fallback()


def streamed(
    tokenizer: TextTokenizer, prompt: list[int], tokens: list[int], skip: bool
) -> list[str]:
    stream = text_stream(tokenizer, prompt, skip_special_tokens=skip)
    return [*(stream.feed(token) for token in tokens), stream.finish()]


def test_which_tokenizers_are_byte_level():
    assert all(tokenizer.is_byte_level for tokenizer in BYTE_LEVEL)
    assert not SENTENCE_LIKE.is_byte_level


@given(
    which=st.integers(0, 1), tokens=st.lists(st.integers(0, 410), max_size=60), skip=st.booleans()
)
def test_any_tokens_of_byte_level_bpe_concatenate_to_their_decoding(which, tokens, skip):
    tokenizer = BYTE_LEVEL[which]
    pieces = streamed(tokenizer, [1, 2], tokens, skip)
    assert "".join(pieces) == tokenizer.decode(tokens, skip_special_tokens=skip)


@given(text=st.text(max_size=40))
def test_characters_come_out_whole(text):
    tokenizer = BYTE_LEVEL[1]
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces = streamed(tokenizer, [], tokens, skip=False)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


@given(words=st.lists(st.sampled_from(["a", "b", " a", "ab", "é", "世", " ", "🌍"]), max_size=20))
def test_sentencepiece_like_text(words):
    """After a prompt, a leading space is text; that of a text's first token would be stripped."""
    tokenizer = SENTENCE_LIKE
    text = "".join(words)
    tokens = tokenizer.encode(text.replace(" ", "▁"), add_special_tokens=False)
    prompt = tokenizer.encode("ab", add_special_tokens=False)
    pieces = streamed(tokenizer, prompt, tokens, skip=True)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_unfinished_character_is_shown_at_the_end():
    tokenizer = BYTE_LEVEL[0]
    tokens = tokenizer.encode("a🌍", add_special_tokens=False)[:-1]
    assert streamed(tokenizer, [], tokens, skip=True) == ["a", "", "", "", "\ufffd"]
    tokens = SENTENCE_LIKE.encode("🌍", add_special_tokens=False)[:-1]
    assert "".join(streamed(SENTENCE_LIKE, [256], tokens, skip=True)) == "\ufffd" * 3


def test_special_tokens_and_ids_beyond_the_vocabulary():
    tokenizer = BYTE_LEVEL[0]
    assert streamed(tokenizer, [], [256, 263], skip=True) == ["", "", ""]
    assert streamed(tokenizer, [], [256, 263], skip=False) == ["<|end|>", "", ""]
    assert tokenizer.special_ids == {256, 257, 258}
    assert tokenizer.longest_token_chars == len("<|start|>")


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop string whose end comes first, of those the longest; by looking at every prefix."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            hit = max(hits, key=len)
            return text[: end if include else end - len(hit)], hit
    return text, None


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=3),
    include=st.booleans(),
)
def test_stop_strings_against_naive_search(pieces, stops, include):
    matcher = StopMatcher(stops, include=include)
    given_out = "".join(matcher.feed(piece) for piece in pieces) + matcher.finish()
    expected, hit = naive("".join(pieces), stops, include)
    assert given_out == expected
    assert matcher.matched == hit


@pytest.mark.parametrize(
    ("text", "held"), [("abc", ""), ("abS", "S"), ("abSTO", "STO"), ("STOx", ""), ("SS", "S")]
)
def test_only_what_may_begin_a_stop_string_is_held_back(text, held):
    matcher = StopMatcher(["STOP"], include=False)
    assert matcher.feed(text) == text[: len(text) - len(held)]
    assert matcher.finish() == held
