"""Tokens that depend on a seed, a key, a number and a position alone, encoded as a prompt needs them.

Knows no traces and no sessions. A *run* is a stretch of tokens named by (kind, key, number): a block of a
trace, or what one turn adds. Invariants:

- The same seed and range give the same tokens on every machine and in every version (a golden test holds).
- Runs of different kinds differ in their first token: each kind has a third of the range for it.
- Runs of one kind and key whose numbers are not equal modulo `lead_base` (a third of the range) differ in
  their first token; any two numbers below 2**32 differ within the first `lead_tokens` tokens, if the run has
  as many. That is because a run starts with the digits of its number, the lowest first, in that base. No
  construction does much better: a range of n tokens has n first tokens.
- Runs of different keys agree in a first token by chance, one time in `lead_base`.

What follows the lead is a splitmix64 hash (Steele, Lea, Flood 2014) of where it stands.

Each token is a *cell* of one width, its text and a separator: ids padded with spaces, which JSON allows
between values, or words of four letters. So encoding is a look-up in a table, and the n-th token of a prompt
is at n times the width.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import xxhash

from dualpath.base.errors import ConfigError
from dualpath.bench.replay.words import WORDS

__all__ = ["Form", "RunKind", "TokenSource"]

U64 = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.uint32]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_LEAD_NUMBERS = 1 << 32
_SMALLEST_RANGE = 48
_PIECE_TOKENS = 16_384
"""Hashed at once: what fits a core's cache."""


class Form(enum.Enum):
    """How a prompt is sent: its JSON's opening, what parts two tokens, and closing."""

    IDS = (b"[", b",", b"]")
    TEXT = (b'"', b" ", b'"')

    @property
    def opening(self) -> bytes:
        return self.value[0]

    @property
    def separator(self) -> bytes:
        return self.value[1]

    @property
    def closing(self) -> bytes:
        return self.value[2]


class RunKind(enum.IntEnum):
    """The value is the third of the range that first tokens come from."""

    BLOCK = 0
    TURN = 1
    FIRST_ROUND = 2


class TokenSource:
    """Tokens in [first, end) for any key, always the same for one seed. Immutable; shared by all sessions.

    Raises ConfigError for a range of fewer than 48 tokens.
    """

    def __init__(self, seed: int, first: int, end: int) -> None:
        if first < 0 or end - first < _SMALLEST_RANGE:
            raise ConfigError(
                f"prompts need a range of at least {_SMALLEST_RANGE} token ids, got {first} to {end}: "
                "give the model's --vocab-size"
            )
        cells = [str(token) for token in range(first, end)]
        self._set_up(seed, first, cells, Form.IDS)

    @classmethod
    def words(cls, seed: int) -> TokenSource:
        """Words in place of token ids, for servers that take text: "token id" n is then the n-th word of a
        fixed list, and counts of tokens are approximate, as the server's tokenizer has the last word."""
        source = cls.__new__(cls)
        source._set_up(seed, 0, list(WORDS), Form.TEXT)
        return source

    def _set_up(self, seed: int, first: int, cells: list[str], form: Form) -> None:
        self.seed = seed & _MASK
        self.first = first
        self.end = first + len(cells)
        self.form = form
        self.width = max(len(cell) for cell in cells) + 1
        """Bytes of one token with its separator."""
        self.lead_base = len(cells) // len(RunKind)
        self.lead_tokens = 1
        while self.lead_base**self.lead_tokens < _LEAD_NUMBERS:
            self.lead_tokens += 1
        padded = "".join(cell.rjust(self.width - 1) + form.separator.decode() for cell in cells)
        self._cells = np.frombuffer(padded.encode(), dtype=f"V{self.width}")

    def encode(self, kind: RunKind, key: str, numbers: Sequence[int] | U64, tokens: int) -> bytes:
        """The cells of a run of `tokens` tokens for each of `numbers`, one after the other.

        Numbers are in [0, 2**63). The last byte is a separator.
        """
        return self._cells[self._indices(kind, key, numbers, tokens)].tobytes()

    def token_ids(
        self, kind: RunKind, key: str, numbers: Sequence[int] | U64, tokens: int
    ) -> list[int]:
        """What `encode` encodes, as numbers."""
        indices = self._indices(kind, key, numbers, tokens)
        return [self.first + index for index in indices.tolist()]

    def _indices(
        self, kind: RunKind, key: str, numbers: Sequence[int] | U64, tokens: int
    ) -> npt.NDArray[np.intp]:
        """Flat, of len(numbers) * tokens."""
        runs = np.asarray(numbers, dtype=np.uint64)
        base = xxhash.xxh3_64_intdigest(f"{kind.name} {key}".encode(), seed=self.seed)
        indices = np.empty((len(runs), tokens), dtype=np.intp)
        step = max(1, _PIECE_TOKENS // max(1, tokens))
        for start in range(0, len(runs), step):
            piece = runs[start : start + step]
            indices[start : start + step] = self._body(base, piece, tokens)
            self._write_lead(indices[start : start + step], base, piece, kind)
        return indices.reshape(-1)

    def _body(self, base: int, runs: U64, tokens: int) -> npt.NDArray[np.intp]:
        keys = _mixed(runs * np.uint64(_GOLDEN) + np.uint64(base))
        steps = np.arange(1, tokens + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        return _below(_mixed(keys[:, None] + steps[None, :]), len(self._cells))

    def _write_lead(
        self, indices: npt.NDArray[np.intp], base: int, runs: U64, kind: RunKind
    ) -> None:
        lead = min(self.lead_tokens, indices.shape[1])
        steps = np.arange(1, lead + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        offsets = _below(_mixed(np.uint64(base) ^ steps), self.lead_base)
        rest = runs
        modulus = np.uint64(self.lead_base)
        for position in range(lead):
            digits = (rest % modulus).astype(np.intp)
            digits = (digits + offsets[position]) % self.lead_base
            indices[:, position] = digits + int(kind) * self.lead_base
            rest = rest // modulus


def _mixed(values: U64) -> U64:
    """The finaliser of splitmix64, in place."""
    shift = np.uint64
    values ^= values >> shift(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> shift(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> shift(31)
    return values


def _below(values: U64, bound: int) -> npt.NDArray[np.intp]:
    """Uniform in [0, bound) but for bound / 2**32; `values` is changed."""
    values >>= np.uint64(32)
    values *= np.uint64(bound)
    values >>= np.uint64(32)
    return values.astype(np.intp)
