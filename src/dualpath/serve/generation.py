"""What the HTTP side asks of the cluster: a request in, updates out.

Knows neither HTTP nor engines. Invariants of a `Generator`: the updates of a request concatenate to its
output; exactly one update, the last, has a finish reason; closing the generator early aborts the request and
returns everything it holds; every request ends (the generator has its own deadline).
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Literal, Protocol

import msgspec

from dualpath.base.ids import RequestId
from dualpath.engine.sampling import SamplingParams, TokenLogprobs

__all__ = [
    "FinishReason",
    "GenerationRequest",
    "GenerationUpdate",
    "Generator",
    "GeneratorHealth",
    "Placement",
    "RequestTimings",
]

FinishReason = Literal["stop", "length", "abort", "error"]
"""stop: the last token is the end-of-sequence token or one of `stop_token_ids`, and part of the output."""


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """`request_id` is unique in the server. Blocks are shared only among requests of one `cache_salt`.

    `arrival_s`: `time.monotonic()` when the HTTP request came. Stop strings are the HTTP side's: it closes
    the generator.
    """

    request_id: RequestId
    token_ids: list[int]
    sampling: SamplingParams
    cache_salt: str
    arrival_s: float


class RequestTimings(msgspec.Struct, frozen=True, kw_only=True):
    """The parts of the time from a request's arrival to its first token, in seconds; they sum up to it.

    One after the other: `prepare_s` until it is read, checked and tokenised; `scheduling_s` until engines are
    assigned; `retry_s` until the assignment of the attempt that gave the token, if earlier ones failed;
    `allocation_s` until both engines have memory; `read_s` until both sides have read stored KV; `wait_s`
    until the prefill batch starts; `prefill_s` until it has ended. `delivery_s`: the way of the assignment to
    the engines, and of the first token back.
    """

    prepare_s: float
    scheduling_s: float
    retry_s: float
    allocation_s: float
    read_s: float
    wait_s: float
    prefill_s: float
    delivery_s: float

    @property
    def total_s(self) -> float:
        """The time to the first token."""
        engines_s = self.allocation_s + self.read_s + self.wait_s + self.prefill_s
        return self.prepare_s + self.scheduling_s + self.retry_s + engines_s + self.delivery_s

    def delivered_after(self, ttft_s: float) -> RequestTimings:
        """The same when the token has come farther, `ttft_s` after the arrival."""
        more_s = ttft_s - self.total_s
        return msgspec.structs.replace(self, delivery_s=self.delivery_s + more_s)


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where an attempt, the first being 1, was computed."""

    attempt: int
    prefill_engine: str
    decode_engine: str


class GenerationUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """New tokens of a request, or its end, or both.

    `logprobs`: one for each of `token_ids` if asked for. `cached_tokens`: prompt tokens whose KV came from
    storage; `cached_by_path` tells how many by side ("pe", "de"); these and `timings` come with the first
    tokens, `placement` with the first of each attempt. `error`: a sentence for the client, with finish reason
    "error" only; `error_status` its HTTP status (503 where another try may help) and `error_code` a stable
    word.
    """

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    cached_tokens: int | None = None
    cached_by_path: dict[str, int] | None = None
    timings: RequestTimings | None = None
    placement: Placement | None = None
    error: str | None = None
    error_status: int = 500
    error_code: str | None = None


class GeneratorHealth(msgspec.Struct, frozen=True, kw_only=True):
    """`ready`: requests can be served. `detail` says why not, or what is degraded; for people."""

    ready: bool
    detail: str
    prefill_engines: int
    decode_engines: int
    store_up: bool | None
    """None: this server has no store."""


class Generator(Protocol):
    """A cluster that generates. Used from one asyncio loop."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationUpdate, None]:
        """Updates until one has a finish reason. Raises RequestError (with its HTTP status) for a request
        that cannot be admitted. Closing the generator aborts the request."""

    async def abort(self, request_id: RequestId) -> None:
        """End a request with finish reason "abort"; one that is unknown or ended is left alone."""

    def health(self) -> GeneratorHealth:
        """Without I/O."""
