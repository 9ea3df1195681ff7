"""The connector's counts in vLLM's log and `/metrics`: `vllm:dualpath_<name>_total`.

Beside them one gauge, `vllm:dualpath_slots_in_use`: slots of the DRAM buffer that have an owner, as of the
last step.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from dualpath.vllm.agent_stats import AgentStats

__all__ = ["SLOTS_IN_USE", "DualPathPromMetrics", "DualPathStats"]

SLOTS_IN_USE = "slots_in_use"

_HELP = {
    "read_blocks": "KV blocks read from the store",
    "read_for_peer_blocks": "KV blocks read from the store for a prefill server",
    "pulled_blocks": "KV blocks pulled from a peer",
    "saved_blocks": "KV blocks copied out of the device",
    "written_blocks": "KV blocks that became durable",
    "dropped_saves": "KV blocks not saved, because the buffer was full",
    "failed_reads": "KV blocks that should be stored and could not be read",
    "failed_pulls": "Transfers from a peer that failed",
    "failed_writes": "KV blocks that could not be stored",
    "expired_prompts": "Prompts whose KV no decode server fetched in time",
}


@dataclass
class DualPathStats(KVConnectorStats):
    """Counts since the last report, by name of `AgentStats`."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, count in other.data.items():
            self.data[name] = self.data.get(name, 0) + count
        return self

    def reduce(self) -> dict[str, int | float]:
        return {name: count for name, count in self.data.items() if name != SLOTS_IN_USE}

    def is_empty(self) -> bool:
        return not self.data


class DualPathPromMetrics(KVConnectorPromMetrics):
    """One counter for each count, and the gauge."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counts = [name for name in asdict(AgentStats()) if not name.startswith("_")]
        self._counters: dict[str, dict[int, Counter]] = {}
        for name in counts:
            counter = self._counter_cls(
                name=f"vllm:dualpath_{name}", documentation=_HELP[name], labelnames=labelnames
            )
            self._counters[name] = {
                engine: counter.labels(*values) for engine, values in per_engine_labelvalues.items()
            }

        gauge = self._gauge_cls(
            name=f"vllm:dualpath_{SLOTS_IN_USE}",
            documentation="Slots of the DRAM buffer in use, as of the last step",
            labelnames=labelnames,
            multiprocess_mode="mostrecent",
        )
        self._slots_in_use = {
            engine: gauge.labels(*values) for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, count in transfer_stats_data.items():
            if name == SLOTS_IN_USE:
                self._slots_in_use[engine_idx].set(count)
            else:
                self._counters[name][engine_idx].inc(count)
