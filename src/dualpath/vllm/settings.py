"""Settings of the connector: what `kv_connector_extra_config` of vLLM's `--kv-transfer-config` may say.

Invariant: an instance that exists is valid. It knows no vLLM, and opens nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.base.ids import GiB
from dualpath.vllm.params import KvPeer

__all__ = ["SECRET_ENV", "ConnectorSettings", "TransferKind", "connector_settings"]

SECRET_ENV = "DUALPATH_KV_SECRET"
"""Environment variable with the secret that all servers of a cluster share."""

TransferKind = Literal["tcp", "nixl"]
"""What moves KV between servers; both listen on a TCP port."""

_Positive = Annotated[float, msgspec.Meta(gt=0)]


class ConnectorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One server's. Sizes are of each rank.

    `store`: address of the store of blocks ("" for none), as `dualpath serve --store`; `store_capacity_bytes`
    bounds what this server accounts for. `buffer_bytes`: DRAM that stages blocks. `kv_port`: port of the KV
    endpoint (of rank 0; None: no peers), listening on `kv_host`, told to peers as `kv_advertise` where that
    differs; KV moves by `transfer`, the same on all servers. `kv_secret_file`: the cluster's secret, where
    the environment does not have it. `model_id` names the weights in the store's keys, where a path does not.
    `stage_deadline_s`: what is not staged by then is computed. `lease_s`: how long KV waits for a peer.
    """

    store: str = ""
    store_capacity_bytes: Annotated[int, msgspec.Meta(gt=0)] | None = None
    buffer_bytes: Annotated[int, msgspec.Meta(gt=0)] = 1 * GiB
    kv_host: str = "127.0.0.1"
    kv_port: Annotated[int, msgspec.Meta(gt=0, lt=65536)] | None = None
    kv_advertise: str | None = None
    transfer: TransferKind = "tcp"
    kv_secret_file: str | None = None
    model_id: str = ""
    stage_deadline_s: _Positive = 30.0
    lease_s: _Positive = 60.0

    def peer(self, rank: int = 0) -> KvPeer | None:
        """Where a rank of this server can be reached; None without a KV endpoint."""
        if self.kv_port is None:
            return None
        return KvPeer(self.kv_advertise or self.kv_host, self.kv_port + rank)

    def secret(self, environ: Mapping[str, str] = os.environ) -> bytes:
        """The cluster's secret, empty if there is none. Raises ConfigError for a file that cannot be
        read."""
        if self.kv_secret_file is None:
            return environ.get(SECRET_ENV, "").encode()
        try:
            return Path(self.kv_secret_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"kv_secret_file {self.kv_secret_file}: {error.strerror}") from error


def connector_settings(extra_config: Mapping[str, object]) -> ConnectorSettings:
    """Read `kv_connector_extra_config`. Raises ConfigError, naming the key at fault."""
    try:
        return msgspec.convert(dict(extra_config), ConnectorSettings)
    except msgspec.ValidationError as error:
        known = ", ".join(field.name for field in msgspec.structs.fields(ConnectorSettings))
        raise ConfigError(f"kv_connector_extra_config: {error}; it may hold {known}") from None
