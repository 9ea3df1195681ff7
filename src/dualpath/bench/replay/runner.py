"""Plays sessions against a server, and records when everything was due, was sent and came back.

Open loop: an online session starts at its arrival time whatever the server does, and a turn is due when the
one before has ended and its delay has passed; a send that is late is recorded as late, and latencies count
from when it was due (no coordinated omission). Knows no HTTP, no token ids and no figures. Invariants:
turns of a session go out in order, one at a time; a turn that fails ends its session; nothing waits in a
queue; every request that was sent has one record, that of a request cut off at the end has no `end_s` and
no error; a background task that fails takes the run down.
"""

from __future__ import annotations

import asyncio
import gc
import math
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from dualpath.bench.replay.conversation import Conversation, PromptBody
from dualpath.bench.replay.endpoint import Answer, Sender
from dualpath.bench.replay.gaps import GapHistogram
from dualpath.bench.replay.load import Limits, OfflineLoad, OnlineLoad, Tally
from dualpath.bench.replay.records import RequestRecord, Run, ServerSample, SessionRecord
from dualpath.bench.replay.server_metrics import used
from dualpath.bench.replay.steady import SteadyState, Verdict
from dualpath.traces.model import Session

__all__ = ["CLIENT_LIMIT", "Converse", "run_load"]

Converse = Callable[[Session], Conversation]

CLIENT_LIMIT = "client limit"
"""The kind of error of a request above `Limits.max_in_flight`."""

_LEAD_S = 0.25  # A session's first prompt is made this long before it is due.
_SLICE_S = 60.0
_METRICS_DEADLINE_S = 5.0
_CUT_DEADLINE_S = 30.0
_PREPARED_AT_ONCE = 32
_EMPTY_LOOKS = 3
_RARE_COLLECTIONS = (50_000, 100, 100)


