"""How long a prompt is, and how much of it was sent before: the scheduler's hints, without a tokenizer.

A prompt is seen as the bytes the client sent: four a token where it gave token ids, else its text or the
JSON of its messages. `PromptMeter` turns bytes into tokens by the ratio that the servers' answers have
shown; `SentPrompts` remembers which prefixes of such bytes went to a server, and so are stored soon after.
Both are estimates of what only the servers know, and cost a round trip and the work of tokenising twice
otherwise.

Knows no servers. Invariant: the memory of `SentPrompts` is bounded; the prefixes used least recently go.
"""

from __future__ import annotations

from collections import OrderedDict

import xxhash

__all__ = ["BLOCK_BYTES", "PromptMeter", "SentPrompts"]

BLOCK_BYTES = 512
_REMEMBERED_BLOCKS = 2**19
"""A quarter of a GiB of text, in about 60 MiB."""
_FIRST_BYTES_PER_TOKEN = 4.0
_WEIGHT = 0.1
_RATIO_LIMITS = (0.5, 64.0)


class PromptMeter:
    """Bytes of text for each token, as measured: a moving mean over prompts."""

    def __init__(self) -> None:
        self._bytes_per_token = _FIRST_BYTES_PER_TOKEN

    def tokens(self, text_bytes: int) -> int:
        """At least 1."""
        return max(1, round(text_bytes / self._bytes_per_token))

    def measured(self, text_bytes: int, tokens: int) -> None:
        """A server counted `tokens` in a prompt of so many bytes."""
        if text_bytes and tokens > 0:
            low, high = _RATIO_LIMITS
            ratio = min(max(text_bytes / tokens, low), high)
            self._bytes_per_token += _WEIGHT * (ratio - self._bytes_per_token)


class SentPrompts:
    """Prefixes of prompts, in blocks of `BLOCK_BYTES`, by a hash of all that precedes the block's end.

    128 bits suffice: two prompts taken for one another would make a wrong hint, no wrong token.

    """

    def __init__(self, limit_blocks: int = _REMEMBERED_BLOCKS) -> None:
        self._limit_blocks = limit_blocks
        self._known: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    @staticmethod
    def digests(root: bytes, content: bytes) -> list[int]:
        """One for each whole block. `root` keeps apart what shares no KV, such as tenants."""
        state = xxhash.xxh3_128(len(root).to_bytes(4, "little") + root)
        view = memoryview(content)
        found = []
        for start in range(0, len(content) - BLOCK_BYTES + 1, BLOCK_BYTES):
            state.update(view[start : start + BLOCK_BYTES])
            found.append(state.intdigest())
        return found

    def known_bytes(self, digests: list[int]) -> int:
        """Length of the longest prefix that was sent."""
        blocks = 0
        for digest in digests:
            if digest not in self._known:
                break
            blocks += 1
        return blocks * BLOCK_BYTES

    def sent(self, digests: list[int]) -> None:
        """A server has computed the KV of this prompt."""
        known = self._known
        # From its end, so that a prompt's end is forgotten before its start.
        for digest in reversed(digests):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._limit_blocks:
            known.popitem(last=False)
