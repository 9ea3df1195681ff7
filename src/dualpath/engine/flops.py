"""Floating point operations of a forward pass, for the metric of what an engine achieves.

Two a weight and token (of a mixture of experts: of the experts that a token visits), and those of
attention: two products of a query with every key and value it sees. Embedding look-ups, norms and the
logits of the few rows that need them are left out. Counts what the model asks for, not what a kernel
does beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dualpath.engine.linear import PrepackedLinear
from dualpath.engine.model import LoadedModel

__all__ = ["ForwardCost", "forward_cost"]

_EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")


@dataclass(frozen=True, slots=True)
class ForwardCost:
    """`per_token`: of the weights. `per_pair`: of one query and one key, over all heads and layers."""

    per_token: float
    per_pair: float

    def of(self, tokens: int, pairs: int) -> float:
        """FLOPs of so many new tokens that see so many keys in all."""
        return self.per_token * tokens + self.per_pair * pairs


def forward_cost(loaded: LoadedModel) -> ForwardCost:
    """The cost of the loaded model, from its weights and its configuration."""
    config = loaded.config
    experts = next((n for name in _EXPERT_COUNTS if (n := getattr(config, name, None))), None)
    visited_share = 1.0 if experts is None else config.num_experts_per_tok / experts
    weights = 0.0
    for name, size in _weights(loaded.model):
        if "embed_tokens" not in name and "lm_head" not in name:
            weights += size * (visited_share if ".experts." in name else 1.0)
    heads, layout = config.num_attention_heads, loaded.layout
    if layout.kind == "mla":
        width = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    else:
        width = sum(part.dim for part in layout.parts)
    return ForwardCost(2.0 * weights, 2.0 * heads * width * layout.n_layers)


def _weights(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """Name and size of every matrix; those in a kernel's own order are no parameters any more."""
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            yield name, parameter.numel()
    for name, module in model.named_modules():
        if isinstance(module, PrepackedLinear):
            yield name, module.in_features * module.out_features
