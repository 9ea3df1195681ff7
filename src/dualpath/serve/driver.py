"""The driver of the real cluster: executes the policy's instructions with processes and messages.

One asyncio loop owns everything here. Events come from clients, engines and the process watcher;
each is given to the pure scheduler, and what it instructs is sent to engines. The driver holds no
scheduling rule of its own. Invariants: a request known to the scheduler is in `_requests`; a
message of an attempt that is over changes nothing; blocks that a running read may use are pinned.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import msgspec

from dualpath.base.errors import InvariantViolation, RequestError
from dualpath.base.ids import EngineId, GroupId, RequestId, Role
from dualpath.kv.chain import Fingerprint, pack_tokens
from dualpath.monitor.metrics import Metrics
from dualpath.policy import events as policy
from dualpath.policy.scheduler import Scheduler
from dualpath.serve.generation import (
    GenerationRequest,
    GenerationUpdate,
    GeneratorHealth,
)
from dualpath.serve.messages import (
    Assignment,
    AttemptFailure,
    BlockNotPersisted,
    BlockPersisted,
    Decode,
    EngineStatus,
    FailureCause,
    Fatal,
    FromEngine,
    Hello,
    Name,
    Prefill,
    PrefillReleased,
    ReadProgress,
    ReleaseAttempt,
    RequestDone,
    StartAttempt,
    ToEngine,
    Tokens,
)
from dualpath.serve.request_state import RequestState, failure_update
from dualpath.serve.roster import EngineRoster, sample_of
from dualpath.serve.stored_prefixes import StoredPrefixes
from dualpath.store.catalog import Catalog

__all__ = ["Driver", "DriverLimits"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DriverLimits:
    """What a request may ask for, and how failures are met."""

    max_model_len: int
    block_tokens: int
    full_block_bytes: int
    request_timeout_s: float
    recompute_on_load_failure: bool


class Driver:
    """Implements `serve.generation.Generator` over engines that `EngineProcesses` keeps alive.

    `send(engine, message)` delivers a control message or drops it when the engine is gone.
    `roster` and `prefixes` are for reading from outside.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        catalog: Catalog | None,
        fingerprint: Fingerprint,
        limits: DriverLimits,
        metrics: Metrics,
        send: Callable[[EngineId, ToEngine], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = limits
        self.roster = EngineRoster()
        self.prefixes = StoredPrefixes(catalog, fingerprint, limits.block_tokens, metrics)
        self._scheduler = scheduler
        self._metrics = metrics
        self._send = send
        self._clock = clock
        self._requests: dict[RequestId, RequestState] = {}
        self._fetch_scheduled = False
        self._draining = False
        self._gone_roles: set[Role] = set()
        self._idle = asyncio.Event()
        self._idle.set()
        self.failure: Exception | None = None
        self._broken = asyncio.Event()

    # The client's side.

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationUpdate, None]:
        """Updates until one carries a finish reason; closing the iterator aborts the request.

        Raises RequestError for a request that could never be served.
        """
        state = self._admit(request)
        until = asyncio.get_running_loop().time() + self.limits.request_timeout_s
        try:
            while True:
                try:
                    async with asyncio.timeout_at(until):
                        update = await state.updates.get()
                except TimeoutError:
                    update = self._late(state)
                yield update
                if update.finish_reason is not None:
                    return
        finally:
            self._leave(state)

    def _late(self, state: RequestState) -> GenerationUpdate:
        reason = f"not ended within {self.limits.request_timeout_s:g} s"
        if state.last_failure:
            reason += f"; its last attempt failed: {state.last_failure}"
        return failure_update(reason, status=504, code="timeout")

    async def abort(self, request_id: RequestId) -> None:
        """End a request for its client with finish reason "abort"."""
        state = self._requests.get(request_id)
        if state is not None and not state.ended:
            state.end(GenerationUpdate(finish_reason="abort"))
            self._abort(state)

    def _admit(self, request: GenerationRequest) -> RequestState:
        if self._draining:
            raise RequestError("the server is shutting down", status=503, code="shutting_down")
        if self.failure is not None:
            raise RequestError(str(_bug(self.failure).error), status=503, code="server_failed")
        if self._gone_roles:
            raise RequestError(self._no_engine().error or "", status=503, code="no_engine")
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id} is in use", code="duplicate_id")
        room = self.limits.max_model_len - len(request.token_ids)
        state = RequestState(
            request=request,
            arrived_s=self._clock(),
            max_new_tokens=min(request.sampling.max_tokens or room, room),
        )
        self._requests[request.request_id] = state
        self._idle.clear()
        hit_tokens = self._pin_stored(state)
        self._metrics.prefix_lookup(queried_tokens=len(request.token_ids), hit_tokens=hit_tokens)
        self._apply(
            policy.RequestArrived(
                request=request.request_id,
                prompt_tokens=len(request.token_ids),
                hit_tokens=hit_tokens,
                new_tokens=state.max_new_tokens,
                now_s=self._clock(),
            )
        )
        self._fetch_soon()
        return state

    def _leave(self, state: RequestState) -> None:
        """The client's iterator is closed: if nothing ended the request, the client went away."""
        if not state.ended:
            state.ended = True
            self._abort(state)

    def _abort(self, state: RequestState) -> None:
        request_id = state.request.request_id
        if self._requests.get(request_id) is state:
            self._apply(policy.RequestAborted(request_id, self._clock()))
            self._forget(request_id)

    def _forget(self, request_id: RequestId) -> None:
        state = self._requests.pop(request_id, None)
        if state is not None:
            state.cancel_retry()
        self.prefixes.release(request_id)
        if not self._requests:
            self._idle.set()

    def _pin_stored(self, state: RequestState) -> int:
        """Hit tokens of the next attempt, pinned until its reads are complete.

        At least one token is computed: its logits are the next token.
        """
        prompt = state.prompt
        most = len(prompt) - 1
        if state.loadable_tokens is not None:
            most = min(most, state.loadable_tokens)
        salt = state.request.cache_salt
        return self.prefixes.pin(state.id, salt, prompt[:most], self._clock())

    # Events in, instructions out.

    def _apply(self, event: policy.Event) -> None:
        """A bug in here, whoever called, ends the server: its state cannot be trusted any more."""
        if self.failure is not None:
            return
        try:
            for instruction in self._scheduler.handle(event):
                self._execute(instruction)
        except Exception as error:
            self._break(error)
            raise

    def _break(self, error: Exception) -> None:
        """Every request ends with an error now; `failed` tells the one who runs the server."""
        if self.failure is not None:
            return
        self.failure = error
        log.critical("a bug in the scheduler or its driver: %s", error, exc_info=error)
        for state in self._requests.values():
            state.end(_bug(error))
        self._requests.clear()
        self._idle.set()
        self._broken.set()

    async def failed(self) -> None:
        """Returns only by raising what broke the driver."""
        await self._broken.wait()
        assert self.failure is not None
        raise self.failure

    def _execute(self, instruction: policy.Instruction) -> None:
        match instruction:
            case policy.Assign():
                self._assign(instruction)
            case policy.StartPrefill(request=request, attempt=attempt, prefill=engine):
                self._reads_complete(self._requests[request])
                self._send(engine, StartAttempt(Name(request, attempt)))
            case policy.Release(request=request, attempt=attempt, engines=engines):
                for engine in engines:
                    self._send(engine, ReleaseAttempt(Name(request, attempt)))
            case policy.Interrupted(request=request, attempt=attempt):
                self._retry(request, attempt, FailureCause.ENGINE_LOST, "an engine was lost")
            case policy.Reject(request=request, reason=reason):
                self._reject(request, reason)

    def _assign(self, assign: policy.Assign) -> None:
        state = self._requests[assign.request]
        state.assigned(assign, self._clock())
        self._metrics.attempt_started()
        request = state.request
        work = Assignment(
            name=Name(assign.request, assign.attempt),
            tokens=pack_tokens(state.prompt),
            sampled_tokens=len(state.output),
            hit_tokens=assign.plan.hit_tokens,
            pe_tokens=assign.plan.pe_tokens,
            root=self.prefixes.root(request.cache_salt),
            sampling=msgspec.structs.replace(request.sampling, max_tokens=state.max_new_tokens),
            max_new_tokens=state.left_tokens,
        )
        prefill, decode = self.roster.hello(assign.prefill), self.roster.hello(assign.decode)
        self._send(decode.engine, Decode(work, prefill.engine, prefill.address))
        self._send(prefill.engine, Prefill(work, decode.engine, decode.address))

    def _reject(self, request_id: RequestId, reason: policy.RejectReason) -> None:
        state = self._requests[request_id]
        if reason is policy.RejectReason.TOO_LONG:
            error = failure_update(
                f"{len(state.request.token_ids)} prompt tokens and {state.max_new_tokens} new ones "
                "are more than any engine can hold; shorten the prompt or lower max_tokens",
                status=400,
            )
        elif reason is policy.RejectReason.TOO_MANY_ATTEMPTS:
            log.error("%s: given up, %s", request_id, state.last_failure)
            error = failure_update(
                f"{state.attempt} attempts failed, the last: {state.last_failure}",
                status=503,
                code="attempts_failed",
            )
        else:
            error = self._no_engine()
        state.end(error)
        self._forget(request_id)

    def _fetch_soon(self) -> None:
        """Leaders hold a standing fetch: answer it, once for all that arrived in this turn of the loop."""
        if not self._fetch_scheduled:
            self._fetch_scheduled = True
            asyncio.get_running_loop().call_soon(self._fetch_all)

    def _fetch_all(self) -> None:
        self._fetch_scheduled = False
        for group in self.roster.by_load:
            self._fetch(group)

    def _fetch(self, group: GroupId) -> None:
        fetched = self.roster.fetch(group, self._clock())
        if fetched is not None:
            self._apply(fetched)

    # What engines say.

    def engine_message(self, engine: EngineId, message: FromEngine) -> None:
        """A message of an engine; those of an engine already lost are ignored."""
        if isinstance(message, Hello):
            self._joined(message)
            return
        if engine not in self.roster:
            return
        now_s = self._clock()
        status = message if isinstance(message, EngineStatus) else None
        if status is not None:
            read_bytes = self.roster.newly_read_bytes(engine, status)
            self._metrics.snic_read(self.roster.hello(engine).group, read_bytes)
        self.roster.heard(engine, now_s, status)
        match message:
            case EngineStatus():
                self._metrics.engine_sample(engine, sample_of(message), now_s)
                self._fetch(self.roster.hello(engine).group)
            case BlockPersisted(key=key, parent=parent, stored_bytes=stored_bytes):
                self.prefixes.persisted(key, parent, stored_bytes)
            case BlockNotPersisted(key=key):
                self.prefixes.not_persisted(key)
            case Fatal():
                log.error("%s: %s", engine, message.detail)
                self.engine_lost(engine, "it says that it ends")
            case _:
                self._attempt_message(message)

    def _attempt_message(
        self,
        message: ReadProgress | AttemptFailure | PrefillReleased | Tokens | RequestDone,
    ) -> None:
        name = message.name
        if isinstance(message, AttemptFailure):
            # Also of an attempt that is over: its other side may have failed first.
            self.prefixes.forget(message.bad_keys)
        state = self._requests.get(name.request)
        if state is None or state.attempt != name.attempt:
            return
        now_s = self._clock()
        match message:
            case ReadProgress(side=side, tokens=tokens, elapsed_s=elapsed_s):
                self.prefixes.answered()
                state.read_s = max(state.read_s, elapsed_s)
                blocks = tokens // self.limits.block_tokens
                self._metrics.kv_read(side, blocks * self.limits.full_block_bytes)
                self._apply(policy.ReadProgressed(name.request, name.attempt, side, tokens, now_s))
            case AttemptFailure():
                self._failed(state, message)
            case PrefillReleased():
                self._apply(policy.PrefillDone(name.request, name.attempt, now_s))
            case Tokens():
                self._prefill_complete(state, message)
                state.take_tokens(message, now_s)
            case RequestDone():
                self._apply(policy.RequestFinished(name.request, now_s))
                self._forget(name.request)

    def _reads_complete(self, state: RequestState) -> None:
        self.prefixes.release(state.id)
        if state.assign is not None:
            self.prefixes.gate.loaded(state.assign.plan.hit_tokens, state.read_s)

    def _prefill_complete(self, state: RequestState, message: Tokens) -> None:
        """The first token of an attempt tells what computing took; its second copy says nothing new."""
        times, assign = message.prefill, state.assign
        if times is None or assign is None or message.position < len(state.output):
            return
        missed_tokens = len(state.prompt) - assign.plan.hit_tokens
        self.prefixes.gate.computed(missed_tokens, times.finished_s - times.started_s)

    # Failures.

    def _failed(self, state: RequestState, failure: AttemptFailure) -> None:
        if failure.loadable_tokens is not None:
            state.loadable_tokens = failure.loadable_tokens
        if failure.cause in (FailureCause.STORE_TIMEOUT, FailureCause.STORE_ERROR):
            self.prefixes.failed(failure.detail, self._clock())
        if failure.cause.of_store:
            self._metrics.kv_load_failed(failure.cause)
        if failure.cause.of_store and not self.limits.recompute_on_load_failure:
            state.end(
                failure_update(f"stored KV could not be loaded ({failure.cause}): {failure.detail}")
            )
            self._abort(state)
            return
        self._retry(failure.name.request, failure.name.attempt, failure.cause, failure.detail)

    def _retry(self, request_id: RequestId, attempt: int, cause: FailureCause, detail: str) -> None:
        state = self._requests[request_id]
        if state.ended:
            self._abort(state)
            return
        self._metrics.attempt_retried(cause)
        state.last_failure = f"{cause}: {detail}"
        state.attempt = attempt + 1
        state.assign = None
        state.cancel_retry()  # It waited to see whether an engine is lost.
        delay_s = state.retry_delay_s(cause)
        if delay_s:
            loop = asyncio.get_running_loop()
            state.retry = loop.call_later(delay_s, self._attempt_again, state, attempt)
        else:
            self._attempt_again(state, attempt)

    def _attempt_again(self, state: RequestState, attempt: int) -> None:
        if self._requests.get(state.id) is not state:
            return
        state.retry = None
        self._apply(
            policy.AttemptFailed(
                request=state.id,
                attempt=attempt,
                prompt_tokens=len(state.prompt),
                hit_tokens=self._pin_stored(state),
                new_tokens=state.left_tokens,
                now_s=self._clock(),
            )
        )
        self._fetch_soon()

    def engine_lost(self, engine: EngineId, reason: str) -> None:
        """Its process is gone: its requests are attempted again on the rest."""
        lost = self.roster.leave(engine)
        if lost is not None:
            log.warning("%s is lost (%s): its requests start again", engine, reason)
            self._metrics.engine_lost(engine, lost.role)
            self._apply(policy.EngineLost(engine, self._clock()))
            self._fetch_soon()

    def role_gone(self, role: Role) -> None:
        """No engine of this role is left and none will be started again."""
        self._gone_roles.add(role)
        for state in list(self._requests.values()):
            state.end(self._no_engine())
            self._abort(state)

    def _no_engine(self) -> GenerationUpdate:
        roles = " and ".join(sorted(self._gone_roles)) or "needed"
        return failure_update(
            f"no {roles} engine is left and restarting failed; see the log, then restart the server",
            status=503,
            code="no_engine",
        )

    def _joined(self, hello: Hello) -> None:
        self.roster.join(hello, self._clock())
        self._metrics.engine_joined(hello.engine, hello.role)
        self._metrics.snic_read(hello.group, 0)
        self._apply(
            policy.EngineJoined(
                engine=hello.engine,
                group=hello.group,
                role=hello.role,
                hbm_tokens=hello.hbm_tokens,
                buffer_tokens=hello.buffer_tokens,
                now_s=self._clock(),
            )
        )

    # For supervision, reports and shutdown.

    @property
    def n_requests(self) -> int:
        return len(self._requests)

    def check_idle(self) -> None:
        """Without requests nothing may be left of any. Raises InvariantViolation."""
        if self._requests:
            return
        self._scheduler.validate()
        left = sum(self._scheduler.stats().phases.values())
        if left:
            raise InvariantViolation(f"no request is left, but {left} in the scheduler")

    async def drain(self, timeout_s: float) -> int:
        """Admit nothing more and wait for what runs; returns how many requests were cut off."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            pass
        left = list(self._requests.values())
        for state in left:
            state.end(GenerationUpdate(finish_reason="abort"))
            self._abort(state)
        return len(left)

    def health(self) -> GeneratorHealth:
        prefill, decode = self.roster.count(Role.PREFILL), self.roster.count(Role.DECODE)
        store_up = self.prefixes.store_up
        detail = "serving"
        if self._draining:
            detail = "shutting down"
        elif not prefill or not decode:
            detail = f"{prefill} prefill and {decode} decode engines: one of each is needed"
        elif store_up is False:
            detail = "serving without the store, which does not answer"
        return GeneratorHealth(
            ready=bool(prefill and decode) and not self._draining,
            detail=detail,
            prefill_engines=prefill,
            decode_engines=decode,
            store_up=store_up,
        )

    def observe(self) -> None:
        """Set the gauges that no event sets, and look for leaks when idle."""
        self.check_idle()
        running = sum(state.assign is not None for state in self._requests.values())
        self._metrics.queues(running=running, waiting=len(self._requests) - running)
        for group, tokens in self.roster.read_queues.items():
            self._metrics.read_queue(group, tokens)
        for group, share in self.roster.read_utilization(self._clock()).items():
            self._metrics.snic_utilization(group, share)
        self.prefixes.observe()


def _bug(error: Exception) -> GenerationUpdate:
    return failure_update(
        f"the server failed and ends ({type(error).__name__}: {error}); see its log, then restart it",
        status=503,
        code="server_failed",
    )
