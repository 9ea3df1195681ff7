"""Which links a simulated cluster has, and how long KV takes over slow memory or PCIe.

One agent alone: what a run takes longer with half the rate is what it moved, by the rate.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from plan_kit import small_question
from reproduction_kit import SETTINGS

from dualpath.sim.experiments import EXPERIMENTS
from dualpath.sim.experiments.grid import ds_27b
from dualpath.sim.experiments.policies import POLICIES
from dualpath.sim.hardware import Hardware, NodeSpec, hardware_names, load_hardware
from dualpath.sim.outcome import Outcome
from dualpath.sim.reproduction import all_cases
from dualpath.sim.setting import Assumptions, Deployment, System, prepare
from dualpath.sim.simulation import Simulation

SLOW_BYTES_S = 0.2e9


def deployment(**node: float) -> Deployment:
    question = small_question()
    spec = msgspec.structs.replace(question.hardware.node, **node)
    return Deployment(
        model=question.model,
        hardware=Hardware(question.hardware.gpu, spec),
        prefill_nodes=1,
        decode_nodes=1,
    )


def run(system: System, **node: float) -> Outcome:
    question = small_question()
    cluster, policy = prepare(deployment(**node), system, question.assumptions)
    return Simulation(cluster, policy, question.sessions.starting(np.zeros(1))).run()


def longer_s(system: System, field: str) -> float:
    """With half of SLOW_BYTES_S."""
    slower, slow = (run(system, **{field: rate}) for rate in (SLOW_BYTES_S / 2, SLOW_BYTES_S))
    return slower.end_s - slow.end_s


def moved_s(system: System, tokens: Callable[[Outcome], np.ndarray]) -> float:
    kv_bytes = deployment().model.kv_bytes_token
    return float(tokens(run(system)).sum()) * kv_bytes / SLOW_BYTES_S


def test_slow_memory_takes_its_time_for_each_pass() -> None:
    """Read in; beside the step all goes into the decode node's memory, and then out of it."""
    found_s = longer_s(System.LAYERWISE, "memory_bytes_s")
    expected_s = moved_s(
        System.LAYERWISE, lambda it: it.records.hit_tokens + 2 * it.records.prompt_tokens
    )
    assert found_s == pytest.approx(expected_s, rel=0.02)


def test_slow_memory_without_layerwise_prefill() -> None:
    """In and out of both memories, one after the other."""
    found_s = longer_s(System.BASIC, "memory_bytes_s")
    expected_s = moved_s(
        System.BASIC, lambda it: 2 * it.records.hit_tokens + 2 * it.records.prompt_tokens
    )
    assert found_s == pytest.approx(expected_s, rel=0.02)


def test_slow_pcie_takes_its_time_for_each_copy() -> None:
    """Stored KV in, all of it out to the decode node, and there into the device."""
    found_s = longer_s(System.LAYERWISE, "pcie_bytes_s")
    expected_s = moved_s(
        System.LAYERWISE, lambda it: it.records.hit_tokens + 2 * it.records.prompt_tokens
    )
    assert found_s == pytest.approx(expected_s, rel=0.02)


def test_an_engines_traffic_passes_its_compute_nic_and_its_pcie_link() -> None:
    assert NodeSpec(cnic_bytes_s=50e9, pcie_bytes_s=64e9).network_bytes_s == 50e9
    assert NodeSpec(cnic_bytes_s=100e9, pcie_bytes_s=64e9).network_bytes_s == 64e9
    by_pcie, by_nic = (
        prepare(deployment(**{field: 1e9}), System.DUAL, Assumptions())
        for field in ("pcie_bytes_s", "cnic_bytes_s")
    )
    assert by_pcie == by_nic


def memory_bytes_s(it: Deployment, system: System = System.DUAL) -> float:
    return prepare(it, system, Assumptions())[0].memory_bytes_s


def test_memory_is_simulated_where_it_is_nearly_full() -> None:
    # In storage's bytes: three times what a node reads, and twice what the other hands over.
    full_bytes_s = 5 * 100e9 * Assumptions().snic_share
    near = deployment(snic_bytes_s=100e9, memory_bytes_s=full_bytes_s / 0.91)
    far = deployment(snic_bytes_s=100e9, memory_bytes_s=full_bytes_s / 0.89)
    assert memory_bytes_s(near) == full_bytes_s / 0.91
    assert memory_bytes_s(near, System.BASIC) == full_bytes_s / 0.91 / 2
    assert math.isinf(memory_bytes_s(far))


def test_memory_is_simulated_where_new_kv_fills_it() -> None:
    """Storage that is slower than memory does not make memory fast."""
    slow = deployment(snic_bytes_s=1e6, memory_bytes_s=1e9)
    cluster, _ = prepare(slow, System.DUAL, Assumptions())
    new_bytes_s = cluster.gpus * cluster.kv_bytes_token / cluster.prefill.linear_token_s
    assert 2 * new_bytes_s > 1e9
    assert cluster.memory_bytes_s == 1e9
    fast = deployment(snic_bytes_s=1e6, memory_bytes_s=2 * new_bytes_s / 0.89)
    assert math.isinf(memory_bytes_s(fast))


@pytest.mark.parametrize("name", hardware_names())
def test_shipped_nodes_have_no_memory_link(name: str) -> None:
    node = load_hardware(name).node
    assert node.network_bytes_s == node.cnic_bytes_s
    it = ds_27b()
    for prefill, decode in ((1, 1), (1, 2), (2, 1)):
        divided = Deployment(
            model=it.model,
            hardware=load_hardware(name),
            prefill_nodes=prefill,
            decode_nodes=decode,
        )
        assert math.isinf(memory_bytes_s(divided))


def test_experiments_have_no_memory_link() -> None:
    """The published ones, and the policies', with up to five prefill nodes for a decode node."""
    cases = all_cases(EXPERIMENTS.values(), SETTINGS)
    for policies in POLICIES.values():
        cases += [trial.case for trial in policies.trials(SETTINGS)]
    for deployed, system in {(case.deployment, case.system) for case in cases}:
        assert math.isinf(memory_bytes_s(deployed, system))
