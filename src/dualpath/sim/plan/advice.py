"""What to set on a cluster, and why: block size, buffers, thresholds, quota, flags of `dualpath serve`.

Pure arithmetic on a simulated cluster, what it was asked for and what came out. Rules are the paper's where
it has one; each is named in the advice's `reasons`. Knows no runs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from dualpath.base.config import format_bytes, options
from dualpath.base.ids import GiB, KiB, MiB
from dualpath.policy.bandwidth import NodeBandwidth, bottleneck_free_range, resource_loads
from dualpath.policy.config import PolicyConfig, ReadPlanKind
from dualpath.serve.config import ServeConfig
from dualpath.sim.cluster import Cluster
from dualpath.sim.hardware import Hardware, NodeSpec
from dualpath.sim.model import ModelShape
from dualpath.sim.plan.load import Sessions
from dualpath.sim.plan.result import Advice, Figures, Loads, Ratios

__all__ = [
    "Turns",
    "advise",
    "beta_tokens_for",
    "block_tokens_for",
    "decode_tokens_s",
    "loads_of",
    "node_bandwidth",
    "quota_s_for",
    "serve_arguments",
    "staging_bytes_for",
]

_BLOCKS = ((16_384, 64), (65_536, 128))
_LARGEST_BLOCK = 256
_TRANSFER_BYTES = 64 * KiB
_MEMORY_SHARE = 0.2
_LONGEST_REQUESTS = 4
_HEADROOM = 1.25
_PAPER_QUOTA_S = 0.3
_QUOTA_OF_TTFT = 0.1
_PAPER_NODE_BUFFER_BYTES = 80e9


@dataclass(frozen=True, slots=True)
class Turns:
    """Means over the turns of a trace, and the longest prompt with its output."""

    prompt_tokens: float
    append_tokens: float
    longest_tokens: int

    @classmethod
    def of(cls, sessions: Sessions) -> Turns:
        work, turns = sessions.work, slice(int(sessions.work.first_turn[sessions.count]))
        prompt, reused = work.prompt_tokens[turns], work.reused_tokens[turns]
        return cls(
            prompt_tokens=float(prompt.mean()),
            append_tokens=float((prompt - reused).mean()),
            longest_tokens=int((prompt + work.output_tokens[turns]).max()),
        )


def node_bandwidth(node: NodeSpec) -> NodeBandwidth:
    return NodeBandwidth(node.gpus, node.network_bytes_s, node.snic_bytes_s, node.memory_bytes_s)


def loads_of(node: NodeSpec, prefill_nodes: int, decode_nodes: int) -> Loads:
    """The paper's bottleneck analysis of a ratio, by the rates of the specification."""
    bandwidth = node_bandwidth(node)
    found = bottleneck_free_range(bandwidth)
    shares = resource_loads(bandwidth, prefill_nodes, decode_nodes)
    ratios = None
    if found is not None:
        ratios = Ratios(
            low=found.low,
            high=found.high,
            low_resource=found.low_resource.value,
            high_resource=found.high_resource.value,
        )
    return Loads(
        ratios=ratios,
        in_range=found is not None and found.holds(prefill_nodes, decode_nodes),
        shares={resource.value: share for resource, share in shares.items()},
        fullest=max(shares, key=lambda each: shares[each]).value,
    )


def block_tokens_for(mean_context_tokens: float) -> int:
    """64 below a mean context of 16K tokens, 128 below 64K, else 256."""
    return next((size for below, size in _BLOCKS if mean_context_tokens < below), _LARGEST_BLOCK)


def staging_bytes_for(model: ModelShape, node: NodeSpec, turns: Turns) -> float:
    """Staging buffers of a node to simulate with: the paper's 80 GB, or four of the longest requests for each
    engine if that is more, but no more than a fifth of the node's memory."""
    longest_bytes = turns.longest_tokens * model.kv_bytes_token
    wanted = max(_PAPER_NODE_BUFFER_BYTES, _LONGEST_REQUESTS * node.gpus * longest_bytes)
    return min(wanted, _MEMORY_SHARE * node.memory_bytes)


