"""What the null server answers: an OpenAI API with set delays, as cheaply as Python can.

Each answer has the tokens asked for, `tokens_per_event` in an event: the first event `ttft_s` after the
request came (or after its turn among `capacity`), each other `tpot_s` a token after the one before. Delays
are counted in ticks of a millisecond: all events of a tick are sent by one callback. Knows enough HTTP/1.1
for clients that send a length, and looks into a body only for the few fields it needs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import re
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields

from dualpath.base.errors import ConfigError

__all__ = ["MODEL", "NullConfig", "serve_null"]

MODEL = "null"
_MAX_MODEL_LEN = 1 << 20
_VOCAB_SIZE = 32_000
_TICK_S = 0.001
_BACKLOG = 4096
_BODY_LIMIT_BYTES = 256 * 1024 * 1024
_NEAR_BYTES = 512
"""Clients write a body's short fields before or after the prompt: there they are looked for first."""

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": *(\d+)')
_STREAM = re.compile(rb'"stream": *true')
_STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NullConfig:
    """`capacity`: requests answered at once, the others wait in order; 0: all. After `stall_after` requests
    nothing is sent for `stall_s`, once. Of all requests `error_share` are answered with HTTP 503,
    `event_error_share` with an error event after the first tokens, `cut_share` lose their connection there.
    """

    ttft_s: float = 0.0
    tpot_s: float = 0.0
    tokens_per_event: int = 1
    capacity: int = 0
    stall_after: int = 0
    stall_s: float = 0.0
    error_share: float = 0.0
    event_error_share: float = 0.0
    cut_share: float = 0.0

    def __post_init__(self) -> None:
        shares = (self.error_share, self.event_error_share, self.cut_share)
        times = (self.ttft_s, self.tpot_s, self.stall_s)
        if not all(0 <= share <= 1 for share in shares):
            raise ConfigError("null server: shares are between 0 and 1")
        if not all(math.isfinite(time) and time >= 0 for time in times):
            raise ConfigError("null server: times are seconds, zero or more")
        if self.tokens_per_event < 1 or self.capacity < 0 or self.stall_after < 0:
            raise ConfigError(
                "null server: --tokens-per-event is 1 or more, other counts 0 or more"
            )

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """A flag for each field."""
        for each in fields(cls):
            flag = f"--{each.name.replace('_', '-')}"
            parser.add_argument(flag, type=type(each.default), default=each.default, metavar="N")

    @classmethod
    def from_arguments(cls, args: argparse.Namespace) -> NullConfig:
        return cls(**{each.name: getattr(args, each.name) for each in fields(cls)})

    def arguments(self) -> list[str]:
        """The flags that give this configuration."""
        return [
            f"--{each.name.replace('_', '-')}={getattr(self, each.name)}"
            for each in fields(self)
            if getattr(self, each.name) != each.default
        ]


@asynccontextmanager
async def serve_null(config: NullConfig, *, port: int = 0) -> AsyncIterator[str]:
    """Listens on loopback inside the context; gives the base URL, with /v1."""
    loop = asyncio.get_running_loop()
    answers = _Answers(config, loop)
    server = await loop.create_server(
        lambda: _Connection(answers), "127.0.0.1", port, backlog=_BACKLOG
    )
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        answers.close()


class _Stream:
    """One answer under way. `events` left, `start_ticks`: until the first."""

    __slots__ = ("connection", "event", "events", "fault", "final", "last", "started", "step_ticks")

    def __init__(
        self,
        connection: _Connection,
        *,
        event: bytes,
        events: int,
        last: bytes,
        final: bytes,
        step_ticks: int,
        fault: bytes | None,
    ) -> None:
        self.connection = connection
        self.event = event
        self.events = events
        self.last = last
        """The last event, with what tokens remain."""
        self.final = final
        """What ends the stream, sent with the last event."""
        self.step_ticks = step_ticks
        self.fault = fault
        """Sent in place of the second event; empty: the connection is closed there."""
        self.started = False


