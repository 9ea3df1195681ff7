"""Seeded faults around any store.

A plan reads like `fault=read:hang:0.01,read:miss:0.05,write:error:0.1;seed=3`: operation, fault and
share of operations. Further fields: `slow_s` (how long `slow` takes) and `hang_s` (when a hang ends
by itself). The same plan over the same order of operations gives the same faults.
"""

from __future__ import annotations

import logging
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from types import TracebackType

from dualpath.base.errors import ConfigError
from dualpath.base.ids import BlockKey
from dualpath.store.contract import (
    BlockRead,
    BlockResult,
    BlockWrite,
    ReadStatus,
    Store,
    StoredBlock,
    WriteResult,
)
from dualpath.store.directory import DirectoryStore
from dualpath.store.io_lane import IoLane, IoTask, Ticket
from dualpath.testing.damage import Damage, damage_file
from dualpath.testing.results import Results

__all__ = ["Fault", "FaultPlan", "FaultRule", "FaultyStore", "Operation", "with_faults"]

_log = logging.getLogger(__name__)


class Operation(StrEnum):
    READ = "read"
    WRITE = "write"


class Fault(StrEnum):
    """What goes wrong. A write can be `slow`, `hang` or `error`, a read also the rest."""

    MISS = "miss"
    FLIP = "flip"
    TRUNCATE = "truncate"
    SLOW = "slow"
    HANG = "hang"
    ERROR = "error"


_WRITE_FAULTS = {Fault.SLOW, Fault.HANG, Fault.ERROR}
_DAMAGE = {Fault.FLIP: Damage.FLIP_PAYLOAD, Fault.TRUNCATE: Damage.TRUNCATE}


@dataclass(frozen=True, slots=True)
class FaultRule:
    """`rate` is the share of operations, 0 to 1."""

    operation: Operation
    fault: Fault
    rate: float


def _draw_seed() -> int:
    return random.SystemRandom().randrange(2**32)


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """`str(plan)` is the spec that repeats it, seed included: print it when a test fails."""

    rules: tuple[FaultRule, ...] = ()
    seed: int = field(default_factory=_draw_seed)
    slow_s: float = 0.2
    hang_s: float = 60.0

    def __post_init__(self) -> None:
        for operation in Operation:
            total = sum(rule.rate for rule in self.rules if rule.operation is operation)
            if total > 1.0:
                raise ConfigError(f"fault rates of {operation}s add up to {total:g}, more than 1")
        for rule in self.rules:
            if not 0.0 <= rule.rate <= 1.0:
                raise ConfigError(f"fault rate {rule.rate:g} is not in [0, 1]")
            if rule.operation is Operation.WRITE and rule.fault not in _WRITE_FAULTS:
                raise ConfigError(f"a write cannot have the fault {rule.fault!s}")

    @classmethod
    def parse(cls, spec: str) -> FaultPlan:
        """Raises ConfigError that names the part at fault and what it may be."""
        plan = cls()
        for part in filter(None, spec.split(";")):
            name, _, value = part.partition("=")
            try:
                if name == "fault":
                    rules = tuple(_parse_rule(rule) for rule in value.split(","))
                    plan = replace(plan, rules=plan.rules + rules)
                elif name == "seed":
                    plan = replace(plan, seed=int(value))
                elif name == "slow_s":
                    plan = replace(plan, slow_s=float(value))
                elif name == "hang_s":
                    plan = replace(plan, hang_s=float(value))
                else:
                    raise ConfigError(f"no field {name!r}; known: fault, seed, slow_s, hang_s")
            except ValueError as error:
                raise ConfigError(f"store faults {spec!r}, part {part!r}: {error}") from error
        return plan

    def __str__(self) -> str:
        rules = ",".join(f"{r.operation}:{r.fault}:{r.rate:g}" for r in self.rules)
        fault = f"fault={rules};" if rules else ""
        return f"{fault}seed={self.seed};slow_s={self.slow_s:g};hang_s={self.hang_s:g}"


def _parse_rule(text: str) -> FaultRule:
    parts = text.split(":")
    if len(parts) != 3:
        raise ValueError(f"{text!r} is not operation:fault:rate")
    return FaultRule(Operation(parts[0]), Fault(parts[1]), float(parts[2]))


