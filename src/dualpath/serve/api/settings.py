"""What the HTTP side is told at start, and what its handlers share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from dualpath.base.errors import RequestError
from dualpath.monitor.metrics import Metrics
from dualpath.monitor.tracing import Tracing
from dualpath.serve.config import ServeConfig
from dualpath.serve.generation import Generator
from dualpath.serve.tokenizer import TextTokenizer

__all__ = ["Admission", "ApiContext", "ApiSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiSettings:
    """`max_model_len`: most tokens of a prompt with its answer. `vocab_size`: the model's, ids are below.

    `eos_tokens` end a text. `max_concurrent_sequences` bounds what is in the server at once: a request
    counts once for each prompt and choice. `model_root` is shown in /v1/models. `oracle`: answers mean
    nothing, and each response says so.
    """

    model_name: str
    max_model_len: int
    vocab_size: int
    eos_tokens: tuple[int, ...]
    model_root: str | None = None
    api_key: str | None = None
    max_concurrent_sequences: int = 1024
    max_body_bytes: int = 32 * 1024 * 1024
    body_timeout_s: float = 60.0
    max_logprobs: int = 20
    max_choices: int = 128
    oracle: bool = False

    @classmethod
    def from_config(
        cls,
        config: ServeConfig,
        *,
        max_model_len: int,
        vocab_size: int,
        eos_tokens: tuple[int, ...],
    ) -> ApiSettings:
        """What `dualpath serve` was told, with what the model's files say."""
        return cls(
            model_name=config.model_name,
            model_root=config.model,
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            eos_tokens=eos_tokens,
            api_key=config.api_key,
            max_concurrent_sequences=config.max_concurrent_requests,
            max_body_bytes=config.max_body,
            oracle=config.oracle,
        )


class Admission:
    """Counts the sequences in the server, up to a limit."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.active = 0

    @contextmanager
    def admit(self, sequences: int) -> Iterator[None]:
        """Holds places for the time of the context; RequestError when there are not enough."""
        if sequences > self._limit:
            raise RequestError(
                f"the request asks for {sequences} sequences (prompts times n), and this server takes "
                f"{self._limit} at once; send fewer in one request",
                code="too_many_sequences",
            )
        if self.active + sequences > self._limit:
            raise RequestError(
                f"{self.active} sequences are in the server, which takes {self._limit}; try again later",
                status=429,
                code="server_busy",
            )
        self.active += sequences
        try:
            yield
        finally:
            self.active -= sequences


@dataclass(frozen=True, slots=True)
class ApiContext:
    """What every handler needs; one per app."""

    generator: Generator
    tokenizer: TextTokenizer
    settings: ApiSettings
    metrics: Metrics
    admission: Admission
    started_at: int
    """Unix time."""
    tracing: Tracing | None = None
