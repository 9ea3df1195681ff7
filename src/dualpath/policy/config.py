"""Every constant of the policy, in one frozen configuration.

The defaults serve a laptop and a large cluster alike: the thresholds only have to be large enough that
an engine never runs dry between two fetches of its group, and small enough that what is queued stays
in the central queue, where it can still go anywhere. Profile a cluster and use `with_profile` for
the paper's rule.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import msgspec

from dualpath.base.config import Config, option
from dualpath.base.errors import ConfigError

__all__ = ["PolicyConfig", "ReadPlanKind", "SchedulerKind"]

_INTER = "Scheduling"
_INTRA = "Prefill batches"


class SchedulerKind(StrEnum):
    """Who chooses engines and read plans; all but `dualpath` are baselines to compare with."""

    DUALPATH = "dualpath"
    BASIC = "basic"
    """DualPath's choice of engines, but only the prefill side reads."""
    ROUND_ROBIN = "round-robin"
    """Engines in turn, and the two sides in turn; blind to load, but not to free device memory."""
    RANDOM = "random"
    """Engines and sides drawn uniformly; blind to load, but not to free device memory."""
    ORACLE = "oracle"
    """DualPath's choice of engines, and stored KV costs nothing: the bound of what loading can gain."""


class ReadPlanKind(StrEnum):
    """Which side reads a request's stored KV (scheduler `dualpath`)."""

    PE = "pe"
    DE = "de"
    SHORTER = "shorter"
    """The side whose node has the shorter read queue (the paper's rule)."""
    SPLIT = "split"
    """Both sides, in the proportion that lets them end together."""
    STEADY = "steady"
    """Both sides, in the proportion that keeps all nodes of a larger cluster equally busy."""


class PolicyConfig(Config, frozen=True, kw_only=True):
    """Constants of the scheduler and of prefill batches. Raises ConfigError when out of range."""

    scheduler: Annotated[
        SchedulerKind,
        option("How engines are chosen; all but dualpath are baselines.", group=_INTER),
    ] = SchedulerKind.DUALPATH
    read_plan: Annotated[
        ReadPlanKind,
        option("Which side reads stored KV (scheduler dualpath and no other).", group=_INTER),
    ] = ReadPlanKind.SPLIT
    block_tokens: Annotated[int, option("Tokens of a stored block.", group=_INTER, ge=1)] = 64
    alpha_tokens: Annotated[
        int,
        option(
            "Read queue of a node, in tokens, above which its prefill engines are chosen only when no "
            "other is free: what a node reads in alpha_s.",
            group=_INTER,
            ge=0,
        ),
    ] = 262_144
    beta_tokens: Annotated[
        int,
        option(
            "Unfinished prompt tokens above which a prefill engine gets no request: what an engine "
            "processes, stored tokens included, in beta_s.",
            group=_INTER,
            ge=0,
        ),
    ] = 65_536
    alpha_s: Annotated[float, option("Seconds of reading for alpha.", group=_INTER, gt=0)] = 3.0
    beta_s: Annotated[float, option("Seconds of processing for beta.", group=_INTER, gt=0)] = 5.0
    z_factor: Annotated[
        float,
        option(
            "Decode engines up to this many times the group's mean tokens count as balanced.",
            group=_INTER,
            ge=1.0,
        ),
    ] = 1.05
    pe_read_rate: Annotated[
        int,
        option(
            "Tokens a second that a prefill node reads; only its ratio to de-read-rate matters, and "
            "only for split.",
            group=_INTER,
            ge=1,
        ),
    ] = 1_000_000
    de_read_rate: Annotated[
        int, option("Tokens a second that a decode node reads.", group=_INTER, ge=1)
    ] = 1_000_000
    seed: Annotated[int, option("Seed of the scheduler random.", group=_INTER, ge=0)] = 0
    max_attempts: Annotated[
        int,
        option("Failed attempts after which a request is rejected.", group=_INTER, ge=1),
    ] = 16
    reject_without_engines: Annotated[
        bool,
        option(
            "Reject requests when no engine of a role is left, instead of waiting for one to join.",
            group=_INTER,
        ),
    ] = False
    quota_s: Annotated[
        float, option("Attention time that a prefill batch may take.", group=_INTRA, gt=0)
    ] = 0.3
    max_batch_tokens: Annotated[
        int, option("Tokens that a prefill batch may compute.", group=_INTRA, ge=1)
    ] = 8192

    def check(self) -> None:
        if self.max_batch_tokens < self.block_tokens:
            raise ConfigError(
                f"--max-batch-tokens {self.max_batch_tokens} is less than --block-tokens "
                f"{self.block_tokens}: a batch must take at least one block"
            )

    def with_profile(
        self, *, node_read_tokens_per_s: float, engine_tokens_per_s: float
    ) -> PolicyConfig:
        """The thresholds by the paper's rule, from two measured rates (section on scheduling)."""
        return msgspec.structs.replace(
            self,
            alpha_tokens=round(self.alpha_s * node_read_tokens_per_s),
            beta_tokens=round(self.beta_s * engine_tokens_per_s),
        )
