"""What is written down of testbeds."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from dualpath.base.errors import ConfigError
from dualpath.testbed import state
from dualpath.testbed.state import BedState, Owner, StateDirectory


def bed(name: str, owner: Owner | None = None) -> BedState:
    return BedState(
        name=name,
        topology="1P2D",
        snic_bits_s=4,
        cnic_bits_s=5,
        subnet=6,
        owner=owner,
    )


def test_what_is_written_is_read_until_it_is_removed(tmp_path: Path) -> None:
    states = StateDirectory(tmp_path / "beds")
    with states.locked():
        assert states.read() == []
        states.write(bed("b"))
        states.write(bed("a", Owner.this_process()))
        (states.files("b") / "log").write_text("x")
        assert [each.name for each in states.read()] == ["a", "b"]
        states.remove("b")
        assert states.read() == [bed("a", Owner.this_process())]
        assert not states.files("b").exists()
        states.remove("b")


def test_a_bed_is_orphaned_when_its_process_is_gone_or_is_another() -> None:
    process = subprocess.Popen(["sleep", "60"])
    mine = Owner.this_process()
    try:
        alive = Owner(process.pid, Owner.this_process().started_ticks - 1)
        assert not bed("a", mine).orphaned
        assert not bed("a", None).orphaned
        assert bed("a", alive).orphaned  # The same number, started at another time.
    finally:
        process.kill()
        process.wait(5)
    assert bed("a", Owner(process.pid, 0)).orphaned


def test_the_lock_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    states = StateDirectory(tmp_path)
    with states.locked():
        pass
    code = (
        "import fcntl, sys\n"
        f"file = open({str(tmp_path / 'lock')!r}, 'w')\n"
        "fcntl.flock(file, fcntl.LOCK_EX)\n"
        "print('locked', flush=True)\n"
        "sys.stdin.read()\n"
    )
    monkeypatch.setattr(state, "_LOCK_S", 0.05)
    holder = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"locked\n"
        started_s = time.monotonic()
        with pytest.raises(ConfigError, match=r"another process has been making .*/lock"):
            states.locked().__enter__()
        assert time.monotonic() - started_s >= 0.05
    finally:
        holder.communicate()
    with states.locked():
        pass


def test_a_place_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"testbeds keep their state in .*/file"):
        StateDirectory(tmp_path / "file").locked().__enter__()
