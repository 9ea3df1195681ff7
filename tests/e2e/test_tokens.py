"""The promise of the whole: every path gives the tokens of plain `transformers` generate.

Real processes, shared memory or TCP between them, a real store. Models by how their KV lies: Qwen2 (GQA),
Llama (MHA), DeepSeek-V3 (MLA), gpt-oss (sinks and windows); float32, greedy.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dualpath.base.ids import RequestId
from dualpath.engine.model_source import ModelSpec, resolve_model
from dualpath.engine.sampling import SamplingParams
from dualpath.kv.chain import block_chain, root_key
from dualpath.monitor.metrics import Metrics
from dualpath.policy.config import ReadPlanKind
from dualpath.serve.cluster import Cluster, describe_model
from dualpath.serve.config import LogLevel, ServeConfig, TransferKind
from dualpath.serve.generation import GenerationRequest
from dualpath.transfer import nixl_missing

BLOCK_TOKENS = 32
NEW_TOKENS = 6
CONCURRENT = 32

MODELS = ["tiny", "tiny-mha", "tiny-mla"]


class Plain:
    """Plain `transformers`, the tokens to compare with."""

    def __init__(self, name: str) -> None:
        directory = resolve_model(ModelSpec(model=name)).directory
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        self._model.eval()
        self._known: dict[tuple[int, ...], list[int]] = {}

    def generate(self, prompt: Sequence[int]) -> list[int]:
        key = tuple(prompt)
        if key not in self._known:
            ids = torch.tensor([list(prompt)])
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=NEW_TOKENS,
                min_new_tokens=NEW_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
            self._known[key] = out[0, len(prompt) :].tolist()
        return self._known[key]


@pytest.fixture(scope="module")
def plain() -> dict[str, Plain]:
    return {}


class Client:
    """Sends prompts to a cluster; counts cached tokens by path."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._number = 0

    async def ask(self, prompt: list[int]) -> tuple[list[int], dict[str, int]]:
        self._number += 1
        request = GenerationRequest(
            request_id=RequestId(f"request-{self._number}"),
            token_ids=prompt,
            sampling=SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True),
            cache_salt="",
            arrival_s=time.monotonic(),
        )
        tokens: list[int] = []
        by_path: dict[str, int] = {}
        async for update in self._cluster.driver.generate(request):
            assert update.error is None, update.error
            tokens += update.token_ids
            by_path = update.cached_by_path or by_path
        return tokens, by_path

    async def ask_all(self, prompts: list[list[int]]) -> list[tuple[list[int], dict[str, int]]]:
        return await asyncio.gather(*(self.ask(prompt) for prompt in prompts))

    async def persisted(self, prompt: list[int]) -> None:
        """Wait until every full block of the prompt is durable and in the index."""
        catalog, probe = self._cluster.catalog, RequestId("probe")
        assert catalog is not None
        root = root_key(self._cluster.facts.fingerprint, "")
        chain = block_chain(root, prompt, BLOCK_TOKENS)
        async with asyncio.timeout(30):
            while catalog.lookup(chain, probe) < len(chain):
                await asyncio.sleep(0.01)
        catalog.release(probe)


def random_tokens(seed: int, n: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, n).tolist()


async def check(config: ServeConfig, plain: Plain) -> None:
    cluster = Cluster(config, describe_model(config), Metrics())
    try:
        await cluster.start(lambda _: None)
        client = Client(cluster)
        await check_one(client, plain, config.read_path)
        await check_many(client, plain, config.read_path)
    finally:
        assert await cluster.stop() == 0


