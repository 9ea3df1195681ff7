"""What `dualpath qos check` finds: on written answers of `tc`, and in a real network namespace."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from qos_kit import Namespace, network_namespace

from dualpath.base.traffic_class import DEFAULT_PLAN, TrafficClass
from dualpath.cli.main import main
from dualpath.qos import Verdict, compute_egress, storage_egress
from dualpath.qos.check import compare_egress
from dualpath.qos.observe import (
    ObservedEgress,
    ObservedFilter,
    parse_classes,
    parse_fifos,
    parse_filters,
    parse_root,
)

INTERFACES = ("--dev", "cnic", "--rate", "3200mbit", "--snic", "snic", "--snic-rate", "400mbit")

CLASSES = """\
class htb 1:10 parent 1:1 prio 0 rate 3168Mbit ceil 3200Mbit burst 261360b cburst 261600b 
 Sent 5300 bytes 50 pkt (dropped 0, overlimits 0 requeues 0) 
 backlog 0b 0p requeues 0

class htb 1:1 root rate 3200Mbit ceil 3200Mbit burst 261600b cburst 261600b 
 Sent 5390 bytes 51 pkt (dropped 0, overlimits 0 requeues 0) 
 backlog 0b 0p requeues 0

class htb 1:20 parent 1:1 leaf 800e: prio 1 rate 32Mbit ceil 3200Mbit burst 64Kb cburst 261600b 
 Sent 90 bytes 1 pkt (dropped 0, overlimits 0 requeues 0) 
 backlog 0b 0p requeues 0
