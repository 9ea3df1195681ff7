"""Small clusters with round numbers, workloads from lists, and kernels on them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dualpath.policy.config import PolicyConfig, ReadPlanKind
from dualpath.policy.quota import AttentionFit
from dualpath.policy.splitmix import SplitMix64
from dualpath.sim.cluster import Cluster
from dualpath.sim.costs import DecodeCosts, PrefillCosts
from dualpath.sim.kernel import Handle, State, handle_of, make_state
from dualpath.sim.kernel.events import kind_of
from dualpath.sim.kernel.links import next_link, take_ended
from dualpath.sim.workload import Workload

BLOCK = 16

PREFILL = PrefillCosts(
    attention_entry_s=0.01,
    attention_token_s=1e-4,
    attention_pair_s=1e-6,
    linear_token_s=2e-3,
    weights_s=0.02,
    collective_s_token=1e-3,
    base_s=0.005,
)
DECODE = DecodeCosts(
    base_s=0.01,
    sequence_s=0.002,
    linear_sequence_s=0.001,
    weights_s=0.004,
    context_token_s=1e-5,
    collective_s_sequence=0.0005,
)
CLUSTER = Cluster(
    prefill_nodes=1,
    decode_nodes=1,
    gpus=2,
    prefill_instance_nodes=1,
    decode_instance_nodes=1,
    kv_bytes_token=1000,
    layers=4,
    prefill=PREFILL,
    decode=DECODE,
    fit=AttentionFit(0.0, 0.01, 1e-6, 1e-4),
    snic_bytes_s=400_000.0,
    cnic_bytes_s=3_200_000.0,
    read_latency_s=0.05,
    submit_s=1e-4,
    prefill_room_tokens=4000,
    decode_buffer_tokens=4000,
    decode_hbm_tokens=4000,
    fetch_s=0.02,
)
POLICY = PolicyConfig(
    read_plan=ReadPlanKind.SHORTER,
    block_tokens=BLOCK,
    alpha_tokens=500,
    beta_tokens=1000,
    max_batch_tokens=256,
    quota_s=0.3,
)

Turns = list[tuple[int, int, float]]
"""Of an agent: appended tokens, output tokens, delay. What came before is reused."""


def cluster(**changes: Any) -> Cluster:
    return replace(CLUSTER, **changes)


def work(
    *agents: Turns, first_round_tokens: int = 0, starts_s: list[float] | None = None
) -> Workload:
    """A trajectory for each agent; all start at 0."""
    prompt, reused, output, delay, first = [], [], [], [], [0]
    for turns in agents:
        context = 0
        for appended, out, delay_s in turns:
            reused.append(context)
            prompt.append(context + appended)
            output.append(out)
            delay.append(delay_s)
            context += appended + out
        first.append(len(prompt))
    count = len(agents)
    return Workload(
        prompt_tokens=np.array(prompt, np.int32),
        reused_tokens=np.array(reused, np.int32),
        output_tokens=np.array(output, np.int32),
        delay_s=np.array(delay),
        first_turn=np.array(first, np.int64),
        trajectory=np.arange(count, dtype=np.int32),
        first_round_tokens=np.full(count, first_round_tokens, np.int32),
        start_s=np.zeros(count) if starts_s is None else np.array(starts_s),
    )


def many(agents: int, turns: int, seed: int, longest: int = 400) -> Workload:
    """Random turns; requests of at most about `longest` tokens."""
    numbers = SplitMix64(seed)
    most = longest // turns - 20
    return work(
        *(
            [
                (1 + numbers.below(most), 1 + numbers.below(19), numbers.below(1000) / 1000)
                for _ in range(turns)
            ]
            for _ in range(agents)
        )
    )


@dataclass
class Kernel:
    """A state and the handle that compiled functions take."""

    state: State
    handle: Handle

    @classmethod
    def of(
        cls, cluster: Cluster = CLUSTER, agents: int = 4, policy: PolicyConfig = POLICY
    ) -> Kernel:
        turns: list[Turns] = [[(10, 2, 0.0)]] * agents
        state = make_state(cluster, policy, work(*turns), window_s=1.0, windows=100)
        return cls(state, handle_of(state))

    def events_s(self, kind: int) -> list[float]:
        """Times of the events of this kind that wait."""
        waiting = self.state.heap[: self.state.clock[0].heap_size].tolist()
        return sorted(at_s for at_s, key, _ in waiting if kind_of(key) == kind)

    def next_end_s(self) -> float:
        return float(self.state.link_end_s[next_link(self.handle)])

    def ends(self, until_s: float = float("inf")) -> dict[int, float]:
        """Flows by when they ended, up to `until_s`."""
        ended: dict[int, float] = {}
        while (now_s := self.next_end_s()) <= until_s and now_s < float("inf"):
            flow = take_ended(self.handle, next_link(self.handle), now_s)
            if flow >= 0:
                ended[flow] = now_s
        return ended
