"""A running cluster: engines, driver, control plane and catalog put together.

The composition that `dualpath serve`, the benchmarks and the tests share. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from dualpath.base.errors import ConfigError, StoreError
from dualpath.base.ids import EngineId, GroupId, Role
from dualpath.engine.model_source import (
    ModelFiles,
    ModelSpec,
    load_config,
    model_identity,
    resolve_model,
)
from dualpath.engine.support import kv_layout, max_positions, refuse_unsupported, resolve_dtype
from dualpath.kv.chain import Fingerprint, fingerprint
from dualpath.kv.index import TrieIndex
from dualpath.kv.layout import KVLayout
from dualpath.monitor.metrics import Metrics
from dualpath.policy.scheduler import Scheduler
from dualpath.serve.config import Dtype, KVLoadFailurePolicy, ServeConfig, TransferKind
from dualpath.serve.control import ControlKeys, ControlServer
from dualpath.serve.driver import Driver, DriverLimits
from dualpath.serve.engine_config import EngineConfig
from dualpath.serve.messages import Fatal, FromEngine, Shutdown
from dualpath.serve.placement import EnginePlace, Placement, load_placement
from dualpath.serve.processes import EngineProcesses, EngineSlot, start_engine
from dualpath.store import UntouchedStore, open_store, printable_address
from dualpath.store.catalog import Catalog
from dualpath.store.contract import Store
from dualpath.transfer import nixl_missing

__all__ = ["Cluster", "ModelFacts", "describe_model"]

log = logging.getLogger(__name__)

_START_DEADLINE_S = 900.0
_WATCH_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the frontend knows of the model without loading it."""

    files: ModelFiles
    dtype: str
    layout: KVLayout
    fingerprint: Fingerprint
    max_model_len: int
    vocabulary: int


def describe_model(config: ServeConfig) -> ModelFacts:
    """Resolve MODEL (made or downloaded if need be) and derive KV layout and limits.

    Raises ConfigError or UnsupportedModel, with what to change.
    """
    missing = nixl_missing()
    if config.transfer is TransferKind.NIXL and missing is not None:
        raise ConfigError(f"--transfer nixl: {missing}")
    files = resolve_model(ModelSpec(model=config.model, revision=config.revision))
    hf_config = load_config(files)
    refuse_unsupported(hf_config)
    on_cpu = config.device.value != "cuda"
    wanted = "float32" if config.dtype is Dtype.AUTO and on_cpu else config.dtype.value
    dtype = resolve_dtype(hf_config, wanted)
    layout = kv_layout(hf_config, dtype, config.block_tokens)
    return ModelFacts(
        files=files,
        dtype=dtype,
        layout=layout,
        fingerprint=fingerprint(model_identity(files), "", layout),
        max_model_len=_window(config, layout, max_positions(hf_config)),
        vocabulary=int(hf_config.vocab_size),
    )


def _window(config: ServeConfig, layout: KVLayout, positions: int) -> int:
    """Tokens of the longest request: bounded by the model and by every engine's memory (case 9)."""
    wanted = config.max_model_len or positions
    if wanted > positions:
        raise ConfigError(f"--max-model-len {wanted}: the model was made for {positions} tokens")
    room = {
        "--pe-buffer": config.pe_buffer // layout.slot_bytes * layout.block_tokens,
        "--de-buffer": config.de_buffer // layout.slot_bytes * layout.block_tokens,
        "--kv-device-memory": config.kv_device_memory // (layout.row_bytes * layout.n_layers),
    }
    flag, least = min(room.items(), key=lambda item: item[1])
    if least >= wanted:
        return wanted
    if config.max_model_len is not None or least < layout.block_tokens:
        raise ConfigError(
            f"{flag} holds {least} tokens, less than a request of --max-model-len {wanted}: "
            f"raise {flag} or lower --max-model-len"
        )
    log.warning("%s holds %d tokens: requests are limited to that, not %d", flag, least, wanted)
    return least


