"""From what was asked for to a question that can be simulated: reads files, applies rules, runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.qos.rates import parse_rate
from dualpath.sim.arrivals import Arrivals, open_arrivals
from dualpath.sim.hardware import Hardware, hardware_sources, load_hardware
from dualpath.sim.model import ModelShape
from dualpath.sim.model_config import load_model
from dualpath.sim.paper_traces import paper_trace
from dualpath.sim.plan.advice import (
    Turns,
    block_tokens_for,
    decode_tokens_s,
    quota_s_for,
    staging_bytes_for,
)
from dualpath.sim.plan.load import (
    AtRate,
    Capacity,
    Goal,
    Offline,
    Sessions,
    steady_horizon_s,
)
from dualpath.sim.plan.settings import PAPER_PREFIX, PlanSettings
from dualpath.sim.plan.splits import InstanceNodes
from dualpath.sim.setting import Assumptions, Deployment, System, prepare
from dualpath.traces import Trace, limit_context, open_trace, without_delays

__all__ = ["Question", "instance_sizes", "question_of"]

_AGENTS_A_NODE = 256
_MOST_INSTANCE_NODES = 16
"""128 GPUs in nodes of 8: about what published expert parallelism spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is planned. `snics`: storage NICs of a node; the hardware's rate is of all of them.
    `hardware_sources`: as `hardware.hardware_sources`.

    `seed`: of the trace, where it is generated, and of arrivals at random. `trace_name`, `max_context` and
    `delays`: what `sessions` were made of, as it was given.
    """

    model: ModelShape
    hardware: Hardware
    hardware_sources: Mapping[str, str]
    snics: int
    nodes: int
    prefill_instance: InstanceNodes
    decode_instance: InstanceNodes
    most_splits: int
    block_tokens: int
    trace_name: str
    max_context: int | None
    delays: bool
    sessions: Sessions
    goal: Goal
    assumptions: Assumptions
    arrivals: Arrivals
    seed: int

    def setup(self) -> dict[str, str | int | float | None]:
        """What is needed to ask it again, and what was decided by a rule."""
        turns = Turns.of(self.sessions)
        node = self.hardware.node
        return {
            "model": self.model.name,
            "gpu": self.hardware.gpu.name,
            "nodes": self.nodes,
            "gpus_per_node": node.gpus,
            "snics": self.snics,
            "snic_gbit_s": node.snic_bytes_s * 8e-9,
            "cnic_gbit_s": node.cnic_bytes_s * 8e-9,
            "memory_gib": node.memory_bytes / 2**30,
            "trace": self.trace_name,
            "max_context": self.max_context,
            "delays": self.delays,
            "arrivals": self.arrivals.name,
            "splits": self.most_splits,
            "sessions": self.sessions.count,
            "mean_prompt_tokens": round(turns.prompt_tokens, 1),
            "mean_append_tokens": round(turns.append_tokens, 1),
            "longest_tokens": turns.longest_tokens,
            "kv_bytes_token": self.model.kv_bytes_token,
            "attention_weight_bytes": self.model.formats.attention_weight_bytes,
            "mlp_weight_bytes": self.model.formats.mlp_weight_bytes,
            "block_tokens": self.block_tokens,
            "least_prefill_instance_nodes": self.prefill_instance.least,
            "least_decode_instance_nodes": self.decode_instance.least,
            "seed": self.seed,
        }


def question_of(settings: PlanSettings) -> Question:
    """Raises ConfigError that names the flag or file."""
    model = load_model(settings.model, weights=settings.weights)
    hardware, sources = _hardware(settings)
    trace = _trace(settings)
    sessions = Sessions.of(trace)
    turns = Turns.of(sessions)
    goal = _goal(settings, sessions)
    ttft_s = goal.limits_s.get("ttft") if isinstance(goal, Capacity) else None
    assumptions = replace(
        Assumptions(),
        quota_s=quota_s_for(ttft_s),
        buffer_bytes=staging_bytes_for(model, hardware.node, turns),
    )
    prefill, decode = instance_sizes(model, hardware, assumptions, turns)
    return Question(
        model=model,
        hardware=hardware,
        hardware_sources=sources,
        snics=settings.snics,
        nodes=settings.nodes,
        prefill_instance=InstanceNodes(prefill, settings.prefill_instance),
        decode_instance=InstanceNodes(decode, settings.decode_instance),
        most_splits=settings.splits,
        block_tokens=settings.block_tokens or block_tokens_for(turns.prompt_tokens),
        trace_name=settings.trace,
        max_context=settings.max_context,
        delays=settings.delays,
        sessions=sessions,
        goal=goal,
        assumptions=assumptions,
        arrivals=open_arrivals(settings.arrivals),
        seed=settings.seed,
    )


def instance_sizes(
    model: ModelShape, hardware: Hardware, assumptions: Assumptions, turns: Turns
) -> tuple[dict[int, float], dict[int, float]]:
    """Of prefill and of decode, `InstanceNodes.rates`: sizes that leave room for the longest request.

    Prefill without layerwise loading is what needs most room. Prefill sizes count as equal, so that the
    smallest is taken: more ranks only wait for each other longer. Decode sizes differ by what an engine
    generates: with more ranks each has fewer experts to read, and more room for KV. Raises ConfigError when
    no instance is large enough.
    """
    prefill: dict[int, float] = {}
    decode: dict[int, float] = {}
    reason = (
        f"a request of {turns.longest_tokens:,} tokens, the trace's longest, does not fit beside the "
        f"weights or into a staging buffer of {assumptions.buffer_bytes / hardware.node.gpus / 1e9:.1f} GB; "
        "--max-context leaves longer ones out"
    )
    for nodes in range(1, _MOST_INSTANCE_NODES + 1):
        deployment = Deployment(
            model=model,
            hardware=hardware,
            prefill_nodes=nodes,
            decode_nodes=nodes,
            prefill_instance_nodes=nodes,
            decode_instance_nodes=nodes,
        )
        try:
            cluster, _ = prepare(deployment, System.BASIC, assumptions)
        except ConfigError as error:
            reason = str(error)
            continue
        if cluster.prefill_room_tokens >= turns.longest_tokens:
            prefill[nodes] = 1.0
        if cluster.decode_hbm_tokens >= turns.longest_tokens:
            decode[nodes] = decode_tokens_s(cluster, turns)
    if not prefill or not decode:
        raise ConfigError(
            f"--model {model.name}, {hardware.gpu.name}: no instance of up to {_MOST_INSTANCE_NODES} nodes "
            f"is large enough: {reason}"
        )
    return prefill, decode


def _hardware(settings: PlanSettings) -> tuple[Hardware, dict[str, str]]:
    """And where each number is from. The rate of storage is of all its NICs, `--snics` of one rate."""
    name = settings.gpu if settings.gpu is not None else settings.hardware
    assert name is not None
    hardware, sources = load_hardware(name), hardware_sources(name)
    changed: dict[str, float] = {}
    one_bytes_s = hardware.node.snic_bytes_s
    if settings.snic is not None:
        one_bytes_s = parse_rate(settings.snic, "--snic") / 8
    if settings.snic is not None or settings.snics > 1:
        changed["snic_bytes_s"] = settings.snics * one_bytes_s
    if settings.cnic is not None:
        changed["cnic_bytes_s"] = parse_rate(settings.cnic, "--cnic") / 8
    if settings.memory is not None:
        changed["memory_bytes"] = settings.memory
    node = msgspec.structs.replace(hardware.node, **changed)
    given = {f"node.{field}": "given as a flag" for field in changed}
    return Hardware(hardware.gpu, node), sources | given


def _trace(settings: PlanSettings) -> Trace:
    if settings.trace.startswith(PAPER_PREFIX):
        trace = paper_trace(settings.trace.removeprefix(PAPER_PREFIX), seed=settings.seed)
    else:
        trace = open_trace(settings.trace, seed=settings.seed)
    if settings.max_context is not None:
        trace = limit_context(trace, settings.max_context).trace
    return trace if settings.delays else without_delays(trace)


def _goal(settings: PlanSettings, sessions: Sessions) -> Goal:
    limits_s = settings.limits_s()
    if settings.rate is None and not limits_s:
        return Offline(settings.agents or _AGENTS_A_NODE * settings.nodes)
    horizon_s = settings.horizon_s or round(steady_horizon_s(sessions.work, limits_s))
    if settings.rate is not None:
        return AtRate(settings.rate, horizon_s)
    return Capacity(limits_s, horizon_s)
