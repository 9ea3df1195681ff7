"""Starting, draining, stopping and giving up; memory and storage that are too small; bugs of our own."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from cluster_kit import BLOCK_TOKENS, Reference, Served, prompt_of

from dualpath.base.errors import InvariantViolation, RequestError
from dualpath.base.ids import EngineId, Role
from dualpath.bench.server import ServeProcess, ServerFailed
from dualpath.policy import Event, Instruction, PolicyConfig, Scheduler
from dualpath.policy.config import ReadPlanKind
from dualpath.serve import processes
from dualpath.serve.messages import StartAttempt, Tokens
from dualpath.testing.faults import FaultPlan

Serve = Callable[..., Served]


def abstract_sockets() -> str:
    """What the kernel lists; ours, and those of whoever else runs here."""
    return Path("/proc/net/unix").read_text()


def test_stop_finishes_what_runs_and_leaves_nothing(serve: Serve) -> None:
    shm = set(os.listdir("/dev/shm"))
    served = serve(drain_timeout_s=60)
    pids = list(served.cluster.engine_pids.values())
    roster = served.cluster.driver.roster
    names = [
        re.findall("dualpath-[0-9a-f]{32}", roster.hello(engine).address)[0]
        for engine in roster.engines
    ]
    assert all(name in abstract_sockets() for name in names)
    prompts = [prompt_of(i, 300) for i in range(4)]

    async def stop_in_the_middle() -> None:
        streaming = asyncio.Event()
        asking = [
            asyncio.ensure_future(served.ask_right(prompt, 60, on_update=lambda _: streaming.set()))
            for prompt in prompts
        ]
        await streaming.wait()
        assert await served.cluster.stop() == 0
        for each in asking:
            assert each.done()
            each.result()
        with pytest.raises(RequestError, match="shutting down"):
            await served.ask(prompts[0])

    served.run(stop_in_the_middle())
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert set(os.listdir("/dev/shm")) <= shm
    assert not any(name in abstract_sockets() for name in names)
    assert list((served.store_root / "tmp").iterdir()) == []
    # All that ran to its end was persisted, the last blocks too.
    stored = len(list(served.store_root.rglob("*.kv")))
    assert stored == len(prompts) * ((300 + 60 - 1) // BLOCK_TOKENS)


def test_stop_cuts_off_what_does_not_end_in_time_and_a_new_start_finds_the_store(
    serve: Serve, plain: Reference
) -> None:
    """Also: the index is made from a scan (case 13), and keys are no process's own (case 14)."""
    prompt = prompt_of(10, 20 * BLOCK_TOKENS)
    first = serve(drain_timeout_s=0)

    async def cut_off() -> None:
        await first.store_prompt(prompt)
        streaming = asyncio.Event()
        asking = asyncio.ensure_future(
            first.ask(prompt_of(11, 100), 5000, on_update=lambda _: streaming.set())
        )
        await streaming.wait()
        assert await first.cluster.stop() == 1
        assert (await asking).finish_reason == "abort"

    first.run(cut_off())
    temp = first.store_root / "tmp"
    assert list(temp.iterdir()) == []
    second = serve()

    async def ask() -> None:
        answer = await second.ask_right(prompt)
        assert answer.cached_tokens == 19 * BLOCK_TOKENS
        await second.released()

    second.run(ask())


