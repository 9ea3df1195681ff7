"""Engines of `dualpath serve` on the nodes of a testbed. The one module here that knows engines."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dualpath.serve.placement import EnginePlace, Placement
from dualpath.testbed.bed import Testbed

__all__ = ["placement_of", "write_placement"]


def placement_of(bed: Testbed) -> Placement:
    """Each group on its node: store over the SNIC, hand-over over the CNIC, control over management."""
    return Placement(
        control_host=bed.frontend_address,
        engines={
            node.group: EnginePlace(
                host=node.compute_address,
                launch=tuple(node.command()),
                store=bed.node_store_address,
            )
            for node in bed.nodes.values()
        },
    )


def write_placement(bed: Testbed) -> Path:
    """The file for `--placement`, among the testbed's files."""
    path = bed.files / "placement.json"
    encoded = msgspec.json.format(msgspec.json.encode(placement_of(bed)), indent=2)
    path.write_bytes(encoded + b"\n")
    return path
