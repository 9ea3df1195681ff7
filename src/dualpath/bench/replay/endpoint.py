"""One request to an OpenAI endpoint, streamed, with the times of its tokens.

Knows no sessions and no schedule. Invariants: nothing is tried twice; `send` never raises for what a server
or network does, the answer says it; each request has a deadline.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Protocol

import msgspec

import dualpath
from dualpath.base.errors import ConfigError
from dualpath.base.ids import MiB
from dualpath.base.origin import Origin
from dualpath.bench.replay.answer import Answer
from dualpath.bench.replay.answer_stream import AnswerReader, error_message
from dualpath.bench.replay.conversation import PromptBody
from dualpath.http import ConnectionPool, Head, HttpFailed, raise_descriptor_limit

__all__ = ["Answer", "Endpoint", "EndpointConfig", "EndpointFacts", "Sender"]

_PROBE_TOKENS = 2
_BODY_LIMIT_BYTES = 16 * MiB
_PROBE_DEADLINE_S = 60.0
_METRICS_DEADLINE_S = 5.0
_METRICS = (b"dualpath:", b"vllm:", b"sglang:")
_REFUSED = ("http 400", "http 422")


class Sender(Protocol):
    """What the replay needs of an endpoint; tests have their own."""

    async def send(
        self,
        prompt: PromptBody,
        output_tokens: int,
        on_first: Callable[[float], None] | None = None,
    ) -> Answer:
        """Greedy, exactly `output_tokens` tokens. `on_first` is called with the time of the first token when
        it comes, so that a request is known to wait while it does."""

    async def metrics(self) -> dict[str, float]:
        """The server's Prometheus metrics now, `name{label="value",...}` to value; empty if it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointConfig:
    """`base_url` with /v1. `api`: "completions" (token prompts) or "chat" (text). `extra_body`: fields added
    to each request, such as {"cache_salt": "..."}."""

    base_url: str
    model: str | None = None
    api: str = "completions"
    api_key: str | None = None
    timeout_s: float = 600.0
    extra_body: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointFacts:
    """What a first request found out. None: the server does not say.

    `takes_extensions`: it takes the fields of vLLM and SGLang that make an answer exactly as long as asked
    for; where it does not, answers may end early, and that is no error.
    """

    model: str
    max_model_len: int | None
    vocab_size: int | None
    returns_token_ids: bool
    reports_timings: bool
    takes_extensions: bool = True


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    vocab_size: int | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class Endpoint:
    """A `Sender` over HTTP. An asynchronous context manager that owns its connections.

    Each request in flight has a connection of its own, so a file descriptor: entering raises this process's
    limit as far as the system allows. Without `probe` the configuration must name the model.
    """

    def __init__(self, config: EndpointConfig) -> None:
        if config.api not in ("completions", "chat"):
            raise ConfigError(f"--api: expected completions or chat, got {config.api!r}")
        if config.api_key and not (config.api_key.isascii() and config.api_key.isprintable()):
            raise ConfigError(
                "--api-key: has characters that no key may have, such as a line's end"
            )
        self._config = config
        self._origin = Origin.of(config.base_url)
        self._pool = ConnectionPool(self._origin)
        self._chat = config.api == "chat"
        self._model = config.model or ""
        self._extensions = True
        self._set_up_request()

    async def __aenter__(self) -> Endpoint:
        raise_descriptor_limit()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._pool.close()

    @property
    def open_connections(self) -> int:
        """Now, in use or idle."""
        return self._pool.open_connections

    async def probe(self) -> EndpointFacts:
        """Ask for the model and two tokens. Raises ConfigError with what to do when the endpoint cannot be
        used."""
        card = await self._find_model()
        self._model = card.id
        self._extensions = True
        self._set_up_request()
        answer = await self._ask_two()
        if answer.error in _REFUSED:
            first = answer
            self._extensions = False
            self._set_up_request()
            answer = await self._ask_two()
            if answer.error in _REFUSED:
                answer = first
        if answer.error:
            raise ConfigError(self._advice(answer.error, answer.detail))
        return EndpointFacts(
            model=card.id,
            max_model_len=card.max_model_len,
            vocab_size=card.vocab_size,
            returns_token_ids=answer.token_ids is not None,
            reports_timings=bool(answer.timings),
            takes_extensions=self._extensions,
        )

    async def send(
        self,
        prompt: PromptBody,
        output_tokens: int,
        on_first: Callable[[float], None] | None = None,
    ) -> Answer:
        """See `Sender`. Cancelling it closes the connection, so that the server stops too."""
        reader = AnswerReader(output_tokens, exact=self._extensions, on_first=on_first)
        sent_s = time.perf_counter()
        try:
            async with asyncio.timeout(self._config.timeout_s):
                ended_s = await self._pool.exchange(self._request(prompt, output_tokens), reader)
        except HttpFailed as error:
            return reader.failed(sent_s, error.kind, error.detail)
        except TimeoutError:
            return reader.failed(sent_s, "timeout", f"no end within {self._config.timeout_s:g} s")
        return reader.finished(sent_s, ended_s)

    async def metrics(self) -> dict[str, float]:
        """See `Sender`. From /metrics beside /v1; histograms' buckets are left out."""
        path = self._origin.path.removesuffix("/v1")
        try:
            status, body = await self._get(f"{path}/metrics", _METRICS_DEADLINE_S)
        except HttpFailed:
            return {}
        return _parse_metrics(body) if status == 200 else {}

    def _set_up_request(self) -> None:
        """What is the same in each request: head, and the body before and after the prompt."""
        path = "chat/completions" if self._chat else "completions"
        self._head = self._head_lines("POST", f"{self._origin.path}/{path}")
        self._head += b"Content-Type: application/json\r\nContent-Length: "
        fields: dict[str, object] = {
            "model": self._model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._extensions:
            fields["ignore_eos"] = True
        fields |= self._config.extra_body
        opening = b',"messages":[{"role":"user","content":' if self._chat else b',"prompt":'
        self._before = msgspec.json.encode(fields)[:-1] + opening
        self._after = b"}]" if self._chat else b""

    def _request(self, prompt: PromptBody, output_tokens: int) -> bytes:
        limit = b"%d" % output_tokens
        after = self._after
        if self._chat:
            after += b',"max_completion_tokens":' + limit
        if self._extensions:
            after += b',"min_tokens":' + limit
            if prompt.wants_answer_ids:
                after += b',"return_token_ids":true'
        if not self._chat or self._extensions:
            after += b',"max_tokens":' + limit
        after += b"}"
        length = b"%d" % (len(self._before) + len(prompt.json) + len(after))
        return b"".join((self._head, length, b"\r\n\r\n", self._before, prompt.json, after))

    def _head_lines(self, method: str, path: str) -> bytes:
        lines = [
            f"{method} {path} HTTP/1.1",
            f"Host: {self._origin.authority}",
            f"User-Agent: dualpath/{dualpath.__version__}",
            "Accept: */*",
            "Accept-Encoding: identity",
        ]
        if self._config.api_key:
            lines.append(f"Authorization: Bearer {self._config.api_key}")
        return ("\r\n".join(lines) + "\r\n").encode("latin-1")

    async def _get(self, path: str, deadline_s: float) -> tuple[int, bytes]:
        """Status and body. Raises HttpFailed, also with the kind "timeout"."""
        body = _Body()
        try:
            async with asyncio.timeout(deadline_s):
                await self._pool.exchange(self._head_lines("GET", path) + b"\r\n", body)
        except TimeoutError:
            raise HttpFailed("timeout", f"no answer within {deadline_s:g} s") from None
        return body.status, bytes(body.content)

    async def _find_model(self) -> _Card:
        """The card of the configured model, or of the first. ConfigError when there is none to be found."""
        wanted = self._config.model
        try:
            status, body = await self._get(f"{self._origin.path}/models", _PROBE_DEADLINE_S)
        except HttpFailed as error:
            raise ConfigError(self._advice(error.kind, error.detail)) from error
        if status in (401, 403):
            raise ConfigError(self._advice(f"http {status}", error_message(body)))
        try:
            cards = msgspec.json.decode(body, type=_Cards).data if status == 200 else []
        except msgspec.MsgspecError:
            cards = []
        if wanted is not None:
            return next((card for card in cards if card.id == wanted), _Card(wanted))
        if not cards:
            raise ConfigError(
                f"{self._config.base_url}/models names no model (HTTP {status}): check that --base-url ends "
                "as the server's API does, usually in /v1, or give --model"
            )
        return cards[0]

    async def _ask_two(self) -> Answer:
        prompt = PromptBody(b'"Hello"', 0) if self._chat else PromptBody(b"[1,2,3,4,5,6,7,8]", 8)
        try:
            async with asyncio.timeout(_PROBE_DEADLINE_S):
                return await self.send(prompt, _PROBE_TOKENS)
        except TimeoutError:
            detail = f"no answer within {_PROBE_DEADLINE_S:g} s"
            return Answer(sent_s=0.0, error="timeout", detail=detail)

    def _advice(self, kind: str, detail: str) -> str:
        url = self._config.base_url
        match kind:
            case "connect":
                return (
                    f"nothing answers at {url} ({detail}): start the server, or correct --base-url"
                )
            case "timeout":
                return f"{url} does not answer ({detail}): is the model loaded?"
            case "http 401" | "http 403":
                return f"{url} refuses the key ({detail}): give --api-key"
            case "http 404":
                return (
                    f"{url} knows no model {self._model!r} or has no {self._config.api} API ({detail}): "
                    "check --model, --base-url (usually with /v1) and --api"
                )
            case "http 400" | "http 422" if not self._chat:
                return (
                    f"{url} refuses a prompt of token ids ({detail}): "
                    "where that is why, use --api chat, which sends text"
                )
            case "bad answer":
                return f"{url} streams no tokens as OpenAI's API does ({detail})"
        return f"{url} cannot be used: {kind}: {detail}"


class _Body:
    """A `Receiver` that keeps the whole body; what is longer than any that is asked for, is cut."""

    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()

    def on_head(self, head: Head) -> None:
        self.status = head.status

    def on_body(self, data: bytes, at_s: float) -> None:
        self.content += data[: _BODY_LIMIT_BYTES - len(self.content)]


def _parse_metrics(body: bytes) -> dict[str, float]:
    """Prometheus' text format; samples of other names, of buckets, and what is no number are left out."""
    found = {}
    for line in body.split(b"\n"):
        if not line.startswith(_METRICS):
            continue
        name, _, value = line.strip().rpartition(b" ")
        if b"_bucket{" in name:
            continue
        try:
            found[name.decode()] = float(value)
        except ValueError:
            continue
    return found
