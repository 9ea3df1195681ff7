"""Decoding: device KV by request under a token budget, and continuous batching.

A request reserves device memory for its whole length, joins with its prompt's KV and its first token,
takes part in every step until a token ends it, and keeps its memory until it is removed, so that
its last full blocks can still be copied out. Requests join and leave between steps.

Invariants: a request with n tokens (prompt and generated) that is between steps has KV of the first
n - 1; the last one's comes with the step that feeds it. Reserved tokens never exceed the budget.
This module knows neither schedulers, stores nor transports. One thread at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from dualpath.base.errors import InvariantViolation
from dualpath.engine.forward import forward_packed
from dualpath.engine.hostmem import block_tensor
from dualpath.engine.model import LoadedModel
from dualpath.engine.packed import PackedBatch, PackedKV
from dualpath.engine.sampling import (
    FinishReason,
    Sampled,
    SamplingParams,
    TokenLogprobs,
    finish_reason,
    sample,
)
from dualpath.kv.layout import KVLayout

__all__ = ["DecodeEngine", "DecodedToken"]


class DecodedToken(msgspec.Struct, frozen=True):
    """One token of one request. With a `finish_reason` it is the last, and part of the text."""

    name: str
    token: int
    logprobs: TokenLogprobs | None
    finish_reason: FinishReason | None


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request with KV on the device: `rows` `[n_layers, capacity, row_elements]`."""

    name: str
    rows: Tensor
    tokens: list[int]
    prompt_tokens: int
    kv_tokens: int
    params: SamplingParams
    finished: bool = False


class _DecodeKV(PackedKV):
    """One step's view of the sequences: each appends one row a layer."""

    def __init__(self, sequences: Sequence[_Sequence], layout: KVLayout) -> None:
        cached = [s.kv_tokens for s in sequences]
        super().__init__(PackedBatch.of(cached, [1] * len(sequences)), layout)
        self._rows = [s.rows for s in sequences]
        self._cached = cached

    def store(self, layer: int, first: Tensor, second: Tensor) -> None:
        new = torch.cat(
            [part[0].transpose(0, 1).flatten(1) for part in (first, second)], dim=1
        ).unbind(0)
        into = [rows[layer, at] for rows, at in zip(self._rows, self._cached, strict=True)]
        torch._foreach_copy_(into, list(new))

    def rows(self, layer: int, index: int) -> Tensor:
        return self._rows[index][layer, : self._cached[index] + 1]


