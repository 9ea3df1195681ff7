"""The simulator's driver and the product's, on the same work: the same events and instructions.

The product's `Driver` is the real one, with the real scheduler, roster and catalog. Its engines are fakes:
what they do, and when, is what a second copy of the simulated cluster does with the assignments that reach it
as messages; they answer with messages. So whatever the two drivers do differently shows in what passes
between them and their schedulers. A node has one engine, as engines of the product step by themselves.

Left out of the comparison are fetches to which the scheduler answered nothing: the product has more of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math

import numpy as np
import pytest
from msgspec.structs import replace

from dualpath.base.ids import EngineId, RequestId, Side
from dualpath.engine.sampling import SamplingParams
from dualpath.kv.chain import block_chain, root_key
from dualpath.kv.index import TrieIndex
from dualpath.kv.layout import KVLayout, RowPart
from dualpath.monitor.metrics import Metrics
from dualpath.policy.config import PolicyConfig, ReadPlanKind, SchedulerKind
from dualpath.policy.events import (
    Assign,
    EngineJoined,
    Event,
    GroupFetched,
    Instruction,
    RequestArrived,
)
from dualpath.policy.quota import AttentionFit
from dualpath.policy.scheduler import Scheduler
from dualpath.serve.driver import Driver, DriverLimits
from dualpath.serve.generation import GenerationRequest
from dualpath.serve.messages import (
    BlockPersisted,
    Decode,
    EngineStatus,
    FromEngine,
    Hello,
    Name,
    Prefill,
    PrefillReleased,
    ReadProgress,
    RequestDone,
    StartAttempt,
    ToEngine,
    Tokens,
)
from dualpath.sim.cluster import Cluster
from dualpath.sim.costs import DecodeCosts, PrefillCosts
from dualpath.sim.kernel import advance, assign_all, handle_of, make_state, read_queue_tokens
from dualpath.sim.kernel.log import ARRIVED, FINISHED, PREFILL_DONE, READ_ON_PE
from dualpath.sim.simulation import Simulation
from dualpath.sim.workload import Workload, offline
from dualpath.store.catalog import Catalog
from dualpath.testing import MemoryDevice, MemoryStore, run_virtual
from dualpath.traces import AppendPrompt, Session, Trace, Turn

Passed = list[tuple[Event, list[Instruction]]]

BLOCK_TOKENS = 16
FINGERPRINT = b"f" * 32
LAYOUT = KVLayout(
    kind="gqa",
    n_layers=4,
    block_tokens=BLOCK_TOKENS,
    parts=(RowPart("key", 1, 8), RowPart("value", 1, 8)),
    dtype="float32",
    item_bytes=4,
)
SETTLED_S = 1e-6
"""In virtual time: long enough for whatever can run to have run."""

CLUSTER = Cluster(
    prefill_nodes=2,
    decode_nodes=2,
    gpus=1,
    prefill_instance_nodes=1,
    decode_instance_nodes=1,
    kv_bytes_token=1000,
    layers=4,
    prefill=PrefillCosts(
        attention_entry_s=0.01,
        attention_token_s=0.0,
        attention_pair_s=1e-6,
        linear_token_s=0.002,
        weights_s=0.0,
        collective_s_token=0.0,
        base_s=0.005,
    ),
    decode=DecodeCosts(
        base_s=0.01,
        sequence_s=0.002,
        linear_sequence_s=0.0,
        weights_s=0.0,
        context_token_s=1e-5,
    ),
    fit=AttentionFit(0.0, 0.01, 1e-6),
    snic_bytes_s=400_000.0,
    cnic_bytes_s=3_200_000.0,
    prefill_room_tokens=1000,
    decode_buffer_tokens=1000,
    decode_hbm_tokens=500,
)
BASELINES = (
    SchedulerKind.BASIC,
    SchedulerKind.ROUND_ROBIN,
    SchedulerKind.RANDOM,
    SchedulerKind.ORACLE,
)
POLICY = PolicyConfig(
    block_tokens=BLOCK_TOKENS, alpha_tokens=100, beta_tokens=150, max_batch_tokens=256
)


def work() -> Workload:
    """Twelve requests of four agents. The first of each has nothing stored, the others have."""
    turns = [
        ((150, 5, 0.0), (21, 9, 0.11), (70, 4, 0.23)),
        ((97, 7, 0.0), (33, 1, 0.07), (41, 6, 0.31)),
        ((203, 4, 0.0), (19, 11, 0.19), (29, 3, 0.05)),
        ((58, 9, 0.0), (83, 6, 0.13), (17, 8, 0.17)),
    ]
    sessions = tuple(
        Session(str(agent), tuple(Turn(AppendPrompt(a), out, delay) for a, out, delay in each))
        for agent, each in enumerate(turns)
    )
    return offline(Trace("twelve", "trajectories", sessions), len(sessions))


def simulated(cluster: Cluster, policy: PolicyConfig) -> Passed:
    passed: Passed = []

    def log(event: Event, instructions: list[Instruction]) -> None:
        passed.append((event, list(instructions)))

    outcome = Simulation(cluster, policy, work(), log=log).run()
    assert outcome.unfinished_agents == 0
    return passed


class WatchedScheduler(Scheduler):
    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config)
        self.passed: Passed = []

    def handle(self, event: Event) -> list[Instruction]:
        instructions = super().handle(event)
        self.passed.append((event, list(instructions)))
        return instructions


@dataclasses.dataclass
class FakeEngine:
    hello: Hello
    index: int


class FakeEngines:
    """All engines of a cluster, behind the driver's `send`."""

    def __init__(self, cluster: Cluster, policy: PolicyConfig, joined: list[EngineJoined]) -> None:
        self.state = make_state(cluster, policy, work(), window_s=1.0, windows=100)
        self._kernel = handle_of(self.state)
        self.driver: Driver
        self._engines = {
            each.engine: FakeEngine(
                Hello(
                    engine=each.engine,
                    group=each.group,
                    role=each.role,
                    address="",
                    buffer_tokens=each.buffer_tokens,
                    hbm_tokens=each.hbm_tokens,
                ),
                index,
            )
            for index, each in enumerate(joined)
        }
        self._names = list(self._engines)
        self._requests: dict[int, RequestId] = {}
        self._bypass = policy.scheduler is SchedulerKind.ORACLE
        self._decode: dict[Name, tuple[EngineId, Decode]] = {}
        self._unheard: list[Prefill] = []
        self._started: set[Name] = set()
        self._clients: list[asyncio.Task[list[int]]] = []

    def now_s(self) -> float:
        return float(self.state.clock[0].now_s)

    async def serve(self) -> None:
        """Until all agents are done."""
        for each in self._engines.values():
            self._say(each.hello.engine, each.hello)
        self._report(self._names)
        while self.state.clock[0].unfinished_agents:
            await asyncio.sleep(SETTLED_S)
            taken = advance(self._kernel, math.inf, True)
            self._happened(self.state.log[:taken].copy())
        await asyncio.sleep(SETTLED_S)
        for agent, client in enumerate(self._clients):
            assert client.done(), f"request {agent} has not ended"
        await asyncio.gather(*self._clients)

    # What the driver sends.

    def send(self, engine: EngineId, message: ToEngine) -> None:
        match message:
            case Decode(assignment=assignment):
                self._decode[assignment.name] = engine, message
            case Prefill(assignment=assignment):
                told, decode = self._decode[assignment.name]
                assert (message.peer, decode.peer) == (told, engine)
                assert decode.assignment == assignment
                if not self._unheard:
                    # A message takes its way: engines have it when the driver's turn is over.
                    asyncio.get_running_loop().call_soon(self._hear)
                self._unheard.append(message)
            case StartAttempt(name=name):
                self._started.add(name)
            case _:
                raise AssertionError(f"nothing fails here, but {engine} is sent {message}")

    def _hear(self) -> None:
        slots = {request: slot for slot, request in self._requests.items()}
        rows, engines = [], []
        for message in self._unheard:
            each = message.assignment
            slot, (decode, its) = slots[each.name.request], self._decode.pop(each.name)
            assert each.hit_tokens == self.state.slots[slot].hit_tokens
            pair = self._engines[its.peer].index, self._engines[decode].index
            rows.append((slot, *pair, each.pe_tokens, self._bypass))
            engines += [decode, its.peer]
        self._unheard.clear()
        assign_all(self._kernel, np.array(rows, np.int64))
        self._report(list(dict.fromkeys(engines)))

    # What engines say.

    def _say(self, engine: EngineId, message: FromEngine) -> None:
        self.driver.engine_message(engine, message)

    def _report(self, engines: list[EngineId]) -> None:
        for name in engines:
            engine = self._engines[name]
            each = self.state.engines[engine.index]
            status = dict.fromkeys(EngineStatus.__struct_fields__, 0) | {
                "seen": int(each.seen),
                "requests": int(each.requests),
                "tokens": int(each.tokens),
                "free_hbm_tokens": int(each.free_hbm_tokens),
                "read_queue_tokens": read_queue_tokens(self._kernel, engine.index),
                "traffic": None,
            }
            self._say(name, EngineStatus(**status))

    def _happened(self, entries: np.recarray) -> None:
        reporting: list[EngineId] = []
        for entry in entries:
            if entry.kind == ARRIVED:
                # Nobody's load has changed, but reads went on.
                self._report(self._names)
                self._ask(entry)
                continue
            slot = self.state.slots[entry.slot]
            prefill, decode = self._names[slot.prefill], self._names[slot.decode]
            name = Name(self._requests[int(entry.slot)], 0)
            match entry.kind:
                case kind if kind == PREFILL_DONE:
                    assert name in self._started, f"{name} computes, and was not told to"
                    self._say(prefill, _tokens(name, slot, 0, 1))
                    self._say(prefill, PrefillReleased(name))
                    reporting.append(prefill)
                case kind if kind == FINISHED:
                    if slot.output_tokens > 1:
                        self._say(decode, _tokens(name, slot, 1, int(slot.output_tokens)))
                    for block in block_chain(
                        root_key(FINGERPRINT, ""),
                        _conversation(entry.slot, slot.prompt_tokens + slot.output_tokens),
                        BLOCK_TOKENS,
                    ):
                        self._say(decode, BlockPersisted(block.key, block.parent, 1))
                    self._say(decode, RequestDone(name))
                    reporting.append(decode)
                case kind:
                    side = Side.PE if kind == READ_ON_PE else Side.DE
                    reader = prefill if side is Side.PE else decode
                    self._say(reader, ReadProgress(name, side, int(entry.tokens), 0.0))
                    reporting.append(reader)
        self._report(reporting)

    def _ask(self, entry: np.record) -> None:
        request = self._requests[int(entry.slot)] = RequestId(f"{entry.slot}.{entry.turn}")
        prompt = _conversation(entry.slot, entry.tokens)
        asked = GenerationRequest(
            request_id=request,
            token_ids=prompt,
            sampling=SamplingParams(max_tokens=int(entry.output_tokens)),
            cache_salt="",
            arrival_s=0.0,
        )
        expected = _conversation(entry.slot, entry.tokens + entry.output_tokens)[len(prompt) :]
        self._clients.append(asyncio.create_task(self._client(asked, expected)))

    async def _client(self, request: GenerationRequest, expected: list[int]) -> None:
        got = [
            token async for update in self.driver.generate(request) for token in update.token_ids
        ]
        assert got == expected


