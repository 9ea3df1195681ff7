"""KV events: what of a request became durable, as a subscriber of vLLM's publisher hears it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zmq
from engine_kit import connector, engine, generate, prompts_of

from dualpath.bench.vllm_server import BLOCK_TOKENS
from dualpath.kv import Fingerprint, block_chain, root_key

DEADLINE_S = 60.0


class Subscriber:
    """Hears all batches in order; those published before it was connected it asks for, as vLLM provides."""

    def __init__(self, directory: Path) -> None:
        self.endpoint = f"ipc://{directory}/events"
        self.replay_endpoint = f"ipc://{directory}/replay"
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.subscribe(b"")
        self._live.connect(self.endpoint)
        self._next_batch = 0

    def batches(self) -> Iterator[bytes]:
        """Those that came since the last call."""
        while self._live.poll(100):
            _, number, payload = self._live.recv_multipart()
            batch = int.from_bytes(number, "big")
            if batch > self._next_batch:
                yield from self._missed(self._next_batch, batch)
            self._next_batch = batch + 1
            yield payload

    def _missed(self, first: int, stop: int) -> Iterator[bytes]:
        with self._context.socket(zmq.REQ) as asking:
            asking.connect(self.replay_endpoint)
            asking.send(first.to_bytes(8, "big"))
            while asking.poll(DEADLINE_S * 1000):
                _, number, payload = asking.recv_multipart()
                if not payload:
                    return
                if int.from_bytes(number, "big") < stop:
                    yield payload

    def close(self) -> None:
        self._context.destroy(linger=0)


@contextmanager
def subscriber(directory: Path) -> Iterator[Subscriber]:
    made = Subscriber(directory)
    try:
        yield made
    finally:
        made.close()


def test_blocks_that_became_durable_are_published(model: Path, tmp_path: Path) -> None:
    """Each once, by key, parent and tokens, as they are in the store. The two prompts share their start."""
    import msgspec
    from vllm.config.kv_events import KVEventsConfig
    from vllm.distributed.kv_events import BlockStored, KVEventBatch

    first, rest = prompts_of(5, (900, 400))
    second = first[: 4 * BLOCK_TOKENS] + rest
    with subscriber(tmp_path) as heard:
        events = KVEventsConfig(
            enable_kv_cache_events=True,
            publisher="zmq",
            endpoint=heard.endpoint,
            replay_endpoint=heard.replay_endpoint,
        )
        with engine(
            model, kv_transfer_config=connector(tmp_path / "store"), kv_events_config=events
        ) as llm:
            generate(llm, [first], 4)
            generate(llm, [second], 4)
            (fingerprint,) = (Fingerprint(bytes.fromhex(p.name)) for p in tmp_path.glob("store/*"))
            root = root_key(fingerprint, "")
            want = {
                block.key: block
                for tokens in (first, second)
                for block in block_chain(root, tokens, BLOCK_TOKENS)
            }
            published: dict[object, BlockStored] = {}
            until_s = time.monotonic() + DEADLINE_S
            while len(published) < len(want):
                assert time.monotonic() < until_s, f"{len(published)} of {len(want)} came"
                generate(llm, [[1, 2, 3]], 2)  # A step, which brings what was stored meanwhile.
                for payload in heard.batches():
                    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
                    ours = [each for each in batch.events if each.medium == "dualpath"]
                    for event in ours:
                        assert isinstance(event, BlockStored)
                        (key,) = event.block_hashes
                        assert key not in published, "once"
                        published[key] = event
    assert published.keys() == want.keys()
    assert published.keys() == {bytes.fromhex(p.stem) for p in tmp_path.glob("store/*/*/*/*.kv")}
    for key, event in published.items():
        block = want[key]
        assert event.token_ids == list(block.tokens)
        assert event.parent_block_hash == (None if block.parent == root else block.parent)
        assert event.block_size == BLOCK_TOKENS
