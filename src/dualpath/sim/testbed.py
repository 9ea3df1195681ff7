"""Predicts a testbed: how long agents take on a cluster of network namespaces on one machine.

What is put in is measured part by part, and no job completion time: what one engine's computing takes when
it is alone, how much slower engines are when several compute at once, what a request costs outside of
engines, and what the NICs bring. The policy is the product's, with the thresholds that its benchmark sets.

Cores are shared by a mean: an engine is as much slower as it would be with as many others computing as
compute on average in the run. That needs the run, so it is simulated again until the two agree. Whoever
computes outside of engines, frontend and client, counts as one more engine, busy for the time that requests
spend there.

Knows no benchmark and no model. Copies within a node are taken to go over its compute NIC, as in the
paper; on a testbed they are quicker. Storage and compute network cost no CPU time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from dualpath.base.errors import ConfigError
from dualpath.policy.config import PolicyConfig, ReadPlanKind, SchedulerKind
from dualpath.policy.quota import AttentionFit, pairs
from dualpath.sim.cluster import Cluster
from dualpath.sim.costs import DecodeCosts, PrefillCosts
from dualpath.sim.workload import Workload, offline
from dualpath.traces import AppendPrompt, Session, Trace, Turn

if TYPE_CHECKING:
    from dualpath.sim.outcome import Outcome

__all__ = ["SYSTEMS", "ComputeRates", "TestbedRun", "predict"]

_ROUNDS = 4
_PLENTY_TOKENS = 1 << 30
"""Benchmarks give engines room for all requests at once."""


class _System(msgspec.Struct, frozen=True):
    policy: PolicyConfig
    both_sides: bool = True


SYSTEMS = {
    "basic": _System(PolicyConfig(read_plan=ReadPlanKind.PE), both_sides=False),
    "shorter": _System(PolicyConfig(read_plan=ReadPlanKind.SHORTER)),
    "split": _System(PolicyConfig(read_plan=ReadPlanKind.SPLIT)),
    "steady": _System(PolicyConfig(read_plan=ReadPlanKind.STEADY)),
    "oracle": _System(PolicyConfig(scheduler=SchedulerKind.ORACLE)),
}
"""As `dualpath bench pooling` names them."""


class ComputeRates(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that computing takes on an engine while no other computes.

    A prefill batch: base, new tokens, query-key pairs. A decode step: base, sequences, tokens of their
    contexts; and `join_token_s` once for each token of a prompt that joins the decode batch.
    `slowdown[n]`: how many times as long it takes while n others compute; beyond the last, a straight line.
    """

    prefill_base_s: float
    prefill_token_s: float
    prefill_pair_s: float
    decode_base_s: float
    decode_sequence_s: float
    decode_context_token_s: float
    join_token_s: float
    slowdown: tuple[float, ...]

    def request_s(self, cached_tokens: int, new_tokens: int, output_tokens: int) -> float:
        """Of one request alone: its prefill, joining the decode batch, and a step for each token but the
        first."""
        prompt_tokens, steps = cached_tokens + new_tokens, output_tokens - 1
        seen = pairs(cached_tokens, new_tokens)
        prefill_s = (
            self.prefill_base_s + self.prefill_token_s * new_tokens + self.prefill_pair_s * seen
        )
        step_s = self.decode_base_s + self.decode_sequence_s
        contexts = steps * prompt_tokens + steps * (steps + 1) // 2
        decode_s = step_s * steps + self.decode_context_token_s * contexts
        return prefill_s + self.join_token_s * prompt_tokens + decode_s

    def slowdown_beside(self, busy_shares: Sequence[float]) -> float:
        """Beside others that compute for such shares of the time, each at times of its own.

        The mean over how many compute at once: their mean number alone would tell less, because a third
        on two cores costs more than a second.
        """
        chances = [1.0]
        for share in busy_shares:
            idle = [*(chance * (1 - share) for chance in chances), 0.0]
            busy = [0.0, *(chance * share for chance in chances)]
            chances = [a + b for a, b in zip(idle, busy, strict=True)]
        return sum(chance * self._slowdown(others) for others, chance in enumerate(chances))

    def _slowdown(self, others: int) -> float:
        known = self.slowdown
        last = len(known) - 1
        if others <= last:
            return known[others]
        return known[last] + (others - last) * (known[last] - known[max(0, last - 1)])