def _conversation(slot: int, tokens: int) -> list[int]:
    """Prompts and answers of an agent so far: the same from its start on, and nobody else's."""
    return list(range(int(slot) * 10_000, int(slot) * 10_000 + int(tokens)))


def _tokens(name: Name, slot: np.record, first: int, stop: int) -> Tokens:
    agent = int(name.request.partition(".")[0])
    answer = _conversation(agent, slot.prompt_tokens + slot.output_tokens)[slot.prompt_tokens :]
    return Tokens(
        name=name,
        position=first,
        tokens=tuple(answer[first:stop]),
        finish_reason="length" if stop == slot.output_tokens else None,
    )


def served(cluster: Cluster, policy: PolicyConfig, joined: list[EngineJoined]) -> Passed:
    """What passes in the product."""

    async def serve() -> Passed:
        scheduler = WatchedScheduler(policy)
        engines = FakeEngines(cluster, policy, joined)
        store = MemoryStore(MemoryDevice(), FINGERPRINT, LAYOUT)
        engines.driver = Driver(
            scheduler=scheduler,
            catalog=Catalog(store, TrieIndex(), 2**30),
            fingerprint=FINGERPRINT,
            limits=DriverLimits(
                max_model_len=10_000,
                block_tokens=BLOCK_TOKENS,
                full_block_bytes=1,
                request_timeout_s=1e6,
                recompute_on_load_failure=True,
            ),
            metrics=Metrics(),
            send=engines.send,
            clock=engines.now_s,
        )
        await engines.serve()
        engines.driver.check_idle()
        store.close()
        return scheduler.passed

    return run_virtual(serve())