def test_only_engine_is_restarted_and_given_up_when_it_keeps_dying(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "_FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(processes, "_MOST_FAILURES", 3)
    served = serve(prefill=1, decode=1)
    driver = served.cluster.driver
    prompt = prompt_of(20, 300)

    async def check() -> None:
        first = next(iter(served.cluster.engine_pids))
        decode = EngineId("de0.1")
        killed: list[EngineId] = []

        def kill_once(engine: EngineId, message: Any) -> None:
            if isinstance(message, Tokens) and not killed:
                killed.append(decode)
                served.kill(decode)

        served.wire.received.append(kill_once)
        # Nobody else is there: the request waits for the new engine and goes on.
        await served.ask_right(prompt, 30)
        assert killed and first
        # All tokens may have been on their way when it died; the loss is then noticed after the answer.
        await served.until(lambda: served.metric("engine_restarts_total", role="decode") == 1)
        await served.until(lambda: driver.roster.count(Role.DECODE) == 1)
        # From now on it dies as soon as it starts.
        waiting = asyncio.ensure_future(served.ask(prompt, 5000))
        while Role.DECODE not in driver._gone_roles:
            for engine in list(served.cluster.engine_pids):
                if engine.startswith("de"):
                    # The last kill may not have been noticed yet.
                    with contextlib.suppress(ProcessLookupError):
                        served.kill(engine)
            await asyncio.sleep(0.01)
        answer = await waiting
        assert (answer.finish_reason, answer.error_status) == ("error", 503)
        assert answer.error is not None
        assert answer.error.startswith("no decode engine is left and restarting failed")
        with pytest.raises(RequestError, match="no decode engine is left") as refused:
            await served.ask(prompt)
        assert refused.value.status == 503
        assert not driver.health().ready

    served.run(check())


def test_small_buffers_make_requests_wait_and_never_deadlock(serve: Serve) -> None:
    """2P2D, each buffer smaller than what is asked at once by far; hits on both sides (case 9)."""
    served = serve(
        prefill=2, decode=2, pe_buffer=2**20, de_buffer=2**20, read_path=ReadPlanKind.SPLIT
    )
    assert served.cluster.facts.max_model_len == 512
    prompts = [prompt_of(100 + i, 250 + 10 * (i % 20)) for i in range(24)]

    async def check() -> None:
        for _ in range(2):
            await asyncio.gather(*(served.ask_right(prompt, 20) for prompt in prompts))
        assert served.metric("kv_read_bytes_total", path="pe") > 0
        assert served.metric("kv_read_bytes_total", path="de") > 0
        await served.released()

    served.run(check())


def test_small_store_evicts_while_it_serves(serve: Serve) -> None:
    served = serve(store_capacity=2**20)
    catalog = served.cluster.catalog
    assert catalog is not None
    prompts = [prompt_of(200 + i, 8 * BLOCK_TOKENS + 3) for i in range(10)]

    def on_disk() -> int:
        """Bytes; 0 while files go."""
        try:
            return sum(file.stat().st_size for file in served.store_root.rglob("*.kv"))
        except FileNotFoundError:
            return 0

    async def check() -> None:
        for _ in range(3):
            await asyncio.gather(*(served.ask_right(prompt) for prompt in prompts))
        await served.released()
        # Of the last writes the catalog may yet have to hear.
        await served.until(
            lambda: not catalog.over_capacity and on_disk() == catalog.stats.stored_bytes
        )
        assert catalog.stats.stored_bytes <= 2**20
        assert catalog.stats.evicted_blocks > 0

    served.run(check())


def test_store_faults_of_every_kind_at_once(serve: Serve) -> None:
    """The seeded faults of `--store-faults`: right tokens, and at the end nothing is held."""
    spec = (
        "fault=read:miss:0.04,read:flip:0.04,read:truncate:0.04,read:error:0.04,read:slow:0.1,"
        "read:hang:0.02,write:error:0.1,write:slow:0.1,write:hang:0.02;seed=5;slow_s=0.05;hang_s=3"
    )
    assert FaultPlan.parse(spec).seed == 5
    served = serve(prefill=1, decode=1, store_timeout_s=1.0, store_faults=spec)
    served.cluster.driver.prefixes.health.first_pause_s = 0.2
    prompts = [prompt_of(300 + i, 6 * BLOCK_TOKENS + 30 * i) for i in range(12)]

    async def check() -> None:
        cached = 0
        for _ in range(4):
            answers = await asyncio.gather(*(served.ask_right(prompt, 20) for prompt in prompts))
            cached += sum(answer.cached_tokens or 0 for answer in answers)
        assert cached > 0
        assert set(served.load_failures()) >= {"block_miss", "block_corrupt", "store_error"}
        await served.released()

    served.run(check())


class _Broken(Scheduler):
    """A bug in the policy."""

    def handle(self, event: Event) -> list[Instruction]:
        raise InvariantViolation("one and one is three")


def test_bug_in_the_frontend_ends_every_request_and_the_server(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve(store=None)
    driver = served.cluster.driver

    async def check() -> None:
        failed = asyncio.ensure_future(served.cluster.failed())
        streaming = asyncio.Event()
        asking = asyncio.ensure_future(
            served.ask(prompt_of(400, 50), 5000, on_update=lambda _: streaming.set())
        )
        await streaming.wait()

        monkeypatch.setattr(driver, "_scheduler", _Broken(PolicyConfig()))
        answer = await asking
        assert (answer.finish_reason, answer.error_status) == ("error", 503)
        assert answer.error is not None
        assert "one and one is three" in answer.error
        with pytest.raises(InvariantViolation, match="one and one is three"):
            await failed
        with pytest.raises(RequestError, match="one and one is three"):
            await served.ask(prompt_of(401, 50))

    served.run(check())


def test_bug_in_an_engine_ends_its_process_and_no_request(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A message that the actor cannot decode, and a token that the model does not have."""
    monkeypatch.setattr(processes, "_FIRST_RETRY_S", 0.01)
    served = serve(store=None, prefill=1, decode=1)
    prompt = prompt_of(410, 200)

    async def check() -> None:
        sent: list[EngineId] = []

        def spoil(engine: EngineId, message: Any) -> None:
            if isinstance(message, StartAttempt) and not sent:
                sent.append(engine)
                served.cluster._control._socket.send_multipart([engine.encode(), b"\xc1"])

        served.wire.sent.append(spoil)
        await served.ask_right(prompt, 10)
        assert sent == ["pe0.1"]
        assert served.metric("engine_restarts_total", role="prefill") == 1
        # On the compute thread. The client leaves before its poison kills too often.
        lost = served.metric("engine_restarts_total", role="prefill")
        poison = asyncio.ensure_future(served.ask([7, 10**6, 7], 5))
        await served.until(lambda: served.metric("engine_restarts_total", role="prefill") > lost)
        poison.cancel()
        await asyncio.wait([poison])
        await served.ask_right(prompt, 10)
        await served.released()

    served.run(check())
    log = capfd.readouterr().err
    assert "pe0.1 ends" in log
    assert "pe0.2 ends" in log


def test_ctrl_c_completes_the_running_answer(plain: Reference, tmp_path: Path) -> None:
    """Through `dualpath serve` and HTTP; ends with exit code 0 and leaves no process."""
    arguments = ["tiny", "--store", str(tmp_path / "store"), "--drain-timeout-s", "60"]
    with ServeProcess(arguments, tmp_path / "log") as server:
        engines = list(server.engine_pids)
        body = {
            "model": "tiny",
            "prompt": prompt_of(430, 100),
            "max_tokens": 200,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": True,
        }
        lines, last = 0, ""
        with httpx.stream(
            "POST", f"{server.base_url}/completions", json=body, timeout=60
        ) as response:
            for line in response.iter_lines():
                lines += line.startswith("data: {")
                if lines == 10:
                    os.kill(server.pid, signal.SIGINT)
                last = line or last
        assert last == "data: [DONE]"
        assert lines >= 200
        server.stop()
    assert not [pid for pid in engines if psutil.pid_exists(pid)]


def test_engines_end_with_a_killed_frontend(plain: Reference, tmp_path: Path) -> None:
    with ServeProcess(["tiny", "--no-store"], tmp_path / "log") as server:
        engines = list(server.engine_pids)
        assert len(engines) == 2
        os.kill(server.pid, signal.SIGKILL)
        until_s = time.monotonic() + 30
        while any(psutil.pid_exists(pid) for pid in engines):
            assert time.monotonic() < until_s
            time.sleep(0.01)
        with pytest.raises(ServerFailed):
            server.stop()
