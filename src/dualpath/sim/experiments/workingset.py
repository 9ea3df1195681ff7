"""The working set: how much KV the agents that are served at a time use together, DS 660B online.

By the paper's formula: arrival rate x time that an agent takes x half of its total tokens x KV bytes of a
token. Tokens and turns are those of the table of traces; the time of a request is simulated, with DualPath,
in the runs of figure 10, and an agent takes as many times that as it has turns.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.sim.case import Case
from dualpath.sim.experiments.experiment import (
    Evaluation,
    Experiment,
    Figure,
    Results,
    Settings,
)
from dualpath.sim.experiments.grid import ds_660b, online_case
from dualpath.sim.paper_traces import PAPER_TRACES
from dualpath.sim.setting import System

__all__ = ["EXPERIMENT", "working_set_bytes"]

RATES_APS = (0.1, 0.45)


def working_set_bytes(
    rate_aps: float, agent_s: float, total_tokens: float, kv_bytes_token: int
) -> float:
    """Of agents that take `agent_s` each and grow to `total_tokens` (paper, working set)."""
    return rate_aps * agent_s * total_tokens / 2 * kv_bytes_token


def _case(settings: Settings, rate_aps: float) -> Case:
    return online_case(settings, ds_660b(), System.DUAL, rate_aps)


def _cases(settings: Settings) -> Sequence[Case]:
    return [_case(settings, rate) for rate in RATES_APS]


def _evaluate(settings: Settings, results: Results) -> Evaluation:
    trace, model = PAPER_TRACES["64k"], ds_660b().model
    figures = []
    rows: list[Sequence[str | float]] = [("rate_aps", "request_s", "agent_s", "working_set_gb")]
    for rate in RATES_APS:
        request_s = results[_case(settings, rate)].request.mean_s
        agent_s = request_s * trace.turns
        ours = working_set_bytes(rate, agent_s, trace.total_tokens, model.kv_bytes_token) / 1e9
        figures.append(Figure(f"workingset.{rate:g}", ours, f"an agent takes {agent_s:.0f} s"))
        rows.append((rate, request_s, agent_s, ours))
    return Evaluation(figures, rows=rows)


EXPERIMENT = Experiment(
    "workingset",
    "Working set",
    "KV in use by rate, DS 660B with DualPath, from the time that a request takes in the runs of figure 10.",
    _cases,
    _evaluate,
    gap="The number is the paper's formula, so what is off is the time of a request, more so at "
    "the low rate, where most of it is decode. Decode was fitted near 0.4 agents a second; "
    "that it is too slow here with few sequences is likely, and not shown: the paper gives "
    "no TPOT at 0.1, nor which of its measured times went into the formula.",
)