def compared(passed: Passed) -> Passed:
    """From the first request on, without fetches that had no effect."""
    after_joins = itertools.dropwhile(lambda each: not isinstance(each[0], RequestArrived), passed)
    return [each for each in after_joins if each[1] or not isinstance(each[0], GroupFetched)]


def instructions(passed: Passed) -> list[Instruction]:
    return [each for _, given in passed for each in given]


def joins(passed: Passed) -> list[EngineJoined]:
    return [event for event, _ in passed if isinstance(event, EngineJoined)]


SYSTEMS = {
    "split": POLICY,
    "shorter": replace(POLICY, read_plan=ReadPlanKind.SHORTER),
    "decode side": replace(POLICY, read_plan=ReadPlanKind.DE),
    **{kind.value: replace(POLICY, scheduler=kind) for kind in BASELINES},
}


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("in_order", [False, True])
def test_both_drivers_pass_the_same(name: str, in_order: bool) -> None:
    cluster = dataclasses.replace(CLUSTER, reads_in_order=in_order)
    expected = simulated(cluster, SYSTEMS[name])
    passed = served(cluster, SYSTEMS[name], joins(expected))
    ours, theirs = compared(expected), compared(passed)
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=False)):
        assert mine == its, f"event {number} of {len(ours)} and its instructions"
    assert len(ours) == len(theirs)
    assert sum(isinstance(each, Assign) for each in instructions(passed)) == 12


def test_the_work_is_worth_comparing() -> None:
    """Each engine serves, both sides read, some requests have no hits, some wait until another has ended."""
    passed = simulated(CLUSTER, SYSTEMS["split"])
    assigns = [each for each in instructions(passed) if isinstance(each, Assign)]
    used = {each.prefill for each in assigns} | {each.decode for each in assigns}
    assert used == {each.engine for each in joins(passed)}
    plans = [each.plan for each in assigns]
    assert any(plan.pe_tokens and plan.de_tokens for plan in plans)
    assert any(not plan.hit_tokens for plan in plans)
    arrived_s = {each.request: each.now_s for each, _ in passed if isinstance(each, RequestArrived)}
    assert any(
        event.now_s > arrived_s[each.request]
        for event, given in passed
        for each in given
        if isinstance(each, Assign)
    )


def test_the_same_run_twice_passes_the_same() -> None:
    assert simulated(CLUSTER, POLICY) == simulated(CLUSTER, POLICY)
