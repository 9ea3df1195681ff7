"""One request as the driver sees it, and the updates that its client gets.

Knows the request's tokens and attempts; no engines, no scheduler, no store.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from dualpath.base.errors import InvariantViolation
from dualpath.base.ids import RequestId, Side
from dualpath.policy.events import Assign
from dualpath.serve.generation import (
    GenerationRequest,
    GenerationUpdate,
    Placement,
    RequestTimings,
)
from dualpath.serve.messages import FailureCause, PrefillTimes, Tokens

__all__ = ["RequestState", "failure_update"]

_FIRST_RETRY_S = 0.05
_LONGEST_RETRY_S = 2.0


@dataclass(slots=True, eq=False)
class RequestState:
    """Owned by the driver from arrival until the cluster holds nothing of the request."""

    request: GenerationRequest
    arrived_s: float
    max_new_tokens: int
    updates: asyncio.Queue[GenerationUpdate] = field(default_factory=asyncio.Queue)
    """Bounded by the tokens that a request may generate."""
    output: list[int] = field(default_factory=list)
    attempt: int = 0
    loadable_tokens: int | None = None
    """What an attempt may still load: each failed load lowers it, so a bad store ends no request."""
    assign: Assign | None = None
    ended: bool = False
    """The client has its finish reason, or is gone."""
    first_assigned_s: float | None = None
    assigned_s: float = 0.0
    """When the present attempt got its engines."""
    placed_attempt: int | None = None
    """The last attempt whose placement the client was told."""
    read_s: float = 0.0
    """How long this attempt's reads have taken so far, on the slower side."""
    last_failure: str = ""
    engine_failures: int = 0
    """Attempts that failed for another reason than the store or a lost engine."""
    retry: asyncio.TimerHandle | None = None

    @property
    def id(self) -> RequestId:
        return self.request.request_id

    @property
    def prompt(self) -> list[int]:
        """The next attempt's prompt: the client's, and what was generated so far."""
        return [*self.request.token_ids, *self.output]

    @property
    def left_tokens(self) -> int:
        """The most tokens that may still be generated."""
        return self.max_new_tokens - len(self.output)

    def end(self, update: GenerationUpdate) -> None:
        """The last update, unless there was one."""
        if not self.ended:
            self.ended = True
            self.updates.put_nowait(update)

    def take_tokens(self, message: Tokens, now_s: float) -> None:
        """Tokens of the current attempt, for the client. Raises InvariantViolation for a gap."""
        if message.position < len(self.output):
            return  # The attempt's first token, which both of its engines send.
        if message.position > len(self.output):
            raise InvariantViolation(
                f"{message.name}: tokens from position {message.position} on, {len(self.output)} known"
            )
        first = not self.output
        self.output.extend(message.tokens)
        if self.ended:
            return
        plan = self.assign.plan if first and self.assign is not None else None
        self.updates.put_nowait(
            GenerationUpdate(
                token_ids=list(message.tokens),
                logprobs=list(message.logprobs) or None,
                finish_reason=message.finish_reason,
                cached_tokens=None if plan is None else plan.hit_tokens,
                cached_by_path=None
                if plan is None
                else {Side.PE.value: plan.pe_tokens, Side.DE.value: plan.de_tokens},
                timings=self._timings(message.prefill, now_s) if first else None,
                placement=self._new_placement(),
            )
        )
        self.ended = message.finish_reason is not None

    def retry_delay_s(self, cause: FailureCause) -> float:
        """How long to wait before the next attempt, after a failure that counts from now on.

        A dying engine breaks its connections before its end is known to the driver, and refuses new
        ones at once: without a pause a request would use up its attempts in that time.
        """
        if cause.of_store or cause is FailureCause.ENGINE_LOST:
            return 0.0
        self.engine_failures += 1
        if self.engine_failures == 1:
            return 0.0
        return min(_FIRST_RETRY_S * 2.0 ** (self.engine_failures - 2), _LONGEST_RETRY_S)

    def cancel_retry(self) -> None:
        if self.retry is not None:
            self.retry.cancel()
            self.retry = None

    def assigned(self, assign: Assign, now_s: float) -> None:
        """The present attempt has its engines."""
        self.assign = assign
        self.read_s = 0.0
        self.assigned_s = now_s
        if self.first_assigned_s is None:
            self.first_assigned_s = now_s

    def _new_placement(self) -> Placement | None:
        if self.assign is None or self.placed_attempt == self.attempt:
            return None
        self.placed_attempt = self.attempt
        return Placement(
            attempt=self.attempt + 1,
            prefill_engine=self.assign.prefill,
            decode_engine=self.assign.decode,
        )

    def _timings(self, at_engine: PrefillTimes | None, now_s: float) -> RequestTimings | None:
        """With the first token, which is here now. The engine's times start when it got the attempt."""
        if at_engine is None or self.first_assigned_s is None:
            return None
        return RequestTimings(
            prepare_s=self.arrived_s - self.request.arrival_s,
            scheduling_s=self.first_assigned_s - self.arrived_s,
            retry_s=self.assigned_s - self.first_assigned_s,
            allocation_s=at_engine.reserved_s,
            read_s=at_engine.read_s - at_engine.reserved_s,
            wait_s=at_engine.started_s - at_engine.read_s,
            prefill_s=at_engine.finished_s - at_engine.started_s,
            delivery_s=now_s - self.assigned_s - at_engine.finished_s,
        )


def failure_update(message: str, *, status: int = 500, code: str | None = None) -> GenerationUpdate:
    """The end of a request that could not be served; `status` is the HTTP status."""
    return GenerationUpdate(
        finish_reason="error", error=message, error_status=status, error_code=code
    )
