"""What the engine tests share: a reference, prompts, and a request run from prompt to tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from dualpath.base.errors import TransferError
from dualpath.engine.decode import DecodeEngine
from dualpath.engine.host_blocks import HostBlocks
from dualpath.engine.model import LoadedModel
from dualpath.engine.prefill import ChunkResult, LayerwisePrefill, PrefillChunk
from dualpath.engine.sampling import SamplingParams


@dataclass(frozen=True)
class Reference:
    """Plain `transformers`: generate, and the KV that its own cache holds."""

    model: Any

    @classmethod
    def load(cls, directory: Path) -> Reference:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        return cls(model.eval())

    def generate(self, prompt: Sequence[int], new_tokens: int) -> list[int]:
        """Exactly `new_tokens` greedy tokens (no end of text)."""
        ids = torch.tensor([list(prompt)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=new_tokens,
            min_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def kv_rows(self, tokens: Sequence[int]) -> list[torch.Tensor]:
        """Each layer's KV as rows `[tokens, row_elements]`."""
        cache = DynamicCache()
        self.model(input_ids=torch.tensor([list(tokens)]), cache=cache, use_cache=True)
        return [
            torch.cat(
                [part[0].transpose(0, 1).flatten(1) for part in (layer.keys, layer.values)], dim=1
            )
            for layer in cache.layers
        ]


def random_prompt(seed: int, tokens: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, tokens).tolist()


def greedy(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)


@dataclass
class Conversation:
    """A request in the making: its prompt and the host memory of its KV."""

    name: str
    prompt: list[int]
    blocks: HostBlocks
    cached: int = 0
    tokens: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, loaded: LoadedModel, name: str, prompt: list[int]) -> Conversation:
        return cls(name, prompt, HostBlocks.allocate(loaded.layout, len(prompt)))

    def chunk(self, stop: int | None = None, **changes: Any) -> PrefillChunk:
        """The next chunk, up to token `stop` of the prompt."""
        stop = len(self.prompt) if stop is None else stop
        fields = {
            "name": self.name,
            "token_ids": self.prompt[self.cached : stop],
            "cached_tokens": self.cached,
            "source": self.blocks,
            "sink": self.blocks,
            "needs_logits": stop == len(self.prompt),
        }
        return PrefillChunk(**{**fields, **changes})


def run_chunk(engine: LayerwisePrefill, one: Conversation, stop: int | None = None) -> ChunkResult:
    """Compute one chunk alone, and count it as cached."""
    (result,) = engine.run([one.chunk(stop)])
    assert result.error is None
    one.cached = len(one.prompt) if stop is None else stop
    return result


def decode_all(
    loaded: LoadedModel, conversations: Sequence[Conversation], first: Sequence[int], new: int
) -> dict[str, list[int]]:
    """All tokens of requests whose prompts are computed, decoded in one batch."""
    engine = DecodeEngine(loaded, hbm_tokens=sum(len(c.prompt) + new for c in conversations))
    out = {c.name: [token] for c, token in zip(conversations, first, strict=True)}
    for one, token in zip(conversations, first, strict=True):
        assert engine.reserve(one.name, len(one.prompt) + new)
        engine.join(
            one.name,
            [*one.prompt, token],
            one.blocks.blocks,
            greedy(new),
            prompt_tokens=len(one.prompt),
        )
    while engine.running:
        for step in engine.step():
            out[step.name].append(step.token)
    for one in conversations:
        engine.remove(one.name)
    assert engine.free_tokens == engine.hbm_tokens
    return out


class FailingSource:
    """Loads of `layer` and later fail, in `start_load` or in the future; earlier ones are as given."""

    def __init__(self, source: HostBlocks, layer: int, *, at_once: bool) -> None:
        self._source = source
        self._layer = layer
        self._at_once = at_once

    def start_load(self, layer: int, into: memoryview) -> Future[int]:
        if layer < self._layer:
            return self._source.start_load(layer, into)
        # What arrived before the failure may be anything, also not-a-number.
        np.frombuffer(into, dtype=np.uint8)[:] = 0xFF
        error = TransferError(f"no layer {layer}")
        if self._at_once:
            raise error
        failed: Future[int] = Future()
        failed.set_exception(error)
        return failed


Loader = Callable[[str], LoadedModel]
Plain = Callable[[str], Reference]
