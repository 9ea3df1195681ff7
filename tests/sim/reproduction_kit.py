"""Summaries of runs that were not played, by rules that tests choose, so that what is made of them is
known."""

from __future__ import annotations

from dualpath.sim.experiments import EXPERIMENTS
from dualpath.sim.experiments.experiment import Settings
from dualpath.sim.reproduction import all_cases
from dualpath.sim.setting import Assumptions, System
from dualpath.sim.summary import POINTS, Balance, Spread, Summary

SETTINGS = Settings(Assumptions())
JCT_S = {
    System.BASIC: 200.0,
    System.LAYERWISE: 160.0,
    System.BLIND: 120.0,
    System.DUAL: 100.0,
    System.ORACLE: 96.0,
}
"""So that every step is faster, and DualPath is twice as fast as Basic and close to Oracle."""


def spread(mean_s):
    return Spread(mean_s, mean_s, mean_s, mean_s)


def summary(
    jct_s=100.0, ttft_s=1.0, ttst_s=0.2, tpot_s=0.04, request_s=8.0, balance=1.2, attention=1.05
):
    series = (1.0,) * POINTS
    return Summary(
        jct_s=jct_s,
        from_s=0.0,
        until_s=jct_s,
        events=1,
        agents=1,
        unfinished_agents=0,
        requests=1,
        prompt_tokens=1,
        hit_tokens=0,
        output_tokens=1,
        ttft=spread(ttft_s),
        ttst=spread(ttst_s),
        tpot=spread(tpot_s),
        request=spread(request_s),
        parts_s={"queued": 0.1, "read": 0.2, "wait": 0.3, "prefill": 0.4},
        halves_differ=0.01,
        snic_utilization=0.5,
        prefill_snic=series,
        decode_snic=series,
        snic_balance=Balance(balance, 0.5, (1.1, 1.1, 1.1), series),
        attention_balance=Balance(attention, 0.5, (1.0, 1.0, 1.0), series),
        prefill_busy_share=0.5,
        decode_busy_share=0.5,
    )


def by_system(case):
    """What a case gives: see JCT_S; online, Basic reaches the limit of TTFT at 0.2 agents a second and the
    others at 0.4."""
    rate = getattr(case.load, "rate_aps", 0.0)
    rate *= 6 / case.deployment.decode_nodes if case.deployment.decode_nodes > 4 else 1
    top = 0.2 if case.system is System.BASIC else 0.4
    blind = case.system is System.BLIND
    return summary(
        jct_s=JCT_S[case.system] - 10 * (case.append > 1 and case.system is System.BASIC),
        ttft_s=4.0 * 10 ** (rate / top - 1),
        balance=1.5 if blind else 1.2,
        attention=1.2 if blind else 1.05,
    )


def results(rule=by_system, settings=SETTINGS):
    return {case: rule(case) for case in all_cases(EXPERIMENTS.values(), settings)}
