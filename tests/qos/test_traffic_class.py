from __future__ import annotations

import socket
from dataclasses import replace

import pytest

from dualpath.base.errors import ConfigError
from dualpath.base.socket_marks import mark_socket
from dualpath.base.traffic_class import (
    DEFAULT_PLAN,
    ClassMarks,
    LaneArbitration,
    QosPlan,
    TrafficClass,
    Urgency,
)


def changed(traffic_class: TrafficClass, **fields: object) -> tuple[ClassMarks, ...]:
    return tuple(
        replace(each, **fields) if each.traffic_class is traffic_class else each  # type: ignore[arg-type]
        for each in DEFAULT_PLAN.classes
    )


def test_kv_is_low_and_execution_high() -> None:
    assert DEFAULT_PLAN.marks(TrafficClass.EXECUTION).urgency is Urgency.HIGH
    assert DEFAULT_PLAN.marks(TrafficClass.KV).urgency is Urgency.LOW
    assert (DEFAULT_PLAN.high_weight, DEFAULT_PLAN.low_weight) == (99, 1)


def test_bytes_of_a_class() -> None:
    marks = DEFAULT_PLAN.marks(TrafficClass.EXECUTION)
    assert (marks.dscp, marks.tos, marks.roce_traffic_class) == (46, 0xB8, 186)


def test_priorities_are_those_that_switches_map_by_default() -> None:
    assert [each.priority for each in DEFAULT_PLAN.classes] == [
        each.dscp // 8 for each in DEFAULT_PLAN.classes
    ]


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("dscp", 64, "expected dscp from 0 to 63, got 64"),
        ("priority", 8, "expected priority from 0 to 7"),
        ("so_priority", 7, "expected so_priority from 0 to 6"),
        ("service_level", 15, "expected service_level from 0 to 14"),
        ("virtual_lane", -1, "expected virtual_lane from 0 to 14"),
        ("dscp", 46, "execution and kv both have DSCP 46"),
        ("virtual_lane", 1, "execution and kv share virtual_lane 1"),
        ("priority", 5, "execution and kv share priority 5"),
        ("lossless", False, "kv and storage share priority 1"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(field: str, value: object, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        QosPlan(classes=changed(TrafficClass.KV, **{field: value}))


def test_every_class_is_described_once() -> None:
    with pytest.raises(ConfigError, match="once"):
        QosPlan(classes=DEFAULT_PLAN.classes[1:])
    with pytest.raises(ConfigError, match="once"):
        QosPlan(classes=(*DEFAULT_PLAN.classes, DEFAULT_PLAN.classes[0]))


@pytest.mark.parametrize("weight", [0, 50])
def test_the_low_classes_neither_starve_nor_win(weight: int) -> None:
    with pytest.raises(ConfigError, match=f"from 1 to 49 of 100 parts, got {weight}"):
        QosPlan(low_weight=weight)


@pytest.mark.parametrize("numbers", [(255, 192, 64), (0, 192, 64), (240, 64, 64), (240, 192, 0)])
def test_arbitration_that_starves_is_refused(numbers: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        LaneArbitration(*numbers)


def test_other_code_points() -> None:
    plan = DEFAULT_PLAN.with_dscp({TrafficClass.KV: 1})
    assert plan.marks(TrafficClass.KV).dscp == 1
    assert plan.marks(TrafficClass.STORAGE) == DEFAULT_PLAN.marks(TrafficClass.STORAGE)
    with pytest.raises(ConfigError, match="both have DSCP 10"):
        DEFAULT_PLAN.with_dscp({TrafficClass.KV: 10})


@pytest.mark.parametrize("traffic_class", list(TrafficClass))
@pytest.mark.parametrize("family", [socket.AF_INET, socket.AF_INET6])
def test_a_socket_keeps_its_marks(traffic_class: TrafficClass, family: int) -> None:
    marks = DEFAULT_PLAN.marks(traffic_class)
    try:
        target = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        pytest.skip(f"no such sockets here: {error}")
    with target:
        mark_socket(target, marks)
        assert target.getsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY) == marks.so_priority
        assert target.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) & 0xFC == marks.tos
        if family == socket.AF_INET6:
            assert target.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS) == marks.tos
