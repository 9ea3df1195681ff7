"""Where engines run: the file, and what it does to their processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cluster_kit import Served, prompt_of

from dualpath.base.errors import ConfigError
from dualpath.base.ids import EngineId, GroupId
from dualpath.monitor.metrics import Metrics
from dualpath.policy.config import ReadPlanKind
from dualpath.serve.cluster import Cluster, describe_model
from dualpath.serve.config import ServeConfig
from dualpath.serve.placement import EnginePlace, load_placement
from dualpath.testbed import Testbed, TestbedConfig
from dualpath.testbed.placement import write_placement


def written(tmp_path: Path, content: Any) -> str:
    path = tmp_path / "placement.json"
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return str(path)


PE0, DE0, DE1 = (
    ("pe0", GroupId("pe-node0")),
    ("de0", GroupId("de-node0")),
    ("de1", GroupId("de-node0")),
)


def test_an_engine_is_found_by_its_name_then_by_its_group(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        {
            "control_host": "10.0.0.1",
            "engines": {
                "pe0": {"host": "10.0.0.2", "launch": ["ssh", "a"], "threads": 3, "store": "/kv"},
                "de-node0": {"host": "10.0.0.3"},
                "de1": {},
            },
        },
    )
    placement = load_placement(path)
    assert placement.control_host == "10.0.0.1"
    placement.check([PE0, DE0, DE1])
    assert placement.place(*PE0) == EnginePlace(
        host="10.0.0.2", launch=("ssh", "a"), threads=3, store="/kv"
    )
    assert placement.place(*DE0) == EnginePlace(host="10.0.0.3")
    assert placement.place(*DE1) == EnginePlace(host="127.0.0.1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "--placement .*placement.json"),
        ({}, "missing required field `engines`"),
        ({"engines": {"pe0": {"hots": "a"}}}, r"unknown field `hots` - at `\$.engines"),
        ({"engines": {"pe0": {"threads": 0}}}, "Expected `int` >= 1"),
        ({"engines": {"pe0": {"host": "0.0.0.0"}}}, "'0.0.0.0' is not an address that others"),
        ({"engines": {}, "control_host": "::"}, "'::' is not an address that others can reach"),
        ({"engines": {}, "control_host": ""}, "'' is not an address"),
    ],
)
def test_files_that_cannot_work_say_why(tmp_path: Path, content: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_placement(written(tmp_path, content))


def test_a_missing_file_says_so() -> None:
    with pytest.raises(ConfigError, match=r"--placement /nowhere/p\.json: .*No such file"):
        load_placement("/nowhere/p.json")


@pytest.mark.parametrize(
    ("engines", "words"),
    [
        ({"pe0": {}}, "no place for engine de0, nor for group de-node0"),
        ({"pe0": {}, "de0": {}, "de7": {}}, "de7: there is no such engine .* de-node0, de0, pe-"),
    ],
)
def test_a_placement_of_another_cluster_is_refused(
    own_cache: None, tmp_path: Path, engines: Any, words: str
) -> None:
    config = ServeConfig(model="tiny", placement=written(tmp_path, {"engines": engines}))
    with pytest.raises(ConfigError, match=words):
        Cluster(config, describe_model(config), Metrics())


def test_an_address_that_is_not_ours_ends_the_start(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    content = {"control_host": "192.0.2.1", "engines": {"pe0": {}, "de0": {}}}
    with pytest.raises(ConfigError, match=r"control plane cannot listen on 192\.0\.2\.1"):
        serve(placement=written(tmp_path, content))


def test_engines_are_launched_as_told_also_again(
    serve: Callable[..., Served], tmp_path: Path
) -> None:
    content = {
        "engines": {
            "pe0": {"launch": ["nice", "-n", "3"]},
            "de-node0": {"host": "127.0.0.2", "launch": ["nice", "-n", "4"], "threads": 2},
        }
    }
    served = serve(placement=written(tmp_path, content), transfer="tcp")

    def of(engine: str) -> tuple[int, str]:
        pid = served.cluster.engine_pids[EngineId(engine)]
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        (threads,) = [each for each in environment if each.startswith(b"OMP_NUM_THREADS=")]
        return os.getpriority(os.PRIO_PROCESS, pid), threads.decode().partition("=")[2]

    mine = os.getpriority(os.PRIO_PROCESS, 0)
    assert of("pe0.1") == (mine + 3, "1")
    assert of("de0.1") == (mine + 4, "2")

    async def work() -> None:
        await served.store_prompt(prompt_of(1, 40))
        served.kill(EngineId("de0.1"))
        await served.until(lambda: "de0.2" in served.cluster.engine_pids)
        await served.ready()
        await served.ask_right(prompt_of(1, 40))

    served.run(work())
    assert of("de0.2") == (mine + 4, "2")


def test_on_a_testbed_both_storage_nics_read_and_tokens_are_right(
    plain: Any, testbed_possible: None
) -> None:
    """Engines in network namespaces, Redis behind their storage NICs, KV over the compute network."""
    with Testbed(TestbedConfig(topology="1P1D", snic="100mbit")) as bed:
        served = Served(
            plain,
            store=bed.store_address,
            placement=str(write_placement(bed)),
            transfer="tcp",
            read_path=ReadPlanKind.SPLIT,
        )
        served.start()
        try:
            served.run(_read_by_both(served, bed))
        finally:
            assert served.close() == 0


async def _read_by_both(served: Served, bed: Testbed) -> None:
    prompt = prompt_of(2, 400)
    layout = served.cluster.facts.layout
    token_bytes = layout.row_bytes * layout.n_layers
    await served.store_prompt(prompt)
    before = bed.counters()
    answer = await served.ask_right(prompt)
    await served.released()
    after = bed.counters()
    assert sum(answer.by_path.values()) == 384  # 24 of 25 blocks: the last token is computed.
    assert min(answer.by_path.values()) > 0
    for node, side in (("pe0", "pe"), ("de0", "de")):
        read = after.nodes[node].snic.received - before.nodes[node].snic.received
        assert read >= answer.by_path[side] * token_bytes
    sent = after.nodes["de0"].cnic.sent - before.nodes["de0"].cnic.sent
    assert sent >= answer.by_path["de"] * token_bytes
    handed_over = after.nodes["pe0"].cnic.sent - before.nodes["pe0"].cnic.sent
    assert handed_over >= (len(prompt) - answer.by_path["de"]) * token_bytes
