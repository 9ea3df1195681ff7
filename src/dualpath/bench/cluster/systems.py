"""The systems that are compared, and how each is served on a testbed."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dualpath.bench.server import ServeProcess
from dualpath.kv.layout import KVLayout
from dualpath.testbed import Testbed
from dualpath.testbed.placement import write_placement

__all__ = ["SYSTEMS", "Serving", "System"]

_ALPHA_S, _BETA_S = 3.0, 5.0
"""The paper's: a threshold is what a node reads, or what an engine is brought, in such a time."""
_TIMEOUT_S = 900.0
"""Of storage: in a queue of many requests reads wait long, and waiting is what is measured."""


@dataclass(frozen=True, slots=True)
class System:
    """`exact`: its answers are the model's. `both_sides`: all nodes' storage NICs read."""

    name: str
    flags: tuple[str, ...]
    exact: bool = True
    both_sides: bool = True


SYSTEMS = {
    each.name: each
    for each in (
        System("basic", ("--read-path", "pe"), both_sides=False),
        System("shorter", ("--read-path", "shorter")),
        System("split", ("--read-path", "split")),
        System("steady", ("--read-path", "steady")),
        System("oracle", ("--scheduler", "oracle"), exact=False),
        System("decode side", ("--read-path", "de"), both_sides=False),
    )
}
"""`basic`, `shorter` and `oracle` are the paper's Basic, DualPath and Oracle; `split` is the default here,
`steady` another rule of ours that is not measured unless it is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What all systems of one run are served with. `tokens_at_once`: of all requests under way together."""

    model: str
    layout: KVLayout
    longest_tokens: int
    tokens_at_once: int
    threads: int
    logs: Path

    def on(self, bed: Testbed, system: System) -> ServeProcess:
        """A server of the system with its engines on the testbed's nodes."""
        topology = bed.topology
        name = f"{topology}-{system.name.replace(' ', '-')}.log"
        place = [
            *("--prefill", str(topology.prefill), "--decode", str(topology.decode)),
            *("--placement", str(write_placement(bed)), "--transfer", "tcp"),
        ]
        kv_bytes = self.layout.row_bytes * self.layout.n_layers
        node_tokens_s = bed.snic_goodput_bytes_s / kv_bytes
        nodes = topology.prefill + (topology.decode if system.both_sides else 0)
        scheduling = [
            *(*system.flags, "--alpha-tokens", str(round(_ALPHA_S * node_tokens_s))),
            *("--beta-tokens", str(round(_BETA_S * node_tokens_s * nodes / topology.prefill))),
        ]
        return self._serve(bed, [*place, *scheduling], name, self.threads)

    def filling(self, bed: Testbed) -> ServeProcess:
        """A server beside the testbed, whose engines reach the store without a limit."""
        # One engine computes at a time: first the prompt, then a token.
        threads = os.cpu_count() or 1
        return self._serve(bed, ["--read-path", "pe"], f"{bed.topology}-fill.log", threads)

    def _serve(self, bed: Testbed, more: Sequence[str], log: str, threads: int) -> ServeProcess:
        slots = self.layout.blocks_for(self.tokens_at_once) + 64
        buffer = str(slots * self.layout.slot_bytes)
        arguments = [
            *(self.model, "--served-model-name", "model", "--dtype", "float32", "--device", "cpu"),
            *("--threads", str(threads), "--max-model-len", str(self.longest_tokens)),
            *("--block-tokens", str(self.layout.block_tokens)),
            *("--store", bed.store_address, "--store-timeout-s", str(_TIMEOUT_S)),
            *("--pe-buffer", buffer, "--de-buffer", buffer, "--kv-device-memory", buffer),
            *("--transfer-timeout-s", "120"),
            *more,
        ]
        return ServeProcess(arguments, self.logs / log)