class DecodeEngine:
    """Runs every request that joined, one token a step.

    `hbm_tokens`: the tokens of KV that all requests together may reserve on the device.
    """

    def __init__(self, loaded: LoadedModel, hbm_tokens: int) -> None:
        self._loaded = loaded
        self.layout = loaded.layout
        self.hbm_tokens = hbm_tokens
        self._reserved: dict[str, int] = {}
        self._sequences: dict[str, _Sequence] = {}
        self.attention_s = 0.0

    @property
    def free_tokens(self) -> int:
        """Budget that no request has reserved."""
        return self.hbm_tokens - sum(self._reserved.values())

    @property
    def running(self) -> int:
        """Requests that the next step computes."""
        return sum(not s.finished for s in self._sequences.values())

    def reserve(self, name: str, tokens: int) -> bool:
        """Set `tokens` (prompt and all that may be generated) aside for a request, or change nothing.

        Reserving again for the same request is an InvariantViolation.
        """
        if name in self._reserved:
            raise InvariantViolation(f"{name} reserves device memory twice")
        if tokens > self.free_tokens:
            return False
        self._reserved[name] = tokens
        return True

    def join(
        self,
        name: str,
        tokens: Sequence[int],
        blocks: Sequence[memoryview] | None,
        params: SamplingParams,
        *,
        prompt_tokens: int,
    ) -> None:
        """Take a request into the running batch; it must have reserved enough.

        `tokens`: the prompt and, last, the first token that prefill gave, whose KV is not there yet.
        `blocks`: the KV of all but that one, in Full Block layout, in order, the last perhaps partly
        filled; copied before this returns. None: zeros, for measurements without any copy, whose tokens
        mean nothing. The first `prompt_tokens` tokens are the client's own
        prompt, the rest of `tokens` was generated, perhaps by earlier attempts.
        """
        layout, kv_tokens = self.layout, len(tokens) - 1
        capacity = self._reserved.get(name, 0)
        if name in self._sequences or not 1 <= kv_tokens <= capacity:
            raise InvariantViolation(
                f"{name} joins with KV of {kv_tokens} tokens and {capacity} reserved"
            )
        if blocks is not None and len(blocks) < layout.blocks_for(kv_tokens):
            raise ValueError(f"{name}: {len(blocks)} blocks for {kv_tokens} tokens")
        make = torch.zeros if blocks is None else torch.empty
        rows = make(
            (layout.n_layers, capacity, layout.row_elements),
            dtype=self._loaded.dtype,
            device=self._loaded.device,
        )
        for index, memory in enumerate((blocks or ())[: layout.blocks_for(kv_tokens)]):
            first = index * layout.block_tokens
            stop = min(first + layout.block_tokens, kv_tokens)
            block = block_tensor(memory, layout)
            rows[:, first:stop].copy_(block[:, : stop - first])
        self._sequences[name] = _Sequence(
            name=name,
            rows=rows,
            tokens=list(tokens),
            prompt_tokens=prompt_tokens,
            kv_tokens=kv_tokens,
            params=params,
        )

    def step(self, limit: int | None = None) -> list[DecodedToken]:
        """One token for every running request (at most `limit`, those that joined first), in order.

        A request whose text ends leaves the batch and keeps its memory until `remove`.
        """
        batch = [s for s in self._sequences.values() if not s.finished][:limit]
        if not batch:
            return []
        for sequence in batch:
            if sequence.kv_tokens >= sequence.rows.shape[1]:
                raise InvariantViolation(
                    f"{sequence.name} outgrew the {sequence.rows.shape[1]} tokens it reserved"
                )
        kv = _DecodeKV(batch, self.layout)
        logits = forward_packed(
            self._loaded.model, [s.tokens[-1] for s in batch], kv, range(len(batch))
        )
        self.attention_s += kv.attention_s
        return [
            self._append(sequence, sampled)
            for sequence, sampled in zip(batch, _sample_all(batch, logits), strict=True)
        ]

    def _append(self, sequence: _Sequence, sampled: Sampled) -> DecodedToken:
        sequence.kv_tokens += 1
        sequence.tokens.append(sampled.token)
        sequence.finished = sampled.finish_reason is not None
        return DecodedToken(sequence.name, sampled.token, sampled.logprobs, sampled.finish_reason)

    def kv_tokens(self, name: str) -> int:
        """Tokens of the request whose KV is on the device."""
        return self._sequence(name).kv_tokens

    def tokens(self, name: str) -> list[int]:
        """Prompt and generated tokens of the request, a copy."""
        return list(self._sequence(name).tokens)

    def copy_block(self, name: str, first_token: int, into: memoryview) -> None:
        """Copy the Full Block of tokens from `first_token` on into `into` (writable, a slot or more).

        Its KV must be complete on the device; otherwise ValueError.
        """
        sequence, stop = self._sequence(name), first_token + self.layout.block_tokens
        if first_token % self.layout.block_tokens or stop > sequence.kv_tokens:
            raise ValueError(
                f"{name} has KV of {sequence.kv_tokens} tokens, not the block "
                f"[{first_token}, {stop})"
            )
        block_tensor(into, self.layout).copy_(sequence.rows[:, first_token:stop])

    def remove(self, name: str) -> None:
        """Give back memory and reservation of a request, running, finished or unknown."""
        self._sequences.pop(name, None)
        self._reserved.pop(name, None)

    def _sequence(self, name: str) -> _Sequence:
        try:
            return self._sequences[name]
        except KeyError:
            raise ValueError(f"{name} is not in the decode batch") from None


def _sample_all(batch: Sequence[_Sequence], logits: Tensor) -> list[Sampled]:
    """The next token of each; only those that need more than the argmax bring logits to the host."""
    greedy = logits.argmax(dim=-1).tolist()
    sampled: list[Sampled] = []
    for index, sequence in enumerate(batch):
        params = sequence.params
        if params.plain_greedy:
            generated = len(sequence.tokens) - sequence.prompt_tokens + 1
            reason = finish_reason(greedy[index], params, generated)
            sampled.append(Sampled(greedy[index], None, reason))
        else:
            row = logits[index].cpu().numpy()
            sampled.append(
                sample(row, params, tokens=sequence.tokens, prompt_tokens=sequence.prompt_tokens)
            )
    return sampled