"""  # noqa: W291
QDISCS = (
    '[{"kind":"htb","handle":"1:","root":true,"refcnt":3,"options":{"r2q":10,"default":"0x20"}},'
    '{"kind":"bfifo","handle":"800e:","parent":"1:1","options":{"limit":4194304}}]'
)
FILTERS = (
    '[{"parent":"1:","protocol":"ip","pref":1,"kind":"u32","chain":0},'
    '{"parent":"1:","protocol":"ip","pref":1,"kind":"u32","chain":0,"options":{"fh":"800:","ht_divisor":1}},'
    '{"protocol":"ip","pref":1,"kind":"u32","options":{"fh":"800::800","flowid":"1:10","not_in_hw":true,'
    '"match":{"value":"b80000","mask":"fc0000","offmask":"","off":0}}},'
    '{"protocol":"ipv6","pref":2,"kind":"u32","options":{"flowid":"1:10",'
    '"match":{"value":"b800000","mask":"fc00000","offmask":"","off":0}}},'
    '{"protocol":"ip","pref":1,"kind":"u32","options":{"flowid":"1:10",'
    '"match":{"value":"a000000","mask":"ff000000","offmask":"","off":12}}}]'
)


def test_answers_of_tc_are_read() -> None:
    classes = parse_classes(CLASSES)
    assert set(classes) == {"1:1", "1:10", "1:20"}
    assert (classes["1:10"].rate_bit_s, classes["1:10"].prio) == (3_168_000_000, 0)
    assert (classes["1:20"].ceil_bit_s, classes["1:20"].packets) == (3_200_000_000, 1)
    assert classes["1:1"].prio is None
    assert parse_root(QDISCS) == ("htb", "1:20")
    assert parse_root("") == (None, None)
    assert parse_fifos(QDISCS) == {"1:1": 4 * 2**20}
    assert parse_filters(FILTERS) == (
        ObservedFilter("ip", 46, "1:10"),
        ObservedFilter("ipv6", 46, "1:10"),
    )


def right() -> ObservedEgress:
    filters = compute_egress(DEFAULT_PLAN, "cnic", 3_200_000_000).filters
    return ObservedEgress(
        "cnic",
        "htb",
        "1:20",
        parse_classes(CLASSES),
        tuple(ObservedFilter(each.protocol, each.dscp, each.classid) for each in filters),
    )


def wrong_of(observed: ObservedEgress) -> dict[str, str]:
    expected = compute_egress(DEFAULT_PLAN, "cnic", 3_200_000_000)
    return {
        each.subject: each.detail
        for each in compare_egress(expected, observed)
        if each.verdict is not Verdict.OK
    }


def test_what_is_as_planned_is_right() -> None:
    assert wrong_of(right()) == {}


@pytest.mark.parametrize(
    ("before", "after", "subject", "words"),
    [
        (
            "rate 3168Mbit",
            "rate 3100Mbit",
            "cnic class 1:10",
            "rate expected 3168mbit, got 3100mbit",
        ),
        ("prio 1 ", "prio 0 ", "cnic class 1:20", "prio expected 1, got 0"),
        ("32Mbit ceil 3200Mbit", "32Mbit ceil 32Mbit", "cnic class 1:20", "ceil expected 3200mbit"),
        ("htb 1:10", "htb 1:11", "cnic class 1:10", "not there"),
    ],
)
def test_a_wrong_class_is_found(before: str, after: str, subject: str, words: str) -> None:
    text = CLASSES.replace(before, after)
    assert text != CLASSES
    seen = right()
    found = wrong_of(ObservedEgress("cnic", "htb", "1:20", parse_classes(text), seen.filters))
    assert list(found) == [subject]
    assert words in found[subject]


def test_wrong_roots_and_filters_are_found() -> None:
    seen = right()
    assert list(wrong_of(ObservedEgress("cnic", "fq_codel", None))) == ["cnic root"]
    assert "got nothing" in wrong_of(ObservedEgress("cnic", None, None))["cnic root"]
    assert list(wrong_of(ObservedEgress("cnic", "htb", "1:10", seen.classes, seen.filters))) == [
        "cnic root"
    ]
    missing = ObservedEgress("cnic", "htb", "1:20", seen.classes, seen.filters[1:])
    assert wrong_of(missing) == {"cnic filter ip DSCP 46": "expected to 1:10, got no such filter"}
    # The first that matches decides, so a right one behind it does not help.
    shadowed = (ObservedFilter("ip", 46, "1:20"), *seen.filters)
    assert wrong_of(ObservedEgress("cnic", "htb", "1:20", seen.classes, shadowed)) == {
        "cnic filter ip DSCP 46": "expected to 1:10, got 1:20"
    }


def test_a_short_queue_of_a_storage_nic_is_found() -> None:
    expected = storage_egress("snic", 400_000_000)
    classes = parse_classes(
        "class htb 1:1 root leaf 800e: prio 0 rate 400Mbit ceil 400Mbit burst 1b cburst 1b\n"
        " Sent 0 bytes 0 pkt (dropped 0, overlimits 0 requeues 0)\n"
    )
    short = ObservedEgress("snic", "htb", "1:1", classes, (), {"1:1": 2**20})
    assert [each.subject for each in compare_egress(expected, short) if each.verdict != "ok"] == [
        "snic queue of 1:1"
    ]


def test_a_host_without_interfaces_named_passes_and_says_what_was_not_checked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["qos", "check", "--json"]) == 0
    findings = {each["subject"]: each for each in json.loads(capsys.readouterr().out)["findings"]}
    assert findings["sockets of kv"]["verdict"] == "ok"
    for subject in ("classes of an interface", "InfiniBand lanes", "RoCE priorities, PFC, ECN"):
        assert findings[subject]["verdict"] == "cannot check"


@pytest.fixture
def namespace() -> Iterator[Namespace]:
    with network_namespace() as made:
        yield made


def apply(namespace: Namespace) -> None:
    batch = namespace.dualpath("qos", "ethernet", *INTERFACES, "--batch").stdout
    done = namespace.run("tc", "-batch", "-", stdin=batch)
    assert done.stderr == ""


def checked(namespace: Namespace, *flags: str) -> tuple[int, dict[str, str]]:
    """Exit code, and the verdict of each subject."""
    done = namespace.dualpath("qos", "check", *INTERFACES, "--json", *flags)
    assert done.stdout, done.stderr
    result = json.loads(done.stdout)
    assert result["passed"] == (done.returncode == 0)
    return done.returncode, {each["subject"]: each["verdict"] for each in result["findings"]}


def wrong(verdicts: dict[str, str]) -> set[str]:
    return {subject for subject, verdict in verdicts.items() if verdict == "wrong"}


def test_what_is_printed_passes_when_applied(namespace: Namespace) -> None:
    code, verdicts = checked(namespace)
    assert (code, wrong(verdicts)) == (1, {"cnic root", "snic root"})
    apply(namespace)
    code, verdicts = checked(namespace)
    assert (code, wrong(verdicts)) == (0, set())
    for name in ("class 1:1", "class 1:10", "class 1:20", "filter ip DSCP 46"):
        assert verdicts[f"cnic {name}"] == "ok"
    for each in TrafficClass:
        assert verdicts[f"cnic ip packets of {each}"] == "ok"
    assert verdicts["snic queue of 1:1"] == "ok"


def test_the_script_does_the_same_as_the_batch(namespace: Namespace) -> None:
    script = namespace.dualpath("qos", "ethernet", *INTERFACES).stdout
    namespace.run("sh", "-e", stdin=script)
    assert checked(namespace, "--no-send")[0] == 0


def test_a_class_that_was_removed_is_found(namespace: Namespace) -> None:
    apply(namespace)
    namespace.sh("tc class del dev cnic classid 1:20")
    code, verdicts = checked(namespace)
    assert code == 1
    low = (TrafficClass.KV, TrafficClass.STORAGE)
    assert wrong(verdicts) == {"cnic class 1:20"} | {
        f"cnic {protocol} packets of {each}" for protocol in ("ip", "ipv6") for each in low
    }


def test_packets_that_leave_by_another_class_are_found(namespace: Namespace) -> None:
    apply(namespace)
    namespace.sh("tc filter del dev cnic parent 1: protocol ip prio 1")
    namespace.sh("tc filter add dev cnic parent 1: protocol ip prio 1 u32 match u8 0 0 flowid 1:10")
    code, verdicts = checked(namespace)
    assert code == 1
    assert {"cnic ip packets of kv", "cnic ip packets of storage"} <= wrong(verdicts)
    assert verdicts["cnic ip packets of execution"] == "ok"


SENDER = """
import json, socket, sys, time
from dualpath.base.socket_marks import mark_socket
from dualpath.base.traffic_class import DEFAULT_PLAN, TrafficClass
from dualpath.qos.observe import observe_egress

def packets():
    return {each.classid: each.packets for each in observe_egress("cnic").classes.values()}

before = packets()
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
    mark_socket(sender, DEFAULT_PLAN.marks(TrafficClass(sys.argv[1])))
    for _ in range(100):
        sender.sendto(bytes(1000), ("10.99.0.2", 9))
deadline = time.monotonic() + 20
while packets()["1:1"] - before["1:1"] < 100 and time.monotonic() < deadline:
    time.sleep(0.02)
print(json.dumps({each: count - before[each] for each, count in packets().items()}))
"""


@pytest.mark.parametrize(
    ("traffic_class", "classid", "other"), [("execution", "1:10", "1:20"), ("kv", "1:20", "1:10")]
)
def test_a_marked_socket_lands_in_its_class(
    namespace: Namespace, traffic_class: str, classid: str, other: str
) -> None:
    apply(namespace)
    # A neighbour that never answers: without it the packets would wait for one.
    namespace.sh("ip neigh add 10.99.0.2 lladdr 02:00:00:00:00:02 dev cnic")
    grown = json.loads(namespace.python(SENDER, traffic_class))
    assert grown[classid] >= 100
    assert grown[other] < 100
