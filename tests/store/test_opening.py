"""Addresses of stores, and what the packages export."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from dualpath.base.errors import ConfigError
from dualpath.kv import fingerprint
from dualpath.store import DirectoryStore, open_store
from dualpath.testing.store_suite import SUITE_LAYOUT

FP = fingerprint("model", "r1", SUITE_LAYOUT)


@pytest.mark.parametrize("form", ["{}", "file:{}", "file://{}", "FILE://localhost{}"])
def test_forms_of_a_directory(form: str, tmp_path: Path) -> None:
    place = tmp_path / "a place"
    place.mkdir()
    address = form.format(str(place).replace(" ", "%20") if ":" in form else place)
    store = open_store(address, FP, SUITE_LAYOUT, model="m")
    assert isinstance(store, DirectoryStore)
    assert store.files.path == place / FP.hex()
    store.close()


def test_relative_path_is_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("kv", FP, SUITE_LAYOUT)
    assert isinstance(store, DirectoryStore)
    assert store.files.path == tmp_path / "kv" / FP.hex()
    store.close()


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("", "is empty"),
        ("s3://bucket/prefix", "no backend for s3:; give a path or one of file:, redis:, rediss:"),
        ("file://server/share", "write file:///absolute/path"),
        ("file:", "write file:///absolute/path"),
    ],
)
def test_unknown_addresses_are_refused(address: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_store(address, FP, SUITE_LAYOUT)


@pytest.mark.parametrize("package", ["dualpath.kv", "dualpath.store", "dualpath.testing"])
def test_exports_exist_and_are_sorted(package: str) -> None:
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert len(set(module.__all__)) == len(module.__all__)


def test_testing_package_does_not_need_pytest() -> None:
    script = "import sys, dualpath.testing; sys.exit('pytest' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], timeout=60, check=False).returncode == 0
