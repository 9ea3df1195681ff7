"""What the kernel tells the driver: happenings in order of time, from which the policy's events are made."""

from __future__ import annotations

from dualpath.sim.kernel.jit import compiled
from dualpath.sim.kernel.state import State

__all__ = [
    "ARRIVED",
    "FINISHED",
    "PREFILL_DONE",
    "READ_ON_DE",
    "READ_ON_PE",
    "tell",
    "tell_arrival",
]

ARRIVED, READ_ON_PE, READ_ON_DE, PREFILL_DONE, FINISHED = range(5)


@compiled
def tell(s: State, kind: int, slot: int, tokens: int) -> None:
    """There is always room: see `clock.log_full`."""
    clock = s.clock[0]
    entry = s.log[clock.log_size]
    entry.time_s = clock.now_s
    entry.kind = kind
    entry.slot = slot
    entry.tokens = tokens
    clock.log_size += 1


@compiled
def tell_arrival(s: State, slot: int) -> None:
    each = s.slots[slot]
    entry = s.log[s.clock[0].log_size]
    entry.turn = each.turn - s.first_turn[each.trajectory]
    entry.hit_tokens = each.hit_tokens
    entry.output_tokens = each.output_tokens
    tell(s, ARRIVED, slot, each.prompt_tokens)
