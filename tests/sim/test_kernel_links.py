from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_kit import CLUSTER, Kernel, cluster

from dualpath.sim.kernel.heaps import NONE
from dualpath.sim.kernel.links import set_high_share, start_flow, unserved_bytes
from dualpath.sim.kernel.state import FLOWS

RATE = CLUSTER.snic_bytes_s
LINK, OTHER = 0, 1
"""Two storage NICs."""


def start(kernel: Kernel, flow: int, size_bytes: float, now_s: float, *links: int) -> None:
    a, b, c = (*links, NONE, NONE)[:3] if links else (LINK, NONE, NONE)
    start_flow(kernel.handle, flow, size_bytes, a, b, c, now_s)


def test_a_flow_has_the_link_for_itself() -> None:
    kernel = Kernel.of()
    start(kernel, 3, RATE, 0.25)
    assert kernel.ends() == {3: pytest.approx(1.25)}


@pytest.mark.parametrize("count", [2, 3, 24])
def test_equal_flows_end_together(count: int) -> None:
    kernel = Kernel.of()
    for flow in range(count):
        start(kernel, flow, RATE, 1.0)
    ends = kernel.ends()
    assert list(ends) == list(range(count))
    assert list(ends.values()) == pytest.approx([1.0 + count] * count)


def test_a_late_joiner_shares_from_then_on() -> None:
    kernel = Kernel.of()
    start(kernel, 0, RATE, 0.0)
    assert kernel.ends(0.5) == {}
    start(kernel, 1, RATE, 0.5)
    # The first has half left: both get half the rate until 1.5, the second the whole for its other half.
    assert kernel.ends() == {0: pytest.approx(1.5), 1: pytest.approx(2.0)}


def test_a_capped_flow_leaves_the_rest_unused() -> None:
    kernel = Kernel.of(cluster(read_cap_bytes_s=RATE / 4))
    for flow in range(2):
        start(kernel, flow, RATE, 0.0)
    assert kernel.ends() == {0: pytest.approx(4.0), 1: pytest.approx(4.0)}
    for flow in range(8):
        start(kernel, flow, RATE, 10.0)
    assert list(kernel.ends().values()) == pytest.approx([18.0] * 8)


def test_the_high_class_comes_first() -> None:
    kernel = Kernel.of()
    start(kernel, 0, RATE, 0.0)
    set_high_share(kernel.handle, LINK, 0.75, 0.5)
    assert kernel.ends(1.5) == {}
    set_high_share(kernel.handle, LINK, 0.0, 1.5)
    # Half, then a quarter at a quarter of the rate for a second, then the last quarter.
    assert kernel.ends() == {0: pytest.approx(1.75)}


def test_a_flow_on_several_links_waits_for_the_slowest() -> None:
    kernel = Kernel.of()
    start(kernel, 0, RATE, 0.0, LINK, OTHER)
    start(kernel, 1, RATE / 2, 0.0, OTHER)
    assert kernel.ends() == {1: pytest.approx(1.0), 0: pytest.approx(1.5)}


def test_tiny_flows_at_a_late_hour_end() -> None:
    """The clock does not resolve how long they take."""
    kernel = Kernel.of(cluster(snic_bytes_s=1e15))
    start(kernel, 0, 50.0, 1e6)
    start(kernel, 1, 100.0, 1e6)
    assert set(kernel.ends()) == {0, 1}


@settings(max_examples=50)
@given(
    arrivals=st.lists(
        st.tuples(st.floats(0, 5), st.floats(1, 2e6)), min_size=1, max_size=4 * FLOWS
    ),
    cap=st.sampled_from([math.inf, RATE / 3]),
)
def test_the_fluid_is_that_of_a_step_by_step_model(
    arrivals: list[tuple[float, float]], cap: float
) -> None:
    kernel = Kernel.of(cluster(read_cap_bytes_s=cap))
    arrivals.sort()
    ended: dict[int, float] = {}
    for flow, (at_s, size) in enumerate(arrivals):
        ended |= kernel.ends(at_s)
        start(kernel, flow, size, at_s)
    ended |= kernel.ends()
    expected = processor_sharing(arrivals, cap)
    # The kernel takes ends within a byte as one.
    assert ended == pytest.approx(expected, abs=2 * len(arrivals) / min(RATE, cap))
    total = sum(size for _, size in arrivals)
    assert kernel.state.links.served_bytes[LINK] == pytest.approx(total, abs=len(arrivals))
    assert kernel.state.series_bytes[LINK].sum() == pytest.approx(total, abs=len(arrivals))
    assert kernel.state.links.active[LINK] == 0


def processor_sharing(arrivals: list[tuple[float, float]], cap: float) -> dict[int, float]:
    """Ends, by stepping from change to change."""
    left: dict[int, float] = {}
    ended: dict[int, float] = {}
    now_s, coming = 0.0, list(enumerate(arrivals))
    while left or coming:
        rate = min(RATE / len(left), cap) if left else math.inf
        first = min(left, key=lambda flow: left[flow], default=None)
        end_s = now_s + left[first] / rate if first is not None else math.inf
        until_s = min(end_s, coming[0][1][0] if coming else math.inf)
        for flow in left:
            left[flow] -= rate * (until_s - now_s)
        now_s = until_s
        if first is not None and until_s == end_s:
            ended[first] = now_s
            del left[first]
        else:
            flow, (_, size) = coming.pop(0)
            left[flow] = size
    return ended


def test_unserved_bytes_are_those_of_all_flows() -> None:
    kernel = Kernel.of()
    start(kernel, 0, RATE, 0.0)
    start(kernel, 1, 3 * RATE, 0.0)
    assert unserved_bytes(kernel.handle, LINK, 1.0) == pytest.approx(3 * RATE)
    kernel.ends(2.0)
    assert unserved_bytes(kernel.handle, LINK, 3.0) == pytest.approx(RATE)
    assert unserved_bytes(kernel.handle, OTHER, 3.0) == 0


def test_series_split_bytes_by_window() -> None:
    kernel = Kernel.of()
    start(kernel, 0, 2 * RATE, 0.5)
    kernel.ends()
    assert kernel.state.series_bytes[LINK, :4] == pytest.approx([RATE / 2, RATE, RATE / 2, 0])
    start(kernel, 1, RATE, 99.5)
    kernel.ends()
    # What comes after the last window is in the sum only.
    assert kernel.state.series_bytes[LINK].sum() == pytest.approx(2.5 * RATE)
    assert kernel.state.links.served_bytes[LINK] == pytest.approx(3 * RATE)