async def run_load(
    load: OfflineLoad | OnlineLoad,
    sender: Sender,
    converse: Converse,
    limits: Limits | None = None,
    *,
    tally: Tally | None = None,
    stop: asyncio.Event | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """One run. `converse` makes a session's conversation when the session is about to start.

    `tally` is kept up to date meanwhile. Setting `stop` ends the run as "interrupted". `clock` is that of
    the sender's times. Raises only for bugs: what a server does is in the records."""
    return await _Run(load, sender, converse, limits or Limits(), tally or Tally(), clock).play(
        stop
    )


class _Run:
    def __init__(
        self,
        load: OfflineLoad | OnlineLoad,
        sender: Sender,
        converse: Converse,
        limits: Limits,
        tally: Tally,
        clock: Callable[[], float],
    ) -> None:
        self._load = load
        self._sender = sender
        self._converse = converse
        self._limits = limits
        self._tally = tally
        self._clock = clock
        self._origin_s = clock()
        self._ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._tasks: set[asyncio.Task[None]] = set()
        self._unfinished = 0  # Sessions that were started or will be, as far as is known.
        self._requests: list[RequestRecord] = []
        self._sessions: list[SessionRecord] = []
        self._samples: list[ServerSample] = []
        self._waiting: dict[
            int, float
        ] = {}  # Session -> when its request was due; no first token yet.
        self._measured_from_s = 0.0 if limits.warmup_sessions else limits.warmup_s
        if limits.warmup_sessions:
            self._measured_from_s = math.inf
        steady = limits.steady
        self._steady = None if steady is None else SteadyState(steady)
        self._gaps = GapHistogram(_SLICE_S if steady is None else steady.slice_s)

    async def play(self, stop: asyncio.Event | None) -> Run:
        tally = self._tally
        tally.sessions = len(self._load.sessions)
        tally.turns = sum(
            len(each.turns) + (each.first_round_tokens > 0) for each in self._load.sessions
        )
        with _settled_memory():
            if stop is not None:
                self._spawn(self._interrupt(stop))
            if isinstance(self._load, OfflineLoad):
                await self._start_all(self._load)
            else:
                self._origin_s = self._clock() + _LEAD_S
                self._unfinished += 1  # The arrivals themselves.
                self._spawn(self._arrive(self._load), of_session=True)
            cpu_s = time.process_time()
            self._spawn(self._sample())
            if self._limits.duration_s is not None:
                self._spawn(self._end_at(self._limits.duration_s))
            if self._steady is not None and self._limits.steady is not None:
                self._spawn(self._judge(self._steady, self._limits.steady.slice_s))
            try:
                ended = await self._ended
                duration_s = self._now()
                cpu_s = time.process_time() - cpu_s
            finally:
                await self._cut()
            await self._look_at_server()
        return self._result(ended, duration_s, cpu_s)

    def _result(self, ended: str, duration_s: float, cpu_s: float) -> Run:
        from_s = min(self._measured_from_s, duration_s)
        if self._steady is not None and ended == Verdict.STEADY:
            from_s = max(from_s, self._steady.from_s)
        online = isinstance(self._load, OnlineLoad)
        return Run(
            mode="online" if online else "offline",
            agents=None if online else len(self._load.sessions),
            rate_aps=self._load.rate_aps if isinstance(self._load, OnlineLoad) else None,
            ended=ended,
            from_s=from_s,
            duration_s=duration_s,
            client_cpu_s=cpu_s,
            requests=self._requests,
            sessions=self._sessions,
            samples=self._samples,
            itl_s=self._gaps.quantiles(from_s if ended == Verdict.STEADY else 0.0),
        )

    # Starting sessions.

    async def _start_all(self, load: OfflineLoad) -> None:
        """Time 0 is when all first prompts are made."""
        ready = []
        for session in load.sessions:
            talk = self._converse(session)
            ready.append((session, talk, talk.prompt(0)))
            if len(ready) % _PREPARED_AT_ONCE == 0:
                await asyncio.sleep(0)
                if self._ended.done():
                    break
        self._origin_s = self._clock()
        self._unfinished += len(ready)
        for session, talk, body in ready:
            self._spawn(self._play(session, talk, body, 0.0), of_session=True)
        if not ready:
            self._end("complete")

    async def _arrive(self, load: OnlineLoad) -> None:
        last_s = self._limits.duration_s
        for session, at_s in zip(load.sessions, load.arrivals_s, strict=True):
            if last_s is not None and at_s >= last_s:
                # Measured to its end also when all who came have left.
                await self._end_at(last_s)
                break
            await self._until(at_s - _LEAD_S)
            self._unfinished += 1
            self._spawn(self._start(session, at_s), of_session=True)

    async def _start(self, session: Session, at_s: float) -> None:
        talk = self._converse(session)
        body = talk.prompt(0)
        await self._until(at_s)
        await self._play(session, talk, body, at_s)

    # One session.

    async def _play(
        self, session: Session, talk: Conversation, body: PromptBody, at_s: float
    ) -> None:
        turns = talk.turns
        number = len(self._sessions)
        record = SessionRecord(id=session.id, turns=len(turns), scheduled_s=at_s)
        self._sessions.append(record)
        self._tally.sessions_started += 1
        if number == self._limits.warmup_sessions and number:
            self._measured_from_s = max(at_s, self._limits.warmup_s)
        for index, turn in enumerate(turns):
            await self._until(at_s)
            answer = await self._ask(number, index, at_s, body, turn.output_tokens)
            if answer.error:
                self._tally.turns_skipped += len(turns) - index - 1
                break
            ended_s = self._now() if answer.end_s is None else answer.end_s - self._origin_s
            talk.take_answer(index, answer.token_ids)
            if index + 1 < len(turns):
                at_s = ended_s + turns[index + 1].delay_s
                body = talk.prompt(index + 1)
            else:
                self._sessions[number] = replace(record, finished_s=ended_s)
        self._tally.sessions_ended += 1

    async def _ask(
        self, number: int, index: int, at_s: float, body: PromptBody, output_tokens: int
    ) -> Answer:
        """Send, and record what came of it."""
        tally = self._tally
        sent_s = self._clock()
        if tally.in_flight >= self._limits.max_in_flight:
            detail = f"{tally.in_flight} requests in flight"
            answer = Answer(sent_s=sent_s, end_s=sent_s, error=CLIENT_LIMIT, detail=detail)
            self._record(number, index, at_s, answer)
            return answer
        first_s: float | None = None

        def take_first(seen_s: float) -> None:
            nonlocal first_s
            first_s = seen_s
            self._waiting.pop(number, None)

        tally.in_flight += 1
        self._waiting[number] = at_s
        try:
            answer = await self._sender.send(body, output_tokens, take_first)
        except asyncio.CancelledError:
            self._record(number, index, at_s, Answer(sent_s=sent_s, first_s=first_s))
            raise
        finally:
            tally.in_flight -= 1
            self._waiting.pop(number, None)
        self._record(number, index, at_s, answer)
        return answer

    def _record(self, number: int, index: int, at_s: float, answer: Answer) -> None:
        origin_s = self._origin_s

        def since(seen_s: float | None) -> float | None:
            return None if seen_s is None else seen_s - origin_s

        record = RequestRecord(
            session=number,
            turn=index,
            scheduled_s=at_s,
            sent_s=answer.sent_s - origin_s,
            first_s=since(answer.first_s),
            second_s=since(answer.second_s),
            last_s=since(answer.last_s),
            end_s=since(answer.end_s),
            prompt_tokens=answer.prompt_tokens,
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            cached_by_path=answer.cached_by_path,
            timings=answer.timings,
            error=answer.error,
            detail=answer.detail,
        )
        self._requests.append(record)
        tally = self._tally
        if answer.error:
            tally.requests += 1
            tally.errors[answer.error] = tally.errors.get(answer.error, 0) + 1
            if self._steady is not None:
                self._steady.observe_failure(self._now())
        elif answer.end_s is not None:
            tally.requests += 1
            tally.output_tokens += answer.output_tokens
            if at_s >= self._measured_from_s:
                self._gaps.add(at_s, answer.gaps_s)
            if record.ttft_s is not None:
                tally.answered += 1
                tally.ttft_sum_s += record.ttft_s
                if self._steady is not None:
                    self._steady.observe(self._now(), record.ttft_s, record.tpot_s)

    # Beside the sessions.

    async def _judge(self, steady: SteadyState, slice_s: float) -> None:
        number = 1
        while True:
            await self._until(number * slice_s)
            now_s = self._now()
            waiting_s = [max(now_s - at_s, 0.0) for at_s in self._waiting.values()]
            verdict = steady.look(now_s, waiting_s)
            if verdict is not Verdict.CONTINUE:
                return self._end(verdict.value)
            number = max(number, math.floor(now_s / slice_s)) + 1

    async def _end_at(self, at_s: float) -> None:
        await self._until(at_s)
        self._end("duration")

    async def _interrupt(self, stop: asyncio.Event) -> None:
        await stop.wait()
        self._end("interrupted")

    async def _sample(self) -> None:
        """A server that has no metrics is not asked again and again."""
        number = 0
        while number < _EMPTY_LOOKS or self._samples:
            at_s = number * self._limits.sample_s
            await self._until(at_s)
            await self._look_at_server()
            number = max(number, math.floor(self._now() / self._limits.sample_s)) + 1

    async def _look_at_server(self) -> None:
        try:
            async with asyncio.timeout(_METRICS_DEADLINE_S):
                metrics = used(await self._sender.metrics())
        except TimeoutError:
            return
        if metrics:
            self._samples.append(ServerSample(at_s=self._now(), metrics=metrics))

    # Time and tasks.

    def _now(self) -> float:
        return self._clock() - self._origin_s

    async def _until(self, at_s: float) -> None:
        """Returns at once, without giving way, when that is past."""
        delay_s = self._origin_s + at_s - self._clock()
        if delay_s > 0:
            await asyncio.sleep(delay_s)

    def _spawn(self, work: Coroutine[Any, Any, None], *, of_session: bool = False) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._session_done if of_session else self._task_done)

    def _session_done(self, task: asyncio.Task[None]) -> None:
        self._task_done(task)
        self._unfinished -= 1
        if not self._unfinished:
            self._end("complete")

    def _task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if (
            not task.cancelled()
            and (error := task.exception()) is not None
            and not self._ended.done()
        ):
            self._ended.set_exception(error)

    def _end(self, why: str) -> None:
        if not self._ended.done():
            self._ended.set_result(why)

    async def _cut(self) -> None:
        """What still runs is cancelled; its requests are recorded as cut off."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=_CUT_DEADLINE_S)


@contextmanager
def _settled_memory() -> Iterator[None]:
    """Few garbage collections, and none of what exists before the run: their pauses, measured at 2 to 6 ms
    each with a few hundred requests in flight, would delay sends. A run makes hardly any cycles."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_RARE_COLLECTIONS)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
