"""The connector in a worker: carries out a step's orders around the forward pass, layer by layer.

    begin(orders): stagings start; blocks of requests that ended are copied before they are written again
    layer_starts(layer): what is staged of this layer is copied in, just before its attention
    layer_ends(layer): what is complete of this layer is copied out
    end(): lets go of what was loaded, hands over what was saved

It knows no vLLM. Invariants: a layer that vLLM did not announce is made up for at the end (saves), or makes
its blocks count as not loaded; after a failed load nothing that this step computed is saved, since other
requests may have read those blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

from dualpath.kv import Lease
from dualpath.vllm.agent import KvAgent
from dualpath.vllm.kv_tensors import KvTensors
from dualpath.vllm.orders import LoadOrder, SaveOrder, StepOrders, WorkerReport

__all__ = ["WorkerSide"]

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.01
"""A step that computes nothing waits so long for a staging: vLLM would come again at once, and its polling
would take the interpreter from the threads that read."""


@dataclass(slots=True)
class _Load:
    order: LoadOrder
    slots: list[int]


@dataclass(slots=True)
class _Save:
    order: SaveOrder
    lease: Lease


@dataclass(slots=True)
class _Step:
    loads: list[_Load] = field(default_factory=list)
    saves: list[_Save] = field(default_factory=list)
    loaded: set[str] = field(default_factory=set)
    copied: set[str] = field(default_factory=set)
    holds: ExitStack = field(default_factory=ExitStack)
    failed: bool = False


class WorkerSide:
    """Of one worker. `agent` and `tensors` stay the caller's. Only the model's thread calls it."""

    def __init__(self, agent: KvAgent, tensors: KvTensors, block_tokens: int) -> None:
        self._agent = agent
        self._tensors = tensors
        self._block_tokens = block_tokens
        self._step = _Step()
        self._failed_blocks: set[int] = set()
        self._sent: set[str] = set()

    def begin(self, orders: StepOrders) -> None:
        """Before the forward pass, and before any block of a request that ended is written again."""
        self._step = _Step()
        for save in orders.saves:
            if save.late:
                self._save_now(save)
        for request in orders.releases:
            self._agent.release(request)
        for request in orders.ended:
            self._agent.ended(request, aborted=False)
        for request in orders.aborted:
            self._agent.ended(request, aborted=True)
        for stage in orders.stages:
            self._agent.stage(stage)
        for load in orders.loads:
            self._begin_load(load)
        for save in orders.saves:
            if not save.late:
                self._begin_save(save)

    def layer_starts(self, layer: str) -> None:
        """Copy what is staged of this layer into the device."""
        if layer not in self._tensors:
            return
        self._step.loaded.add(layer)
        for load in self._step.loads:
            self._tensors.load(layer, load.slots, load.order.block_ids)

    def layer_ends(self, layer: str) -> None:
        """Copy what is complete of this layer out of the device."""
        if layer not in self._tensors:
            return
        self._step.copied.add(layer)
        for save in self._step.saves:
            self._tensors.save(layer, save.lease.slots, save.order.block_ids)

    def end(self) -> None:
        """After the forward pass. Idempotent within a step."""
        step, self._step = self._step, _Step()
        if not step.loaded:
            self._agent.wait_for_reports(_IDLE_WAIT_S)
        missing = [layer for layer in self._tensors.names() if layer not in step.loaded]
        for load in step.loads:
            if missing:
                log.error("%s: layers %s were not announced", load.order.request, missing)
                self._failed_blocks.update(load.order.block_ids)
                step.failed = True
            self._agent.release(load.order.request)
        step.holds.close()
        for save in step.saves:
            if step.failed:
                save.lease.release()
                self._agent.saved(save.order, None)
                continue
            for layer in self._tensors.names():
                if layer not in step.copied:
                    self._tensors.save(layer, save.lease.slots, save.order.block_ids)
            self._agent.saved(save.order, save.lease)

    def take_failed_blocks(self) -> set[int]:
        """vLLM's ids of the blocks that could not be loaded since the last call."""
        failed, self._failed_blocks = self._failed_blocks, set()
        return failed

    def take_sent(self) -> set[str]:
        """Requests whose late saves are made: their blocks may be freed."""
        sent, self._sent = self._sent, set()
        return sent

    def report(self) -> WorkerReport:
        """What happened since the last report. Raises InvariantViolation when the agent died."""
        return WorkerReport(self._agent.take_reports(), self._agent.take_stored())

    def _begin_load(self, load: LoadOrder) -> None:
        first = load.first_token // self._block_tokens
        slots = self._step.holds.enter_context(self._agent.staged_slots(load.request, load.serial))
        blocks: Sequence[int] = range(first, first + len(load.block_ids))
        if slots is None or any(block not in slots for block in blocks):
            log.error("%s: its staged KV is gone, it is computed", load.request)
            self._failed_blocks.update(load.block_ids)
            self._step.failed = True
            return
        self._step.loads.append(_Load(load, [slots[block] for block in blocks]))

    def _begin_save(self, save: SaveOrder) -> None:
        lease = self._agent.lease_for_save(save.request, len(save.block_ids))
        if lease is None:
            self._agent.saved(save, None)
            return
        self._step.saves.append(_Save(save, lease))

    def _save_now(self, save: SaveOrder) -> None:
        self._sent.add(save.request)
        lease = self._agent.lease_for_save(save.request, len(save.block_ids))
        if lease is not None:
            for layer in self._tensors.names():
                self._tensors.save(layer, lease.slots, save.block_ids)
        self._agent.saved(save, lease)
