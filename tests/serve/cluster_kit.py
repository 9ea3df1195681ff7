"""A cluster of real engine processes in the test's own process, and ways to watch and to break it.

The cluster's loop runs only inside `Served.run`. Answers are compared with plain `transformers`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from dualpath.base.ids import BlockKey, EngineId, RequestId, Role
from dualpath.engine.sampling import SamplingParams
from dualpath.kv.chain import block_chain, root_key
from dualpath.monitor.metrics import PREFIX, Metrics
from dualpath.serve.cluster import Cluster, describe_model
from dualpath.serve.config import LogLevel, ServeConfig
from dualpath.serve.control import ControlServer
from dualpath.serve.driver import Driver
from dualpath.serve.generation import (
    GenerationRequest,
    GenerationUpdate,
    Placement,
    RequestTimings,
)
from dualpath.serve.messages import FromEngine, ToEngine

BLOCK_TOKENS = 16
DEADLINE_S = 60.0
"""Of anything a test waits for; far more than it takes."""

T = TypeVar("T")


def prompt_of(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


class Reference:
    """Greedy tokens of plain `transformers` generate, each computed once."""

    def __init__(self, directory: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model: Any = model.eval()
        self._known: dict[tuple[int, ...], list[int]] = {}

    def generate(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        known = self._known.get(tuple(prompt), [])
        if len(known) < new_tokens:
            ids = torch.tensor([list(prompt)])
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=new_tokens,
                min_new_tokens=new_tokens,
                eos_token_id=None,
                pad_token_id=0,
            )
            known = self._known[tuple(prompt)] = out[0, len(prompt) :].tolist()
        return known[:new_tokens]


@dataclass
class Answer:
    """What a client got. `cached_tokens` is None when no token came."""

    tokens: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    by_path: dict[str, int] = field(default_factory=dict)
    finish_reason: str | None = None
    error: str | None = None
    error_status: int = 0
    arrival_s: float = 0.0
    timings: RequestTimings | None = None
    placements: list[Placement] = field(default_factory=list)

    def take(self, update: GenerationUpdate) -> None:
        self.tokens += update.token_ids
        if update.cached_tokens is not None:
            self.cached_tokens = update.cached_tokens
            self.by_path = update.cached_by_path or {}
        self.timings = update.timings or self.timings
        if update.placement is not None:
            self.placements.append(update.placement)
        self.finish_reason = update.finish_reason
        self.error, self.error_status = update.error, update.error_status


Listener = Callable[[EngineId, Any], None]


class Wire:
    """Sees every control message. A listener may kill, stop or disturb whom it likes."""

    def __init__(self) -> None:
        self.sent: list[Listener] = []
        self.received: list[Listener] = []
        self.rewrite: Callable[[FromEngine], FromEngine] = lambda message: message

    @contextmanager
    def tapped(self) -> Iterator[None]:
        """Class-wide, so only one cluster may start inside."""
        send, receive = ControlServer.send, Driver.engine_message

        def tapped_send(control: ControlServer, engine: EngineId, message: ToEngine) -> None:
            send(control, engine, message)
            for listener in list(self.sent):
                listener(engine, message)

        def tapped_receive(driver: Driver, engine: EngineId, message: FromEngine) -> None:
            receive(driver, engine, self.rewrite(message))
            for listener in list(self.received):
                listener(engine, message)

        ControlServer.send, Driver.engine_message = tapped_send, tapped_receive  # type: ignore[method-assign]
        try:
            yield
        finally:
            ControlServer.send, Driver.engine_message = send, receive  # type: ignore[method-assign]


class Served:
    """A cluster on `tiny`, float32, blocks of 16 tokens; one client at a time or many."""

    def __init__(self, reference: Reference, **settings: Any) -> None:
        defaults: dict[str, Any] = {
            "model": "tiny",
            "block_tokens": BLOCK_TOKENS,
            "threads": 1,
            "store_timeout_s": 5.0,
            "log_level": LogLevel.WARNING,
        }
        self.config = ServeConfig(**{**defaults, **settings})
        self.reference = reference
        self.metrics = Metrics()
        self.wire = Wire()
        self.cluster = Cluster(self.config, describe_model(self.config), self.metrics)
        self._runner = asyncio.Runner()
        self._tap = self.wire.tapped()
        self._n_requests = 0
        self._closed = False

    def run(self, work: Coroutine[Any, Any, T], *, within_s: float = DEADLINE_S) -> T:
        return self._runner.run(asyncio.wait_for(work, within_s))

    def start(self) -> None:
        self._tap.__enter__()
        try:
            self.run(self.cluster.start(lambda _: None), within_s=120)
        except BaseException:
            self.close()
            raise

    def close(self) -> int:
        """Stop; returns how many requests were cut off. Idempotent."""
        if self._closed:
            return 0
        self._closed = True
        self._tap.__exit__(None, None, None)
        try:
            return self.run(self.cluster.stop())
        finally:
            self._runner.close()

    # Clients.

    async def ask(
        self,
        prompt: Sequence[int],
        new_tokens: int = 8,
        *,
        salt: str = "",
        sampling: SamplingParams | None = None,
        on_update: Callable[[Answer], None] = lambda _: None,
        leave: Callable[[Answer], bool] = lambda _: False,
    ) -> Answer:
        """Stream an answer to its end, or until `leave` is true of it, when the client goes away."""
        self._n_requests += 1
        request = GenerationRequest(
            request_id=RequestId(f"r{self._n_requests}"),
            token_ids=list(prompt),
            sampling=sampling
            or SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True),
            cache_salt=salt,
            arrival_s=time.monotonic(),
        )
        answer = Answer(arrival_s=request.arrival_s)
        async with aclosing(self.cluster.driver.generate(request)) as updates:
            async for update in updates:
                answer.take(update)
                on_update(answer)
                if leave(answer):
                    break
        return answer

    async def ask_right(self, prompt: Sequence[int], new_tokens: int = 8, **how: Any) -> Answer:
        """`ask`, and the tokens must be those of plain `transformers`."""
        answer = await self.ask(prompt, new_tokens, **how)
        assert answer.error is None, answer.error
        assert answer.tokens == self.reference.generate(prompt, new_tokens)
        assert answer.finish_reason == "length"
        return answer

    async def store_prompt(self, prompt: Sequence[int], *, salt: str = "") -> list[Path]:
        """Ask once and wait until all full blocks of the prompt are durable; their files in order."""
        await self.ask_right(prompt, salt=salt)
        return await self.stored(prompt, salt=salt)

    async def stored(self, prompt: Sequence[int], *, salt: str = "") -> list[Path]:
        catalog, probe = self.cluster.catalog, RequestId("probe")
        assert catalog is not None
        chain = block_chain(root_key(self.cluster.facts.fingerprint, salt), prompt, BLOCK_TOKENS)
        await self.until(lambda: catalog.lookup(chain, probe) == len(chain))
        catalog.release(probe)
        return [self.file_of(block.key) for block in chain]

    @property
    def store_root(self) -> Path:
        """The directory of this model's blocks."""
        assert self.config.store_address is not None
        return Path(self.config.store_address) / self.cluster.facts.fingerprint.hex()

    def file_of(self, key: BlockKey) -> Path:
        name = key.hex()
        return self.store_root / name[:2] / name[2:4] / f"{name}.kv"

    # What is going on.

    async def until(self, condition: Callable[[], bool], *, within_s: float = DEADLINE_S) -> None:
        """Poll, with a deadline that says what was waited for."""
        end_s = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < end_s, f"not within {within_s:g} s: {condition}"
            await asyncio.sleep(0.005)

    async def ready(self) -> None:
        """Wait until every engine serves (again)."""
        driver = self.cluster.driver
        wanted = {Role.PREFILL: self.config.prefill, Role.DECODE: self.config.decode}
        await self.until(lambda: all(driver.roster.count(role) == n for role, n in wanted.items()))

    async def released(self) -> None:
        """Wait until nothing is held anywhere: slots, device memory, pins, requests; all invariants."""
        driver, catalog = self.cluster.driver, self.cluster.catalog
        await self.until(lambda: driver.n_requests == 0 and not self.held())
        driver.check_idle()
        if catalog is not None:
            assert catalog.stats.pinned_requests == 0
            catalog.check()

    def held(self) -> list[str]:
        """What engines still hold, by their last word."""
        return [
            f"{engine}: {status}"
            for engine, status in self.cluster.driver.roster.statuses.items()
            if status.requests
            or status.running
            or status.read_queue_tokens
            or status.pool_free_slots != status.pool_slots
            or status.free_hbm_tokens != status.hbm_tokens
        ]

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(PREFIX + name, labels) or 0.0

    def retries(self) -> float:
        """`request_retries_total` over all causes."""
        return sum(
            sample.value
            for family in self.metrics.registry.collect()
            if family.name == f"{PREFIX}request_retries"
            for sample in family.samples
            if sample.name.endswith("_total")
        )

    def load_failures(self) -> dict[str, float]:
        """`kv_load_failures_total` by cause."""
        return {
            sample.labels["cause"]: sample.value
            for family in self.metrics.registry.collect()
            if family.name == f"{PREFIX}kv_load_failures"
            for sample in family.samples
            if sample.name.endswith("_total")
        }

    # Breaking things.

    def kill(self, engine: EngineId) -> None:
        self.signal(engine, signal.SIGKILL)

    def signal(self, engine: EngineId, number: signal.Signals) -> None:
        os.kill(self.cluster.engine_pids[engine], number)
