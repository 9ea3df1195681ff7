"""A model of a cluster that plays a driver's part: it makes events, and executes instructions.

For tests, golden logs and benchmarks of `dualpath.policy`. It holds the truth that reports are made of
(what each engine was given and still holds), delivers instructions to an engine late and in order, and
checks what any driver relies on, with an AssertionError that names the ids:

- each attempt is assigned once, to engines that exist, under a plan that covers the hit once;
- prefill starts once, when all reads are complete;
- `Release` goes once to every engine that holds the attempt and is not lost, and to no other;
- no decode engine is ever given more than its device memory.

It moves no bytes and computes nothing; time is a counter. What happens when is the caller's choice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from dualpath.base.ids import EngineId, GroupId, NodeId, RequestId, Role, Side
from dualpath.policy.events import (
    Assign,
    AttemptFailed,
    EngineJoined,
    EngineLost,
    EngineReport,
    GroupFetched,
    Instruction,
    Interrupted,
    PrefillDone,
    ReadProgressed,
    Reject,
    RejectReason,
    Release,
    RequestAborted,
    RequestArrived,
    RequestFinished,
    StartPrefill,
)

__all__ = ["ModelCluster", "ModelEngine", "ModelRequest"]


@dataclass(slots=True)
class _Held:
    """What an engine holds, or is to hold, for one attempt."""

    request: RequestId
    tokens: int
    hbm_tokens: int
    unread_tokens: int


@dataclass(slots=True)
class ModelEngine:
    """`mail`: instructions on their way. `held`: by request, of which the engine has one attempt."""

    id: EngineId
    group: GroupId
    node: NodeId
    role: Role
    hbm_tokens: int
    buffer_tokens: int
    seen: int = 0
    tokens: int = 0
    used_hbm_tokens: int = 0
    mail: deque[_Held | Release] = field(default_factory=deque)
    held: dict[RequestId, _Held] = field(default_factory=dict)

    @property
    def side(self) -> Side:
        return Side.PE if self.role is Role.PREFILL else Side.DE

    @property
    def tokens_under_way(self) -> int:
        """Prompt tokens of the assignments that have not reached it and will not be released at once."""
        tokens: dict[RequestId, int] = {}
        for each in self.mail:
            if isinstance(each, _Held):
                tokens[each.request] = each.tokens
            else:
                tokens.pop(each.request, None)
        return sum(tokens.values())


@dataclass(slots=True)
class ModelRequest:
    """`assign`: of the present attempt, None while it waits. `told`: engines with the attempt."""

    id: RequestId
    prompt_tokens: int
    hit_tokens: int
    new_tokens: int
    attempt: int = 0
    assign: Assign | None = None
    unread_tokens: dict[Side, int] = field(default_factory=dict)
    told: list[EngineId] = field(default_factory=list)
    started: bool = False
    prefilled: bool = False
    interrupted: bool = False


class ModelCluster:
    """The methods that return an event change the truth first; give the event to the scheduler at once

    (a `fetch` may be given later). Give what the scheduler answers to `execute`.
    """

    def __init__(self, block_tokens: int) -> None:
        self.engines: dict[EngineId, ModelEngine] = {}
        self.groups: dict[GroupId, list[ModelEngine]] = {}
        self.requests: dict[RequestId, ModelRequest] = {}
        self.rejected: dict[RequestId, RejectReason] = {}
        self.read_tokens: dict[NodeId, int] = {}
        """Tokens read by each node since the start."""
        self._read_queue_tokens: dict[NodeId, int] = {}
        self._block_tokens = block_tokens
        self._now_s = 0.0

    def join(
        self,
        engine: EngineId,
        group: GroupId,
        role: Role,
        hbm_tokens: int,
        buffer_tokens: int,
        node: NodeId | None = None,
    ) -> EngineJoined:
        """A new engine, or a lost one that restarted, empty."""
        node_id = NodeId(group) if node is None else node
        model = ModelEngine(engine, group, node_id, role, hbm_tokens, buffer_tokens)
        self.engines[engine] = model
        members = self.groups.setdefault(group, [])
        members.append(model)
        self.read_tokens.setdefault(node_id, 0)
        self._read_queue_tokens.setdefault(node_id, 0)
        return EngineJoined(engine, group, role, hbm_tokens, buffer_tokens, self._tick(), node)

    def lose(self, engine: EngineId) -> EngineLost:
        """The engine is gone, with all it held and all that was on its way to it."""
        model = self.engines.pop(engine)
        members = self.groups[model.group]
        members.remove(model)
        if not members:
            del self.groups[model.group]
        for held in model.held.values():
            self._read_queue_tokens[model.node] -= held.unread_tokens
        return EngineLost(engine, self._tick())

    def fetch(self, group: GroupId) -> GroupFetched:
        """What the group's leader would report now."""
        members = self.groups[group]
        reports = tuple(
            [
                EngineReport(
                    each.id,
                    each.seen,
                    len(each.held),
                    each.tokens,
                    each.hbm_tokens - each.used_hbm_tokens,
                    None if str(each.node) == group else self._read_queue_tokens[each.node],
                )
                for each in members
            ]
        )
        return GroupFetched(group, reports, self._read_queue_tokens[members[0].node], self._tick())

    def arrive(
        self, request: RequestId, prompt_tokens: int, hit_tokens: int, new_tokens: int
    ) -> RequestArrived:
        self.requests[request] = ModelRequest(request, prompt_tokens, hit_tokens, new_tokens)
        return RequestArrived(request, prompt_tokens, hit_tokens, new_tokens, self._tick())

    def read(self, request: RequestId, side: Side, tokens: int) -> ReadProgressed:
        """The side's engine has got its instructions, and read `tokens` more of its part."""
        model = self.requests[request]
        assign = _assigned(model)
        engine_id = assign.prefill if side is Side.PE else assign.decode
        self.deliver(engine_id)
        engine = self.engines[engine_id]
        model.unread_tokens[side] -= tokens
        engine.held[request].unread_tokens -= tokens
        self._read_queue_tokens[engine.node] -= tokens
        self.read_tokens[engine.node] += tokens
        return ReadProgressed(request, model.attempt, side, tokens, self._tick())

    def finish_prefill(self, request: RequestId) -> PrefillDone:
        model = self.requests[request]
        assign = _assigned(model)
        assert model.started, f"{request} was never started"
        self.deliver(assign.prefill)
        self.deliver(assign.decode)
        self._give_back(self.engines[assign.prefill], request)
        model.told.remove(assign.prefill)
        model.prefilled = True
        return PrefillDone(request, model.attempt, self._tick())

    def finish(self, request: RequestId) -> RequestFinished:
        """Its decode engine, which has it, ends it."""
        model = self.requests.pop(request)
        assign = _assigned(model)
        self._give_back(self.engines[assign.decode], request)
        return RequestFinished(request, self._tick())

    def abort(self, request: RequestId) -> RequestAborted:
        """Also of a request that is not there."""
        return RequestAborted(request, self._tick())

    def fail(self, request: RequestId, hit_tokens: int, generated_tokens: int) -> AttemptFailed:
        """The attempt failed (or was interrupted) after so many tokens were generated."""
        model = self.requests[request]
        _assigned(model)
        return AttemptFailed(
            request,
            model.attempt,
            model.prompt_tokens + generated_tokens,
            hit_tokens,
            model.new_tokens - generated_tokens,
            self._tick(),
        )

    def deliver(self, engine: EngineId) -> None:
        """All instructions on their way to the engine arrive."""
        model = self.engines[engine]
        while model.mail:
            mail = model.mail.popleft()
            if isinstance(mail, _Held):
                _reserve(model, mail)
                self._read_queue_tokens[model.node] += mail.unread_tokens
            else:
                self._give_back(model, mail.request)

    def execute(self, instructions: Iterable[Instruction], event: object = None) -> None:
        """Check the instructions and put them on their way. `event`: what the scheduler was given."""
        failed = event if isinstance(event, AttemptFailed) else None
        if isinstance(event, RequestAborted) and event.request in self.requests:
            self._execute_end(self.requests[event.request], instructions)
            del self.requests[event.request]
            return
        for each in instructions:
            if isinstance(each, Assign):
                self._execute_assign(each)
            elif isinstance(each, StartPrefill):
                self._execute_start(each)
            elif isinstance(each, Release):
                self._execute_release(each)
            elif isinstance(each, Interrupted):
                model = self.requests[each.request]
                assert each.attempt == model.attempt and model.assign is not None, str(each)
                alive = [engine for engine in model.told if engine in self.engines]
                assert not alive, f"{each} while held by {alive}"
                model.told = []
                model.interrupted = True
            else:
                self._reject(each)
        if failed is not None and failed.request in self.requests:
            self._next_attempt(self.requests[failed.request], failed)

    def check_idle(self) -> None:
        """No request is left, and no engine holds anything once its mail has arrived."""
        assert not self.requests, f"left: {sorted(self.requests)[:5]}"
        for engine in self.engines.values():
            self.deliver(engine.id)
            assert not engine.held, f"{engine.id} still holds {sorted(engine.held)[:5]}"
            assert engine.tokens == engine.used_hbm_tokens == 0, engine.id
        assert not any(self._read_queue_tokens.values()), f"{self._read_queue_tokens}"

    def _tick(self) -> float:
        self._now_s = round(self._now_s + 0.001, 3)
        return self._now_s

    def _execute_assign(self, assign: Assign) -> None:
        model = self.requests[assign.request]
        story = f"{assign}"
        assert model.assign is None and assign.attempt == model.attempt, f"assigned twice: {story}"
        plan = assign.plan
        assert plan.pe_tokens >= 0 and plan.de_tokens >= 0, story
        assert plan.hit_tokens == model.hit_tokens, f"hit is {model.hit_tokens}: {story}"
        assert plan.pe_tokens % self._block_tokens == 0, story
        assert self.engines[assign.prefill].role is Role.PREFILL, story
        assert self.engines[assign.decode].role is Role.DECODE, story
        model.assign = assign
        model.told = [assign.prefill, assign.decode]
        bypass = plan.bypass
        model.unread_tokens = {
            Side.PE: 0 if bypass else plan.pe_tokens,
            Side.DE: 0 if bypass else plan.de_tokens,
        }
        for engine in map(self.engines.__getitem__, model.told):
            hbm_tokens = model.prompt_tokens + model.new_tokens if engine.side is Side.DE else 0
            unread_tokens = model.unread_tokens[engine.side]
            engine.mail.append(_Held(model.id, model.prompt_tokens, hbm_tokens, unread_tokens))

    def _execute_start(self, start: StartPrefill) -> None:
        model = self.requests[start.request]
        assign = _assigned(model)
        assert start.attempt == model.attempt and start.prefill == assign.prefill, str(start)
        assert not model.started, f"started twice: {start}"
        assert not any(model.unread_tokens.values()), f"{model.unread_tokens} unread: {start}"
        model.started = True

    def _execute_release(self, release: Release) -> None:
        model = self.requests.get(release.request)
        if model is not None:
            assert release.attempt == model.attempt, f"attempt is {model.attempt}: {release}"
            alive = [each for each in model.told if each in self.engines]
            assert sorted(release.engines) == sorted(alive), f"held by {alive}: {release}"
            model.told = []
        for engine in release.engines:
            self.engines[engine].mail.append(release)

    def _execute_end(self, model: ModelRequest, instructions: Iterable[Instruction]) -> None:
        """Of an abort: every engine that has the attempt is told, and nothing else happens."""
        for each in instructions:
            assert isinstance(each, Release), f"{each} on abort"
            self._execute_release(each)
        assert not model.told, f"{model.id} aborted, but not released on {model.told}"

    def _reject(self, reject: Reject) -> None:
        model = self.requests.pop(reject.request)
        assert not model.told, f"{reject} while held by {model.told}"
        self.rejected[reject.request] = reject.reason

    def _next_attempt(self, model: ModelRequest, failed: AttemptFailed) -> None:
        assert not model.told, f"{model.id} failed, but not released on {model.told}"
        self.requests[model.id] = ModelRequest(
            model.id,
            failed.prompt_tokens,
            failed.hit_tokens,
            failed.new_tokens,
            attempt=failed.attempt + 1,
        )

    def _give_back(self, engine: ModelEngine, request: RequestId) -> None:
        held = engine.held.pop(request)
        engine.tokens -= held.tokens
        engine.used_hbm_tokens -= held.hbm_tokens
        self._read_queue_tokens[engine.node] -= held.unread_tokens


def _reserve(engine: ModelEngine, held: _Held) -> None:
    engine.seen += 1
    assert held.request not in engine.held, f"{engine.id} holds {held.request} already"
    engine.held[held.request] = held
    engine.tokens += held.tokens
    engine.used_hbm_tokens += held.hbm_tokens
    if engine.role is Role.DECODE:
        used = engine.used_hbm_tokens
        assert used <= engine.hbm_tokens, f"{engine.id} has no memory for {held}: {used} used"


def _assigned(model: ModelRequest) -> Assign:
    assert model.assign is not None, f"{model.id} is not assigned"
    return model.assign
