"""From a stream of tokens to a stream of text: whole characters only, and stop strings.

Knows nothing of requests or HTTP. Invariants: the texts given out concatenate to the decoding of all tokens;
nothing given out is ever taken back.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

from dualpath.serve.tokenizer import TextTokenizer

__all__ = ["StopMatcher", "TextStream", "text_stream"]

_CONTEXT_TOKENS = 5
"""Tokens of the prompt that decoding starts from, for decoders that treat the first token differently."""

_REPLACEMENT = "\ufffd"


class TextStream(ABC):
    """Text of one sequence, token by token."""

    @abstractmethod
    def feed(self, token: int) -> str:
        """The text that is complete with this token; "" while a character is unfinished."""

    @abstractmethod
    def finish(self) -> str:
        """The rest: an unfinished character as U+FFFD."""


def text_stream(
    tokenizer: TextTokenizer, prompt: Sequence[int], *, skip_special_tokens: bool
) -> TextStream:
    """A stream for the tokens generated after `prompt`."""
    if tokenizer.is_byte_level:
        return _ByteStream(tokenizer, skip_special_tokens)
    return _WindowStream(tokenizer, prompt[-_CONTEXT_TOKENS:], skip_special_tokens)


class _ByteStream(TextStream):
    """Byte-level tokenizers: tokens are bytes, and UTF-8 says where a character ends."""

    def __init__(self, tokenizer: TextTokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset[int]()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token: int) -> str:
        if token in self._skipped:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream(TextStream):
    """Any tokenizer: decodes a window of the last tokens with and without the new one.

    The window starts where the text given out last started, as what a token stands for may depend on
    its predecessor (a leading space, bytes of one character).
    """

    def __init__(
        self, tokenizer: TextTokenizer, context: Sequence[int], skip_special_tokens: bool
    ) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._window = list(context)
        self._given = len(self._window)
        """Tokens of the window whose text was given out."""

    def feed(self, token: int) -> str:
        self._window.append(token)
        new = self._new_text()
        if not new or new.endswith(_REPLACEMENT):
            return ""
        self._advance()
        return new

    def finish(self) -> str:
        new = self._new_text()
        self._advance()
        return new

    def _new_text(self) -> str:
        before = self._decode(self._window[: self._given])
        return self._decode(self._window)[len(before) :]

    def _decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=self._skip)

    def _advance(self) -> None:
        del self._window[: self._given]
        self._given = len(self._window)


class StopMatcher:
    """Finds the first stop string in a stream of text; holds back what may be the start of one.

    The text before the match is given out, with `include` also the match; what follows is dropped.
    """

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str, *, armed: bool = True) -> str:
        """Text that is safe to give out. Not `armed` (before min_tokens): nothing is matched."""
        if self.matched is not None:
            return ""
        text = self._held + text
        self._held = ""
        if not armed or not self._stops:
            return text
        found = [(start, stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            # The one that is complete first, so that the result does not depend on how text is cut up.
            start, self.matched = min(found, key=lambda each: (each[0] + len(each[1]), each[0]))
            return text[: start + len(self.matched)] if self._include else text[:start]
        held = max(_unfinished(text, stop) for stop in self._stops)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text held back, once no more comes."""
        held, self._held = self._held, ""
        return held


def _unfinished(text: str, stop: str) -> int:
    """Characters at the end of `text` that are a start of `stop`, the most there are."""
    start = max(0, len(text) - len(stop) + 1)
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
