"""One completion through the `openai` client, streamed and measured.

Works against any server of the API; what only DualPath reports (hits by path, times of the parts) stays
empty or zero elsewhere. Knows no traces and no processes.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.request import ProxyHandler, Request, build_opener

import msgspec

from dualpath.base.errors import ConfigError, DualPathError

if TYPE_CHECKING:
    import openai

__all__ = [
    "Completion",
    "RequestFailed",
    "Tokenized",
    "ask",
    "complete",
    "connect",
    "read_metrics",
    "require_openai",
    "tokenize",
]

_TIMEOUT_S = 600.0
_SAMPLE = re.compile(r"^([\w:]+) (\S+)$", re.MULTILINE)


class RequestFailed(DualPathError):
    """The server answered an error, or what it streamed is no complete answer."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A greedy answer. `ttft_s`: from sending the request to the first token, as the client sees it.

    `cached_by_path`: prompt tokens whose stored KV was read by the "pe" and the "de" side. `timings`: seconds
    of the parts of the time to the first token, as the server reports them.
    """

    token_ids: tuple[int, ...]
    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float
    cached_by_path: Mapping[str, int] = field(default_factory=dict)
    timings: Mapping[str, float] = field(default_factory=dict)


class Tokenized(msgspec.Struct, frozen=True):
    """Answer of POST /tokenize. `max_model_len`: tokens of the longest prompt with its answer."""

    tokens: list[int]
    max_model_len: int


def require_openai() -> None:
    """Raises ConfigError when the package is missing."""
    if importlib.util.find_spec("openai") is None:
        raise ConfigError("the client package is missing: pip install 'dualpath[demo]'")


def connect(base_url: str) -> openai.AsyncOpenAI:
    """A client that tries nothing twice, so that what is measured is one request. Close it."""
    require_openai()
    from openai import AsyncOpenAI, DefaultAsyncHttpxClient

    return AsyncOpenAI(
        base_url=base_url,
        api_key="none",
        max_retries=0,
        timeout=_TIMEOUT_S,
        # A proxy of the environment has no way to this machine's loopback.
        http_client=DefaultAsyncHttpxClient(trust_env=False),
    )


async def ask(client: openai.AsyncOpenAI, model: str, question: str, *, max_tokens: int) -> str:
    """The answer to one chat message, greedy. Raises RequestFailed."""
    from openai import OpenAIError

    try:
        response = await client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": question}],
            max_tokens=max_tokens,
            temperature=0,
        )
    except OpenAIError as error:
        raise RequestFailed(f"the chat request failed: {error}") from error
    answer: str = response.choices[0].message.content or ""
    return answer


async def tokenize(base_url: str, model: str, text: str) -> Tokenized:
    """The tokens of a prompt, and the model's window. Raises RequestFailed."""
    body = msgspec.json.encode({"model": model, "prompt": text})
    return msgspec.json.decode(await _fetch(base_url, "tokenize", body), type=Tokenized)


async def read_metrics(base_url: str) -> dict[str, float]:
    """The metrics that have no labels, by their exported name. Raises RequestFailed."""
    text = (await _fetch(base_url, "metrics", None)).decode()
    return {name: float(value) for name, value in _SAMPLE.findall(text)}


async def complete(
    client: openai.AsyncOpenAI,
    model: str,
    prompt: str | list[int],
    *,
    max_tokens: int,
    cache_salt: str | None = None,
) -> Completion:
    """Greedy, exactly `max_tokens` tokens. With a `cache_salt` never used before nothing can be a hit.

    Raises RequestFailed.
    """
    from openai import OpenAIError

    # vLLM's names; OpenAI's own server would refuse them.
    extra: dict[str, object] = {"ignore_eos": True, "return_token_ids": True}
    if cache_salt is not None:
        extra["cache_salt"] = cache_salt
    reader = _StreamReader()
    try:
        stream = await client.completions.create(
            model=model,
            prompt=prompt,
            max_tokens=max_tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body=extra,
        )
        async for chunk in stream:
            reader.take(chunk)
    except OpenAIError as error:
        raise RequestFailed(f"a completion of {max_tokens} tokens failed: {error}") from error
    return reader.result(max_tokens)


class _StreamReader:
    """Puts a stream's chunks together. The time starts when it is made."""

    def __init__(self) -> None:
        self._started_s = time.perf_counter()
        self._first_s: float | None = None
        self._tokens: list[int] = []
        self._text = ""
        self._last: Any = None

    def take(self, chunk: Any) -> None:
        """`Any`: the client's objects carry fields of the server that its types do not know."""
        if chunk.usage is not None:
            self._last = chunk
        for choice in chunk.choices:
            tokens = getattr(choice, "token_ids", None) or []
            if tokens and self._first_s is None:
                self._first_s = time.perf_counter()
            self._tokens += tokens
            self._text += choice.text

    def result(self, max_tokens: int) -> Completion:
        if self._last is None or self._first_s is None or len(self._tokens) != max_tokens:
            raise RequestFailed(
                f"expected {max_tokens} tokens and the usage, the stream ended after "
                f"{len(self._tokens)} tokens{'' if self._last is None else ' and the usage'}"
            )
        usage = self._last.usage
        details = usage.prompt_tokens_details
        paths: dict[str, Any] = getattr(self._last, "kv_transfer_params", None) or {}
        return Completion(
            token_ids=tuple(self._tokens),
            text=self._text,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=(details.cached_tokens or 0) if details is not None else 0,
            ttft_s=self._first_s - self._started_s,
            total_s=time.perf_counter() - self._started_s,
            cached_by_path=paths.get("cached_tokens_by_path", {}),
            timings=paths.get("timings", {}),
        )


async def _fetch(base_url: str, name: str, body: bytes | None) -> bytes:
    """What `name`, which lies beside /v1 as in vLLM, answers to a GET, or to a POST with a body."""
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/{name}"
    request = Request(url, data=body, headers={"Content-Type": "application/json"})

    def read() -> bytes:
        with build_opener(ProxyHandler({})).open(request, timeout=_TIMEOUT_S) as response:
            content: bytes = response.read()
            return content

    try:
        return await asyncio.to_thread(read)
    except OSError as error:  # Also what is raised for an error status.
        raise RequestFailed(f"{url} failed: {error}") from error
