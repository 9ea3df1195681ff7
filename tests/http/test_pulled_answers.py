"""Answers that are pulled: parts as they come, ends of every kind, and a server that is held back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from dualpath.base.origin import Origin
from dualpath.http import ConnectionPool, HttpFailed, PulledAnswer
from dualpath.http.answer import HELD_BYTES

REQUEST = b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nX-Kind: Odd\r\nX-Kind: Even\r\nContent-Length: 6\r\n\r\n"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def pool_of(handler: Handler, **settings: float) -> AsyncIterator[ConnectionPool]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    pool = ConnectionPool(Origin.of(f"http://127.0.0.1:{port}"), **settings)
    try:
        yield pool
    finally:
        await pool.close()
        server.close()


async def request_read(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n\r\n")


async def whole(answer: PulledAnswer) -> bytes:
    await answer.head()
    return await answer.body(1000)


def run(work: Awaitable[None]) -> None:
    async def with_deadline() -> None:
        async with asyncio.timeout(30):
            await work

    asyncio.run(with_deadline())


def test_head_and_parts_come_as_they_are_sent() -> None:
    async def work() -> None:
        step = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_read(reader)
            for data in (HEAD, b"abc", b"def"):
                writer.write(data)
                await step.wait()
                step.clear()

        async with pool_of(handler) as pool, pool.open(REQUEST) as answer:
            head = await answer.head()
            assert (head.status, head.headers[:2]) == (
                200,
                [(b"x-kind", b"Odd"), (b"x-kind", b"Even")],
            )
            assert head.content_type == ""
            step.set()
            assert await answer.part() == b"abc"
            step.set()
            assert await answer.part() == b"def"
            assert await answer.part() == b""
            assert await answer.part() == b""

    run(work())


def test_a_connection_is_used_again_after_an_answer_that_was_read_to_its_end() -> None:
    async def work() -> None:
        connections = []

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connections.append(writer)
            while True:
                try:
                    await request_read(reader)
                except asyncio.IncompleteReadError:
                    return
                writer.write(HEAD + b"abcdef")

        async with pool_of(handler) as pool:
            for _ in range(3):
                async with pool.open(REQUEST) as answer:
                    assert await answer.body(6) == b"abcdef"
            assert len(connections) == 1
            async with pool.open(REQUEST) as answer:
                await answer.head()
            async with pool.open(REQUEST) as answer:
                with pytest.raises(HttpFailed, match="longer than 5 bytes"):
                    await answer.body(5)

    run(work())


def test_leaving_early_closes_the_connection() -> None:
    async def work() -> None:
        closed = asyncio.Event()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_read(reader)
            writer.write(HEAD + b"abc")
            try:
                assert await reader.read() == b""
            finally:
                closed.set()

        async with pool_of(handler) as pool:
            async with pool.open(REQUEST) as answer:
                assert await answer.part() == b"abc"
            await closed.wait()

    run(work())


@pytest.mark.parametrize(
    ("sent", "kind"),
    [(b"", "stream cut"), (HEAD + b"abc", "stream cut"), (b"SSH-2.0\r\n\r\n", "bad answer")],
)
def test_ends_that_are_none(sent: bytes, kind: str) -> None:
    async def work() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_read(reader)
            writer.write(sent)

        async with pool_of(handler) as pool, pool.open(REQUEST) as answer:
            with pytest.raises(HttpFailed) as caught:
                await whole(answer)
            assert caught.value.kind == kind

    run(work())


def test_cutting_an_exchange_wakes_whoever_waits() -> None:
    async def work() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_read(reader)
            writer.write(HEAD)
            await reader.read()

        async with pool_of(handler) as pool, pool.open(REQUEST) as answer:
            await answer.head()
            waiting = asyncio.create_task(answer.part())
            await asyncio.sleep(0)
            answer.cut()
            with pytest.raises(HttpFailed, match="stream cut"):
                await waiting

    run(work())


def test_a_server_is_held_back_while_nothing_is_taken() -> None:
    async def work() -> None:
        size = 64 * 1024 * 1024

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await request_read(reader)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
            for _ in range(size // 65536):
                writer.write(bytes(65536))
                await writer.drain()

        async with pool_of(handler) as pool, pool.open(REQUEST) as answer:
            await answer.head()
            received = 0
            while received < size:
                for _ in range(20):
                    await asyncio.sleep(0)
                assert answer.held_bytes <= HELD_BYTES + 65536
                part = await answer.part()
                assert part
                received += len(part)
            assert await answer.part() == b""

    run(work())


def test_connecting_has_a_deadline() -> None:
    async def work() -> None:
        # Nobody answers there (RFC 5737), or the network says at once that there is no way.
        pool = ConnectionPool(Origin.of("http://192.0.2.1:9"), connect_timeout_s=0.1)
        with pytest.raises(HttpFailed, match="connect"):
            async with pool.open(REQUEST):
                pass

    run(work())
