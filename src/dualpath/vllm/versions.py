"""What of vLLM the plug-in works with: versions, and ways to run a model in parallel."""

from __future__ import annotations

import re

from dualpath.base.errors import ConfigError

__all__ = ["TESTED_VERSIONS", "check_parallelism", "check_version"]

TESTED_VERSIONS = ("0.31", "0.32")
_OLDEST = (0, 30)
_NEWEST = (0, 32)


def check_version(version: str) -> None:
    """Raises ConfigError for a vLLM whose interfaces are not those that the plug-in is written for."""
    match = re.match(r"(\d+)\.(\d+)", version)
    found = (int(match.group(1)), int(match.group(2))) if match else (0, 0)
    if not _OLDEST <= found <= _NEWEST:
        oldest, newest = (".".join(map(str, each)) for each in (_OLDEST, _NEWEST))
        raise ConfigError(
            f"vLLM {version}: the plug-in works with {oldest} to {newest}; install one of these, "
            f"or another version of dualpath"
        )


def check_parallelism(parallel_config: object, *, has_peers: bool) -> None:
    """Raises ConfigError for a split of KV that our blocks do not follow. Takes `ParallelConfig` of vLLM."""
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
    ):
        size = getattr(parallel_config, name, 1)
        if size > 1:
            raise ConfigError(
                f"{name} {size}: the connector works with tensor and expert parallelism; set it to 1"
            )
    replicas = getattr(parallel_config, "data_parallel_size", 1)
    if has_peers and replicas > 1:
        raise ConfigError(
            f"data_parallel_size {replicas}: a KV endpoint belongs to one engine; start a server for each, "
            f"with a kv_port of its own, and give the router all of them"
        )
