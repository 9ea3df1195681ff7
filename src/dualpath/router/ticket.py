"""A request's stay with the scheduler, as its holder sees it: wait for seats, give them up, end.

Knows no policy and no HTTP. Owned by `Seating`, which makes and ends it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from dualpath.base.errors import RequestError
from dualpath.base.ids import RequestId
from dualpath.router.upstream import Upstream

__all__ = ["Seats", "Ticket"]


@dataclass(frozen=True, slots=True)
class Seats:
    """The servers of one attempt, and its read plan. `prefill` None: prefilled where it is decoded."""

    prefill: Upstream | None
    decode: Upstream
    pe_tokens: int
    de_tokens: int

    @property
    def hit_tokens(self) -> int:
        return self.pe_tokens + self.de_tokens


class Ticket:
    """`attempt` counts from 0. `finished`: set it when the request's answer was complete. `seats` are None
    while it waits. `prefill_done` is the seating's own."""

    def __init__(self, name: RequestId, prompt_tokens: int, hit_tokens: int) -> None:
        self.name = name
        self.prompt_tokens = prompt_tokens
        self.hit_tokens = hit_tokens
        self.attempt = 0
        self.finished = False
        self.seats: Seats | None = None
        self.prefill_done = False
        self.interrupted = False
        """A server of these seats is lost."""
        self._cut: Callable[[], None] | None = None
        self._decided: asyncio.Future[Seats] = asyncio.get_running_loop().create_future()

    async def wait(self) -> Seats:
        """The seats of this attempt. RequestError when there are none to be had."""
        return await self._decided

    def cut_with(self, cut: Callable[[], None] | None) -> None:
        """What ends the exchange under way, should a server of the seats be lost; None: none is under
        way."""
        self._cut = cut
        if cut is not None and self.interrupted:
            cut()

    # Called by the seating.

    def seat(self, seats: Seats) -> None:
        self.seats = seats
        if not self._decided.done():
            self._decided.set_result(seats)

    def reject(self, error: RequestError) -> None:
        if not self._decided.done():
            self._decided.set_exception(error)
            self._decided.exception()  # Also if nobody waits.

    def interrupt(self) -> None:
        self.interrupted = True
        if self._cut is not None:
            self._cut()

    def next_attempt(self, hit_tokens: int) -> None:
        self.attempt += 1
        self.hit_tokens = hit_tokens
        self.seats = None
        self.prefill_done = False
        self.interrupted = False
        self._cut = None
        self._decided = asyncio.get_running_loop().create_future()