def quota_s_for(ttft_s: float | None) -> float:
    """The paper's 300 ms, or a tenth of the time to the first token that is allowed, if that is less.

    A request that comes while a step runs waits for it, and then takes one of its own. Rounded, as it is a
    flag that people read.
    """
    if ttft_s is None:
        return _PAPER_QUOTA_S
    return min(_PAPER_QUOTA_S, float(f"{_QUOTA_OF_TTFT * ttft_s:.3g}"))


def beta_tokens_for(cluster: Cluster, policy: PolicyConfig, turns: Turns) -> int:
    """What a prefill engine processes in 5 s, stored tokens included (paper), a mean turn a step."""
    costs, append = cluster.prefill, turns.append_tokens
    seen = append * (turns.prompt_tokens - append) + append * (append + 1) / 2
    attention_s = (
        costs.attention_entry_s + costs.attention_token_s * append + costs.attention_pair_s * seen
    )
    return round(policy.beta_s * turns.prompt_tokens / costs.step_s(attention_s, append))


def decode_tokens_s(cluster: Cluster, turns: Turns) -> float:
    """What an engine generates a second with as many mean contexts as its device has room for."""
    batch = cluster.decode_hbm_tokens / turns.prompt_tokens
    return batch / cluster.decode.step_s(batch, batch, cluster.decode_hbm_tokens)


def serve_arguments(config: ServeConfig) -> tuple[str, ...]:
    """The flags, in order, of what differs from the defaults. They exist because they come from there."""
    arguments: list[str] = []
    for each in options(ServeConfig):
        value = getattr(config, each.field)
        if not each.positional and value != each.default:
            text = format_bytes(value) if each.unit is not None else f"{value}"
            arguments += [each.flag, text]
    return tuple(arguments)


def advise(
    cluster: Cluster,
    policy: PolicyConfig,
    hardware: Hardware,
    turns: Turns,
    best: Figures,
    ttft_s: float | None,
) -> Advice:
    """For the deployment that `best` was measured on; `policy` is what it was simulated with."""
    kv_bytes = cluster.kv_bytes_token
    pe_bytes = _buffer_bytes(
        best.held.pe_staging_tokens, cluster.prefill_room_tokens, turns, kv_bytes
    )
    de_bytes = _buffer_bytes(
        best.held.de_staging_tokens, cluster.decode_buffer_tokens, turns, kv_bytes
    )
    node_bytes = cluster.gpus * max(pe_bytes, de_bytes)
    node_share = node_bytes / hardware.node.memory_bytes
    layer_block_bytes = policy.block_tokens * kv_bytes // cluster.layers
    kv_device_bytes = cluster.decode_hbm_tokens * kv_bytes
    max_running = max(1, math.ceil(_HEADROOM * best.held.decoding))
    serve = ServeConfig(
        model="MODEL",
        prefill=best.split.prefill_nodes * cluster.gpus,
        decode=best.split.decode_nodes * cluster.gpus,
        engines_per_group=cluster.gpus,
        block_tokens=policy.block_tokens,
        read_path=policy.read_plan,
        alpha_tokens=policy.alpha_tokens,
        beta_tokens=policy.beta_tokens,
        quota_s=policy.quota_s,
        max_batch_tokens=policy.max_batch_tokens,
        max_running=max_running,
        pe_buffer=pe_bytes,
        de_buffer=de_bytes,
        kv_device_memory=kv_device_bytes // MiB * MiB,
    )
    read_tokens_s = cluster.snic_bytes_s / kv_bytes
    return Advice(
        read_path=policy.read_plan.value,
        block_tokens=policy.block_tokens,
        layer_block_bytes=layer_block_bytes,
        pe_buffer_bytes=pe_bytes,
        de_buffer_bytes=de_bytes,
        node_buffer_bytes=node_bytes,
        node_buffer_share=node_share,
        kv_device_bytes=kv_device_bytes,
        alpha_tokens=policy.alpha_tokens,
        beta_tokens=policy.beta_tokens,
        quota_s=policy.quota_s,
        max_running=max_running,
        reasons={
            "read_path": _read_path_reason(policy.read_plan),
            "block_tokens": _block_reason(turns.prompt_tokens, layer_block_bytes),
            "buffers": _buffer_reason(best, cluster, node_bytes, node_share),
            "kv_device": (
                f"beside the weights a decode engine has room for {cluster.decode_hbm_tokens:,} tokens"
            ),
            "alpha_tokens": (
                f"what a node reads in {policy.alpha_s:g} s (paper): {read_tokens_s:,.0f} tokens/s"
            ),
            "beta_tokens": (
                f"what a prefill engine processes in {policy.beta_s:g} s (paper), stored tokens included: "
                f"{policy.beta_tokens / policy.beta_s:,.0f} tokens/s"
            ),
            "quota_s": _quota_reason(policy.quota_s, ttft_s),
            "max_running": f"a decode engine ran {best.held.decoding} at once at most",
        },
        serve=serve_arguments(serve),
    )


