"""Hardware files: what they say, that every number has a source, and what is refused."""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path

import pytest

from dualpath.base.errors import ConfigError
from dualpath.sim.hardware import NodeSpec, hardware_names, hardware_sources, load_hardware

MINIMAL = """
[gpu]
name = "mine"
bf16_flop_s = 1e12
fp8_flop_s = 0
hbm_bytes = 1_000
hbm_bytes_s = 2e9
[node]
gpus = 2
[sources.gpu]
bf16_flop_s = "measured"
fp8_flop_s = "it has none"
hbm_bytes = "measured"
hbm_bytes_s = "measured"
[sources.node]
gpus = "counted"
"""


def written(path: Path, text: str) -> Path:
    file = path / "mine.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_names() -> None:
    assert hardware_names() == ["a100", "b200", "h100", "h200", "h800"]


@pytest.mark.parametrize("name", hardware_names())
def test_every_shipped_number_has_a_source_and_is_said(name: str) -> None:
    hardware = load_hardware(name)
    file = resources.files("dualpath.sim") / "hardware_files" / f"{name}.toml"
    tables = tomllib.loads(file.read_text(encoding="utf-8"))
    said = {f"{table}.{field}" for table in ("gpu", "node") for field in tables["sources"][table]}
    fields = {f"gpu.{field}" for field in hardware.gpu.__struct_fields__} - {"gpu.name"}
    assert said == fields | {f"node.{field}" for field in NodeSpec.__struct_fields__}
    assert all(len(each) > 5 for table in tables["sources"].values() for each in table.values())


def test_dense_and_each_way() -> None:
    h100, h800, h200 = (load_hardware(name) for name in ("h100", "h800", "h200"))
    assert h100.gpu.bf16_flop_s == pytest.approx(1979e12 / 2, rel=1e-3)
    assert h100.gpu.fp8_flop_s == pytest.approx(3958e12 / 2, rel=1e-3)
    assert h100.node == NodeSpec()
    assert (h100.node.nvlink_bytes_s, h800.node.nvlink_bytes_s) == (900e9 / 2, 400e9 / 2)
    assert h800.gpu.bf16_flop_s == h200.gpu.bf16_flop_s == h100.gpu.bf16_flop_s
    assert h200.gpu.hbm_bytes == pytest.approx(141 * 1024**3, rel=0.01)
    assert load_hardware("A100").gpu.fp8_flop_s == 0
    # The trend that the paper shows: compute grows faster than HBM, and HBM faster than links.
    a100, b200 = load_hardware("a100"), load_hardware("b200")
    compute = b200.gpu.fp8_flop_s / a100.gpu.bf16_flop_s
    assert compute > b200.gpu.hbm_bytes_s / a100.gpu.hbm_bytes_s
    assert b200.node.pcie_bytes_s / a100.node.pcie_bytes_s == 2


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = written(tmp_path, MINIMAL)
    hardware = load_hardware(file)
    assert load_hardware(str(file)) == hardware
    assert (hardware.gpu.name, hardware.gpu.hbm_bytes) == ("mine", 1_000)
    assert hardware.node == NodeSpec(gpus=2)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('hbm_bytes_s = "measured"', "", r"gpu\.hbm_bytes_s has no source.*\[sources\.gpu\]"),
        ('gpus = "counted"', "", r"node\.gpus has no source"),
        ('gpus = "counted"', 'gpus = ""', "length >= 1"),
        ('gpus = "counted"', 'gpus = "counted"\nsnic_bytes_s = "x"', r"node\.snic_bytes_s, which"),
        ("gpus = 2", "gpus = 0", r"node\.gpus"),
        ("bf16_flop_s = 1e12", "bf16_flop_s = 0", "bf16_flop_s"),
        ("gpus = 2", "gpu = 2", "unknown field `gpu`"),
        ("hbm_bytes = 1_000", "", "hbm_bytes"),
        ("[gpu]", "[gpu", "expected TOML"),
    ],
)
def test_what_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_hardware(written(tmp_path, MINIMAL.replace(old, new, 1)))


def test_unknown_names_and_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'h1000': expected one of a100, b200, h100, h200, h800"):
        load_hardware("h1000")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_hardware(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_hardware("h100.toml")


def test_sources_are_told_by_table_and_field(tmp_path: Path) -> None:
    assert hardware_sources(written(tmp_path, MINIMAL)) == {
        "gpu.bf16_flop_s": "measured",
        "gpu.fp8_flop_s": "it has none",
        "gpu.hbm_bytes": "measured",
        "gpu.hbm_bytes_s": "measured",
        "node.gpus": "counted",
    }
