"""A scheduler that moves alpha, beta and the compute quota with the load while it runs.

An article on the published system gives a rule for alpha: a tenth less where the storage NICs are used to
more than 0.8, a tenth more where to less than 0.5. Of beta it says only that it follows the GPUs' use, of the
quota that it is adjusted. Our reading of those: by the use of GPUs, with the same limits and steps, in a
direction that is chosen for each. How often, and within which bounds, is ours as well.

Use is that of all nodes of a kind together, since the last change, by what the profile behind alpha and beta
says they can do. Invariant: a value stays within BOUNDS times what it started with.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec.structs import replace

from dualpath.base.ids import Role
from dualpath.policy.config import PolicyConfig
from dualpath.policy.events import GroupFetched, Instruction, PrefillDone
from dualpath.policy.placement import make_placement
from dualpath.policy.scheduler import Scheduler

__all__ = ["BOUNDS", "EVERY_S", "AdaptiveScheduler", "Threshold", "factor"]

EVERY_S = 10.0
"""Long beside a read or a prefill step, short beside a session."""
BOUNDS = (0.25, 4.0)

_IDLE, _BUSY, _STEP = 0.5, 0.8, 0.1


class Threshold(StrEnum):
    ALPHA = "alpha"
    BETA = "beta"
    QUOTA = "quota"


def factor(before: float, used: float, *, grows_when_busy: bool) -> float:
    """What the value at the start is multiplied by, after `before`."""
    if _IDLE <= used <= _BUSY:
        return before
    grows = (used > _BUSY) is grows_when_busy
    low, high = BOUNDS
    return min(high, max(low, before * (1 + _STEP if grows else 1 - _STEP)))


class AdaptiveScheduler(Scheduler):
    """`grow_when_busy`: the thresholds that are adapted, and which of them grow when what they go by is busy
    instead of when it is idle. `quota_s` is for whoever makes batches."""

    def __init__(self, config: PolicyConfig, grow_when_busy: Mapping[Threshold, bool]) -> None:
        super().__init__(config)
        self.factors = dict.fromkeys(grow_when_busy, 1.0)
        self._grow_when_busy = grow_when_busy
        self._changed_s = 0.0
        self._read_tokens = 0
        self._computed_tokens = 0

    @property
    def quota_s(self) -> float:
        return self._config.quota_s * self.factors.get(Threshold.QUOTA, 1.0)

    def _prefill_done(self, event: PrefillDone) -> list[Instruction]:
        self._computed_tokens += self._requests[event.request].tokens
        return super()._prefill_done(event)

    def _fetched(self, event: GroupFetched) -> list[Instruction]:
        if event.now_s >= self._changed_s + EVERY_S:
            self._change(event.now_s)
        return super()._fetched(event)

    def _change(self, now_s: float) -> None:
        for name, before in self.factors.items():
            used = self._storage_use(now_s) if name is Threshold.ALPHA else self._gpu_use(now_s)
            self.factors[name] = factor(before, used, grows_when_busy=self._grow_when_busy[name])
        self._changed_s = now_s
        self._read_tokens = self._done_tokens()
        self._computed_tokens = 0
        self._place_by(
            replace(
                self._config,
                alpha_tokens=int(self._config.alpha_tokens * self.factors.get(Threshold.ALPHA, 1)),
                beta_tokens=int(self._config.beta_tokens * self.factors.get(Threshold.BETA, 1)),
            )
        )

    def _place_by(self, config: PolicyConfig) -> None:
        self._placement = make_placement(config, self._members, self._queues)
        for group in self._members.groups[Role.DECODE].values():
            self._placement.touch(group)

    def _storage_use(self, now_s: float) -> float:
        could = self._config.alpha_tokens / self._config.alpha_s * len(self._members.nodes)
        return (self._done_tokens() - self._read_tokens) / could / (now_s - self._changed_s)

    def _gpu_use(self, now_s: float) -> float:
        engines = len(self._members.by_role[Role.PREFILL])
        could = self._config.beta_tokens / self._config.beta_s * engines
        return self._computed_tokens / could / (now_s - self._changed_s)

    def _done_tokens(self) -> int:
        return sum(each.done_tokens for each in self._members.nodes.values())
