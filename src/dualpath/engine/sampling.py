"""The next token from logits: penalties, temperature, top-k, top-p, min-p, and when a text ends.

Randomness is counter-based: a draw depends only on (seed, position in the text), so a request that is
attempted again on another engine continues as it would have. Nothing is kept between draws.
Works on host memory with numpy and imports no torch, so every process can use its types.
Stop strings are not known here: they are the frontend's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec
import numpy as np
import numpy.typing as npt

__all__ = [
    "FinishReason",
    "Sampled",
    "SamplingParams",
    "TokenLogprob",
    "TokenLogprobs",
    "finish_reason",
    "sample",
    "uniform",
]

Logits = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_NUCLEUS_CANDIDATES = 2048
"""Most likely tokens looked at first for top-p; only when they fall short is everything sorted."""


class FinishReason(StrEnum):
    """Why a text ends here."""

    STOP = "stop"
    LENGTH = "length"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one request is sampled. `temperature` 0 is greedy.

    `top_k` 0, `top_p` 1 and `min_p` 0 keep every token. `logprobs`: how many alternatives to report
    besides the token itself, None for no report. `max_tokens` None: as many as the model's window holds.
    `eos_tokens` are the model's own ends (the frontend fills them in); `ignore_eos` goes on past them.
    `min_tokens`: neither they nor `stop_token_ids` are drawn before. `seed`: the frontend chooses one
    when the client gives none. `logit_bias` is added by token id.
    Repetition penalty counts prompt and text, presence and frequency penalties the text alone.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    eos_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}

    @property
    def ends(self) -> frozenset[int]:
        """The tokens that end the text."""
        own = () if self.ignore_eos else self.eos_tokens
        return frozenset((*own, *self.stop_token_ids))

    @property
    def plain_greedy(self) -> bool:
        """Whether the next token is the argmax of the raw logits, with nothing to report."""
        return (
            self.temperature == 0
            and self.logprobs is None
            and self.min_tokens == 0
            and not self.changes_logits
        )

    @property
    def changes_logits(self) -> bool:
        """Whether penalties or biases apply."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
            or bool(self.logit_bias)
        )


class TokenLogprob(msgspec.Struct, frozen=True, array_like=True):
    """Natural logarithm of a token's probability under the raw logits."""

    token: int
    logprob: float


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """The drawn token's, and the `top` most likely ones, most likely first."""

    token: int
    logprob: float
    top: tuple[TokenLogprob, ...]


class Sampled(msgspec.Struct, frozen=True):
    """One drawn token. With a finish reason it is the last, and part of the text."""

    token: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


def sample(
    logits: npt.ArrayLike, params: SamplingParams, *, tokens: Sequence[int], prompt_tokens: int
) -> Sampled:
    """Draw the token at position `len(tokens)`.

    `logits` `[vocabulary]`, raw. `tokens`: the prompt and what was generated so far, in any attempt;
    the first `prompt_tokens` of them are the client's prompt.
    """
    raw: Logits = np.asarray(logits, dtype=np.float32)
    generated = len(tokens) - prompt_tokens
    adjusted = _adjust(raw, params, tokens, prompt_tokens)
    if params.temperature == 0:
        token = int(adjusted.argmax())
    else:
        scaled = adjusted.astype(np.float64) / params.temperature
        token = _draw(scaled, params, uniform(params.seed, len(tokens)))
    report = None if params.logprobs is None else _report(raw, token, params.logprobs)
    return Sampled(token, report, finish_reason(token, params, generated + 1))


def finish_reason(token: int, params: SamplingParams, generated: int) -> FinishReason | None:
    """Whether the text ends with `token`, its `generated`-th generated one."""
    if token in params.ends:
        return FinishReason.STOP
    if params.max_tokens is not None and generated >= params.max_tokens:
        return FinishReason.LENGTH
    return None


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) that is a function of its arguments, the same on every machine."""
    digest = hashlib.blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2.0**53


def _adjust(
    raw: Logits, params: SamplingParams, tokens: Sequence[int], prompt_tokens: int
) -> Logits:
    forbidden = params.ends if len(tokens) - prompt_tokens < params.min_tokens else frozenset()
    if not params.changes_logits and not forbidden:
        return raw
    logits = raw.copy()
    if params.repetition_penalty != 1:
        seen = _known(set(tokens), len(raw))
        factor = np.float32(params.repetition_penalty)
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / factor, logits[seen] * factor)
    if params.presence_penalty or params.frequency_penalty:
        written, counts = np.unique(
            np.asarray(tokens[prompt_tokens:], np.int64), return_counts=True
        )
        logits[written] -= params.presence_penalty + params.frequency_penalty * counts
    for token, bias in params.logit_bias.items():
        if 0 <= token < len(logits):
            logits[token] += bias
    logits[_known(forbidden, len(raw))] = -np.inf
    return logits


def _known(tokens: Iterable[int], vocabulary: int) -> Ids:
    return np.array(sorted(t for t in tokens if 0 <= t < vocabulary), dtype=np.int64)


def _draw(scaled: Floats, params: SamplingParams, at: float) -> int:
    """The token whose slice of the cumulative distribution holds `at`."""
    highest = scaled.max()
    ids, mass = _candidates(scaled, params), None
    if ids is None:
        ids = _most_likely(scaled, _NUCLEUS_CANDIDATES)
        mass = float(np.exp(scaled - highest).sum())
        if np.exp(scaled[ids] - highest).sum() < params.top_p * mass:
            ids = _by_likelihood(scaled)
    weights = np.exp(scaled[ids] - highest)
    if params.min_p > 0:
        # The most likely token has weight 1.
        kept = weights >= params.min_p
        ids, weights = ids[kept], weights[kept]
    total = np.cumsum(weights)
    if params.top_p < 1:
        # All up to the first one with which the share of the mass is reached.
        share = params.top_p * (total[-1] if mass is None else mass)
        count = int(np.searchsorted(total, share, side="left")) + 1
        ids, total = ids[:count], total[:count]
    index = int(np.searchsorted(total, at * total[-1], side="right"))
    return int(ids[min(index, len(ids) - 1)])


def _candidates(scaled: Floats, params: SamplingParams) -> Ids | None:
    """What may be drawn: by id when nothing restricts it, else the most likely first, ties by id.

    None: the most likely few of a large vocabulary will do, if they hold the top-p share of the mass.
    """
    if 0 < params.top_k < len(scaled):
        return _most_likely(scaled, params.top_k)
    if params.top_p >= 1:
        return np.arange(len(scaled))
    if len(scaled) > _NUCLEUS_CANDIDATES and params.min_p == 0:
        return None
    return _by_likelihood(scaled)


def _by_likelihood(values: Floats) -> Ids:
    order: Ids = np.argsort(-values, kind="stable")
    return order


def _most_likely(values: npt.NDArray[np.floating], count: int) -> Ids:
    """The `count` largest, largest first, ties by id (also at the border)."""
    border = np.partition(values, len(values) - count)[len(values) - count]
    above = np.flatnonzero(values > border)
    at = np.flatnonzero(values == border)[: count - len(above)]
    chosen = np.concatenate((above, at))
    return chosen[np.lexsort((chosen, -values[chosen]))]


def _report(raw: Logits, token: int, count: int) -> TokenLogprobs:
    values = raw.astype(np.float64)
    highest = values.max()
    values -= highest + np.log(np.exp(values - highest).sum())
    top = _most_likely(values, min(count, len(values))) if count else ()
    return TokenLogprobs(
        token, float(values[token]), tuple(TokenLogprob(int(i), float(values[i])) for i in top)
    )
