"""Whether requests should be placed in another order than that of their arrival.

A request's place is its arrival time plus so many seconds for each token of its prompt. Below 0 that is by
slack: what takes longer to read and compute has less time left for the same limit. Above 0 it is shortest
first, with ageing. Either way nobody is overtaken by what arrives more than that time later: nobody starves.

Around the rate at which the time to the first token reaches the paper's limit: DS 660B 2P4D, 64K contexts.
"""

from __future__ import annotations

from collections.abc import Mapping

from dualpath.policy.config import PolicyConfig
from dualpath.policy.events import Instruction, RequestArrived
from dualpath.policy.scheduler import Scheduler
from dualpath.sim.experiments.experiment import Settings
from dualpath.sim.experiments.grid import ds_660b, online_case
from dualpath.sim.experiments.trial import (
    Measured,
    PolicyExperiment,
    Results,
    Trial,
    Value,
    name_of,
    play_with,
    ratio,
)
from dualpath.sim.setting import System

__all__ = ["EXPERIMENT"]

_NAME = "order"
_SECONDS_A_TOKEN = {
    "fifo": 0.0,
    "slack": -30e-6,
    "slack x2": -60e-6,
    "shortest": 60e-6,
    "shortest x4": 240e-6,
}
"""A context of 33k tokens is read and computed in about a second."""
_RATES_APS = (0.55, 0.6)
_BEFORE_S = 100.0
"""Keeps places above 0."""
_PLACES_S = 1_000_000
_ARRIVALS = 1 << 24
"""More than requests arrive: among equal places the order is that of arrival."""


class _Ordered(Scheduler):
    """A request's number in its queues is its place, rather than a count of arrivals."""

    def __init__(self, config: PolicyConfig, seconds_a_token: float) -> None:
        super().__init__(config)
        self._seconds_a_token = seconds_a_token
        self._arrived_so_far = 0

    def _arrived(self, event: RequestArrived) -> list[Instruction]:
        place_s = _BEFORE_S + event.now_s + self._seconds_a_token * event.prompt_tokens
        self._next_arrival = int(place_s * _PLACES_S) * _ARRIVALS + self._arrived_so_far
        self._arrived_so_far += 1
        return super()._arrived(event)


def _trials(settings: Settings) -> list[Trial]:
    return [
        Trial(_NAME, variant, online_case(settings, ds_660b(), System.SPLIT, rate_aps))
        for rate_aps in _RATES_APS
        for variant in _SECONDS_A_TOKEN
    ]


def _play(trial: Trial) -> Measured:
    seconds = _SECONDS_A_TOKEN[trial.variant]
    return play_with(trial.case, schedule=lambda config: _Ordered(config, seconds))


def _evaluate(settings: Settings, results: Results) -> Mapping[str, Value]:
    found: dict[str, dict[str, Value]] = {}
    for trial in _trials(settings):
        each = results[trial]
        found.setdefault(name_of(trial.case), {})[trial.variant] = {
            "ttft_mean_s": ratio(each.summary.ttft.mean_s),
            "ttft_p50_s": ratio(each.summary.ttft.p50_s),
            "ttft_p99_s": ratio(each.summary.ttft.p99_s),
            "ttft_longest_s": ratio(each.longest_ttft_s),
            "ttft_of_long_s": ratio(each.long_ttft_s),
            "within_4_s": ratio(each.in_time),
            "queued_s": ratio(each.summary.parts_s["queued"]),
            "request_s": ratio(each.summary.request.mean_s),
        }
    return {"orders": found}


EXPERIMENT = PolicyExperiment(_NAME, "Order of waiting requests", _trials, _play, _evaluate)
