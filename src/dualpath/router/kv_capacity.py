"""How many tokens of KV fit into a server's device memory, by what its metrics say.

vLLM tells it in the labels of `vllm:cache_config_info`. Pure: text in, a number out.
"""

from __future__ import annotations

import re

__all__ = ["kv_capacity_tokens"]

_INFO = re.compile(r"^vllm:cache_config_info\{(.*)\} ", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def kv_capacity_tokens(metrics: str) -> int | None:
    """Over all engines of the server; None when it does not say. `metrics`: in Prometheus' text format."""
    tokens = 0
    for info in _INFO.findall(metrics):
        labels = dict(_LABEL.findall(info))
        try:
            tokens += int(labels["num_gpu_blocks"]) * int(labels["block_size"])
        except (KeyError, ValueError):
            return None
    return tokens or None
