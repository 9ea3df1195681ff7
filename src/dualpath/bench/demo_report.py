"""What a demonstration found: figures, and a table with a row for each session. Pure.

All blocks have the same size, so the share of bytes that a side read is the share of tokens that it read.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rich import box
from rich.table import Table

from dualpath.bench.harness import Figure
from dualpath.bench.openai_client import Completion

__all__ = ["ComparedTurn", "DemoReport", "SessionReport", "percentile"]


def percentile(values: Iterable[float], percent: float) -> float:
    """Nearest rank: the least value that at least `percent` % of the values do not exceed; NaN of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)]


@dataclass(frozen=True, slots=True)
class ComparedTurn:
    """Turn `turn` in the replay, then alone with its KV stored, then alone with none."""

    turn: int
    replayed: Completion
    stored: Completion
    computed: Completion

    @property
    def tokens_equal(self) -> bool:
        return self.replayed.token_ids == self.stored.token_ids == self.computed.token_ids


@dataclass(slots=True)
class SessionReport:
    """One session as it was replayed. `cut_turns`: prompts that did not fit the model's window."""

    name: str
    turns: list[Completion] = field(default_factory=list)
    compared: list[ComparedTurn] = field(default_factory=list)
    cut_turns: int = 0

    @property
    def prompt_tokens(self) -> int:
        return sum(turn.prompt_tokens for turn in self.turns)

    @property
    def cached_tokens(self) -> int:
        return sum(turn.cached_tokens for turn in self.turns)

    @property
    def tokens_equal(self) -> bool:
        return bool(self.compared) and all(each.tokens_equal for each in self.compared)

    def read_tokens(self, path: str) -> int:
        """Tokens whose stored KV the side `path` ("pe" or "de") read."""
        return sum(turn.cached_by_path.get(path, 0) for turn in self.turns)


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All sessions. `start_s` until the server took requests, `replay_s` all turns, `total_s` everything."""

    sessions: Sequence[SessionReport]
    start_s: float
    replay_s: float
    total_s: float

    @property
    def tokens_equal(self) -> bool:
        """Whether every compared turn gave the same tokens on every way; False when none was compared."""
        return bool(self.sessions) and all(session.tokens_equal for session in self.sessions)

    def figures(self) -> dict[str, Figure]:
        """TTFT figures in seconds: of the replay, and of the compared turns, which ran alone."""
        whole = _merged("all", self.sessions)
        stored = [each.stored.ttft_s for each in whole.compared]
        computed = [each.computed.ttft_s for each in whole.compared]
        replayed = [turn.ttft_s for turn in whole.turns]
        return {
            "hit_rate": _share(whole.cached_tokens, whole.prompt_tokens),
            "pe_share": _share(whole.read_tokens("pe"), whole.cached_tokens),
            "de_share": _share(whole.read_tokens("de"), whole.cached_tokens),
            "tokens_equal": self.tokens_equal,
            "sessions": len(self.sessions),
            "turns": len(whole.turns),
            "cut_turns": whole.cut_turns,
            "compared_turns": len(whole.compared),
            "prompt_tokens": whole.prompt_tokens,
            "cached_tokens": whole.cached_tokens,
            "ttft_replay_p50_s": _rounded(percentile(replayed, 50)),
            "ttft_replay_p95_s": _rounded(percentile(replayed, 95)),
            "ttft_stored_p50_s": _rounded(percentile(stored, 50)),
            "ttft_stored_p95_s": _rounded(percentile(stored, 95)),
            "ttft_computed_p50_s": _rounded(percentile(computed, 50)),
            "ttft_computed_p95_s": _rounded(percentile(computed, 95)),
            "ttft_gain": _rounded(_gain(whole.compared)),
            "start_s": _rounded(self.start_s),
            "replay_s": _rounded(self.replay_s),
            "total_s": _rounded(self.total_s),
        }

    def table(self) -> Table:
        """A row for each session and one for all; it fits 100 columns."""
        again = sum(len(session.compared) for session in self.sessions)
        table = Table(
            title="Agent sessions replayed",
            caption=f"TTFT in seconds, p50 / p95. KV stored, no KV: {again} of the turns again, each alone.",
            box=box.SIMPLE_HEAD,
            padding=0,
            title_justify="left",
            caption_justify="left",
        )
        table.add_column("session")
        for heading in (
            "turns",
            "prompt\ntokens",
            "cached\ntokens",
            "hit\nrate",
            "bytes by\nPE / DE",
            "TTFT\nreplay",
            "TTFT\nKV stored",
            "TTFT\nno KV",
            "tokens\nequal",
        ):
            table.add_column(heading, justify="right")
        for session in self.sessions:
            table.add_row(*_row(session))
        if len(self.sessions) > 1:
            table.add_section()
            table.add_row(*_row(_merged("all", self.sessions)))
        return table


def _row(session: SessionReport) -> list[str]:
    hits = _share(session.cached_tokens, session.prompt_tokens)
    pe = _share(session.read_tokens("pe"), session.cached_tokens)
    de = _share(session.read_tokens("de"), session.cached_tokens)
    return [
        session.name[:8],
        str(len(session.turns)),
        f"{session.prompt_tokens:,}",
        f"{session.cached_tokens:,}",
        f"{hits:.1%}",
        f"{pe:.0%} / {de:.0%}",
        _pair(turn.ttft_s for turn in session.turns),
        _pair(each.stored.ttft_s for each in session.compared),
        _pair(each.computed.ttft_s for each in session.compared),
        "yes" if session.tokens_equal else "NO",
    ]


def _merged(name: str, sessions: Sequence[SessionReport]) -> SessionReport:
    return SessionReport(
        name,
        [turn for session in sessions for turn in session.turns],
        [each for session in sessions for each in session.compared],
        sum(session.cut_turns for session in sessions),
    )


def _gain(compared: Sequence[ComparedTurn]) -> float:
    """How many times sooner the first token comes, the median over turns; NaN of none."""
    gains = [each.computed.ttft_s / each.stored.ttft_s for each in compared]
    return statistics.median(gains) if gains else math.nan


def _pair(seconds: Iterable[float]) -> str:
    values = list(seconds)
    if not values:
        return "-"
    return f"{percentile(values, 50):.2f} / {percentile(values, 95):.2f}"


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


def _rounded(value: float) -> float:
    return round(value, 3)
