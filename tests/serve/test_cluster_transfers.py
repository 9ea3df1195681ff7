"""Connections between engines that break or stand still: TCP, through a proxy before each engine."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Iterator

import msgspec
import pytest
from cluster_kit import BLOCK_TOKENS, Reference, Served, prompt_of

from dualpath.serve.config import TransferKind
from dualpath.serve.messages import FromEngine, Hello

TOKENS = 40 * BLOCK_TOKENS + 5
NEW_TOKENS = 12
TRANSFER_TIMEOUT_S = 2.0


class Proxies:
    """A proxy for each endpoint; what passes can be counted, cut off, and held up."""

    def __init__(self) -> None:
        self.passed_bytes = 0
        self.cut_after_bytes: int | None = None
        self.flows = asyncio.Event()
        self.flows.set()
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._servers: list[asyncio.Server] = []

    def redirect(self, message: FromEngine) -> FromEngine:
        """An engine that says hello is reached through a new proxy."""
        if not isinstance(message, Hello):
            return message
        address = json.loads(message.address)
        address["locations"]["tcp"] = self._before(address["locations"]["tcp"])
        return msgspec.structs.replace(message, address=json.dumps(address))

    def cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def close(self) -> None:
        self.flows.set()
        self.cut()
        for server in self._servers:
            server.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _before(self, location: str) -> str:
        host, _, port = location.rpartition(":")
        listener = socket.create_server(("127.0.0.1", 0))

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            self._writers += [writer, far_writer]
            self._spawn(self._pump(reader, far_writer))
            self._spawn(self._pump(far_reader, writer))

        async def listen() -> None:
            self._servers.append(await asyncio.start_server(accept, sock=listener))

        self._spawn(listen())
        return f"127.0.0.1:{listener.getsockname()[1]}"

    def _spawn(self, work: object) -> None:
        task = asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(16384):
                await self.flows.wait()
                self.passed_bytes += len(data)
                if self.cut_after_bytes is not None and self.passed_bytes >= self.cut_after_bytes:
                    self.cut_after_bytes = None
                    self.cut()
                writer.write(data)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()


@pytest.fixture(scope="module")
def served(plain: Reference, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    served = Served(
        plain,
        store=str(tmp_path_factory.mktemp("transfers") / "store"),
        transfer=TransferKind.TCP,
        transfer_timeout_s=TRANSFER_TIMEOUT_S,
    )
    yield served
    assert served.close() == 0


@pytest.fixture(scope="module")
def proxies(served: Served) -> Iterator[Proxies]:
    async def make() -> Proxies:
        return Proxies()

    proxies = served.run(make())
    served.wire.rewrite = proxies.redirect
    served.start()
    yield proxies
    served.run(proxies.close())


@pytest.fixture(autouse=True)
def all_released(served: Served, proxies: Proxies) -> Iterator[None]:
    yield
    served.run(served.released())


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
def test_cut_connection_is_made_again(served: Served, proxies: Proxies, share: float) -> None:
    """Cut after a share of the bytes of a hand-over: before, in and after the pulls."""
    prompt = prompt_of(int(100 * share), TOKENS)
    layout = served.cluster.facts.layout
    handed_over_bytes = TOKENS * layout.row_bytes * layout.n_layers

    async def check() -> None:
        retries = served.retries()
        proxies.cut_after_bytes = proxies.passed_bytes + int(share * handed_over_bytes)
        await served.ask_right(prompt, NEW_TOKENS)
        assert proxies.cut_after_bytes is None
        assert 1 <= served.retries() - retries <= 3
        assert (await served.ask_right(prompt, NEW_TOKENS)).cached_tokens is not None

    served.run(check())


def test_cuts_at_any_time_under_load(served: Served, proxies: Proxies) -> None:
    async def check() -> None:
        asking = asyncio.gather(
            *(served.ask_right(prompt_of(200 + i, 60 + 40 * i), NEW_TOKENS) for i in range(10))
        )
        for n_cuts in range(5):
            passed = proxies.passed_bytes
            await served.until(
                lambda passed=passed: asking.done() or proxies.passed_bytes > passed + 100_000
            )
            if n_cuts < 4:
                proxies.cut()
        await asking

    served.run(check())


def test_hand_over_that_stands_still_ends_by_its_deadline(served: Served, proxies: Proxies) -> None:
    prompt = prompt_of(300, TOKENS)

    async def check() -> None:
        await served.ask_right(prompt_of(301, 50))  # So that the engines are connected.
        retries = served.retries()
        asking = asyncio.ensure_future(served.ask_right(prompt, NEW_TOKENS))
        passed = proxies.passed_bytes
        await served.until(lambda: proxies.passed_bytes > passed)
        proxies.flows.clear()
        # Pulls end by their deadline; where only messages are held up, pings find it out.
        await served.until(lambda: served.retries() > retries, within_s=20)
        proxies.flows.set()
        await asking

    served.run(check())
