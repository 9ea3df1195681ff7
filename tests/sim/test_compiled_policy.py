"""The compiled policy decides as its source does: the same logs, byte for byte, and the same records."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from kernel_kit import POLICY, cluster, many
from msgspec.structs import replace

from dualpath import policy
from dualpath.policy import Event, Instruction, ReadPlanKind, SchedulerKind, is_compiled
from dualpath.sim.simulation import Simulation

_OF_SOURCES = """
import sys
from importlib.machinery import SOURCE_SUFFIXES, FileFinder, SourceFileLoader

def sources_of_the_policy(path):
    if path != sys.argv[1]:
        raise ImportError
    return FileFinder(path, (SourceFileLoader, SOURCE_SUFFIXES))

sys.path_hooks.insert(0, sources_of_the_policy)

import test_compiled_policy as here

assert not here.is_compiled()
print(here.digest_of_runs())
"""


def digest_of_runs() -> str:
    """Of logs, as JSON lines, and records, with each scheduler and with each read plan."""
    digest = hashlib.sha256()

    def log(event: Event, instructions: list[Instruction]) -> None:
        digest.update(msgspec.json.encode((event, instructions)) + b"\n")

    larger = cluster(prefill_nodes=2, decode_nodes=4, decode_instance_nodes=2)
    configs = [replace(POLICY, scheduler=each) for each in SchedulerKind]
    configs += [replace(POLICY, read_plan=each) for each in ReadPlanKind]
    for config in configs:
        outcome = Simulation(larger, config, many(30, 6, seed=1), log=log).run()
        assert outcome.unfinished_agents == 0
        digest.update(outcome.records.tobytes())
    return digest.hexdigest()


@pytest.mark.skipif(not is_compiled(), reason="the policy is not compiled")
def test_the_compiled_policy_gives_the_logs_of_its_sources() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", _OF_SOURCES, str(Path(policy.__file__).parent)],
        cwd=Path(__file__).parent,
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == digest_of_runs()
