"""Trajectories like those of the paper's evaluation, drawn from formulas.

Of one trajectory, with Z standard normal and LN(s) log-normal with mean 1:

    scale     = exp(SCALE_SIGMA Z - SCALE_SIGMA^2 / 2)
    append(t) = APPEND scale (1 + EARLY exp(-t / EARLY_TURNS)) LN(APPEND_SIGMA)
    gen(t)    = GEN exp(GEN_SCALE Z) (1 + GEN_GROWTH min(t, 200) / 100) LN(GEN_SIGMA)

The first append, the prompt, is log-normal instead. A trajectory ends before the turn that would go over the
maximum length, or at its natural number of turns, which is log-normal too. There are no delays: the paper
replays without.

The constants were fitted to the paper's table of traces (32K, 48K, 64K: turns, append, gen, total and
context), all 15 means together; a test compares them. What is drawn once a trajectory is drawn stratified
over all of them, so that a few hundred come near the means whatever the seed. Knows no files.
Invariant: the same length, number and seed give the same trajectories.
"""

from __future__ import annotations

import re
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from dualpath.base.errors import ConfigError
from dualpath.traces.lines import MAX_TOKENS
from dualpath.traces.model import AppendPrompt, Session, Turn

__all__ = ["MIN_LENGTH", "PREFIX", "SESSIONS", "generate", "parse_length"]

PREFIX = "generated:"
SESSIONS = 500
"""As many as each of the paper's traces has."""
MIN_LENGTH = 1024

_SCALE_SIGMA = 0.717
_APPEND, _APPEND_SIGMA = 117.0, 0.906
_EARLY, _EARLY_TURNS = 4.65, 39.3
_GEN, _GEN_SIGMA, _GEN_SCALE, _GEN_GROWTH = 151.0, 0.6, 0.127, 0.108
_FIRST_MEDIAN, _FIRST_SIGMA = 3872.0, 0.35
_TURNS_MEDIAN, _TURNS_SIGMA = 610.0, 2.08
_LENGTH = re.compile(r"(\d{1,12})(k?)", re.IGNORECASE)
_DRAWN_AT_ONCE = 256


def parse_length(text: str) -> int:
    """Tokens of "64k" (64 * 1024) or "40000". Raises ConfigError."""
    match = _LENGTH.fullmatch(text)
    tokens = int(match[1]) * (1024 if match[2] else 1) if match else 0
    if not MIN_LENGTH <= tokens <= MAX_TOKENS:
        raise ConfigError(
            f"{PREFIX}{text}: expected a length of {MIN_LENGTH} to {MAX_TOKENS} tokens, such as"
            f" {PREFIX}64k"
        )
    return tokens


def generate(max_tokens: int, sessions: int = SESSIONS, seed: int = 0) -> tuple[Session, ...]:
    """`sessions` trajectories of at most `max_tokens` each, MIN_LENGTH or more. Raises ConfigError."""
    if sessions < 1 or seed < 0:
        raise ConfigError(f"expected sessions >= 1 and a seed >= 0, got {sessions} and {seed}")
    shared = np.random.default_rng(seed)
    scales = _stratified(shared, sessions)
    limits = _TURNS_MEDIAN * np.exp(_TURNS_SIGMA * _stratified(shared, sessions))
    firsts = _FIRST_MEDIAN * np.exp(_FIRST_SIGMA * _stratified(shared, sessions))
    drawn = zip(scales.tolist(), limits.tolist(), firsts.tolist(), strict=True)
    return tuple(
        Session(
            f"generated {i}",
            _turns(np.random.default_rng([seed, i]), max_tokens, scale, limit, first),
        )
        for i, (scale, limit, first) in enumerate(drawn)
    )


def _turns(
    random: np.random.Generator, max_tokens: int, scale: float, limit: float, first: float
) -> tuple[Turn, ...]:
    # Any first turn fits.
    longest = max_tokens // 2
    turns: list[Turn] = []
    total = 0
    while True:
        t = np.arange(len(turns), len(turns) + _DRAWN_AT_ONCE)
        append = _APPEND * np.exp(_SCALE_SIGMA * scale - _SCALE_SIGMA**2 / 2)
        append = append * (1 + _EARLY * np.exp(-t / _EARLY_TURNS))
        append = append * _mean_one(random, _APPEND_SIGMA)
        gen = _GEN * np.exp(_GEN_SCALE * scale) * (1 + _GEN_GROWTH * np.minimum(t, 200) / 100)
        gen = gen * _mean_one(random, _GEN_SIGMA)
        if not turns:
            append[0] = first
        whole = np.clip(np.rint(np.stack((append, gen), axis=1)), 1, longest).astype(np.int64)
        for append_tokens, gen_tokens in whole.tolist():
            total += append_tokens + gen_tokens
            if turns and (total > max_tokens or len(turns) >= limit):
                return tuple(turns)
            turns.append(Turn(AppendPrompt(append_tokens), gen_tokens))


def _mean_one(random: np.random.Generator, sigma: float) -> npt.NDArray[np.float64]:
    return np.exp(sigma * random.standard_normal(_DRAWN_AT_ONCE) - sigma**2 / 2)


def _stratified(random: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Standard normal, one of each of `count` equally likely ranges, in random order."""
    # Above 0 and below 1, where the inverse is finite.
    at = (random.permutation(count) + random.uniform(1e-9, 1 - 1e-9, count)) / count
    inverse = NormalDist().inv_cdf
    return np.array([inverse(each) for each in at.tolist()])
