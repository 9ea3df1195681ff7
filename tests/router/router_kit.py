"""Servers that behave as vLLM with the connector does, as far as a router sees it, and a router before them.

All of it runs in the test's own event loop, over real sockets.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from dualpath.router.config import RouterConfig
from dualpath.router.service import running_router
from dualpath.serve.api import serve_http

__all__ = ["FakeServer", "Seen", "events_of", "pair_config", "routed", "run", "until"]

DEADLINE_S = 60.0
MODEL = "fake"


def run(work: Coroutine[Any, Any, None]) -> None:
    async def with_deadline() -> None:
        async with asyncio.timeout(DEADLINE_S):
            await work

    asyncio.run(with_deadline())


async def until(condition: Callable[[], bool]) -> None:
    """Lets the loop run until the condition holds; the test's deadline ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.005)


@dataclass(frozen=True, slots=True)
class Seen:
    """A request that reached a server."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]

    @property
    def params(self) -> dict[str, Any] | None:
        """What the router says to the connector."""
        return (self.body.get("kv_transfer_params") or {}).get("dualpath")


@dataclass(slots=True, eq=False)
class FakeServer:
    """`tokens` words are generated, each with an event of its own. Faults, each until it is taken back:

    `status`: what generation is answered with. `cut_after`: events after which the connection breaks; -1:
    before the head. `hold_after`: events (of an answer that is no stream: 0) after which it waits for
    `release`. `kv_blocks`: of 16 tokens, that its metrics tell of.
    """

    connector: bool = True
    tokens: int = 3
    health: int = 200
    status: int = 200
    cut_after: int | None = None
    hold_after: int | None = None
    kv_blocks: int | None = None
    seen: list[Seen] = field(default_factory=list)
    holding: int = 0
    gone: int = 0
    """Answers that ended because the client went away."""
    release: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    _stop: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None
    _open: list[Send] = field(default_factory=list)

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.name}"

    async def start(self) -> None:
        """On the same port as before, if it ran before."""
        started = asyncio.Event()

        def on_started(port: int) -> None:
            self.port = port
            started.set()

        # uvicorn takes a bound method for an application of another kind.
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            self._open.append(send)
            try:
                await self._app(scope, receive, send)
            finally:
                self._open.remove(send)

        self._stop = asyncio.Event()
        self._task = asyncio.create_task(
            serve_http(
                app,
                host="127.0.0.1",
                port=self.port,
                stop=self._stop,
                drain_timeout_s=1,
                on_started=on_started,
            )
        )
        await started.wait()

    async def kill(self) -> None:
        """At once: connections break, and no more are taken."""
        for send in list(self._open):
            _cut(send)
        await self.stop_listening()

    async def stop_listening(self) -> None:
        """No connections are taken any more, and nothing comes on those there are."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def __aenter__(self) -> FakeServer:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.release.set()
        await self.kill()

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        path = request.url.path
        if path == "/health":
            await _json(send, self.health, {})
        elif path == "/metrics" and self.kv_blocks is not None:
            labels = f'block_size="16",engine="0",num_gpu_blocks="{self.kv_blocks}"'
            await _text(send, f"vllm:cache_config_info{{{labels}}} 1.0\n")
        elif path == "/metrics":
            await _json(send, 404, {})
        elif request.method == "GET":
            self.seen.append(Seen(path, dict(request.headers), {}))
            await _json(send, 200, {"object": "list", "data": [{"id": MODEL}]})
        else:
            body = json.loads(await request.body())
            self.seen.append(Seen(path, dict(request.headers), body))
            gone = asyncio.create_task(_disconnected(receive))
            answer = asyncio.create_task(self._generate(self.seen[-1], send))
            try:
                await asyncio.wait({gone, answer}, return_when=asyncio.FIRST_COMPLETED)
                if answer.done():
                    answer.result()
                else:
                    self.gone += 1
            finally:
                gone.cancel()
                answer.cancel()
                await asyncio.gather(gone, answer, return_exceptions=True)

    async def _generate(self, seen: Seen, send: Send) -> None:
        if self.cut_after == -1:
            return _cut(send)
        if self.status != 200:
            return await _json(send, self.status, {"error": {"message": f"told {self.status}"}})
        if seen.body.get("stream"):
            return await self._stream(send)
        await self._hold(0)
        answer: dict[str, Any] = {
            "choices": [{"index": 0, "text": "word " * self.tokens}],
            "usage": {"prompt_tokens": 7, "completion_tokens": self.tokens},
        }
        if self.connector and seen.params is not None and seen.params["role"] == "prefill":
            handed = seen.params | {"role": "decode", "prompt_tokens": 7, "kept_by": self.name}
            answer["kv_transfer_params"] = {"dualpath": handed}
        return await _json(send, 200, answer)

    async def _stream(self, send: Send) -> None:
        head = {"type": "http.response.start", "status": 200}
        await send(head | {"headers": [(b"content-type", b"text/event-stream; charset=utf-8")]})
        for number in range(self.tokens):
            await self._hold(number)
            if self.cut_after == number:
                # In the middle of an event.
                await _part(send, b'data: {"choi')
                _cut(send)
                return
            event = {"choices": [{"index": 0, "text": f"word{number}"}]}
            await _part(send, b"data: " + json.dumps(event).encode() + b"\n\n")
        await _part(send, b"data: [DONE]\n\n", more=False)

    async def _hold(self, number: int) -> None:
        if self.hold_after == number:
            self.holding += 1
            try:
                await self.release.wait()
            finally:
                self.holding -= 1


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _cut(send: Send) -> None:
    """Break the connection: `send` is a method of what uvicorn keeps for a request."""
    send.__self__.transport.abort()  # type: ignore[attr-defined]


async def _part(send: Send, data: bytes, *, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": more})


async def _json(send: Send, status: int, content: object) -> None:
    await _whole(send, status, b"application/json", json.dumps(content).encode())


async def _text(send: Send, content: str) -> None:
    await _whole(send, 200, b"text/plain", content.encode())


async def _whole(send: Send, status: int, kind: bytes, body: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await _part(send, body, more=False)


def pair_config(
    prefill: Sequence[FakeServer], decode: Sequence[FakeServer], **settings: Any
) -> RouterConfig:
    """Looks at health seldom, so that a test's own events decide."""
    settings = {"health_interval_s": 30.0, "port": 0} | settings
    return RouterConfig(
        prefill=tuple(f"{each.url}#kv={each.port}" for each in prefill),
        decode=tuple(f"{each.url}#kv={each.port}" for each in decode),
        **settings,
    )


@asynccontextmanager
async def routed(config: RouterConfig) -> AsyncIterator[httpx.AsyncClient]:
    """A router inside the context, and a client of it."""
    started: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(running_router(config))
        serving = asyncio.create_task(
            serve_http(
                router.app,
                host="127.0.0.1",
                port=0,
                stop=stop,
                drain_timeout_s=1,
                on_started=started.set_result,
            )
        )
        try:
            url = f"http://127.0.0.1:{await started}"
            async with httpx.AsyncClient(
                base_url=url, timeout=DEADLINE_S, trust_env=False
            ) as client:
                yield client
        finally:
            stop.set()
            await serving


def events_of(text: str) -> list[Any]:
    """The data of each event, decoded; `[DONE]` as it is."""
    found = []
    for event in text.strip().split("\n\n"):
        data = event.removeprefix("data: ")
        found.append(data if data == "[DONE]" else json.loads(data))
    return found
