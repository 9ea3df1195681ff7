"""What the router says to a pair of vLLM servers, and they to it, in `kv_transfer_params`.

A request is served by a *pair*: a prefill server (PE) and a decode server (DE), each a vLLM server with
`DualPathConnector` and a KV endpoint of its own (`KvPeer`). In order:

1. The router sends the prompt to the PE, with max_tokens 1 and no streaming, and `kv_transfer_params =
prefill_params(request, attempt, peer=<KV endpoint of the DE>, ...)`. While the PE computes, its side and,
if the plan says so, the DE's side read the stored prefix; the DE's engine need not run for that. 2. The
PE's answer carries `kv_transfer_params`. The router passes them on **unchanged** as those of the client's
own request (all its parameters, streaming or not), which it sends to the DE. The DE takes the prompt's KV
from the PE, computes the last prompt token, and answers the client. What the PE sampled is discarded.

What may go wrong, and what then:

- The PE fails, or its answer carries no `kv_transfer_params`: send the client's request to a DE without
  `kv_transfer_params`. It takes from the store what is there and computes the rest: right, only slower.
- The DE fails before the first token: send the same to another DE, with the PE's `kv_transfer_params`. The
  PE keeps the prompt's KV for the connector's `lease_s` (60 s unless set) until some DE took it.
- The PE is lost, or its lease ended, when the DE asks: the DE does without.

Whichever server serves a request without these params is a server that does both.

The plan. `hit_tokens` is how long a prefix the router believes to be stored, a hint: what is stored the
connectors find out themselves, and they go on behind the hint. `pe_tokens` of `hit_tokens` are read by the
PE's side, `[0, pe_tokens)`, the rest by the DE's (as `dualpath.policy.ReadPlan`). When the prefix that is
found is longer or shorter the split keeps its proportion; with `hit_tokens` 0 the PE's side reads all.

How the router learns what is stored: from what it sent. The full blocks of every prompt that a PE answered,
and of prompt and output of every answer that ended, are in the store soon after (if there is one). The PE's
answer says in `hit_tokens` what was really found, and in `pe_tokens` what its side read. No other query
exists: a wrong hint costs some balance of the reads, never a token.

This module knows neither vLLM nor the router. Its structs are MessagePack- and JSON-ready, and reject
unknown values; unknown fields are ignored, so that an older server takes a newer router's params.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from dualpath.base.errors import RequestError

__all__ = [
    "PARAMS_KEY",
    "KvPeer",
    "PairParams",
    "decode_params",
    "encode_params",
    "prefill_params",
]

PARAMS_KEY = "dualpath"
"""The one key of ours in a request's or answer's `kv_transfer_params`."""


class KvPeer(msgspec.Struct, frozen=True):
    """The KV endpoint of a server: `kv_host` and `kv_port` of its connector, spelled as it spells them.

    With tensor parallelism rank r listens on `port + r`.
    """

    host: str
    port: int

    def __post_init__(self) -> None:
        if not self.host or not 0 < self.port < 65536:
            raise ValueError(f"a KV endpoint needs a host and a port in [1, 65535], got {self}")

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class PairParams(msgspec.Struct, frozen=True):
    """One side's part in a request. Tokens are counted from the start of the prompt.

    `role`: what the receiver is to do. `request` and `attempt` name it in both servers; a retry of the
    router counts `attempt` up. `peer`: the other server of the pair. `prompt_tokens`: in the decode part,
    how many tokens of KV the PE holds for the DE."""

    role: Literal["prefill", "decode"]
    request: str
    attempt: int
    peer: KvPeer
    hit_tokens: int = 0
    pe_tokens: int = 0
    prompt_tokens: int = 0

    def __post_init__(self) -> None:
        if not self.request or self.attempt < 1:
            raise ValueError(f"a request needs a name, and an attempt >= 1, got {self}")
        if not 0 <= self.pe_tokens <= self.hit_tokens or self.prompt_tokens < 0:
            raise ValueError(f"expected 0 <= pe_tokens <= hit_tokens, got {self}")

    def of_rank(self, rank: int) -> PairParams | None:
        """The part of a tensor-parallel rank, whose peer is the other server's same rank.

        None where there is no such port: such a rank has no peer."""
        if self.peer.port + rank > 65535:
            return None
        return msgspec.structs.replace(self, peer=KvPeer(self.peer.host, self.peer.port + rank))


def prefill_params(
    request: str, attempt: int, peer: KvPeer, *, hit_tokens: int, pe_tokens: int
) -> dict[str, object]:
    """`kv_transfer_params` of the PE's part; `peer` is the DE's KV endpoint."""
    return encode_params(
        PairParams("prefill", request, attempt, peer, hit_tokens=hit_tokens, pe_tokens=pe_tokens)
    )


def encode_params(params: PairParams) -> dict[str, object]:
    """The `kv_transfer_params` that carry `params`, of plain JSON types."""
    return {PARAMS_KEY: msgspec.to_builtins(params)}


def decode_params(kv_transfer_params: Mapping[str, object] | None) -> PairParams | None:
    """What a request's or answer's `kv_transfer_params` say to us; None when they say nothing.

    Raises RequestError for what a router never sends.
    """
    raw = (kv_transfer_params or {}).get(PARAMS_KEY)
    if raw is None:
        return None
    try:
        return msgspec.convert(raw, PairParams)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"kv_transfer_params[{PARAMS_KEY!r}]: {error}; leave it out, or let the router send it",
            param="kv_transfer_params",
        ) from None