class _Answers:
    """What all connections share: configuration, counters, the queue, and the clock that sends events."""

    def __init__(self, config: NullConfig, loop: asyncio.AbstractEventLoop) -> None:
        self.config = config
        self.connections: set[_Connection] = set()
        self._loop = loop
        self._start_s = loop.time()
        self._tick = 0
        self._due: dict[int, list[_Stream]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._waiting: deque[_Stream] = deque()
        """Bounded by the connections: each has one request at a time."""
        self._active = 0
        self._requests = 0
        self._stalled_until_s = 0.0

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for connection in list(self.connections):
            connection.transport.abort()

    def counted(self) -> int:
        """Counts one request; its number, from 1."""
        self._requests += 1
        if self.config.stall_s and self._requests == self.config.stall_after + 1:
            self._stalled_until_s = self._loop.time() + self.config.stall_s
        return self._requests

    def begin(self, stream: _Stream) -> None:
        if self.config.capacity and self._active >= self.config.capacity:
            self._waiting.append(stream)
            return
        self._active += 1
        ticks = round(self.config.ttft_s / _TICK_S)
        if ticks == 0 and self._loop.time() >= self._stalled_until_s:
            self._send(stream, self._now_tick())
        else:
            self._schedule(stream, self._now_tick() + ticks)

    def end(self, stream: _Stream) -> None:
        """Also of one whose client went away."""
        if stream.connection.stream is not stream:
            return
        stream.connection.stream = None
        if stream in self._waiting:
            self._waiting.remove(stream)
            return
        self._active -= 1
        if self._waiting:
            self.begin(self._waiting.popleft())

    def _now_tick(self) -> int:
        return int((self._loop.time() - self._start_s) / _TICK_S)

    def _schedule(self, stream: _Stream, tick: int) -> None:
        due = self._due.get(tick)
        if due is None:
            self._due[tick] = due = []
        due.append(stream)
        if self._timer is None:
            self._tick = min(tick, self._now_tick())
            self._arm()

    def _arm(self) -> None:
        self._timer = self._loop.call_at(self._start_s + (self._tick + 1) * _TICK_S, self._on_tick)

    def _on_tick(self) -> None:
        now = self._now_tick()
        if self._loop.time() < self._stalled_until_s:
            self._timer = self._loop.call_at(self._stalled_until_s, self._on_tick)
            return
        for tick in range(self._tick, now + 1):
            self._tick = tick + 1
            for stream in self._due.pop(tick, ()):
                self._send(stream, tick)
        if self._due:
            self._arm()
        else:
            self._timer = None

    def _send(self, stream: _Stream, tick: int) -> None:
        connection = stream.connection
        if connection.stream is not stream:
            return
        write = connection.transport.write
        if not stream.started:
            stream.started = True
            if stream.events > 1:
                stream.events -= 1
                write(_STREAM_HEAD + stream.event)
            else:
                write(_STREAM_HEAD + stream.last + stream.final)
                self.end(stream)
                return
        elif stream.fault is not None:
            if stream.fault:
                write(stream.fault)
            else:
                connection.transport.close()
            self.end(stream)
            return
        elif stream.events > 1:
            stream.events -= 1
            write(stream.event)
        else:
            write(stream.last + stream.final)
            self.end(stream)
            return
        # A tick that has gone by would never be looked at again.
        self._schedule(stream, max(tick + stream.step_ticks, self._tick))


class _Connection(asyncio.Protocol):
    """One connection: requests come and are answered one at a time."""

    transport: asyncio.Transport

    def __init__(self, answers: _Answers) -> None:
        self._answers = answers
        self._received = bytearray()
        self._path = b""
        self._missing = -1
        """Bytes of the body still to come; -1: the head is not complete."""
        self.stream: _Stream | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._answers.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._answers.connections.discard(self)
        if self.stream is not None:
            self._answers.end(self.stream)

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._missing >= 0:
            self._missing -= len(data)
        else:
            end = self._received.find(b"\r\n\r\n")
            if end < 0:
                return
            head = bytes(self._received[:end])
            del self._received[: end + 4]
            self._path = head.split(b" ", 2)[1]
            length = _LENGTH.search(head)
            size = int(length[1]) if length else 0
            if size > _BODY_LIMIT_BYTES:
                self.transport.abort()
                return
            self._missing = size - len(self._received)
            if self._missing > 0 and b"\r\nexpect: 100-continue" in head.lower():
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if self._missing <= 0:
            body, self._received, self._missing = self._received, bytearray(), -1
            self._answer(body)

    def _answer(self, body: bytearray) -> None:
        path = self._path.removeprefix(b"/v1")
        if path in (b"/completions", b"/chat/completions"):
            self._complete(body, chat=path != b"/completions")
        elif path == b"/models":
            card = {"id": MODEL, "object": "model", "owned_by": "dualpath"}
            limits = {"max_model_len": _MAX_MODEL_LEN, "vocab_size": _VOCAB_SIZE}
            self._reply(200, {"object": "list", "data": [card | limits]})
        elif path == b"/health":
            self._reply(200, {"status": "ok"})
        else:
            self._reply(404, {"error": {"message": "the null server has no such path"}})

    def _reply(self, status: int, content: object) -> None:
        body = json.dumps(content).encode()
        head = f"HTTP/1.1 {status} .\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    def _complete(self, body: bytearray, *, chat: bool) -> None:
        answers, config = self._answers, self._answers.config
        number = answers.counted()
        if _chosen(number, config.error_share):
            self._reply(503, {"error": {"message": "the null server is told to refuse this one"}})
            return
        found = _found(_MAX_TOKENS, body)
        tokens = int(found[1]) if found else 16
        prompt_tokens = body.count(b",")
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": prompt_tokens + tokens,
        }
        if _found(_STREAM, body) is None:
            self._reply(200, _content(chat, tokens, stream=False) | {"usage": usage})
            return
        size = config.tokens_per_event
        events = max(1, -(-tokens // size))
        event = _cached_event(chat, size)
        last = _cached_event(chat, tokens - (events - 1) * size)
        fault = None
        if _chosen(number, config.event_error_share):
            message = {"error": {"message": "the null server is told to fail here", "code": 500}}
            fault = _event(message) + _END
        elif _chosen(number, config.cut_share):
            fault = b""
        if config.tpot_s == 0 and fault is None:
            last, events = event * (events - 1) + last, 1
        self.stream = _Stream(
            self,
            event=event,
            events=events if fault is None else max(2, events),
            last=last,
            final=_event(_content(chat, 0, stream=True) | {"usage": usage}) + _END,
            step_ticks=max(1, round(size * config.tpot_s / _TICK_S)),
            fault=fault,
        )
        answers.begin(self.stream)


def _chosen(number: int, share: float) -> bool:
    """Of the first n numbers, n * share."""
    return int(number * share) > int((number - 1) * share)


def _found(pattern: re.Pattern[bytes], body: bytearray) -> re.Match[bytes] | None:
    return (
        pattern.search(body[-_NEAR_BYTES:])
        or pattern.search(body[:_NEAR_BYTES])
        or pattern.search(body)
    )


def _content(chat: bool, tokens: int, *, stream: bool) -> dict[str, object]:
    """An answer's object, or a chunk's, with `tokens` tokens; a chunk without tokens has no choices."""
    text, choices = " null" * tokens, []
    if tokens:
        choice: dict[str, object] = {"index": 0, "finish_reason": None if stream else "length"}
        if chat:
            choice["delta" if stream else "message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choices.append(choice | {"logprobs": None, "token_ids": [7] * tokens})
    kind = ("chat.completion" if chat else "text_completion") + (
        ".chunk" if chat and stream else ""
    )
    name = "chatcmpl" if chat else "cmpl"
    return {"id": f"{name}-0", "object": kind, "created": 0, "model": MODEL, "choices": choices}


def _event(content: object) -> bytes:
    """As one chunk of HTTP."""
    event = b"data: " + json.dumps(content).encode() + b"\n\n"
    return f"{len(event):x}\r\n".encode() + event + b"\r\n"


_END = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_EVENTS: dict[tuple[bool, int], bytes] = {}


def _cached_event(chat: bool, tokens: int) -> bytes:
    """Made once for each number of tokens up to an event's."""
    key = (chat, tokens)
    if key not in _EVENTS:
        _EVENTS[key] = _event(_content(chat, tokens, stream=True))
    return _EVENTS[key]
