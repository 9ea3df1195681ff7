"""What an experiment with a policy is: runs of variants of it on the same cases, and what comes out of them.

Unlike the experiments of the paper's figures, which play a `Case` as it is, these play it with something
changed: another rule, order or threshold. A run gives its summary and the balance of the storage NICs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from dualpath.policy.config import PolicyConfig
from dualpath.policy.scheduler import Scheduler
from dualpath.sim.case import Case, summarise, workload_of
from dualpath.sim.experiments.experiment import Settings
from dualpath.sim.outcome import Outcome
from dualpath.sim.plan.load import Offline
from dualpath.sim.setting import prepare
from dualpath.sim.simulation import Simulation
from dualpath.sim.summary import Summary, balance_of

__all__ = [
    "Measured",
    "PolicyExperiment",
    "Results",
    "Trial",
    "Value",
    "measured_of",
    "name_of",
    "play_with",
    "ratio",
]

Value = float | str | Sequence["Value"] | Mapping[str, "Value"]
"""As in JSON."""

_BALANCE_WINDOW_S = 10


@dataclass(frozen=True, slots=True)
class Trial:
    """One run: a variant of the experiment's on a case."""

    experiment: str
    variant: str
    case: Case


class Measured(msgspec.Struct, frozen=True):
    """`balance`: busiest storage NIC by the mean of all, over windows of ten seconds of the loaded part.

    `longest_ttft_s`, `in_time`: of requests that counted and had their first token; `in_time` is the share
    within the paper's limit, `long_ttft_s` the mean of the tenth with the longest prompts.
    """

    summary: Summary
    balance: float
    longest_ttft_s: float
    long_ttft_s: float
    in_time: float


Results = Mapping[Trial, Measured]


@dataclass(frozen=True, slots=True)
class PolicyExperiment:
    """`play` is a function of its module, so that worker processes find it. `evaluate`: the figures."""

    name: str
    title: str
    trials: Callable[[Settings], Sequence[Trial]]
    play: Callable[[Trial], Measured]
    evaluate: Callable[[Settings, Results], Mapping[str, Value]]


def play_with(
    case: Case,
    *,
    configure: Callable[[PolicyConfig], PolicyConfig] | None = None,
    schedule: Callable[[PolicyConfig], Scheduler] | None = None,
) -> Measured:
    """The case with another configuration of the policy, or another scheduler. Raises KeyboardInterrupt."""
    cluster, policy = prepare(case.deployment, case.system, case.assumptions)
    if configure is not None:
        policy = configure(policy)
    scheduler = None if schedule is None else schedule(policy)
    outcome = Simulation(cluster, policy, workload_of(case), scheduler=scheduler).run(case.until_s)
    return measured_of(case, outcome)


def measured_of(case: Case, outcome: Outcome) -> Measured:
    """Raises KeyboardInterrupt when the run was interrupted."""
    if outcome.was_interrupted:
        raise KeyboardInterrupt
    summary = summarise(case, outcome)
    counted = outcome.records[outcome.records.arrived_s >= summary.from_s]
    counted = counted[counted.first_token_s > 0]
    ttft_s = counted.first_token_s - counted.arrived_s
    is_long = counted.prompt_tokens >= np.quantile(counted.prompt_tokens, 0.9)
    return Measured(
        summary,
        _balance(outcome.snic_bytes, outcome.window_s),
        float(ttft_s.max()),
        float(ttft_s[is_long].mean()),
        float((ttft_s <= 4.0).mean()),
    )


def _balance(snic_bytes: npt.NDArray[np.float64], window_s: float) -> float:
    together = round(_BALANCE_WINDOW_S / window_s)
    windows = max(1, snic_bytes.shape[1] // together)
    part = snic_bytes[:, : windows * together]
    return balance_of(part.reshape(len(part), windows, -1).sum(axis=2), len(part)).max_mean


def name_of(case: Case) -> str:
    """Of a case in a table, without its system."""
    deployment, load = case.deployment, case.load
    nodes = f"{deployment.prefill_nodes}P{deployment.decode_nodes}D"
    what = f"{load.agents} agents" if isinstance(load, Offline) else f"{load.rate_aps:g} APS"
    return f"{deployment.model.name} {nodes} {case.trace.removeprefix('paper:')} {what}"


def ratio(value: float) -> float:
    """Rounded for a table."""
    return round(value, 4)
