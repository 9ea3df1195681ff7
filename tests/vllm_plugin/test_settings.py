"""The connector's settings, versions, and what names a block."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from vllm_kit import FACTS, LAYOUT

from dualpath.base.errors import ConfigError, UnsupportedModel
from dualpath.vllm import KvPeer
from dualpath.vllm.block_format import block_fingerprint, opaque_layout, tenant_salt
from dualpath.vllm.settings import ConnectorSettings, connector_settings
from dualpath.vllm.versions import TESTED_VERSIONS, check_parallelism, check_version


def test_defaults_and_peers() -> None:
    assert connector_settings({}) == ConnectorSettings()
    assert connector_settings({}).peer() is None
    settings = connector_settings({"store": "/kv", "kv_port": 9000, "kv_advertise": "node1"})
    assert settings.peer(2) == KvPeer("node1", 9002)


@pytest.mark.parametrize(
    "config",
    [{"stor": "/kv"}, {"kv_port": 0}, {"buffer_bytes": -1}, {"lease_s": 0}, {"store": 3}],
)
def test_bad_settings_name_the_key(config: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(config))):
        connector_settings(config)


def test_the_secret(tmp_path: Path) -> None:
    assert ConnectorSettings().secret({"DUALPATH_KV_SECRET": "abc"}) == b"abc"
    assert ConnectorSettings().secret({}) == b""
    file = tmp_path / "secret"
    file.write_bytes(b"from a file\n")
    assert ConnectorSettings(kv_secret_file=str(file)).secret({}) == b"from a file"
    with pytest.raises(ConfigError, match="kv_secret_file"):
        ConnectorSettings(kv_secret_file=str(tmp_path / "no")).secret({})


def test_versions() -> None:
    for version in TESTED_VERSIONS:
        check_version(f"{version}.0+cpu")
    for version in ("0.29.0", "0.33.0", "1.0.0", "dev"):
        with pytest.raises(ConfigError, match=rf"{version}: .* 0\.30 to 0\.32; install one"):
            check_version(version)


def test_parallelism() -> None:
    check_parallelism(SimpleNamespace(tensor_parallel_size=8), has_peers=True)
    check_parallelism(SimpleNamespace(data_parallel_size=2), has_peers=False)
    for refused in ("pipeline_parallel_size", "decode_context_parallel_size", "data_parallel_size"):
        with pytest.raises(ConfigError, match=refused):
            check_parallelism(SimpleNamespace(**{refused: 2}), has_peers=True)


def test_the_layout_is_opaque() -> None:
    assert LAYOUT.full_block_bytes == 4096
    assert (LAYOUT.n_layers, LAYOUT.block_tokens, LAYOUT.layer_block_bytes) == (2, 4, 2048)


def test_layers_of_different_sizes_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match="different sizes"):
        opaque_layout(msgspec.structs.replace(FACTS, block_bytes=(2048, 4096)))
    with pytest.raises(UnsupportedModel, match="does not divide"):
        opaque_layout(msgspec.structs.replace(FACTS, block_bytes=(2047, 2047)))


def test_every_fact_is_in_the_fingerprint() -> None:
    changed: dict[str, object] = {
        "model": "other",
        "revision": "other",
        "vllm_version": "0.33",
        "backend": "other",
        "kv_spec": "other",
        "layers": (("l0", (4, 8), "f"), ("l1", (8, 4), "f")),
        "block_tokens": 8,
        "block_bytes": (4096, 4096),
        "rank": 1,
        "ranks": 2,
    }
    assert set(changed) == set(FACTS.__struct_fields__)
    names = {
        block_fingerprint(msgspec.structs.replace(FACTS, **{k: v})) for k, v in changed.items()
    }
    assert len(names | {block_fingerprint(FACTS)}) == len(changed) + 1


def test_salts() -> None:
    salts = [tenant_salt(*each) for each in ((None, None), ("a", None), (None, "a"), ("a", "a"))]
    assert len(set(salts)) == 4
    assert salts[0] == ""
