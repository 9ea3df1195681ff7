"""The clients of the fault run: what counts as answered, aborted, lost and wrong."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from dualpath.bench.vllm_load import Load, Question, Tally

QUESTIONS = [Question([n, n, n], [n + 1, n + 2, n + 3, n + 4]) for n in range(5)]

Reply = Callable[[dict[str, Any], asyncio.StreamWriter], None]


@asynccontextmanager
async def served(reply: Reply) -> AsyncIterator[str]:
    """Each connection gets one reply to its request, and then nothing."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).lower()
            length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
            reply(json.loads(await reader.readexactly(length)), writer)
            await reader.read()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()


def played(reply: Reply, **goals: Any) -> Tally:
    load = Load(QUESTIONS, clients=3, seed=1)

    async def play() -> None:
        async with asyncio.timeout(60), served(reply) as url:
            await load.play(url, **goals)

    asyncio.run(play())
    return load.tally


def right(body: dict[str, Any]) -> list[int]:
    first: int = body["prompt"][0]
    return [first + 1, first + 2, first + 3, first + 4]


def send(writer: asyncio.StreamWriter, body: bytes, status: str = "200 OK") -> None:
    writer.write(head_of(len(body), status) + body)


def head_of(length: int, status: str = "200 OK") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nConnection: close\r\n\r\n".encode()


def events(tokens: list[int], *, end: bool = True) -> bytes:
    parts = [json.dumps({"choices": [{"token_ids": [each]}]}) for each in tokens]
    return b"".join(b"data: %b\n\n" % each.encode() for each in [*parts, *["[DONE]"] * end])


def answer(writer: asyncio.StreamWriter, body: dict[str, Any], tokens: list[int]) -> None:
    if body["stream"]:
        send(writer, events(tokens))
    else:
        send(writer, json.dumps({"choices": [{"token_ids": tokens}]}).encode())


def test_right_answers_streamed_and_whole() -> None:
    streamed = []

    def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        streamed.append(body["stream"])
        answer(writer, body, right(body))

    tally = played(reply, answers=20)
    assert (tally.aborted, tally.wrong_tokens, tally.lost) == (0, 0, [])
    assert 20 <= tally.answered <= 22, "each client may end one more"
    assert tally.compared_tokens == 4 * tally.answered
    assert set(streamed) == {False, True}


def test_wrong_tokens_are_counted() -> None:
    def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        answer(writer, body, [*right(body)[:2], 99, 99])

    tally = played(reply, answers=5)
    assert tally.wrong_tokens == 2 * tally.answered > 0


def test_what_is_not_whole_is_lost() -> None:
    def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        answer(writer, body, right(body)[:3])

    tally = played(reply, answers=5)
    assert (tally.answered, tally.wrong_tokens) == (0, 0)
    assert set(tally.lost) == {"3 tokens came, expected 4"}


@pytest.mark.parametrize(
    ("status", "body", "reason"),
    [
        ("503 No", b'{"error": {"message": "full"}}', "HTTP 503: "),
        ("200 OK", b"no answer", "not an answer: "),
        ("200 OK", b'data: {"error": {"code": "engine_lost"}}\n\n', "engine_lost"),
    ],
)
def test_errors_are_losses_and_end_the_round(status: str, body: bytes, reason: str) -> None:
    def reply(_: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        send(writer, body, status)

    tally = played(reply, answers=2, streams=reason == "engine_lost")
    assert tally.answered == 0
    assert any(reason in each for each in tally.lost)


def test_clients_leave() -> None:
    """Before the answer, or within a stream. Those that stay get it all, a while after its start."""

    def reply(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        tokens = right(body)
        whole = json.dumps({"choices": [{"token_ids": tokens}]}).encode()
        start = events(tokens[:2], end=False) if body["stream"] else b""
        rest = events(tokens[2:]) if body["stream"] else whole
        writer.write(head_of(len(start) + len(rest)) + start)
        asyncio.get_running_loop().call_later(0.1, writer.write, rest)

    tally = played(reply, answers=3, aborts=12)
    assert tally.aborted >= 12
    assert tally.answered >= 3
    assert (tally.wrong_tokens, tally.lost) == (0, [])
    assert tally.compared_tokens > 4 * tally.answered, "what came before clients left, too"
