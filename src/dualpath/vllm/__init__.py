"""The plug-in for stock vLLM: a KV connector, a scheduler class, and what the router says to them.

Importing this package imports neither vLLM nor torch; `connector` and `scheduler` do, and vLLM imports
them."""

from __future__ import annotations

from dualpath.vllm.params import (
    PARAMS_KEY,
    KvPeer,
    PairParams,
    decode_params,
    encode_params,
    prefill_params,
)

__all__ = [
    "PARAMS_KEY",
    "KvPeer",
    "PairParams",
    "decode_params",
    "encode_params",
    "prefill_params",
]
