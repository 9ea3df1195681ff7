"""One client's generation request, from its body to the end of its answer: the prefill server, then the
decode server, again elsewhere when one fails before anything of the answer has reached the client.

Knows the API's bodies and the connector's parameters (`dualpath.vllm.params` has the contract), and no
policy. A plain answer is passed on when it is complete, so it can be tried again until its end; a stream
from its first event on. Invariants: every exchange that is opened is closed on every path, which tells the
server to stop; at most `max_attempts` attempts.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec
from msgspec import Raw

from dualpath.base.errors import DualPathError, RequestError
from dualpath.base.ids import MiB, RequestId
from dualpath.http import Head, HttpFailed, PulledAnswer
from dualpath.monitor.metrics import Metrics
from dualpath.router.body import GenerationCall
from dualpath.router.prompts import PromptMeter, SentPrompts
from dualpath.router.reply import Reply
from dualpath.router.seating import Seating
from dualpath.router.streams import WholeEvents
from dualpath.router.ticket import Seats, Ticket
from dualpath.router.upstream import Headers, Upstream
from dualpath.vllm.params import decode_params, prefill_params

__all__ = ["Outcomes", "Relay"]

log = logging.getLogger(__name__)

_RETRIED = frozenset({429, 500, 502, 503, 504})
"""What another server, or the same one later, may answer well."""
_ANSWER_LIMIT_BYTES = 64 * MiB
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0
_LOST = "engine_lost"
"""A server of the request is known to be gone, though it need not be the one that was waited for."""
_SERVED_BY = b"x-dualpath-servers"
"""Which servers an answer comes from: prefill, decode."""


class _PrefillUsage(msgspec.Struct):
    prompt_tokens: int = 0


class _PrefillAnswer(msgspec.Struct):
    """What matters of a prefill server's answer."""

    kv_transfer_params: Raw = Raw(b"null")
    usage: _PrefillUsage | None = None


class _AttemptLost(DualPathError):
    """A server failed this attempt. `answer`: what it said, if it said anything."""

    def __init__(
        self, upstream: Upstream, kind: str, detail: str, answer: _Answered | None = None
    ) -> None:
        super().__init__(f"{upstream.name}: {detail}")
        self.upstream = upstream
        self.kind = kind
        self.answer = answer


@dataclass(frozen=True, slots=True)
class _Answered:
    head: Head
    body: bytes


class _Refused(Exception):
    """The client's request is at fault, as a server says; its answer is the client's."""

    def __init__(self, answer: _Answered) -> None:
        super().__init__()
        self.answer = answer


@dataclass(slots=True)
class _Errand:
    """One client's request with what has come of it so far. `kept`: parameters of a prefill that was
    done."""

    name: RequestId
    call: GenerationCall
    headers: Headers
    digests: list[int]
    began_s: float
    kept: Raw | None = None
    kept_by: Upstream | None = None


class Outcomes(Protocol):
    """Is told what came of each exchange with a server."""

    def failed(self, upstream: Upstream, kind: str, detail: str) -> None: ...

    def served(self, upstream: Upstream) -> None: ...