class Cluster:
    """Engines that serve, and the driver in front of them. One asyncio loop; `start`, then `stop`.

    Raises ConfigError when the placement that `config` names cannot be used.
    """

    def __init__(self, config: ServeConfig, facts: ModelFacts, metrics: Metrics) -> None:
        self.config = config
        self.facts = facts
        self.metrics = metrics
        self.driver: Driver
        self.catalog: Catalog | None = None
        self._store: Store | None = None
        self._control: ControlServer
        self._processes: EngineProcesses
        self._keys = ControlKeys.generate()
        self._transfer_secret = secrets.token_bytes(32)
        self._tasks: list[asyncio.Task[None]] = []
        self._fatal: ConfigError | None = None
        self._changed = asyncio.Event()
        self._placement: Placement | None = None
        if config.placement is not None:
            self._placement = load_placement(config.placement)
            self._placement.check((slot.name, slot.group) for slot in self._slots())

    async def start(self, progress: Callable[[str], None]) -> None:
        """Start everything and wait until every engine serves.

        Raises ConfigError when an engine says that it cannot work as configured; then call `stop`.
        """
        config, facts = self.config, self.facts
        if config.oracle:
            self.metrics.oracle()
            log.warning(
                "--scheduler oracle: KV is neither read, copied, transferred nor stored, so answers are "
                "NOT MEANINGFUL; only their times are"
            )
        if config.store_address is not None:
            await asyncio.to_thread(self._open_catalog, config.store_address)
        if self._placement is None:
            self._control = ControlServer(self._keys)
        else:
            self._control = ControlServer(self._keys, self._placement.control_host)
        self.driver = Driver(
            scheduler=Scheduler(config.policy()),
            catalog=self.catalog,
            fingerprint=facts.fingerprint,
            limits=DriverLimits(
                max_model_len=facts.max_model_len,
                block_tokens=config.block_tokens,
                full_block_bytes=facts.layout.full_block_bytes,
                request_timeout_s=config.request_timeout_s,
                recompute_on_load_failure=(
                    config.kv_load_failure_policy is KVLoadFailurePolicy.RECOMPUTE
                ),
            ),
            metrics=self.metrics,
            send=self._control.send,
        )
        self._processes = EngineProcesses(
            self._slots(),
            lambda slot: start_engine(slot, self._configure(slot)),
            lost=self._engine_lost,
            restarted=lambda slot: self.metrics.engine_restarted(slot.role),
        )
        self._tasks = [
            asyncio.create_task(self._receive(), name="control"),
            asyncio.create_task(self._watch(), name="watch"),
        ]
        await self._processes.start()
        await self._wait_ready(progress)

    async def stop(self) -> int:
        """Drain, then end every process; also after a start that failed. Idempotent.

        Returns the number of requests that were cut off.
        """
        cut_off = 0
        if self._tasks:
            cut_off = await self.driver.drain(self.config.drain_timeout_s)
            grace_s = self.config.store_timeout_s + 1
            for engine in self.driver.roster.engines:
                self._control.send(engine, Shutdown(grace_s))
            await self._processes.stop(grace_s + 2)
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            self._tasks.clear()
            self._control.close()
        if self.catalog is not None:
            await asyncio.to_thread(self.catalog.close)
        if self._store is not None:
            await asyncio.to_thread(self._tidy, self._store)
            self._store.close()
            self._store = None
        return cut_off

    async def failed(self) -> None:
        """Returns only by raising: something that runs in the background died, which is a bug."""
        watching = [
            asyncio.create_task(self.driver.failed()),
            asyncio.create_task(self._processes.failed()),
        ]
        try:
            # Not gather: a caller who waits no longer must not end the cluster's own tasks.
            ended, _ = await asyncio.wait(
                [*self._tasks, *watching], return_when=asyncio.FIRST_COMPLETED
            )
            for task in ended:
                task.result()
        finally:
            for task in watching:
                task.cancel()
            await asyncio.gather(*watching, return_exceptions=True)
        raise AssertionError("the cluster's tasks never return")

    @property
    def engine_pids(self) -> dict[EngineId, int]:
        """Process ids of the engines that run now, for tests and reports."""
        return {
            slot.engine: slot.process.pid
            for slot in self._processes.slots
            if slot.process is not None and slot.process.returncode is None
        }

    def _open_catalog(self, address: str) -> None:
        facts = self.facts
        self._store = open_store(address, facts.fingerprint, facts.layout, model=facts.files.name)
        if self.config.oracle:
            self._store = UntouchedStore(self._store)
        self.catalog = Catalog(self._store, TrieIndex(), self.config.store_capacity)
        blocks = self.catalog.load()
        self.catalog.start()
        self.metrics.store_up(True)
        log.info("store %s: %d blocks of this model", printable_address(address), blocks)

    @staticmethod
    def _tidy(store: Store) -> None:
        """Engines that were killed, or ended while a write hung, leave half-written blocks."""
        try:
            store.tidy()
        except StoreError as error:
            log.warning("left-over files stay until the next start: %s", error)

    def _slots(self) -> list[EngineSlot]:
        slots: list[EngineSlot] = []
        for role, count in ((Role.PREFILL, self.config.prefill), (Role.DECODE, self.config.decode)):
            short = "pe" if role is Role.PREFILL else "de"
            for i in range(count):
                node = GroupId(f"{short}-node{i // self.config.engines_per_group}")
                launch = self._place(f"{short}{i}", node).launch
                slots.append(EngineSlot(f"{short}{i}", node, role, launch))
        return slots

    def _place(self, engine: str, group: GroupId) -> EnginePlace:
        return EnginePlace() if self._placement is None else self._placement.place(engine, group)

    def _configure(self, slot: EngineSlot) -> EngineConfig:
        config, facts = self.config, self.facts
        layout = facts.layout
        buffer_bytes = config.pe_buffer if slot.role is Role.PREFILL else config.de_buffer
        engines = config.prefill + config.decode
        place = self._place(slot.name, slot.group)
        return EngineConfig(
            engine=slot.engine,
            group=slot.group,
            role=slot.role,
            control_address=self._control.address,
            control_keys=self._keys.for_engine(),
            transfer=config.transfer.value,
            transfer_secret=self._transfer_secret,
            transfer_connections=config.transfer_connections,
            transfer_deadline_s=config.transfer_timeout_s,
            host=place.host,
            model=str(facts.files.directory),
            dtype=facts.dtype,
            device=config.device.value,
            threads=place.threads or config.threads or max(1, (os.cpu_count() or 1) // engines),
            layout=layout,
            fingerprint=facts.fingerprint,
            pool_slots=buffer_bytes // layout.slot_bytes,
            hbm_tokens=config.kv_device_memory // (layout.row_bytes * layout.n_layers),
            store=None if config.oracle else place.store or config.store_address,
            store_deadline_s=config.store_timeout_s,
            store_faults=config.store_faults,
            quota_s=config.quota_s,
            max_batch_tokens=config.max_batch_tokens,
            max_running=config.max_running,
            oracle=config.oracle,
            log_level=config.log_level.value,
        )

    async def _receive(self) -> None:
        async for engine, message in self._control.messages():
            self._take(engine, message)

    def _take(self, engine: EngineId, message: FromEngine) -> None:
        if isinstance(message, Fatal) and message.config:
            self._fatal = ConfigError(f"{engine}: {message.detail}")
        if not self._processes.runs(engine):
            return  # Its loss is, or will be, an event; nothing it said before counts after that.
        self.driver.engine_message(engine, message)
        self._changed.set()

    def _engine_lost(self, slot: EngineSlot, engine: EngineId, reason: str) -> None:
        self.driver.engine_lost(engine, reason)
        if self._store is not None:
            asyncio.get_running_loop().run_in_executor(None, self._tidy, self._store)
        if all(s.given_up for s in self._processes.slots if s.role is slot.role):
            self.driver.role_gone(slot.role)
        self._changed.set()

    async def _watch(self) -> None:
        """Kill engines that hang: their process lives, but their actor does not answer."""
        silent_s = self.config.engine_timeout_s
        while True:
            slept_at_s = time.monotonic()
            await asyncio.sleep(_WATCH_INTERVAL_S)
            self.driver.observe()
            if time.monotonic() - slept_at_s > silent_s / 2:
                continue  # It was this process that stood still; their messages are in the queue.
            for engine in self.driver.roster.silent(silent_s, time.monotonic()):
                log.error("%s has been silent for %g s: killed", engine, silent_s)
                self._processes.kill(engine)
            for engine in self._processes.hung_starts(
                _START_DEADLINE_S, self.driver.roster.engines
            ):
                log.error("%s has not started in %g s: killed", engine, _START_DEADLINE_S)
                self._processes.kill(engine)

    async def _wait_ready(self, progress: Callable[[str], None]) -> None:
        wanted = {Role.PREFILL: self.config.prefill, Role.DECODE: self.config.decode}
        async with asyncio.timeout(_START_DEADLINE_S):
            while True:
                self._changed.clear()
                if self._fatal is not None:
                    raise self._fatal
                ready = {role: self.driver.roster.count(role) for role in wanted}
                progress(
                    f"engines ready: {ready[Role.PREFILL]}/{wanted[Role.PREFILL]} prefill, "
                    f"{ready[Role.DECODE]}/{wanted[Role.DECODE]} decode"
                )
                if ready == wanted:
                    return
                if any(slot.given_up for slot in self._processes.slots):
                    raise ConfigError("an engine cannot start; its log lines above say why")
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), 5)
