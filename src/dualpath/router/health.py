"""Which servers are up: by looking at their /health, and by what became of the requests they were given.

A server joins with its first good look, when its metrics are also asked for how much KV it holds. It is lost
when it refuses connections, or after three looks in a row that got no answer; what it runs is then cut, as
nothing will come of it. One that answers its /health with an error, as vLLM does when its engine died and
`dualpath serve` when it is shutting down, only gets nothing new: what it runs may still end well. It joins
again as it joined first.

Knows no requests and no policy beyond `joined`, `lost` and `changed`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from dualpath.http import HttpFailed
from dualpath.router.kv_capacity import kv_capacity_tokens
from dualpath.router.upstream import Upstream

__all__ = ["HealthWatch", "Members"]

log = logging.getLogger(__name__)

_LOST_AFTER = 3
_SHORTEST_GAP_S = 0.05
_LOOK_WHILE_DOWN_S = 0.5


class Members(Protocol):
    """Who is told of servers that come and go."""

    def joined(self, upstream: Upstream) -> None: ...

    def lost(self, upstream: Upstream) -> None: ...

    def changed(self) -> None: ...


class HealthWatch:
    """Also the relay's `Outcomes`. `run` it in a task; it ends only by being cancelled."""

    def __init__(
        self, servers: Sequence[Upstream], members: Members, *, interval_s: float, timeout_s: float
    ) -> None:
        self._servers = servers
        self._members = members
        self._interval_s = interval_s
        self._timeout_s = timeout_s
        self._missed = dict.fromkeys((each.name for each in servers), 0)
        self._look_now = {each.name: asyncio.Event() for each in servers}

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            for upstream in self._servers:
                group.create_task(self._watch(upstream))

    async def look_once(self) -> None:
        """At all servers, so that those which are up have joined."""
        await asyncio.gather(*(self._look(each) for each in self._servers))

    # Outcomes.

    def failed(self, upstream: Upstream, kind: str, detail: str) -> None:
        """An exchange with it failed: it is looked at now, and in doubt for a while."""
        loop = asyncio.get_running_loop()
        doubt_s = upstream.failed(loop.time())
        if kind == "connect":
            self._lost(upstream, detail)
        self._look_now[upstream.name].set()
        self._members.changed()
        loop.call_later(doubt_s, self._members.changed)

    def served(self, upstream: Upstream) -> None:
        upstream.succeeded()

    # Looks.

    async def _watch(self, upstream: Upstream) -> None:
        now = self._look_now[upstream.name]
        while True:
            await self._look(upstream)
            await asyncio.sleep(_SHORTEST_GAP_S)
            gap_s = self._interval_s if upstream.up else min(self._interval_s, _LOOK_WHILE_DOWN_S)
            try:
                async with asyncio.timeout(gap_s):
                    await now.wait()
            except TimeoutError:
                pass
            now.clear()

    async def _look(self, upstream: Upstream) -> None:
        try:
            async with asyncio.timeout(self._timeout_s):
                head, _ = await upstream.look("/health")
        except TimeoutError:
            self._miss(upstream, f"/health did not answer within {self._timeout_s:g} s")
        except HttpFailed as error:
            if error.kind == "connect":
                self._lost(upstream, error.detail)
            else:
                self._miss(upstream, f"/health: {error}")
        else:
            self._missed[upstream.name] = 0
            if head.status == 200:
                if not upstream.up:
                    upstream.kv_capacity_tokens = await self._kv_capacity_tokens(upstream)
                self._good(upstream)
            else:
                self._unready(upstream, head.status)

    async def _kv_capacity_tokens(self, upstream: Upstream) -> int | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                head, metrics = await upstream.look("/metrics")
        except (TimeoutError, HttpFailed):
            return None
        return kv_capacity_tokens(metrics.decode(errors="replace")) if head.status == 200 else None

    def _good(self, upstream: Upstream) -> None:
        upstream.detail = "up"
        if not upstream.up:
            upstream.up = True
            upstream.succeeded()
            log.info(
                "%s is up%s",
                upstream.name,
                f", with KV of {upstream.kv_capacity_tokens} tokens"
                if upstream.kv_capacity_tokens is not None
                else "",
            )
            self._members.joined(upstream)

    def _unready(self, upstream: Upstream, status: int) -> None:
        upstream.detail = f"/health answers HTTP {status}"
        if upstream.up:
            loop = asyncio.get_running_loop()
            doubt_s = 2 * self._interval_s
            upstream.doubt(loop.time() + doubt_s)
            self._members.changed()
            loop.call_later(doubt_s, self._members.changed)

    def _miss(self, upstream: Upstream, detail: str) -> None:
        self._missed[upstream.name] += 1
        if not upstream.up:
            upstream.detail = detail
        elif self._missed[upstream.name] >= _LOST_AFTER:
            self._lost(upstream, detail)

    def _lost(self, upstream: Upstream, detail: str) -> None:
        upstream.detail = detail
        if upstream.up:
            upstream.up = False
            log.warning("%s is lost: %s", upstream.name, detail)
            self._members.lost(upstream)
