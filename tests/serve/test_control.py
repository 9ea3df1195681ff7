"""The control plane: who may speak on it, and in what order."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import pytest

from dualpath.base.ids import BlockKey, EngineId
from dualpath.kv.chain import pack_tokens
from dualpath.serve.control import ControlKeys, ControlServer, EngineControl, Inbox
from dualpath.serve.messages import (
    BlockPersisted,
    Name,
    ReleaseAttempt,
    RequestDone,
    Shutdown,
    unpack_tokens,
)

ENGINE = EngineId("pe0.1")


def done(number: int) -> RequestDone:
    return RequestDone(Name(f"r{number}", 0))  # type: ignore[arg-type]


def test_messages_arrive_in_order_both_ways() -> None:
    async def scenario() -> None:
        keys = ControlKeys.generate()
        server = ControlServer(keys)
        engine = EngineControl(server.address, keys.for_engine(), ENGINE)
        try:
            for number in range(50):
                engine.send(done(number))
            received = []
            async with asyncio.timeout(10):
                async for sender, message in server.messages():
                    assert sender == ENGINE
                    received.append(message)
                    if len(received) == 50:
                        break
            assert received == [done(number) for number in range(50)]
            sent = [ReleaseAttempt(Name(f"r{n}", 0)) for n in range(20)] + [Shutdown(1.0)]  # type: ignore[arg-type]
            for message in sent:
                server.send(ENGINE, message)
            got: list[object] = []
            async with asyncio.timeout(10):
                while len(got) < len(sent):
                    got += await asyncio.to_thread(engine.wait, 0.2)
            assert got == sent
        finally:
            engine.close()
            server.close()

    asyncio.run(scenario())


def test_a_stranger_is_not_heard() -> None:
    """Whoever lacks the cluster's keys completes no handshake, though it knows the server's public key."""

    async def scenario() -> None:
        keys = ControlKeys.generate()
        own = ControlKeys.generate()
        forged = msgspec.structs.replace(own, server_public=keys.server_public)
        server = ControlServer(keys)
        stranger = EngineControl(server.address, forged, EngineId("intruder"))
        engine = EngineControl(server.address, keys.for_engine(), ENGINE)
        try:
            stranger.send(done(1))
            engine.send(done(2))
            heard = []

            async def listen() -> None:
                async for sender, message in server.messages():
                    heard.append((sender, message))

            listening = asyncio.create_task(listen())
            async with asyncio.timeout(10):
                while not heard:
                    await asyncio.sleep(0.01)
            # The engine's handshake began after the stranger's and is over.
            listening.cancel()
            assert heard == [(ENGINE, done(2))]
        finally:
            stranger.close()
            engine.close()
            server.close()

    asyncio.run(scenario())


def test_an_engine_gets_no_server_secret() -> None:
    assert ControlKeys.generate().for_engine().server_secret == ""


def test_a_message_that_does_not_decode_is_an_error() -> None:
    keys = [BlockKey(b"k" * 32), BlockKey(b"p" * 32)]
    body = msgspec.msgpack.encode(BlockPersisted(keys[0], keys[1], 4096))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(body, type=ReleaseAttempt | Shutdown)


def test_the_inbox_keeps_order_and_wakes_a_poll() -> None:
    inbox: Inbox[int] = Inbox()
    threads = [
        threading.Thread(target=lambda base=base: [inbox.put(base + i) for i in range(100)])  # type: ignore[misc]
        for base in (0, 1000)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    items = inbox.take()
    assert [item for item in items if item < 1000] == list(range(100))
    assert [item for item in items if item >= 1000] == list(range(1000, 1100))
    assert inbox.take() == []
    inbox.close()
    inbox.put(1)  # After the end nothing is kept, and nothing breaks.


def test_tokens_travel_as_bytes() -> None:
    tokens = [0, 1, 255, 65536, 2**32 - 1]
    assert len(pack_tokens(tokens)) == 4 * len(tokens)
    assert unpack_tokens(pack_tokens(tokens)) == tokens
