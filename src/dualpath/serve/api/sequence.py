"""One sequence: from the cluster's tokens to deltas of text, with stop strings, metrics and its end.

Knows no HTTP. Invariant: whatever way a run ends (a stop string, the client gone, an error), the cluster's
generator is closed, which releases what the request holds, and the end is counted once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Collection, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from dualpath.base.errors import RequestError
from dualpath.engine.sampling import TokenLogprobs
from dualpath.monitor.tracing import RequestFacts, Stage, Tracing
from dualpath.serve.api.sampling import TextRules
from dualpath.serve.api.settings import ApiContext
from dualpath.serve.generation import (
    GenerationRequest,
    GenerationUpdate,
    Placement,
    RequestTimings,
)
from dualpath.serve.text import StopMatcher, text_stream

__all__ = ["Delta", "Sequence", "merged"]


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new of the sequence `index`. The text may lag behind the tokens, never the reverse."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True, eq=False)
class Sequence:
    """A prompt and how to answer it; `index` among the choices of the response. Run it once.

    `trace_headers`: those of the HTTP request that name the client's span.
    """

    context: ApiContext
    request: GenerationRequest
    rules: TextRules
    index: int
    trace_headers: Mapping[str, str] = field(default_factory=dict)
    generated_tokens: int = 0
    cached_tokens: int = 0
    cached_by_path: dict[str, int] = field(default_factory=dict)
    timings: RequestTimings | None = None
    placement: Placement | None = None
    _first_token_s: float | None = None
    _last_token_s: float | None = None

    @property
    def prompt(self) -> list[int]:
        return self.request.token_ids

    async def run(self) -> AsyncGenerator[Delta, None]:
        """Deltas until one has a finish reason. RequestError when the cluster could not."""
        reason = "abort"  # Unless it is known to end otherwise: closed or cancelled.
        failure = None
        try:
            async with aclosing(self._deltas()) as deltas:
                async for delta in deltas:
                    if delta.finish_reason is not None:
                        # Before the yield, from which the consumer need not come back.
                        reason = delta.finish_reason
                    yield delta
        except Exception as error:
            reason, failure = "error", str(error)
            raise
        finally:
            self._count_end(reason, failure)

    async def _deltas(self) -> AsyncGenerator[Delta, None]:
        rules, sampling = self.rules, self.request.sampling
        decoder = text_stream(
            self.context.tokenizer, self.prompt, skip_special_tokens=rules.skip_special_tokens
        )
        matcher = StopMatcher(rules.stops, include=rules.include_stop)
        async with aclosing(self.context.generator.generate(self.request)) as updates:
            async for update in updates:
                self._note(update)
                text = ""
                tokens = update.token_ids
                for position, token in enumerate(update.token_ids):
                    self.generated_tokens += 1
                    is_end = (
                        update.finish_reason == "stop" and position == len(update.token_ids) - 1
                    )
                    if is_end and token in sampling.ends and not rules.include_stop:
                        continue
                    armed = self.generated_tokens > rules.min_tokens
                    text += matcher.feed(decoder.feed(token), armed=armed)
                    if matcher.matched is not None:
                        tokens = tokens[: position + 1]
                        break
                reason = update.finish_reason
                stop_reason: str | int | None = self._stop_token(update)
                if reason is not None and matcher.matched is None:
                    text += matcher.feed(decoder.finish()) + matcher.finish()
                if matcher.matched is not None:
                    reason, stop_reason = "stop", matcher.matched
                logprobs = (update.logprobs or [])[: len(tokens)]
                if text or tokens or reason is not None:
                    yield Delta(self.index, text, list(tokens), logprobs, reason, stop_reason)
                if reason is not None:
                    return
        raise RequestError("the cluster ended the request without a reason", status=500)

    def _note(self, update: GenerationUpdate) -> None:
        if update.finish_reason == "error":
            raise RequestError(
                update.error or "the request failed",
                status=update.error_status,
                code=update.error_code or "generation_failed",
            )
        if update.cached_tokens is not None:
            self.cached_tokens = update.cached_tokens
        if update.cached_by_path is not None:
            self.cached_by_path = update.cached_by_path
        if update.placement is not None:
            self.placement = update.placement
        metrics, now_s = self.context.metrics, time.monotonic()
        if update.timings is not None:
            self.timings = update.timings.delivered_after(now_s - self.request.arrival_s)
            metrics.request_times(
                queue_s=update.timings.scheduling_s,
                read_s=update.timings.read_s,
                prefill_s=update.timings.prefill_s,
            )
        if update.token_ids:
            if self._last_token_s is None:
                metrics.first_token(now_s - self.request.arrival_s)
                self._first_token_s = now_s
            else:
                metrics.next_tokens(now_s - self._last_token_s, len(update.token_ids))
            self._last_token_s = now_s

    def _stop_token(self, update: GenerationUpdate) -> int | None:
        """The client's own stop token, if that is what ended the text."""
        if update.finish_reason != "stop" or not update.token_ids:
            return None
        last = update.token_ids[-1]
        return last if last in self.request.sampling.stop_token_ids else None

    def _count_end(self, reason: str, failure: str | None) -> None:
        end_s = time.monotonic()
        self.context.metrics.request_ended(
            reason,
            e2e_s=end_s - self.request.arrival_s,
            prompt_tokens=len(self.prompt),
            generation_tokens=self.generated_tokens,
        )
        if self.context.tracing is not None:
            self._trace(self.context.tracing, end_s, reason, failure)

    def _trace(self, tracing: Tracing, end_s: float, reason: str, failure: str | None) -> None:
        request, timings, placement = self.request, self.timings, self.placement
        start_s, first_s = request.arrival_s, self._first_token_s
        stages = [] if timings is None else list(_stages(timings, start_s))
        if first_s is not None:
            stages.append(Stage("decode", first_s, end_s))
        tracing.request(
            RequestFacts(
                request_id=request.request_id,
                model=self.context.settings.model_name,
                trace_headers=self.trace_headers,
                start_s=start_s,
                end_s=end_s,
                finish_reason=reason,
                error=failure,
                prompt_tokens=len(self.prompt),
                completion_tokens=self.generated_tokens,
                max_tokens=request.sampling.max_tokens,
                temperature=request.sampling.temperature,
                top_p=request.sampling.top_p,
                ttft_s=None if first_s is None else first_s - start_s,
                scheduling_s=None if timings is None else timings.scheduling_s,
                prefill_s=None if timings is None else timings.prefill_s,
                cached_tokens=None if first_s is None else self.cached_tokens,
                cached_by_path=self.cached_by_path,
                attempts=None if placement is None else placement.attempt,
                prefill_engine=None if placement is None else placement.prefill_engine,
                decode_engine=None if placement is None else placement.decode_engine,
                stages=tuple(stages),
            )
        )


def _stages(timings: RequestTimings, start_s: float) -> Iterator[Stage]:
    """One after the other; those that took no time, such as reads of a miss, are left out.

    The way of the assignment to the engines counts in the last, as engines measure from its arrival.
    """
    for name, seconds in msgspec.structs.asdict(timings).items():
        if seconds > 0:
            yield Stage(name.removesuffix("_s"), start_s, start_s + seconds)
            start_s += seconds


async def merged(sequences: Collection[Sequence]) -> AsyncGenerator[Delta, None]:
    """The deltas of several sequences as they come. The first failure ends all."""
    queue: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(maxsize=2 * len(sequences))

    async def pump(sequence: Sequence) -> None:
        try:
            async with aclosing(sequence.run()) as deltas:
                async for delta in deltas:
                    await queue.put(delta)
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    tasks = [asyncio.create_task(pump(sequence)) for sequence in sequences]
    try:
        running = len(tasks)
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
