"""Extensions compiled from the policy's sources: whether they run, and that they are of these sources."""

from __future__ import annotations

import os
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from dualpath.policy import is_compiled, scheduler
from dualpath.policy.compiled import check_extensions


def test_it_says_whether_it_is_compiled() -> None:
    assert scheduler.__file__ is not None
    assert scheduler.__file__.endswith(tuple(EXTENSION_SUFFIXES)) is is_compiled()


def _package(root: Path, *, source_s: int, extension_s: int) -> Path:
    """With a module and its extension, written at these times."""
    package = root / "src" / "dualpath" / "policy"
    package.mkdir(parents=True)
    names = {"scheduler.py": source_s, f"scheduler{EXTENSION_SUFFIXES[0]}": extension_s}
    for name, at_s in names.items():
        package.joinpath(name).touch()
        os.utime(package / name, (at_s, at_s))
    return package


def test_in_a_checkout_an_extension_older_than_its_source_is_an_error(tmp_path: Path) -> None:
    tmp_path.joinpath("setup.py").touch()
    package = _package(tmp_path, source_s=2, extension_s=1)
    with pytest.raises(ImportError, match=r"scheduler\.py was edited after .* run `make compile`"):
        check_extensions(package)


def test_in_a_checkout_a_younger_extension_is_right(tmp_path: Path) -> None:
    tmp_path.joinpath("setup.py").touch()
    check_extensions(_package(tmp_path, source_s=1, extension_s=2))


def test_where_it_is_installed_times_mean_nothing(tmp_path: Path) -> None:
    check_extensions(_package(tmp_path, source_s=2, extension_s=1))
