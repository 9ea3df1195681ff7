"""Real testbeds: limits, isolation, counters, and that nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from testbed_kit import leftovers, listen, reachable, stream, until

from dualpath.base.errors import ConfigError
from dualpath.testbed import NicBytes, Testbed, TestbedConfig, existing_testbeds, take_down
from dualpath.testbed.kernel import enter_command, processes_in
from dualpath.testbed.store_server import PORT

Build = Callable[..., Testbed]


def test_networks_are_separate(build: Build) -> None:
    bed = build(topology="1P1D")
    pe, de = bed.nodes["pe0"], bed.nodes["de0"]
    layout = bed.layout
    server = listen(de.command(), 5000)
    targets = {
        (de.compute_address, 5000): True,
        (de.storage_address, 5000): False,
        (de.management_address, 5000): False,
        (layout.addresses.store, PORT): True,
        (layout.addresses.store_management, PORT): False,
        ("192.0.2.1", 80): False,  # Outside: there is no route.
    }
    assert dict(zip(targets, reachable(pe.command(), list(targets)), strict=True)) == targets
    from_host = {
        (de.management_address, 5000): True,
        (layout.addresses.store_management, PORT): True,
    }
    assert all(reachable([], list(from_host)))
    server.communicate()


def test_a_storage_nic_holds_its_rate_both_ways_at_once(build: Build) -> None:
    bed = build(topology="1P1D", snic="100mbit")
    pe, store = bed.nodes["pe0"], enter_command(bed.layout.store)
    processes = [
        *stream(store, pe.command(), pe.storage_address, 2.0),
        *stream(pe.command(), store, bed.layout.addresses.store, 2.0),
    ]
    time.sleep(0.6)  # The shaper first lets a burst through: what is measured comes after it.
    before = bed.counters()
    time.sleep(1.2)
    after = bed.counters()
    assert [process.wait(20) for process in processes] == [0] * 4
    window_s = after.at_s - before.at_s
    moved = _difference(after.nodes["pe0"].snic, before.nodes["pe0"].snic)
    # The rate is the kernel's doing; acknowledgements of the other direction take under 2 %.
    for direction in (moved.received, moved.sent):
        assert direction / window_s == pytest.approx(bed.snic_goodput_bytes_s, rel=0.05)
    store_moved = _difference(after.store, before.store)
    assert store_moved.sent == pytest.approx(moved.received, rel=0.05)
    idle = _difference(after.nodes["de0"].snic, before.nodes["de0"].snic)
    assert idle.received + idle.sent < 4096  # Nothing but broadcasts of the bridge.


def _difference(after: NicBytes, before: NicBytes) -> NicBytes:
    return NicBytes(after.received - before.received, after.sent - before.sent)


def test_counters_see_the_compute_network(build: Build) -> None:
    bed = build(topology="1P1D")
    pe, de = bed.nodes["pe0"], bed.nodes["de0"]
    processes = stream(pe.command(), de.command(), de.compute_address, 0.2)
    assert [process.wait(20) for process in processes] == [0, 0]
    nics = bed.counters().nodes
    assert nics["pe0"].cnic.sent > 2**18
    assert nics["de0"].cnic.received == pytest.approx(nics["pe0"].cnic.sent, rel=0.01)
    assert nics["pe0"].snic.sent < 2**14


def test_two_testbeds_do_not_meet(build: Build) -> None:
    first, second = build(topology="1P1D"), build(topology="1P1D")
    assert first.name != second.name
    assert first.frontend_address != second.frontend_address
    server = listen(first.nodes["de0"].command(), 5000)
    target = (first.nodes["de0"].compute_address, 5000)
    assert reachable(first.nodes["pe0"].command(), [target]) == [True]
    assert reachable(second.nodes["pe0"].command(), [target]) == [False]
    server.communicate()


def test_a_name_is_taken_once(build: Build) -> None:
    bed = build(testbed_name="dp-twice")
    with pytest.raises(ConfigError, match="testbed dp-twice already"):
        build(testbed_name="dp-twice")
    assert bed.counters().nodes.keys() == {"pe0", "de0"}


def test_processes_in_it_are_ended_also_those_that_will_not(testbed_possible: None) -> None:
    with Testbed(TestbedConfig()) as bed:
        layout = bed.layout
        stubborn = "import signal; signal.signal(15, 1); print('runs', flush=True); signal.pause()"
        process = subprocess.Popen(
            bed.nodes["pe0"].command([sys.executable, "-c", stubborn]), stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"runs\n"
        assert process.pid in processes_in(layout.namespaces)
    assert process.wait(5) == -signal.SIGKILL
    process.stdout.close()
    assert leftovers(layout) == []


def test_a_build_that_fails_half_way_leaves_nothing(
    testbed_possible: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = Testbed(TestbedConfig(testbed_name="dp-half"))
    monkeypatch.setattr("dualpath.testbed.bed.find_store_server", lambda: "/bin/false")
    with pytest.raises(ConfigError, match="store server did not start"):
        bed.__enter__()
    assert leftovers(bed.layout) == []


def test_commands_that_fail_are_named(testbed_possible: None) -> None:
    host_device = ["ip", "link", "add", "dp-clash", "type", "bridge"]
    subprocess.run(host_device, check=True)
    bed = Testbed(TestbedConfig(testbed_name="dp-clash"))
    try:
        with pytest.raises(
            ConfigError, match=r"ip failed in the host's namespace: .*exists.*dp-clash"
        ):
            bed.__enter__()
    finally:
        subprocess.run(["ip", "link", "del", "dp-clash"], check=False, capture_output=True)
    assert leftovers(bed.layout) == []


OWNER = """
import sys, time
from dualpath.testbed import Testbed, TestbedConfig
with Testbed(TestbedConfig(testbed_name="dp-orphan")):
    print("up", flush=True)
    sys.stdin.read()
"""


def test_what_a_killed_process_left_is_removed_by_the_next(
    testbed_possible: None, build: Build
) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None and owner.stdin is not None
    assert owner.stdout.readline() == b"up\n"
    states = {state.name: state for state, complete in existing_testbeds() if complete}
    assert states["dp-orphan"].owner is not None
    assert states["dp-orphan"].owner.pid == owner.pid
    assert not states["dp-orphan"].orphaned
    owner.kill()
    owner.wait(5)
    owner.stdin.close()
    owner.stdout.close()
    assert states["dp-orphan"].orphaned
    # The store server went with its owner.
    until(lambda: processes_in(["dp-orphan-store"]) == [])
    bed = build(testbed_name="dp-orphan")
    assert [state.owner.pid for state, _ in existing_testbeds() if state.owner] == [os.getpid()]
    assert bed.counters().nodes.keys() == {"pe0", "de0"}


def test_taking_down_what_is_not_there_is_nothing(testbed_possible: None) -> None:
    take_down("dp-nobody")
