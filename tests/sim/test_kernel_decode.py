from __future__ import annotations

import pytest
from kernel_kit import DECODE, Kernel, cluster

from dualpath.sim.kernel.decode import decode_stepped, join_decode
from dualpath.sim.kernel.events import DECODE_EVENT

DE = 2
"""The first of two decode engines; their instance is 1."""


def join(kernel: Kernel, slot: int, engine: int, prompt_tokens: int, output_tokens: int) -> None:
    each = kernel.state.slots[slot]
    each.prompt_tokens, each.output_tokens = prompt_tokens, output_tokens
    each.prefill, each.decode, each.record = 0, engine, slot
    kernel.state.sides[2 * slot + 1].engine = engine
    kernel.state.engines[engine].requests += 1
    kernel.state.engines[engine].tokens += prompt_tokens
    join_decode(kernel.handle, slot)


def step(kernel: Kernel, instance: int = 1) -> float:
    """Let the step end; how long it took."""
    clock = kernel.state.clock[0]
    start_s = clock.now_s
    (clock.now_s,) = kernel.events_s(DECODE_EVENT)
    clock.heap_size = 0
    decode_stepped(kernel.handle, instance)
    return float(clock.now_s - start_s)


def test_a_sequence_gets_a_token_a_step() -> None:
    """Its first is prefill's; the context grows by one each step."""
    kernel = Kernel.of()
    join(kernel, 0, DE, 100, 4)
    steps = [step(kernel) for _ in range(3)]
    assert steps == pytest.approx([DECODE.step_s(1, 0.5, 100 + n) for n in (1, 2, 3)])
    record = kernel.state.records[0]
    assert record.second_token_s == pytest.approx(steps[0])
    assert record.finished_s == pytest.approx(sum(steps))
    assert kernel.events_s(DECODE_EVENT) == []
    engine = kernel.state.engines[DE]
    assert (engine.batch, engine.context_tokens, engine.requests, engine.tokens) == (0, 0, 0, 0)
    assert kernel.state.instances[1].busy_s == pytest.approx(sum(steps))


def test_ranks_step_together_and_wait_for_the_largest() -> None:
    """Those that come during a step join at the next."""
    kernel = Kernel.of()
    join(kernel, 0, DE, 300, 3)
    join(kernel, 1, DE + 1, 100, 9)
    join(kernel, 2, DE + 1, 50, 2)
    assert step(kernel) == pytest.approx(DECODE.step_s(1, 0.5, 301))
    assert step(kernel) == pytest.approx(DECODE.step_s(2, 1.5, 302))
    # The first has its three tokens, the third its two.
    assert [bool(each.finished_s) for each in kernel.state.records[:3]] == [True, False, True]
    assert step(kernel) == pytest.approx(DECODE.step_s(1, 0.5, 102))


def test_a_large_batch_is_bound_by_its_arithmetic() -> None:
    kernel = Kernel.of(agents=24)
    for slot in range(24):
        join(kernel, slot, DE + slot % 2, 20, 3)
    step(kernel)
    assert step(kernel) == pytest.approx(DECODE.step_s(12, 12.0, 12 * 21 + 1))
    assert DECODE.linear_sequence_s * 12 > DECODE.weights_s


def test_the_engine_has_its_memory_again_when_a_sequence_ends() -> None:
    kernel = Kernel.of()
    before = kernel.state.engines[DE].free_hbm_tokens
    kernel.state.engines[DE].free_hbm_tokens -= 102
    join(kernel, 0, DE, 100, 2)
    step(kernel)
    assert kernel.state.engines[DE].free_hbm_tokens == before


@pytest.mark.parametrize("isolated", [True, False])
def test_collectives_take_their_share_of_compute_nics(isolated: bool) -> None:
    kernel = Kernel.of(cluster(decode_nodes=2, decode_instance_nodes=2, isolated=isolated))
    nics = kernel.state.links[3 + 4 :]
    nics.active[:] = 3
    join(kernel, 0, DE, 100, 3)
    alone_s, collective_s = DECODE.step_s(1, 0.25, 101), DECODE.collective_s_sequence
    expected_s = alone_s if isolated else alone_s + 3 * collective_s
    (ends_s,) = kernel.events_s(DECODE_EVENT)
    assert ends_s == pytest.approx(expected_s)
    assert nics.high_share == pytest.approx(collective_s / expected_s)
    nics.active[:] = 0
    step(kernel)
    step(kernel)
    assert (kernel.state.links.high_share == 0).all()
