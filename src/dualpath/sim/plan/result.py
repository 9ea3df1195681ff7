"""What a plan says, as data: every run's figures, the best, the advice, and what one more part would give.

Knows neither how it was found nor how it is shown. Field names carry units; what does not apply is None.
The JSON of a plan is these structures.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dualpath.sim.plan.load import AtRate, Capacity, Goal, Offline
from dualpath.sim.plan.splits import Split
from dualpath.sim.summary import Summary

__all__ = [
    "Advice",
    "Choice",
    "Extra",
    "Figures",
    "Held",
    "Loads",
    "Nearest",
    "Plan",
    "Premise",
    "Ratios",
    "Verdict",
    "WhatIf",
    "gain",
    "measure_name",
]


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """The most that one engine had: tokens of KV on their way, and requests that it decoded."""

    pe_staging_tokens: int
    de_staging_tokens: int
    decoding: int


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One system on one split. `rate_aps`: of an online run. Of a capacity it is 0 when no rate that was
    tried held; `run` is then of the one whose means came nearest to the limits, `nearest_aps`, or, when
    no run had a request that counts, of the lowest."""

    split: Split
    system: str
    rate_aps: float | None
    run: Summary
    held: Held
    nearest_aps: float | None = None

    @property
    def holds(self) -> bool:
        """False: a capacity that is none."""
        return self.rate_aps != 0

    def mean_s(self, metric: str) -> float:
        """Of one that objectives name."""
        spreads = {"ttft": self.run.ttft, "ttst": self.run.ttst, "tpot": self.run.tpot}
        return spreads.get(metric, self.run.request).mean_s

    def score(self, goal: Goal) -> float:
        """What the goal goes by; more is better for Capacity, less for others."""
        match goal:
            case Offline():
                return self.run.jct_s
            case AtRate():
                return self.run.request.mean_s
            case Capacity():
                assert self.rate_aps is not None
                return self.rate_aps

    @property
    def prompt_tokens_s(self) -> float:
        return self.run.prompt_tokens / (self.run.until_s - self.run.from_s)

    @property
    def output_tokens_s(self) -> float:
        return self.run.output_tokens / (self.run.until_s - self.run.from_s)

    @property
    def de_read_share(self) -> float:
        """Of the bytes read, those that decode nodes read."""
        prefill = self.split.prefill_nodes * sum(self.run.prefill_snic)
        decode = self.split.decode_nodes * sum(self.run.decode_snic)
        return decode / (prefill + decode) if decode else 0.0


class Ratios(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill by decode nodes at which nothing but storage limits reading, and what is full at each end."""

    low: float
    high: float
    low_resource: str
    high_resource: str


class Loads(msgspec.Struct, frozen=True, kw_only=True):
    """With all storage NICs reading: shares of what each resource can do. `ratios` is None when no ratio is
    free of bottlenecks; `fullest` is the resource with the highest share."""

    ratios: Ratios | None
    in_range: bool
    shares: dict[str, float]
    fullest: str


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """Constants for the cluster. `reasons`: a sentence for each, by field.

    Buffers and device memory are of one engine. `serve`: the arguments of `dualpath serve` for one instance
    of each role, MODEL left to the reader.
    """

    read_path: str
    block_tokens: int
    layer_block_bytes: int
    pe_buffer_bytes: int
    de_buffer_bytes: int
    node_buffer_bytes: int
    node_buffer_share: float
    kv_device_bytes: int
    alpha_tokens: int
    beta_tokens: int
    quota_s: float
    max_running: int
    reasons: dict[str, str]
    serve: tuple[str, ...]


Extra = Literal["storage NIC", "prefill nodes", "decode nodes"]


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """The best once more with `added` of `extra`; `gain`: how many times as good it is then."""

    extra: Extra
    added: int
    figures: Figures
    gain: float | None


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    system: str
    split: Split


class Nearest(msgspec.Struct, frozen=True, kw_only=True):
    """What comes nearest to objectives that nothing holds; `means_s`: what it reaches, by metric."""

    system: str
    split: Split
    rate_aps: float
    means_s: dict[str, float]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What the figures say.

    `slo_met`: whether basic, dual or split holds the objectives on any division; None without objectives, and
    when Ctrl-C came before all were tried. `recommended`: the best of these three on all divisions. The rest
    is of the division of `Plan.best`: how many times as good as basic it and oracle are, and whether
    loading KV limits basic, which is whether oracle is better.
    """

    slo_met: bool | None
    nearest: Nearest | None
    recommended: Choice | None
    gain_over_basic: float | None
    oracle_gain_over_basic: float | None
    loading_limits: bool | None


class Premise(msgspec.Struct, frozen=True):
    """`value` with its unit, for people."""

    name: str
    value: str
    source: str


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`figures`: of all runs that were made; `best` is one of them, of dual or split: None when Ctrl-C came
    before any, or when none holds the objectives. What depends on it is then None or empty.

    `setup`: what was asked; `premises`: what was taken for granted, each with its value and source.
    """

    goal: Goal
    figures: tuple[Figures, ...]
    best: Figures | None
    verdict: Verdict
    loads: Loads | None
    advice: Advice | None
    what_if: tuple[WhatIf, ...]
    was_interrupted: bool
    setup: dict[str, str | int | float | None]
    premises: tuple[Premise, ...]

    def of_split(self, split: Split) -> dict[str, Figures]:
        """By system."""
        return {each.system: each for each in self.figures if each.split == split}

    def of_system(self, system: str) -> list[Figures]:
        """By prefill nodes."""
        found = [each for each in self.figures if each.system == system]
        return sorted(found, key=lambda each: each.split.prefill_nodes)

    def to_json(self) -> str:
        """One line."""
        return msgspec.json.encode(self).decode()


def gain(goal: Goal, before: Figures, after: Figures) -> float | None:
    """How many times as good `after` is; above 1 is better. None: over a capacity that is none."""
    old, new = before.score(goal), after.score(goal)
    if isinstance(goal, Capacity):
        return new / old if old else None
    return old / new if new else 1.0


def measure_name(goal: Goal) -> str:
    match goal:
        case Offline():
            return "JCT, s"
        case AtRate():
            return "mean request, s"
        case Capacity():
            return "capacity, agents/s"
