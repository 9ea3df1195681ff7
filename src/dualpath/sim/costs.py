"""How long steps of prefill and decode take and how much KV fits: rooflines, pure arithmetic.

An engine instance is a group of ranks that step together. Each rank computes the attention of its own
requests (data-parallel attention), so all wait for the rank with the most of it. Their MLPs are one: the
routed experts, or the MLP of a dense model, are spread over the ranks evenly, and so is their work, whatever
the ranks' batches are. Every part takes the longer of its arithmetic and its reading of memory; collectives
come on top, but for the share that compute hides.

Not modelled: experts with more tokens than others, tiny batches that visit only some experts, pipelines of
layers, speculative decoding. Attention that sees a fixed number of keys (sparse, windows) is taken to see
that many, which is too many while the context is shorter.
"""

from __future__ import annotations

import math

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.policy.quota import AttentionFit
from dualpath.sim.hardware import Hardware
from dualpath.sim.model import ModelShape

__all__ = [
    "DecodeCosts",
    "Efficiency",
    "Parallelism",
    "PrefillCosts",
    "attention_fit",
    "decode_costs",
    "gpu_weight_bytes",
    "kv_capacity_tokens",
    "layerwise_batch_factor",
    "prefill_costs",
]

_ACTIVATION_BYTES = 2


class Efficiency(msgspec.Struct, frozen=True, kw_only=True):
    """Shares of the peaks that are reached, and overheads that no specification gives. Raises ConfigError.

    The defaults of shares are near what published kernels reach on Hopper.
    """

    linear: float = 0.6
    """Of FLOP/s, products with weights. DeepGEMM: up to 0.78 in large dense ones; experts' are smaller."""
    attention: float = 0.6
    """Of FLOP/s. FlashMLA: 0.65 in sparse prefill, 0.67 in dense decode, 0.41 in sparse decode."""
    memory: float = 0.85
    """Of HBM bytes/s. FlashMLA: 0.9."""
    network: float = 0.85
    """Of NVLink and compute NIC bytes/s in collectives. DeepEP: 0.8 of NVLink, 0.9 of a NIC."""
    overlap: float = 0.0
    """Share of collectives that compute hides: 0, or up to 1 with two micro-batches that take turns."""
    launch_s: float = 50e-6
    """A layer of a step: launches of kernels and latency of collectives. Assumed."""
    entry_s: float = 0.0
    """An entry of a prefill batch."""

    def __post_init__(self) -> None:
        for field in ("linear", "attention", "memory", "network"):
            if not 0 < getattr(self, field) <= 1:
                raise ConfigError(
                    f"{field}: expected a share in (0, 1], got {getattr(self, field)}"
                )
        if not 0 <= self.overlap <= 1:
            raise ConfigError(f"overlap: expected a share in [0, 1], got {self.overlap}")
        for field in ("launch_s", "entry_s"):
            if getattr(self, field) < 0:
                raise ConfigError(
                    f"{field}: expected 0 or more seconds, got {getattr(self, field)}"
                )


class Parallelism(msgspec.Struct, frozen=True):
    """`ranks` of data-parallel attention make an instance, and are its expert-parallel group.

    A rank is `tensor` GPUs of one node that share its weights, its heads and so its KV. Raises ConfigError.
    """

    ranks: int
    tensor: int = 1

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.tensor < 1:
            raise ConfigError(f"expected one rank or more of one GPU or more, got {self}")

    @property
    def gpus(self) -> int:
        return self.ranks * self.tensor


class PrefillCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a prefill step. Attention: of a rank, for an entry, a new token, a query-key pair.

    The rest is of the instance: `linear_token_s` for a token of the ranks' mean, but at least `weights_s`,
    the reading of a GPU's weights; `collective_s_token` for a token of the mean; `base_s` a step.
    """

    attention_entry_s: float
    attention_token_s: float
    attention_pair_s: float
    linear_token_s: float
    weights_s: float
    collective_s_token: float
    base_s: float

    def step_s(self, attention_max_s: float, mean_tokens: float) -> float:
        """Of a step whose slowest rank spends `attention_max_s`, with `mean_tokens` new tokens a rank."""
        linear_s = max(self.weights_s, self.linear_token_s * mean_tokens)
        return self.base_s + attention_max_s + linear_s + self.collective_s_token * mean_tokens


class DecodeCosts(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of a decode step, which gives every sequence a token.

    `sequence_s`: for a sequence of the largest batch; projections, logits, attention to a fixed number of
    keys, collectives, which are `collective_s_sequence` of it. `linear_sequence_s`: for a sequence of the
    ranks' mean batch, MLPs, but at least `weights_s`, the reading of a GPU's weights. `context_token_s`: for
    a token of context, of the rank with most. `base_s` a step.
    """

    base_s: float
    sequence_s: float
    linear_sequence_s: float
    weights_s: float
    context_token_s: float
    collective_s_sequence: float = 0.0

    def step_s(self, max_batch: float, mean_batch: float, max_context_tokens: float) -> float:
        """Of a step over ranks with so many sequences at most and on average, and so much KV at most."""
        linear_s = max(self.weights_s, self.linear_sequence_s * mean_batch)
        attention_s = self.sequence_s * max_batch + self.context_token_s * max_context_tokens
        return self.base_s + linear_s + attention_s


