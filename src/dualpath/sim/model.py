"""What a model asks for: bytes of KV and weights, parameters, and floating point operations. Pure arithmetic.

Knows no hardware and no time. Norms, biases and layers for speculative decoding are left out. Invariants:
parameters are those of matrices; FLOPs are two for each parameter and token, and two for each element of the
keys and of the values that a query sees.
"""

from __future__ import annotations

import msgspec

from dualpath.policy.quota import pairs

__all__ = [
    "AttentionFlops",
    "Experts",
    "Formats",
    "GroupedAttention",
    "Indexer",
    "LatentAttention",
    "ModelShape",
]


class Formats(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of what is kept, and what products with weights are computed in.

    Weight bytes are of one parameter, scales included. `kv_extra_bytes_layer`: of one token's KV in one
    layer, beside the elements (scales, parts that are kept wider).
    """

    kv_bytes_per_element: float = 2.0
    kv_extra_bytes_layer: int = 0
    attention_weight_bytes: float = 2.0
    mlp_weight_bytes: float = 2.0
    embedding_weight_bytes: float = 2.0
    fp8_products: bool = False
    """In FP8 where the GPU has it; otherwise in 16 bits."""


class AttentionFlops(msgspec.Struct, frozen=True, kw_only=True):
    """FLOPs of attention over all layers, projections not included.

    `per_pair`: of a new token and a key it sees, where it sees all. `indexer_per_pair`: likewise, of the
    indexer, which may run in another precision. `per_token`: of a new token and all keys that it sees where
    their number is fixed, as if the context were always longer than that number.
    """

    per_token: float
    per_pair: float
    indexer_per_pair: float = 0.0

    def of(self, cached_tokens: int, bsz_tokens: int) -> float:
        """Of computing `bsz_tokens` new tokens after `cached_tokens`."""
        per_pair = self.per_pair + self.indexer_per_pair
        return self.per_token * bsz_tokens + per_pair * pairs(cached_tokens, bsz_tokens)


class GroupedAttention(msgspec.Struct, frozen=True, kw_only=True):
    """MHA, GQA and MQA: `heads` queries share `kv_heads` keys and values."""

    heads: int
    kv_heads: int
    head_dim: int

    @property
    def kv_elements(self) -> int:
        """Of a token in a layer."""
        return 2 * self.kv_heads * self.head_dim

    @property
    def pair_flops(self) -> int:
        """Of one query and one key in a layer, all heads."""
        return 4 * self.heads * self.head_dim

    def parameters(self, hidden: int) -> int:
        """Of a layer."""
        return 2 * hidden * self.head_dim * (self.heads + self.kv_heads)


class Indexer(msgspec.Struct, frozen=True, kw_only=True):
    """Chooses, for each query, the `top_tokens` keys that attention then sees (DeepSeek sparse attention)."""

    heads: int
    head_dim: int
    top_tokens: int

    @property
    def pair_flops(self) -> int:
        return 2 * self.heads * self.head_dim


class LatentAttention(msgspec.Struct, frozen=True, kw_only=True):
    """MLA with absorbed projections: all heads attend to one latent of `kv_rank` and one rotary part.

    `q_rank` is None where queries are projected in one step. The latent has no heads to divide it by: GPUs
    that share the heads of a rank each keep all of its KV.
    """

    heads: int
    q_rank: int | None
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    indexer: Indexer | None = None

    @property
    def kv_heads(self) -> int:
        return 1

    @property
    def kv_elements(self) -> int:
        """Of a token in a layer, the indexer's key included."""
        indexer = self.indexer.head_dim if self.indexer else 0
        return self.kv_rank + self.rope_dim + indexer

    @property
    def pair_flops(self) -> int:
        """Of one query and one key in a layer, all heads, without the indexer."""
        return 2 * self.heads * (2 * self.kv_rank + self.rope_dim)

    def parameters(self, hidden: int) -> int:
        """Of a layer, the indexer's included."""
        queries = self.heads * (self.nope_dim + self.rope_dim)
        count = hidden * self.q_rank + self.q_rank * queries if self.q_rank else hidden * queries
        count += hidden * (self.kv_rank + self.rope_dim)
        count += self.kv_rank * self.heads * (self.nope_dim + self.value_dim)
        count += self.heads * self.value_dim * hidden
        if self.indexer:
            per_head = (self.q_rank or hidden) * self.indexer.head_dim + hidden
            count += self.indexer.heads * per_head + hidden * self.indexer.head_dim
        return count


class Experts(msgspec.Struct, frozen=True, kw_only=True):
    """The mixture of experts of a layer; `active` of `routed` are visited, shared ones always."""

    routed: int
    active: int
    width: int
    shared_width: int = 0
    """Of all shared experts together."""


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A transformer, by its dimensions.

    `dense_layers` have an MLP of `dense_width`, all others `experts` (then not None). `window_layers` see the
    last `window_tokens` only; at least one layer sees all.
    """

    name: str
    layers: int
    hidden: int
    vocabulary: int
    tied_embeddings: bool
    attention: GroupedAttention | LatentAttention
    dense_layers: int
    dense_width: int
    experts: Experts | None = None
    window_layers: int = 0
    window_tokens: int = 0
    formats: Formats = Formats()

    @property
    def indexer(self) -> Indexer | None:
        return self.attention.indexer if isinstance(self.attention, LatentAttention) else None

    @property
    def full_layers(self) -> int:
        """Those without a window."""
        return self.layers - self.window_layers

    @property
    def kv_bytes_layer(self) -> int:
        """Of a token in a layer: a Layer Block is this times its tokens."""
        elements = round(self.attention.kv_elements * self.formats.kv_bytes_per_element)
        return elements + self.formats.kv_extra_bytes_layer

    @property
    def indexer_bytes_layer(self) -> int:
        """The part of `kv_bytes_layer` that the indexer reads; 0 without one."""
        if self.indexer is None:
            return 0
        return round(self.indexer.head_dim * self.formats.kv_bytes_per_element)

    @property
    def kv_bytes_token(self) -> int:
        """Of a token in all layers but those with a window, whose KV does not grow with the context."""
        return self.full_layers * self.kv_bytes_layer

    @property
    def window_kv_bytes_token(self) -> int:
        """Of a token in the layers with a window, while it is in the window."""
        return self.window_layers * self.kv_bytes_layer

    def kv_bytes(self, context_tokens: int) -> int:
        """Of a sequence."""
        in_window = min(context_tokens, self.window_tokens)
        return self.kv_bytes_token * context_tokens + self.window_kv_bytes_token * in_window

    @property
    def attention_parameters(self) -> int:
        """Of all layers. With data-parallel attention every rank keeps and uses all of them."""
        return self.layers * self.attention.parameters(self.hidden)

    @property
    def routed_parameters(self) -> int:
        """Of all routed experts of all layers."""
        if self.experts is None:
            return 0
        per_expert = 3 * self.hidden * self.experts.width
        return (self.layers - self.dense_layers) * self.experts.routed * per_expert

    @property
    def active_routed_parameters(self) -> int:
        """Of the routed experts that one token visits."""
        if self.experts is None:
            return 0
        return self.routed_parameters * self.experts.active // self.experts.routed

    @property
    def unrouted_mlp_parameters(self) -> int:
        """Of dense MLPs, shared experts and routers: every token visits them."""
        count = self.dense_layers * 3 * self.hidden * self.dense_width
        if self.experts is not None:
            per_layer = self.hidden * (3 * self.experts.shared_width + self.experts.routed)
            count += (self.layers - self.dense_layers) * per_layer
        return count

    @property
    def mlp_parameters(self) -> int:
        return self.unrouted_mlp_parameters + self.routed_parameters

    @property
    def active_mlp_parameters(self) -> int:
        """Of what one token visits."""
        return self.unrouted_mlp_parameters + self.active_routed_parameters

    @property
    def head_parameters(self) -> int:
        """Of the projection to logits; the embedding has as many."""
        return self.vocabulary * self.hidden

    @property
    def embedding_parameters(self) -> int:
        """Of the embedding and the projection to logits, once where they are the same."""
        return self.head_parameters * (1 if self.tied_embeddings else 2)

    @property
    def active_parameters(self) -> int:
        """The N of the cache-compute ratio: what a token is multiplied with, logits included."""
        return self.attention_parameters + self.active_mlp_parameters + self.head_parameters

    @property
    def total_parameters(self) -> int:
        return self.attention_parameters + self.mlp_parameters + self.embedding_parameters

    @property
    def attention_flops(self) -> AttentionFlops:
        flops = float(self.attention.pair_flops)
        windows = self.window_layers * self.window_tokens * flops
        if self.indexer is None:
            return AttentionFlops(per_token=windows, per_pair=self.full_layers * flops)
        return AttentionFlops(
            per_token=windows + self.full_layers * self.indexer.top_tokens * flops,
            per_pair=0.0,
            indexer_per_pair=float(self.full_layers * self.indexer.pair_flops),
        )

    def cache_compute_ratio(self, cached_tokens: int, append_tokens: int) -> float:
        """GB of KV to load for each PFLOP of computing a turn (the paper's ratio); GB are 1e9 bytes.

        As the paper, every appended token is taken to see `cached_tokens` keys, and all are multiplied with
        the projection to logits.
        """
        flops = self.attention_flops
        attention = flops.per_token + (flops.per_pair + flops.indexer_per_pair) * cached_tokens
        compute = append_tokens * (2 * self.active_parameters + attention)
        return (self.kv_bytes(cached_tokens) / 1e9) / (compute / 1e15)
