"""What came back for one request. Pure data."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = ["Answer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Times are of `time.perf_counter()`; None where it did not come so far.

    `sent_s`: before a connection is opened, if one is needed. `gaps_s`: between events that brought tokens,
    in order. `token_ids`: None where the server sends none, or none were asked for. `cached_tokens`: -1 where
    the server does not say. `error`: "" or its kind: "connect", "timeout", "http 503" (or another status),
    "server error" (told in the stream), "stream cut", "wrong length", "bad answer"; `detail` tells more.
    """

    sent_s: float
    first_s: float | None = None
    second_s: float | None = None
    last_s: float | None = None
    end_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    token_ids: list[int] | None = None
    prompt_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = -1
    cached_by_path: dict[str, int] = field(default_factory=dict)
    timings: dict[str, float] = field(default_factory=dict)
    error: str = ""
    detail: str = ""