async def check_one(client: Client, plain: Plain, path: ReadPlanKind) -> None:
    """One request at a time: nothing stored, then all of it, then a part of it."""

    async def ask(prompt: list[int], hit_blocks: int) -> None:
        tokens, by_path = await client.ask(prompt)
        assert tokens == plain.generate(prompt)
        assert_read_by(path, by_path, hit_blocks)

    prompt = random_tokens(1, 10 * BLOCK_TOKENS + 5)
    await ask(prompt, 0)
    await client.persisted(prompt)
    await ask(prompt, 10)
    # The turn that follows: prompt and answer, and more.
    longer = [*prompt, *plain.generate(prompt), *random_tokens(2, 40)]
    await ask(longer, 10)
    # Another continuation, from the middle of a block.
    await ask([*prompt[: 4 * BLOCK_TOKENS + 7], *random_tokens(3, 50)], 4)
    # All of the prompt is stored, its last token included: that one is computed again.
    await ask(prompt[: 6 * BLOCK_TOKENS], 5)
    # Shorter than a block: never stored.
    await ask(random_tokens(4, 3), 0)


async def check_many(client: Client, plain: Plain, path: ReadPlanKind) -> None:
    """Many at once, of lengths that do not fit blocks, some sharing a prefix; twice."""
    shared = random_tokens(5, 3 * BLOCK_TOKENS)
    prompts = [
        [*(shared if i % 3 == 0 else []), *random_tokens(100 + i, 20 + 13 * i)]
        for i in range(CONCURRENT)
    ]
    expected = [plain.generate(prompt) for prompt in prompts]
    answers = await client.ask_all(prompts)
    assert [tokens for tokens, _ in answers] == expected
    for prompt in prompts:
        await client.persisted(prompt)
    answers = await client.ask_all(prompts)
    assert [tokens for tokens, _ in answers] == expected
    hit_blocks = [(len(prompt) - 1) // BLOCK_TOKENS for prompt in prompts]
    assert [sum(by_path.values()) for _, by_path in answers] == [
        blocks * BLOCK_TOKENS for blocks in hit_blocks
    ]
    if path in (ReadPlanKind.PE, ReadPlanKind.DE):
        other = "de" if path is ReadPlanKind.PE else "pe"
        assert all(by_path[other] == 0 for _, by_path in answers)


def assert_read_by(path: ReadPlanKind, by_path: dict[str, int], blocks: int) -> None:
    assert sum(by_path.values()) == blocks * BLOCK_TOKENS
    if path is ReadPlanKind.PE:
        assert by_path["de"] == 0
    elif path is ReadPlanKind.DE:
        assert by_path["pe"] == 0
    elif path is ReadPlanKind.SPLIT and blocks > 1:  # On an idle pair: both sides.
        assert min(by_path.values()) > 0


PATHS = [ReadPlanKind.PE, ReadPlanKind.DE, ReadPlanKind.SPLIT]
WHOLE, CHUNKED = 8192, BLOCK_TOKENS + 7


@pytest.mark.parametrize(
    ("model", "path", "max_batch_tokens", "transfer"),
    [
        *((model, path, WHOLE, TransferKind.SHM) for model in MODELS for path in PATHS),
        *((model, ReadPlanKind.SPLIT, CHUNKED, TransferKind.TCP) for model in MODELS),
        ("tiny-gpt-oss", ReadPlanKind.SPLIT, CHUNKED, TransferKind.SHM),
        ("tiny-qwen3", ReadPlanKind.SHORTER, WHOLE, TransferKind.AUTO),
        pytest.param(
            *("tiny-qwen3", ReadPlanKind.SPLIT, CHUNKED, TransferKind.NIXL),
            marks=pytest.mark.skipif(nixl_missing() is not None, reason=nixl_missing() or ""),
        ),
    ],
)
def test_tokens_are_those_of_plain_transformers(
    model: str,
    path: ReadPlanKind,
    max_batch_tokens: int,
    transfer: TransferKind,
    tmp_path: Path,
    plain: dict[str, Plain],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_NET_DEVICES", "lo")  # Of NIXL: not what other tests make and delete.
    config = ServeConfig(
        model=model,
        store=str(tmp_path / "store"),
        read_path=path,
        block_tokens=BLOCK_TOKENS,
        max_batch_tokens=max_batch_tokens,
        transfer=transfer,
        threads=1,
        log_level=LogLevel.WARNING,
    )
    asyncio.run(check(config, plain.setdefault(model, Plain(model))))
