"""What a simulated run gave: a record a request, and what the cluster did. Figures are computed when asked
for.

Knows no policy. Times are seconds from the start of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dualpath.sim.cluster import Cluster
from dualpath.sim.kernel.state import State

__all__ = ["Outcome"]

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Outcome:
    """`records`: of all requests that arrived, fields as `kernel.state.RECORD`; not to be written to.

    `agents`: of the workload, whether they have arrived or not.
    `end_s`: when the last request ended, or until when was simulated if some agent has not.
    `read_bytes[n]`: that node n read; prefill nodes come first. `snic_bytes[n, w]`: the same in window w,
    up to the last that is kept. `attention_s[e, w]`: attention time of prefill engine e in steps that
    started in window w; `prefill_instance_engines` consecutive ones step together. `attention_max_mean`:
    attention time of the slowest rank by the mean of an instance's ranks, over all prefill steps.
    `*_busy_share`: time in steps, of all instances.
    """

    records: np.recarray
    end_s: float
    events: int
    agents: int
    unfinished_agents: int
    was_interrupted: bool
    read_bytes: Float64
    snic_bytes: Float64
    window_s: float
    snic_bytes_s: float
    prefill_nodes: int
    attention_s: Float64
    prefill_instance_engines: int
    attention_max_mean: float
    prefill_busy_share: float
    decode_busy_share: float

    @classmethod
    def of(cls, cluster: Cluster, state: State, *, interrupted: bool) -> Outcome:
        clock = state.clock[0]
        records = state.records[: clock.records]
        end_s = float(clock.now_s)
        if clock.unfinished_agents == 0:
            end_s = float(records.finished_s.max(initial=0.0))
        window_s = float(state.parameters[0].window_s)
        windows = min(state.series_bytes.shape[1], int(end_s / window_s) + 1)
        prefill = state.instances[state.instances.role == 0]
        decode = state.instances[state.instances.role == 1]
        mean_s = float(prefill.attention_mean_s.sum())
        return cls(
            records=records,
            end_s=end_s,
            events=int(clock.events),
            agents=len(state.slots),
            unfinished_agents=int(clock.unfinished_agents),
            was_interrupted=interrupted,
            read_bytes=state.links.served_bytes[: cluster.nodes],
            snic_bytes=state.series_bytes[:, :windows],
            window_s=window_s,
            snic_bytes_s=cluster.snic_bytes_s,
            prefill_nodes=cluster.prefill_nodes,
            attention_s=state.attention_s[:, :windows],
            prefill_instance_engines=cluster.prefill_instance_nodes * cluster.gpus,
            attention_max_mean=float(prefill.attention_max_s.sum()) / mean_s if mean_s else 1.0,
            prefill_busy_share=float(prefill.busy_s.mean()) / end_s if end_s else 0.0,
            decode_busy_share=float(decode.busy_s.mean()) / end_s if end_s else 0.0,
        )

    @property
    def jct_s(self) -> float:
        """When the last request of all agents ended (paper: offline job completion time)."""
        return self.end_s

    def snic_utilization(self) -> float:
        """Of all storage NICs, over the whole run."""
        could_bytes = self.snic_bytes_s * len(self.read_bytes) * self.end_s
        return float(self.read_bytes.sum()) / could_bytes if could_bytes else 0.0

    def snic_balance(self, *, start: float = 0.0, end: float = 1.0) -> float:
        """Busiest storage NIC by their mean, averaged over the windows in which anything was read.

        `start`, `end`: shares of the run between which windows count.
        """
        windows = self.snic_bytes.shape[1]
        part = self.snic_bytes[:, int(start * windows) : max(1, int(end * windows))]
        means = part.mean(axis=0)
        busy = means > 0
        return float((part.max(axis=0)[busy] / means[busy]).mean()) if busy.any() else 1.0
