"""What a node of the cluster can do, by specification: rates and sizes, each number with its source.

Knows no model and no efficiency: what part of a peak is reached is for `costs`. Invariant: every number of a
hardware file is named in the file's `[sources]`, so that no number is without an origin.
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import msgspec

from dualpath.base.errors import ConfigError

__all__ = [
    "GpuSpec",
    "Hardware",
    "NodeSpec",
    "hardware_names",
    "hardware_sources",
    "load_hardware",
]

Rate = Annotated[float, msgspec.Meta(gt=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]


class GpuSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU. FLOP/s are dense, not those of structured sparsity; `fp8_flop_s` is 0 where it has no FP8."""

    name: str
    bf16_flop_s: Rate
    fp8_flop_s: Annotated[float, msgspec.Meta(ge=0)]
    hbm_bytes: Size
    hbm_bytes_s: Rate


class NodeSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A node. The defaults are the paper's: a DGX with one storage NIC of 400 Gb/s."""

    gpus: Size = 8
    cnic_bytes_s: Rate = 50e9
    """Of one GPU's compute NIC, each way."""
    snic_bytes_s: Rate = 50e9
    """Of the node's storage NIC, or of all of them together; `dualpath plan --snics N` has it N times."""
    memory_bytes_s: Rate = 500e9
    """Of the host's memory, reads and writes together."""
    memory_bytes: Size = 2 * 1024**4
    pcie_bytes_s: Rate = 64e9
    """Of one GPU, each way."""
    nvlink_bytes_s: Rate = 450e9
    """Of one GPU, each way."""

    @property
    def network_bytes_s(self) -> float:
        """Of one GPU, each way, through its compute NIC: all of that traffic, copies from and to the host
        too, also passes the GPU's PCIe link."""
        return min(self.cnic_bytes_s, self.pcie_bytes_s)


class Hardware(msgspec.Struct, frozen=True):
    """The nodes of a cluster, which are alike."""

    gpu: GpuSpec
    node: NodeSpec


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    gpu: GpuSpec
    sources: dict[str, dict[str, Annotated[str, msgspec.Meta(min_length=1)]]]
    node: NodeSpec = NodeSpec()


def hardware_names() -> list[str]:
    """The hardware files of this package, by name, sorted."""
    return sorted(
        each.name.removesuffix(".toml")
        for each in _shipped().iterdir()
        if each.name.endswith(".toml")
    )


def load_hardware(name_or_path: str | Path) -> Hardware:
    """The hardware of a name in `hardware_names()`, or of a TOML file.

    A `Path`, and a string with a slash or that ends in `.toml`, is a file: tables `[gpu]` and `[node]` with
    the fields of GpuSpec and NodeSpec, and `[sources.gpu]` and `[sources.node]` with the source of each
    number in them. What `[node]` leaves out has NodeSpec's default. Raises ConfigError.
    """
    file = _read(name_or_path)
    return Hardware(file.gpu, file.node)


def hardware_sources(name_or_path: str | Path) -> dict[str, str]:
    """Of each number in such a file, by table and field: `gpu.hbm_bytes`. Raises ConfigError."""
    tables = _read(name_or_path).sources
    return {
        f"{table}.{field}": source
        for table, fields in tables.items()
        for field, source in fields.items()
    }


def _read(name_or_path: str | Path) -> _File:
    source: Traversable
    name = str(name_or_path)
    if isinstance(name_or_path, Path) or os.sep in name or name.endswith(".toml"):
        source = Path(name).expanduser()
    else:
        names = hardware_names()
        if name.lower() not in names:
            raise ConfigError(
                f"hardware {name!r}: expected one of {', '.join(names)}, or a path that ends in .toml"
            )
        source = _shipped() / f"{name.lower()}.toml"
    try:
        tables = tomllib.loads(source.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"hardware {name}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # Not UTF-8, or not TOML.
        raise ConfigError(f"hardware {name}: expected TOML: {error}") from error
    try:
        file = msgspec.convert(tables, _File)
    except msgspec.ValidationError as error:
        raise ConfigError(f"hardware {name}: {error}") from error
    _check_sources(name, tables, file.sources)
    return file


def _check_sources(
    name: str, tables: Mapping[str, Mapping[str, object]], sources: Mapping[str, Mapping[str, str]]
) -> None:
    """Every number has a source, and every source is of a number."""
    numbers = {
        f"{table}.{field}"
        for table, fields in tables.items()
        if table != "sources"
        for field, value in fields.items()
        if not isinstance(value, str)
    }
    named = {f"{table}.{field}" for table, fields in sources.items() for field in fields}
    for field in sorted(numbers - named):
        raise ConfigError(
            f"hardware {name}: {field} has no source: say in [sources.{field.split('.')[0]}] "
            "where the number is from, if only that it was measured"
        )
    for field in sorted(named - numbers):
        raise ConfigError(f"hardware {name}: a source for {field}, which is no number of the file")


def _shipped() -> Traversable:
    return resources.files("dualpath.sim") / "hardware_files"