def prefill_costs(
    model: ModelShape, hardware: Hardware, parallelism: Parallelism, efficiency: Efficiency
) -> PrefillCosts:
    """Of a rank and its instance. Raises ConfigError when a rank does not fit a node.

    Logits are of the last token only and not counted. KV is not read at a cost of its own: a few dozen new
    tokens make attention bound by its arithmetic.
    """
    rates = _Rates(model, hardware, parallelism, efficiency)
    flops = model.attention_flops
    projections = 2 * model.attention_parameters
    return PrefillCosts(
        attention_entry_s=efficiency.entry_s,
        attention_token_s=projections / rates.linear + flops.per_token / rates.attention,
        attention_pair_s=flops.per_pair / rates.attention + flops.indexer_per_pair / rates.indexer,
        linear_token_s=2 * model.active_mlp_parameters / rates.linear,
        weights_s=gpu_weight_bytes(model, parallelism) / rates.hbm,
        collective_s_token=_collective_s_token(model, hardware, parallelism, efficiency),
        base_s=model.layers * efficiency.launch_s,
    )


def decode_costs(
    model: ModelShape, hardware: Hardware, parallelism: Parallelism, efficiency: Efficiency
) -> DecodeCosts:
    """Of a rank and its instance. Raises ConfigError when a rank does not fit a node."""
    rates = _Rates(model, hardware, parallelism, efficiency)
    pair_flops = model.attention.pair_flops

    def key_s(kv_bytes: int, flops: int, flop_s: float) -> float:
        """One query and one key in one layer."""
        return max(kv_bytes / (rates.hbm * _kv_shards(model, parallelism)), flops / flop_s)

    layer_s = key_s(model.kv_bytes_layer, pair_flops, rates.attention)
    fixed_s = model.window_layers * model.window_tokens * layer_s
    context_s = model.full_layers * layer_s
    if model.indexer is not None:
        chosen_bytes = model.kv_bytes_layer - model.indexer_bytes_layer
        chosen_s = key_s(chosen_bytes, pair_flops, rates.attention)
        fixed_s += model.full_layers * model.indexer.top_tokens * chosen_s
        context_s = model.full_layers * key_s(
            model.indexer_bytes_layer, model.indexer.pair_flops, rates.indexer
        )
    projections_s = 2 * model.attention_parameters / rates.linear
    logits_s = 2 * model.head_parameters / rates.logits
    collective_s = _collective_s_token(model, hardware, parallelism, efficiency)
    return DecodeCosts(
        base_s=model.layers * efficiency.launch_s,
        sequence_s=projections_s + logits_s + fixed_s + collective_s,
        linear_sequence_s=2 * model.active_mlp_parameters / rates.linear,
        weights_s=gpu_weight_bytes(model, parallelism) / rates.hbm,
        context_token_s=context_s,
        collective_s_sequence=collective_s,
    )


def attention_fit(costs: PrefillCosts) -> AttentionFit:
    """What the compute quota goes by: the attention of a rank's batch."""
    return AttentionFit(
        base_s=0.0,
        per_entry_s=costs.attention_entry_s,
        per_pair_s=costs.attention_pair_s,
        per_token_s=costs.attention_token_s,
    )


def gpu_weight_bytes(model: ModelShape, parallelism: Parallelism) -> float:
    """Weights on each GPU of an instance.

    What is spread over the ranks is the routed experts, or without any, the MLPs; everything else is on every
    rank, and shared by the GPUs of the rank.
    """
    spread = model.routed_parameters or model.mlp_parameters
    mlp = model.mlp_parameters - spread + spread / parallelism.ranks
    formats = model.formats
    rank_bytes = (
        model.attention_parameters * formats.attention_weight_bytes
        + mlp * formats.mlp_weight_bytes
        + model.embedding_parameters * formats.embedding_weight_bytes
    )
    return rank_bytes / parallelism.tensor


