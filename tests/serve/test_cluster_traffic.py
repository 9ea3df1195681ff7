"""All KV of a request goes through the traffic managers of its engines, and is counted there to the byte."""

from __future__ import annotations

from collections.abc import Callable

from cluster_kit import BLOCK_TOKENS, Served, prompt_of

from dualpath.base.ids import EngineId
from dualpath.base.traffic_class import TrafficClass
from dualpath.traffic import DEVICE, STORE, PeerTraffic, TrafficKey

Serve = Callable[..., Served]

BLOCKS = 6
REST = 3
PE, DE = EngineId("pe0.1"), EngineId("de0.1")
KV, EXECUTION, STORAGE = TrafficClass.KV, TrafficClass.EXECUTION, TrafficClass.STORAGE

Counts = dict[TrafficKey, PeerTraffic]


def traffic_of(served: Served, engine: EngineId) -> Counts:
    return dict(served.cluster.driver.roster.statuses[engine].traffic or ())


async def settled(served: Served) -> None:
    """Wait until nothing is held, and each engine's last report says that no transfer is left."""
    await served.released()

    def quiet(counts: Counts) -> bool:
        return bool(counts) and not any(each.queued + each.under_way for each in counts.values())

    await served.until(lambda: all(quiet(traffic_of(served, engine)) for engine in (PE, DE)))


def test_a_split_read_is_counted_by_class_and_peer(serve: Serve) -> None:
    served = serve(read_path="split")
    layout = served.cluster.facts.layout
    prompt = prompt_of(1, BLOCKS * BLOCK_TOKENS + REST)
    before: dict[EngineId, Counts] = {}

    async def store_and_hit() -> dict[str, int]:
        await served.store_prompt(prompt)
        await settled(served)
        before.update({engine: traffic_of(served, engine) for engine in (PE, DE)})
        answer = await served.ask_right(prompt, 1)
        await settled(served)
        return answer.by_path

    by_path = served.run(store_and_hit())
    assert (
        by_path["pe"] and by_path["de"] and by_path["pe"] + by_path["de"] == BLOCKS * BLOCK_TOKENS
    )

    def moved(engine: EngineId, of: TrafficClass, peer: str) -> tuple[int, int]:
        """(transfers, bytes) of the hit."""
        key = TrafficKey(of, peer)
        now, then = traffic_of(served, engine)[key], before[engine].get(key, PeerTraffic())
        return now.transfers - then.transfers, now.n_bytes - then.n_bytes

    # From the store: Full Blocks, each side its part.
    assert moved(PE, STORAGE, STORE)[0] == by_path["pe"] // BLOCK_TOKENS
    assert moved(DE, STORAGE, STORE)[0] == by_path["de"] // BLOCK_TOKENS
    # Into the prefill: what the other side read, layer by layer. Computing stands still for the first.
    de_layer_bytes = by_path["de"] * layout.row_bytes
    assert moved(PE, KV, DE) == (layout.n_layers - 1, (layout.n_layers - 1) * de_layer_bytes)
    first = traffic_of(served, PE)[TrafficKey(EXECUTION, DE)]
    assert first.submissions == 1
    # To the decode side: what the PE read, and what it computed.
    pe_layer_bytes = (by_path["pe"] + REST) * layout.row_bytes
    transfers, n_bytes = moved(DE, KV, PE)
    assert n_bytes == layout.n_layers * pe_layer_bytes
    assert transfers == 2 * layout.n_layers
    # Between host and device: the PE's own part in, new rows out.
    assert moved(PE, KV, DEVICE)[1] == layout.n_layers * pe_layer_bytes

    for engine in (PE, DE):
        for counts in traffic_of(served, engine).values():
            assert counts.failed == counts.withdrawn == counts.queued == counts.under_way == 0
    labels = {"engine": DE, "class": KV.value, "peer": PE}
    assert (
        served.metric("traffic_bytes_total", **labels)
        == traffic_of(served, DE)[TrafficKey(KV, PE)].n_bytes
    )


def test_a_lost_engine_takes_its_traffic_with_it(serve: Serve) -> None:
    served = serve()

    async def lose() -> None:
        await served.ask_right(prompt_of(2, BLOCKS * BLOCK_TOKENS))
        await settled(served)
        assert served.metric("traffic_bytes_total", **{"engine": DE, "class": "kv", "peer": PE}) > 0
        served.kill(PE)
        await served.until(lambda: PE not in served.cluster.driver.roster)
        await served.ready()
        await served.ask_right(prompt_of(3, BLOCKS * BLOCK_TOKENS))
        labels = {"engine": DE, "class": "kv", "peer": "pe0.2"}
        await served.until(lambda: served.metric("traffic_bytes_total", **labels) > 0)

    served.run(lose())
    assert PE not in served.metrics.render().decode()