def _buffer_bytes(used_tokens: int, room_tokens: int, turns: Turns, kv_bytes: int) -> int:
    """Of an engine: what was used and a quarter more, as far as it was simulated; at least the longest
    request. In whole GiB above one."""
    tokens = max(min(_HEADROOM * used_tokens, room_tokens), turns.longest_tokens)
    unit = GiB if tokens * kv_bytes > GiB else MiB
    return math.ceil(tokens * kv_bytes / unit) * unit


def _read_path_reason(plan: ReadPlanKind) -> str:
    if plan is ReadPlanKind.SPLIT:
        return "each request's KV is read by both sides, so that they end together"
    return "each request's KV is read by the side with the shorter read queue (paper)"


def _block_reason(mean_tokens: float, layer_block_bytes: int) -> str:
    rule = f"prompts of {mean_tokens:,.0f} tokens on average: 64 below 16K, 128 below 64K, else 256"
    count = math.ceil(_TRANSFER_BYTES / layer_block_bytes)
    size = format_bytes(layer_block_bytes)
    if count == 1:
        return f"{rule}; a Layer Block is {size}, enough for a transfer of its own"
    return f"{rule}; a Layer Block is {size}, so transfers batch {count} to reach 64 KiB"


def _buffer_reason(best: Figures, cluster: Cluster, node_bytes: int, node_share: float) -> str:
    def used(engine: str, tokens: int, room_tokens: int) -> str:
        if tokens < room_tokens:
            return f"a {engine} engine used {tokens:,} tokens at most"
        return f"a {engine} engine used all of the {room_tokens:,} tokens it was simulated with"

    held = best.held
    more = (
        f", more than the {_MEMORY_SHARE:.0%} that is usual" if node_share > _MEMORY_SHARE else ""
    )
    return (
        f"{used('prefill', held.pe_staging_tokens, cluster.prefill_room_tokens)}, "
        f"{used('decode', held.de_staging_tokens, cluster.decode_buffer_tokens)}; with the larger buffer a "
        f"node has {node_bytes / 1e9:,.0f} GB of them, {node_share:.0%} of its memory{more} (paper: "
        f"{_PAPER_NODE_BUFFER_BYTES / 1e9:.0f} GB; usual: 15 to 20 % of memory)"
    )


def _quota_reason(quota_s: float, ttft_s: float | None) -> str:
    if ttft_s is not None and quota_s < _PAPER_QUOTA_S:
        return f"{_QUOTA_OF_TTFT:.0%} of the {ttft_s:g} s that a first token may take"
    return "the paper's 300 ms of attention a prefill batch"