class _IoEnded(AbstractContextManager[None]):
    """The hold of an operation on the inner store: tells when its I/O is over."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.event.set()


class FaultyStore(Store):
    """`inner` with faults. Keeps the contract: deadlines, holds and one answer a block.

    `damage` really spoils a stored block; without it `flip` and `truncate` only report CORRUPT.
    Assign `plan` to change the faults while it runs. Closes `inner` with itself.
    """

    def __init__(
        self,
        inner: Store,
        plan: FaultPlan,
        damage: Callable[[BlockKey, Damage], object] | None = None,
    ) -> None:
        self.inner = inner
        self.capabilities = inner.capabilities
        self.injected: Counter[str] = Counter()
        """How often each fault happened, by `operation:fault`."""
        self._damage = damage
        self._lane = IoLane("store faults", n_threads=8, queue_limit=4096)
        self._lock = threading.Lock()
        self._hang_ends = threading.Event()
        self._closed = threading.Event()
        self.plan = plan

    @property
    def plan(self) -> FaultPlan:
        return self._plan

    @plan.setter
    def plan(self, plan: FaultPlan) -> None:
        with self._lock:
            self._plan = plan
            self._random = random.Random(plan.seed)
        if plan.rules:
            _log.warning("store faults: %s", plan)

    def release_hung(self) -> None:
        """End all hangs so far."""
        with self._lock:
            ended, self._hang_ends = self._hang_ends, threading.Event()
        ended.set()

    def read(
        self,
        blocks: Sequence[BlockRead],
        *,
        deadline_s: float,
        done: Callable[[BlockResult], None],
    ) -> None:
        sound: list[BlockRead] = []
        faulty: list[IoTask[BlockResult]] = []
        for block in blocks:
            fault = self._draw(Operation.READ)
            if fault is None:
                sound.append(block)
            else:
                run = partial(self._faulty_read, block, fault, deadline_s)
                refused = partial(BlockResult, block.identity.key)
                faulty.append(IoTask(run, refused, done, block.hold))
        self.inner.read(sound, deadline_s=deadline_s, done=done)
        self._lane.submit(faulty, deadline_s=deadline_s)

    def write(
        self,
        blocks: Sequence[BlockWrite],
        *,
        deadline_s: float,
        done: Callable[[WriteResult], None],
    ) -> None:
        sound: list[BlockWrite] = []
        faulty: list[IoTask[WriteResult]] = []
        for block in blocks:
            fault = self._draw(Operation.WRITE)
            if fault is None:
                sound.append(block)
            else:
                run = partial(self._faulty_write, block, fault, deadline_s)
                refused = partial(_not_durable, block.identity.key)
                faulty.append(IoTask(run, refused, done, block.hold))
        self.inner.write(sound, deadline_s=deadline_s, done=done)
        self._lane.submit(faulty, deadline_s=deadline_s)

    def delete(self, keys: Sequence[BlockKey]) -> int:
        return self.inner.delete(keys)

    def scan(self) -> Iterator[StoredBlock]:
        return self.inner.scan()

    def tidy(self) -> None:
        self.inner.tidy()

    def free_bytes(self) -> int | None:
        return self.inner.free_bytes()

    def close(self) -> None:
        self._closed.set()
        self.release_hung()
        self._lane.close()
        self.inner.close()

    def _draw(self, operation: Operation) -> Fault | None:
        with self._lock:
            dice = self._random.random()
            for rule in self._plan.rules:
                if rule.operation is operation:
                    dice -= rule.rate
                    if dice < 0:
                        self.injected[f"{operation}:{rule.fault}"] += 1
                        return rule.fault
        return None

    def _delay(self, fault: Fault) -> None:
        if fault is Fault.SLOW:
            self._closed.wait(self._plan.slow_s)
        elif fault is Fault.HANG and not self._closed.is_set():
            self._hang_ends.wait(self._plan.hang_s)

    def _faulty_read(
        self, block: BlockRead, fault: Fault, deadline_s: float, ticket: Ticket
    ) -> BlockResult:
        key = block.identity.key
        if fault is Fault.MISS:
            return BlockResult(key, ReadStatus.MISS)
        if fault is Fault.ERROR:
            return BlockResult(key, ReadStatus.ERROR, "injected error")
        damage = _DAMAGE.get(fault)
        if damage is not None:
            if self._damage is None:
                return BlockResult(key, ReadStatus.CORRUPT, f"injected {fault}")
            self._damage(key, damage)
        self._delay(fault)
        if ticket.abandoned:
            return BlockResult(key, ReadStatus.TIMEOUT, f"injected {fault}")
        ended, results = _IoEnded(), Results[BlockResult]()
        self.inner.read([replace(block, hold=ended)], deadline_s=deadline_s, done=results)
        ended.event.wait()
        return results.wait(1)[0]

    def _faulty_write(
        self, block: BlockWrite, fault: Fault, deadline_s: float, ticket: Ticket
    ) -> WriteResult:
        key = block.identity.key
        if fault is Fault.ERROR:
            return _not_durable(key, ReadStatus.ERROR, "injected error")
        self._delay(fault)
        if ticket.abandoned:
            return _not_durable(key, ReadStatus.TIMEOUT, f"injected {fault}")
        ended, results = _IoEnded(), Results[WriteResult]()
        self.inner.write([replace(block, hold=ended)], deadline_s=deadline_s, done=results)
        ended.event.wait()
        result = results.wait(1)[0]
        if result.durable and not ticket.claim():
            self.inner.delete([key])
        return result


def _not_durable(key: BlockKey, _: ReadStatus, detail: str) -> WriteResult:
    return WriteResult(key, durable=False, stored_bytes=0, detail=detail)


def with_faults(store: Store, spec: str) -> FaultyStore:
    """`store` under the faults of `spec`; a `DirectoryStore`'s files are really spoiled."""
    plan = FaultPlan.parse(spec)
    if not isinstance(store, DirectoryStore):
        return FaultyStore(store, plan)
    files = store.files
    return FaultyStore(store, plan, lambda key, damage: damage_file(files.path_of(key), damage))