class TestbedRun(msgspec.Struct, frozen=True, kw_only=True):
    """Agents that start together, each with `context_tokens` stored; a turn appends and generates.

    `request_s`: what a request takes outside of engines. NICs: what TCP gets of them.
    """

    __test__ = False

    agents: int
    turns: int
    context_tokens: int
    append_tokens: int
    output_tokens: int
    kv_bytes_token: int
    block_tokens: int
    snic_bytes_s: float
    cnic_bytes_s: float
    request_s: float

    def __post_init__(self) -> None:
        if self.output_tokens < 2:
            raise ConfigError(
                f"expected turns that generate 2 tokens or more, got {self.output_tokens}"
            )

    def work(self, slower: float) -> Workload:
        """`slower`: how many times as long a request takes outside of engines."""
        request_s = self.request_s * slower
        first = Turn(AppendPrompt(self.context_tokens + self.append_tokens), self.output_tokens)
        later = Turn(AppendPrompt(self.append_tokens), self.output_tokens, request_s)
        session = Session("agent", (first, *(later,) * (self.turns - 1)))
        sessions = tuple(replace(session, id=f"agent {n}") for n in range(self.agents))
        work = offline(Trace("testbed", "trajectories", sessions), self.agents)
        # The beginning of each first prompt was stored before.
        reused_tokens = work.reused_tokens.copy()
        reused_tokens[work.first_turn[:-1]] = self.context_tokens
        start_s = np.full(self.agents, request_s)
        return replace(work, reused_tokens=reused_tokens, start_s=start_s)


def predict(
    run: TestbedRun, rates: ComputeRates, *, system: str, prefill: int, decode: int
) -> Outcome:
    """What the run is on `prefill` and `decode` nodes of one engine each. `system`: of `SYSTEMS`.

    Raises ConfigError.
    """
    # Imported here: needs numba, which those who only measure need not have.
    from dualpath.sim.simulation import Simulation

    if system not in SYSTEMS:
        raise ConfigError(f"expected a system of {', '.join(SYSTEMS)}, got {system!r}")
    policy = _policy(run, system, prefill, decode)
    slower, slower_requests = (1.0, 1.0), 1.0
    for _ in range(_ROUNDS):
        cluster = _cluster(run, rates, slower, prefill, decode)
        outcome = Simulation(cluster, policy, run.work(slower_requests)).run()
        requests_s = len(outcome.records) * run.request_s * slower_requests
        requests = min(1.0, requests_s / outcome.end_s)
        on_prefill = [outcome.prefill_busy_share] * prefill
        on_decode = [outcome.decode_busy_share] * decode
        slower = (
            rates.slowdown_beside([*on_prefill[1:], *on_decode, requests]),
            rates.slowdown_beside([*on_prefill, *on_decode[1:], requests]),
        )
        slower_requests = rates.slowdown_beside([*on_prefill, *on_decode])
    return outcome


def _policy(run: TestbedRun, system: str, prefill: int, decode: int) -> PolicyConfig:
    """The paper's thresholds: by what a NIC reads, and by what the NICs that read bring to an engine."""
    chosen = SYSTEMS[system]
    node_tokens_s = run.snic_bytes_s / run.kv_bytes_token
    reading = prefill + (decode if chosen.both_sides else 0)
    return msgspec.structs.replace(chosen.policy, block_tokens=run.block_tokens).with_profile(
        node_read_tokens_per_s=node_tokens_s,
        engine_tokens_per_s=node_tokens_s * reading / prefill,
    )


def _cluster(
    run: TestbedRun,
    rates: ComputeRates,
    slower: tuple[float, float],
    prefill: int,
    decode: int,
) -> Cluster:
    on_prefill, on_decode = slower
    # A sequence's joining is spread over its steps; the first token comes from the prefill engine.
    join_s = rates.join_token_s * run.context_tokens / (run.output_tokens - 1)
    return Cluster(
        prefill_nodes=prefill,
        decode_nodes=decode,
        gpus=1,
        prefill_instance_nodes=1,
        decode_instance_nodes=1,
        kv_bytes_token=run.kv_bytes_token,
        layers=1,
        prefill=PrefillCosts(
            attention_entry_s=0.0,
            attention_token_s=rates.prefill_token_s * on_prefill,
            attention_pair_s=rates.prefill_pair_s * on_prefill,
            linear_token_s=0.0,
            weights_s=0.0,
            collective_s_token=0.0,
            base_s=rates.prefill_base_s * on_prefill,
        ),
        decode=DecodeCosts(
            base_s=rates.decode_base_s * on_decode,
            sequence_s=(rates.decode_sequence_s + join_s) * on_decode,
            linear_sequence_s=0.0,
            weights_s=0.0,
            context_token_s=rates.decode_context_token_s * on_decode,
        ),
        fit=AttentionFit(
            0.0, 0.0, rates.prefill_pair_s * on_prefill, rates.prefill_token_s * on_prefill
        ),
        snic_bytes_s=run.snic_bytes_s,
        cnic_bytes_s=run.cnic_bytes_s,
        reads_in_order=True,
        prefill_room_tokens=_PLENTY_TOKENS,
        decode_buffer_tokens=_PLENTY_TOKENS,
        decode_hbm_tokens=_PLENTY_TOKENS,
    )
