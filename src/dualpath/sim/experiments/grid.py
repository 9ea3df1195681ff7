"""The clusters and loads that the experiments share, so that equal runs are run once.

Instances: the paper does not say which GPUs step together. A prefill instance of DeepSeek-V3.2 is taken to
be two nodes and a decode instance four, so that 2P4D is one of each and larger clusters are more of the
same; one of the 27B model is a node. Two ranks of four GPUs make a node of Qwen2.5-32B: in FP16 its weights
leave one GPU room for one long request, and four room for fourteen.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from dualpath.sim.case import Case
from dualpath.sim.experiments.experiment import Settings
from dualpath.sim.hardware import load_hardware
from dualpath.sim.model_config import load_model
from dualpath.sim.paper_traces import PAPER_TRACES
from dualpath.sim.plan.load import AtRate, Offline
from dualpath.sim.setting import Assumptions, Deployment, System

__all__ = [
    "AGENTS",
    "HORIZON_S",
    "LENGTHS",
    "MANY_AGENTS",
    "ds_27b",
    "ds_660b",
    "offline_case",
    "online_case",
    "qwen_32b",
]

GPU = "h800"
AGENTS = (512, 1024)
"""Of offline runs. The paper names 1,024, for its scaled appends; what a larger batch gives is shown
beside."""
MANY_AGENTS = 2048
LENGTHS = tuple(PAPER_TRACES)
HORIZON_S = 4500.0
"""Of online runs; the last third counts. The longest sessions last about an hour near the limits of the
SLO."""
_QWEN_BUFFER_BYTES = 320e9


@lru_cache
def ds_660b(prefill_nodes: int = 2, decode_nodes: int = 4) -> Deployment:
    """DeepSeek-V3.2."""
    return Deployment(
        model=load_model("deepseek-v3.2"),
        hardware=load_hardware(GPU),
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
        prefill_instance_nodes=2,
        decode_instance_nodes=4,
    )


@lru_cache
def ds_27b(prefill_nodes: int = 1, decode_nodes: int = 1) -> Deployment:
    return Deployment(
        model=load_model("ds-27b"),
        hardware=load_hardware(GPU),
        prefill_nodes=prefill_nodes,
        decode_nodes=decode_nodes,
    )


@lru_cache
def qwen_32b() -> Deployment:
    """1P2D, as in the paper."""
    return Deployment(
        model=load_model("qwen2.5-32b"),
        hardware=load_hardware(GPU),
        prefill_nodes=1,
        decode_nodes=2,
        tensor=4,
    )


def offline_case(
    settings: Settings,
    deployment: Deployment,
    system: System,
    length: str,
    agents: int,
    *,
    append: float = 1.0,
    output: float = 1.0,
) -> Case:
    return Case(
        deployment=deployment,
        system=system,
        assumptions=_assumptions(settings, deployment),
        trace=f"paper:{length}",
        load=Offline(agents),
        append=append,
        output=output,
        seed=settings.seed,
    )


def online_case(
    settings: Settings, deployment: Deployment, system: System, rate_aps: float
) -> Case:
    """On the longest trace, for HORIZON_S."""
    return Case(
        deployment=deployment,
        system=system,
        assumptions=_assumptions(settings, deployment),
        trace="paper:64k",
        load=AtRate(rate_aps, HORIZON_S),
        seed=settings.seed,
    )


def _assumptions(settings: Settings, deployment: Deployment) -> Assumptions:
    """The paper gives nodes of the one dense model larger buffers."""
    if deployment.model.name == qwen_32b().model.name:
        return replace(settings.assumptions, buffer_bytes=_QWEN_BUFFER_BYTES)
    return settings.assumptions
