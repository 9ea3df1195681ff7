"""The judge of steps under a quota, and the scheduler that is recorded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from dualpath.bench.vllm_quota import QuotaSteps, Step, over_quota, recording


def test_steps_are_judged_by_their_pairs() -> None:
    """A quota of 10 pairs: 4 new tokens are 10 pairs, 2 behind 4 cached ones are 11."""
    within: list[Step] = [[(0, 4)], [], [(0, 2), (3, 1)], [(100, 1)]]
    assert over_quota(within, 10) == QuotaSteps(violations=0, steps=3, largest_share=10.1)
    over: list[Step] = [[(4, 2)], [(0, 4), (0, 1)], [(100, 1), (0, 1)]]
    assert over_quota(over, 10).violations == 3
    assert over_quota([], 10) == QuotaSteps(0, 0, 0.0)


class FakeScheduler:
    """Two requests of 10 and 3 prompt tokens: one is new, one goes on."""

    def __init__(self) -> None:
        lengths = {"a": 10, "b": 3}
        self.requests = {n: SimpleNamespace(num_prompt_tokens=k) for n, k in lengths.items()}

    def schedule(self, computed: int) -> Any:
        return SimpleNamespace(
            num_scheduled_tokens={"a": 5, "b": 1},
            scheduled_new_reqs=[SimpleNamespace(req_id="a", num_computed_tokens=2)],
            scheduled_cached_reqs=SimpleNamespace(req_ids=["b"], num_computed_tokens=[computed]),
        )


def test_what_a_step_computes_of_prompts_is_recorded() -> None:
    steps: list[Step] = []
    scheduler = recording(FakeScheduler, steps)()
    assert scheduler.schedule(1).num_scheduled_tokens == {"a": 5, "b": 1}
    scheduler.schedule(2)
    assert steps == [[(2, 5), (1, 1)], [(2, 5)]]
