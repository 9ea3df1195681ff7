"""The process of one engine: composition of its parts, and its end.

Reads one `EngineConfig` line from standard input, loads the model, serves until told to shut down
or until standard input closes (the frontend is gone). Run as `python -m dualpath.serve.engine_process`.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.base.ids import PAGE_BYTES, Role
from dualpath.base.kv_threads import stand_behind_compute
from dualpath.engine.decode import DecodeEngine
from dualpath.engine.flops import forward_cost
from dualpath.engine.model import LoadedModel, load_model
from dualpath.engine.model_source import ModelSpec
from dualpath.engine.prefill import LayerwisePrefill
from dualpath.engine.profile import profile_attention
from dualpath.kv.pool import BufferPool
from dualpath.serve.control import EngineControl
from dualpath.serve.decode_worker import DecodeWorker
from dualpath.serve.engine_config import EngineConfig
from dualpath.serve.messages import Fatal, Hello
from dualpath.serve.prefill_worker import PrefillWorker
from dualpath.serve.worker import WorkerParts
from dualpath.store import open_store
from dualpath.store.contract import Store
from dualpath.testing.faults import with_faults
from dualpath.transfer.auto import open_endpoint
from dualpath.transfer.connection import Patience

__all__ = ["main", "run_engine"]

log = logging.getLogger(__name__)

_WRITE_SLOTS = 32
_SWITCH_INTERVAL_S = 0.0005
"""Threads that move bytes wait for the interpreter at most this long behind the model's thread."""


def run_engine(config: EngineConfig) -> None:
    """Load and serve. Raises what ended the engine before its time."""
    control = EngineControl(config.control_address, config.control_keys, config.engine)
    try:
        model = load_model(
            ModelSpec(
                model=config.model,
                dtype=config.dtype,
                device=config.device,
                block_tokens=config.layout.block_tokens,
                threads=config.threads,
            )
        )
        _require_same_model(config, model)
        if model.device.type == "cpu":
            stand_behind_compute()
        store = _open_store(config)
    except ConfigError as error:
        control.send(Fatal(str(error), config=True))
        control.close()
        raise
    pool = BufferPool(config.pool_slots, config.layout.slot_bytes, name=config.engine)
    parts = WorkerParts(
        config=config,
        control=control,
        pool=pool,
        store=store,
        open_endpoint=lambda events: open_endpoint(
            config.transfer,
            config.engine,
            pool,
            config.transfer_secret,
            events,
            host=config.host,
            connections=config.transfer_connections,
            patience=_patience(config.transfer_deadline_s),
        ),
    )
    try:
        _serve(parts, model)
    except BaseException as error:
        control.send(Fatal(f"{type(error).__name__}: {error}", config=False))
        raise
    finally:
        if store is not None:
            store.close()
        pool.close()
        control.close()


def _serve(parts: WorkerParts, model: LoadedModel) -> None:
    config = parts.config
    worker: PrefillWorker | DecodeWorker
    if config.role is Role.PREFILL:
        fit = profile_attention(model)
        worker = PrefillWorker(parts, LayerwisePrefill(model), fit, forward_cost(model))
    else:
        slots = BufferPool(_WRITE_SLOTS, config.layout.slot_bytes, name=f"{config.engine}-writes")
        engine = DecodeEngine(model, config.hbm_tokens)
        worker = DecodeWorker(parts, engine, forward_cost(model), slots)
    worker.run(
        Hello(
            engine=config.engine,
            group=config.group,
            role=config.role,
            address=worker.links.endpoint.address,
            buffer_tokens=config.pool_slots * config.layout.block_tokens,
            hbm_tokens=config.hbm_tokens,
        )
    )


def _patience(deadline_s: float) -> Patience:
    """A connection that stands still is given up when a hand-over on it would be."""
    usual = Patience()
    return replace(
        usual,
        ping_interval_s=min(usual.ping_interval_s, deadline_s / 4),
        peer_timeout_s=deadline_s,
    )


def _require_same_model(config: EngineConfig, model: LoadedModel) -> None:
    if model.layout != config.layout or model.fingerprint != config.fingerprint:
        raise ConfigError(
            f"{config.engine} loaded another model than the frontend described: {model.layout}, "
            f"fingerprint {model.fingerprint.hex()[:16]}; expected {config.layout}, "
            f"{config.fingerprint.hex()[:16]}. Were its files changed since the start?"
        )


def _open_store(config: EngineConfig) -> Store | None:
    if config.store is None:
        return None
    store = open_store(config.store, config.fingerprint, config.layout)
    if config.store_faults is not None:
        return with_faults(store, config.store_faults)
    return store


def _exit_with_parent() -> None:
    """Standard input closes when the frontend is gone, however it went."""

    def wait() -> None:
        while os.read(sys.stdin.fileno(), PAGE_BYTES):
            pass
        os._exit(0)

    threading.Thread(target=wait, name="parent-watch", daemon=True).start()


def main(read_line: Callable[[], bytes] = sys.stdin.buffer.readline) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    config = msgspec.json.decode(read_line(), type=EngineConfig)
    logging.basicConfig(
        level=config.log_level.upper(),
        format=f"%(asctime)s %(levelname)s {config.engine} %(name)s: %(message)s",
    )
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    _exit_with_parent()
    code = 0
    try:
        run_engine(config)
    except ConfigError as error:
        log.error("%s", error)
        code = 2
    except BaseException:
        log.exception("%s ends", config.engine)
        code = 1
    logging.shutdown()
    # I/O threads hung in the kernel would keep the interpreter from ending.
    os._exit(code)


if __name__ == "__main__":
    main()