class Relay:
    """Serves generation requests, any number at once."""

    def __init__(self, seating: Seating, outcomes: Outcomes, metrics: Metrics) -> None:
        self._seating = seating
        self._outcomes = outcomes
        self._metrics = metrics
        self._meter = PromptMeter()
        self._sent = SentPrompts()
        self._without_connector: set[str] = set()

    async def serve(
        self, name: RequestId, call: GenerationCall, headers: Headers, reply: Reply
    ) -> None:
        """Until the answer is complete. RequestError when it cannot be given; then nothing of it was
        sent."""
        errand = _Errand(
            name, call, headers, SentPrompts.digests(call.root, call.content), time.monotonic()
        )
        prompt_tokens, hit_tokens = self._expected(errand)
        last: _AttemptLost | None = None
        with self._seating.ticket(name, prompt_tokens, hit_tokens) as ticket:
            while True:
                try:
                    seats = await ticket.wait()
                except RequestError as error:
                    return await self._give_up(error, last, reply)
                try:
                    await self._attempt(errand, ticket, seats, reply)
                except _Refused as refused:
                    await reply.whole(refused.answer.head, refused.answer.body, ())
                except _AttemptLost as lost:
                    if lost.kind != _LOST:
                        self._outcomes.failed(lost.upstream, lost.kind, str(lost))
                    if reply.started:
                        return await reply.break_off(_broken(lost))
                    last = lost
                    await self._next_attempt(errand, ticket, lost)
                    continue
                ticket.finished = True
                return None

    def _expected(self, errand: _Errand) -> tuple[int, int]:
        """Tokens of the prompt, and of those that are thought to be stored."""
        call = errand.call
        known_bytes = self._sent.known_bytes(errand.digests)
        if call.prompt_tokens is not None:
            return max(1, call.prompt_tokens), known_bytes // 4
        hit_tokens = self._meter.tokens(known_bytes) if known_bytes else 0
        return self._meter.tokens(len(call.content)), hit_tokens

    async def _next_attempt(self, errand: _Errand, ticket: Ticket, lost: _AttemptLost) -> None:
        log.warning("request %s: attempt %d: %s", errand.name, ticket.attempt + 1, lost)
        if lost.upstream is errand.kept_by:
            errand.kept = errand.kept_by = None
        pause_s = min(_FIRST_PAUSE_S * 2.0**ticket.attempt, _LONGEST_PAUSE_S)
        # What a prefill server keeps needs no read, unless that is lost meanwhile.
        hit_tokens = 0 if errand.kept is not None else self._expected(errand)[1]
        await asyncio.sleep(pause_s)
        self._seating.failed(ticket, lost.kind, hit_tokens=hit_tokens)

    async def _give_up(self, error: RequestError, last: _AttemptLost | None, reply: Reply) -> None:
        if last is None:
            raise error
        if last.answer is not None:
            return await reply.whole(last.answer.head, last.answer.body, ())
        raise RequestError(
            f"{error}; the last: {last}", status=error.status, code=error.code
        ) from last

    async def _attempt(self, errand: _Errand, ticket: Ticket, seats: Seats, reply: Reply) -> None:
        if ticket.attempt == 0:
            self._metrics.request_times(
                queue_s=time.monotonic() - errand.began_s, read_s=None, prefill_s=None
            )
        if errand.call.single and errand.kept is None and seats.prefill is not None:
            await self._prefill(errand, ticket, seats, seats.prefill)
        self._seating.prefilled(ticket)
        await self._decode(errand, ticket, seats.decode, reply)

    async def _prefill(
        self, errand: _Errand, ticket: Ticket, seats: Seats, upstream: Upstream
    ) -> None:
        """The prompt's KV is made, and kept by the prefill server for whoever decodes."""
        began_s = time.monotonic()
        params = prefill_params(
            errand.name,
            ticket.attempt + 1,
            seats.decode.address.kv,
            hit_tokens=seats.hit_tokens,
            pe_tokens=seats.pe_tokens,
        )
        body = errand.call.for_prefill(params)
        async with self._exchange(errand, ticket, upstream, body) as (head, answer):
            content = await answer.body(_ANSWER_LIMIT_BYTES)
            if head.status != 200:
                raise _Refused(_Answered(head, content))
        self._outcomes.served(upstream)
        self._metrics.request_times(queue_s=None, read_s=None, prefill_s=time.monotonic() - began_s)
        self._sent.sent(errand.digests)
        self._take_prefilled(errand, upstream, content)

    def _take_prefilled(self, errand: _Errand, upstream: Upstream, content: bytes) -> None:
        try:
            said = msgspec.json.decode(content, type=_PrefillAnswer)
            params = msgspec.json.decode(said.kv_transfer_params, type=dict[str, object] | None)
            ours = decode_params(params)
        except (msgspec.MsgspecError, RequestError) as error:
            detail = f"its answer is not as expected: {error}"
            raise _AttemptLost(upstream, "bad answer", detail) from None
        if said.usage is not None and errand.call.prompt_tokens is None:
            self._meter.measured(len(errand.call.content), said.usage.prompt_tokens)
        if ours is not None:
            errand.kept, errand.kept_by = said.kv_transfer_params, upstream
        elif upstream.name not in self._without_connector:
            self._without_connector.add(upstream.name)
            log.warning(
                "%s answers without kv_transfer_params: its prefill is of no use to decode servers that do "
                "not share its store; start it with DualPathConnector, or give plain servers as --server",
                upstream.name,
            )

    async def _decode(
        self, errand: _Errand, ticket: Ticket, upstream: Upstream, reply: Reply
    ) -> None:
        """The client's own request, and its answer to the client."""
        names = [each.name for each in (errand.kept_by, upstream) if each is not None]
        mark = (_SERVED_BY, ", ".join(names).encode())
        body = errand.call.for_decode(errand.kept)
        content = b""
        async with self._exchange(errand, ticket, upstream, body) as (head, answer):
            streamed = head.status == 200 and head.content_type.startswith("text/event-stream")
            if streamed:
                await self._pass_stream(errand, head, answer, mark, reply)
            else:
                content = await answer.body(_ANSWER_LIMIT_BYTES)
        if head.status != 200:
            raise _Refused(_Answered(head, content))
        self._outcomes.served(upstream)
        self._sent.sent(errand.digests)
        if not streamed:
            self._metrics.first_token(time.monotonic() - errand.began_s)
            await reply.whole(head, content, (mark,))

    async def _pass_stream(
        self,
        errand: _Errand,
        head: Head,
        answer: PulledAnswer,
        mark: tuple[bytes, bytes],
        reply: Reply,
    ) -> None:
        events = WholeEvents()
        while part := await answer.part():
            whole = events.feed(part)
            if not whole:
                continue
            if not reply.started:
                self._metrics.first_token(time.monotonic() - errand.began_s)
                await reply.start(head, (mark,))
            await reply.part(whole)
        if not reply.started:
            await reply.start(head, (mark,))
        await reply.part(events.rest())
        await reply.end()

    @asynccontextmanager
    async def _exchange(
        self, errand: _Errand, ticket: Ticket, upstream: Upstream, body: bytes
    ) -> AsyncIterator[tuple[Head, PulledAnswer]]:
        """POST the body to the call's path of a server. `_AttemptLost` for all that another may do
        better."""
        try:
            async with upstream.open("POST", errand.call.path, errand.headers, body) as answer:
                ticket.cut_with(answer.cut)
                try:
                    head = await answer.head()
                    if head.status in _RETRIED:
                        said = _Answered(head, await answer.body(_ANSWER_LIMIT_BYTES))
                        raise _AttemptLost(
                            upstream, f"http {head.status}", f"answered HTTP {head.status}", said
                        )
                    yield head, answer
                finally:
                    ticket.cut_with(None)
        except HttpFailed as error:
            if ticket.interrupted:
                raise _AttemptLost(upstream, _LOST, "a server of the request was lost") from error
            raise _AttemptLost(upstream, error.kind, str(error)) from error


def _broken(lost: _AttemptLost) -> RequestError:
    return RequestError(
        f"the server that generated this answer failed after a part of it was sent ({lost}); what came is "
        "right, but not all: send the request again",
        status=502,
        code="engine_lost",
    )
