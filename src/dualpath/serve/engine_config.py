"""What an engine process is told when it starts: one JSON line on its standard input."""

from __future__ import annotations

import msgspec

from dualpath.base.ids import EngineId, GroupId, Role
from dualpath.kv.layout import KVLayout
from dualpath.serve.control import ControlKeys
from dualpath.transfer import EndpointKind

__all__ = ["EngineConfig"]


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """`transfer_secret` authenticates engines to each other. Sizes are checked by the frontend.

    `pool_slots` x one Full Block is the engine's staging buffer (PE buffer or DE buffer);
    `hbm_tokens` the device KV a decode engine may hold. `oracle`: reads, copies and transfers of KV are left
    out, as if they took no time; tokens mean nothing.
    """

    engine: EngineId
    group: GroupId
    role: Role
    control_address: str
    control_keys: ControlKeys
    transfer: EndpointKind
    transfer_connections: int
    transfer_secret: bytes
    host: str
    model: str
    dtype: str
    device: str
    threads: int
    layout: KVLayout
    fingerprint: bytes
    pool_slots: int
    hbm_tokens: int
    store: str | None
    store_deadline_s: float
    store_faults: str | None
    transfer_deadline_s: float
    quota_s: float
    max_batch_tokens: int
    max_running: int
    oracle: bool
    log_level: str
