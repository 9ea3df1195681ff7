"""Which class of a compute NIC packets leave by: marked ones, and those of the TCP channel."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

from dualpath.qos.ethernet import HIGH_CLASS, LOW_CLASS
from dualpath.qos.observe import parse_classes
from dualpath.testbed import Node, Testbed

Build = Callable[..., Testbed]

DEADLINE_S = 60
MESSAGES, MESSAGE_BYTES = 64, 32 * 1024
PULL_BYTES = 4 * 2**20
MOST_PAYLOAD_BYTES = 1460
FEW = 200
"""Packets; what is moved takes over a thousand."""

_COMMON = """
import sys, threading
from dualpath.kv.pool import BufferPool
from dualpath.transfer import EndpointEvents, RemoteSpan, TransferName, open_endpoint
def opened(name, host, slot_bytes, notified):
    pool = BufferPool(1, slot_bytes, name=name)
    events = EndpointEvents(notified, lambda peer, reason: None)
    return pool, open_endpoint("tcp", name, pool, bytes(32), events, host=host)
def line():
    assert sys.stdin.readline()
"""
_OWNER = f"""{_COMMON}
host, slot_bytes, messages = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
seen, complete = [], threading.Event()
def notified(peer, message):
    seen.append(len(message))
    if len(seen) == messages:
        complete.set()
pool, endpoint = opened("owner", host, slot_bytes, notified)
lease = pool.try_lease("test", 1)
print(endpoint.address, lease.stamp, lease.slots[0], flush=True)
assert complete.wait(30)
print(sum(seen), flush=True)
sys.stdin.read()
endpoint.close()
"""
_PULLER = f"""{_COMMON}
address, stamp, slot, slot_bytes, messages, size = sys.argv[1], *map(int, sys.argv[2:])
pool, endpoint = opened("puller", "127.0.0.1", slot_bytes, lambda peer, message: None)
channel = endpoint.connect(address, "owner", deadline_s=30)
print("connected", flush=True)
line()
for _ in range(messages):
    channel.notify(bytes(size))
print("notified", flush=True)
line()
span = RemoteSpan(slot, 0, slot_bytes)
pulled = channel.pull(TransferName("r", 1, 0), stamp, [span], [pool.view(0)], deadline_s=30)
print(pulled.result(30), flush=True)
sys.stdin.read()
endpoint.close()
"""


def sent(node: Node) -> dict[str, int]:
    """Packets by class, since the NIC was made."""
    command = node.command(["tc", "-s", "class", "show", "dev", "cnic"])
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    classes = parse_classes(done.stdout)
    return {name: classes[name].packets for name in (HIGH_CLASS, LOW_CLASS)}


def grown(node: Node, before: dict[str, int]) -> dict[str, int]:
    return {name: count - before[name] for name, count in sent(node).items()}


def test_a_node_passes_the_check_of_classes(build: Build) -> None:
    """All high classes, that of messages too, leave by the high class, and KV by the low one."""
    bed = build(topology="1P1D")
    done = subprocess.run(
        bed.nodes["pe0"].command(
            [
                *(sys.executable, "-m", "dualpath", "qos", "check", "--json"),
                *(
                    "--dev",
                    "cnic",
                    "--rate",
                    "3200mbit",
                    "--snic",
                    "snic",
                    "--snic-rate",
                    "400mbit",
                ),
            ]
        ),
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    verdicts = {each["subject"]: each["verdict"] for each in json.loads(done.stdout)["findings"]}
    for name in ("control", "execution", "dispatch", "kv", "storage"):
        assert verdicts[f"cnic ip packets of {name}"] == "ok"


def test_messages_of_the_channel_are_in_the_high_class_and_pulls_in_the_low_one(
    build: Build,
) -> None:
    bed = build(topology="1P1D")
    near, far = bed.nodes["pe0"], bed.nodes["de0"]
    processes: list[subprocess.Popen[str]] = []

    def start(node: Node, code: str, *arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, *(str(each) for each in arguments)]
        pipe = subprocess.PIPE
        processes.append(
            subprocess.Popen(node.command(command), stdin=pipe, stdout=pipe, text=True)
        )
        return processes[-1]

    def told(process: subprocess.Popen[str]) -> str:
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def go_on(process: subprocess.Popen[str]) -> None:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()

    try:
        owner = start(far, _OWNER, far.compute_address, PULL_BYTES, MESSAGES)
        place = told(owner).split()
        puller = start(near, _PULLER, *place, PULL_BYTES, MESSAGES, MESSAGE_BYTES)
        assert told(puller) == "connected"

        before = sent(near)
        go_on(puller)
        assert told(puller) == "notified"
        assert told(owner) == str(MESSAGES * MESSAGE_BYTES)
        moved = grown(near, before)
        assert moved[HIGH_CLASS] * MOST_PAYLOAD_BYTES >= MESSAGES * MESSAGE_BYTES
        assert moved[LOW_CLASS] < FEW, "nothing but signs of life of the lanes"

        before = sent(far)
        go_on(puller)
        assert told(puller) == str(PULL_BYTES)
        moved = grown(far, before)
        assert moved[LOW_CLASS] * MOST_PAYLOAD_BYTES >= PULL_BYTES
        assert moved[HIGH_CLASS] < FEW
    finally:
        for process in processes:
            process.communicate(timeout=DEADLINE_S)
    assert [process.returncode for process in processes] == [0, 0]