def kv_capacity_tokens(
    model: ModelShape, hardware: Hardware, parallelism: Parallelism, reserved_share: float
) -> int:
    """Tokens whose KV fits on a rank beside the weights, `reserved_share` of HBM left to everything else.

    KV in windows is not counted. Raises ConfigError when not one token fits.
    """
    if not 0 <= reserved_share < 1:
        raise ConfigError(f"reserved share: expected [0, 1), got {reserved_share}")
    usable_bytes = hardware.gpu.hbm_bytes * (1 - reserved_share)
    weight_bytes = gpu_weight_bytes(model, parallelism)
    free_bytes = usable_bytes - weight_bytes
    tokens = math.floor(free_bytes * _kv_shards(model, parallelism) / model.kv_bytes_token)
    if tokens < 1:
        raise ConfigError(
            f"{model.name} on {hardware.gpu.name}: expected weights below {usable_bytes / 1e9:.1f} GB "
            f"a GPU, got {weight_bytes / 1e9:.1f} GB with {parallelism}: use more GPUs"
        )
    return tokens


def layerwise_batch_factor(model: ModelShape) -> int:
    """How many times the tokens a prefill batch may have that holds KV of one layer (paper, layerwise)."""
    return model.layers


class _Rates:
    """FLOP/s of a rank (all its GPUs) for each kind of work, and HBM bytes/s of a GPU."""

    def __init__(
        self,
        model: ModelShape,
        hardware: Hardware,
        parallelism: Parallelism,
        efficiency: Efficiency,
    ) -> None:
        gpu, tensor = hardware.gpu, parallelism.tensor
        if tensor > hardware.node.gpus:
            raise ConfigError(
                f"expected tensor parallelism within a node of {hardware.node.gpus} GPUs, got {tensor}"
            )
        fp8 = model.formats.fp8_products and gpu.fp8_flop_s > 0
        low = gpu.fp8_flop_s if fp8 else gpu.bf16_flop_s
        self.linear = low * efficiency.linear * tensor
        self.logits = gpu.bf16_flop_s * efficiency.linear * tensor
        self.attention = gpu.bf16_flop_s * efficiency.attention * tensor
        self.indexer = low * efficiency.attention * tensor
        self.hbm = gpu.hbm_bytes_s * efficiency.memory


def _kv_shards(model: ModelShape, parallelism: Parallelism) -> int:
    """Over how many GPUs of a rank its KV is divided: no further than by heads."""
    return min(parallelism.tensor, model.attention.kv_heads)


def _collective_s_token(
    model: ModelShape, hardware: Hardware, parallelism: Parallelism, efficiency: Efficiency
) -> float:
    """Exposed seconds of all collectives, for each token of a rank.

    Between ranks, at each layer whose MLP is spread: a token goes once to each node where it is needed, over
    compute NICs, and once to each rank, over NVLink, and comes back; both stages flow at the same time.
    Between the GPUs of a rank: two all-reduces a layer.
    """
    node, tensor = hardware.node, parallelism.tensor
    nodes = math.ceil(parallelism.gpus / node.gpus)
    out_bytes = _ACTIVATION_BYTES
    layers = model.layers
    if model.experts is not None:
        layers -= model.dense_layers
        if model.formats.fp8_products:
            out_bytes = 1
    size_bytes = model.hidden * (out_bytes + _ACTIVATION_BYTES) / tensor
    spread_s = size_bytes * max(
        _others_visited(model, nodes) / node.network_bytes_s,
        _others_visited(model, parallelism.ranks) / node.nvlink_bytes_s,
    )
    reduced_bytes = 2 * model.hidden * _ACTIVATION_BYTES * (tensor - 1) / tensor
    reduce_s = 2 * reduced_bytes / node.nvlink_bytes_s
    exposed = (1 - efficiency.overlap) / efficiency.network
    return (layers * spread_s + model.layers * reduce_s) * exposed


def _others_visited(model: ModelShape, places: int) -> float:
    """To how many other places, of all that the MLP is spread over, a token goes on average."""
    if model.experts is None:
        return places - 1
    return float((places - 1) * (1 - (1 - 1 / places) ** model.experts.active))
