"""Where each value of `Assumptions` is from: fitted to published figures, or taken from elsewhere.

One calibration for all models, clusters, systems and experiments. A value stands in `Assumptions` only;
what is said of it here. Figures that a value was fitted on are no predictions; nor are those that were
looked at when a reading of the paper, or the form of the model, was chosen (`CHOICES`). The fitted values
were found together (`HOW_FITTED`); each names the figures that say most about it. Invariant: every value of
`Assumptions` is either fitted or assumed, once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from dualpath.sim.setting import Assumptions

__all__ = [
    "ASSUMED",
    "CHOICES",
    "FITTED",
    "HOW_FITTED",
    "Assumed",
    "Choice",
    "Fitted",
    "fitted_ids",
    "informed_ids",
    "value_names",
    "value_of",
    "with_value",
]


@dataclass(frozen=True, slots=True)
class Fitted:
    """`low` to `high`: where it was searched. `on`: ids of the published figures that it was fitted on.
    `why` no specification or formula gives it."""

    name: str
    low: float
    high: float
    unit: str
    on: tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Assumed:
    name: str
    unit: str
    source: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Made with the figures `ids` in view: `what` was chosen, `instead` of what, and `why`."""

    ids: tuple[str, ...]
    what: str
    instead: str
    why: str


FITTED: tuple[Fitted, ...] = (
    Fitted(
        "prefill_share",
        0.2,
        1.0,
        "of kernels' shares",
        ("table3.2p4d.jct", "fig14.scheduled"),
        "what a whole serving engine reaches of what its kernels reach alone, with experts that get few "
        "tokens each",
    ),
    Fitted(
        "decode_share",
        0.05,
        1.0,
        "of kernels' shares",
        ("fig11.tpot", "table3.44p88d.tpot", "fig10.660b.capacity", "table3.2p4d.jct"),
        "likewise of decode: a few dozen sequences a GPU, expert-parallel exchanges of small messages in "
        "each layer, and nothing that says how much the published engine hides of them",
    ),
    Fitted(
        "prefill_launch_s",
        2e-4,
        2e-3,
        "s a layer",
        ("fig11.ttft", "fig12.scheduling"),
        "launches and synchronisation of a prefill step, which the paper does not give",
    ),
    Fitted(
        "snic_share",
        0.6,
        1.0,
        "of the rate",
        ("fig12.scheduling", "fig12.layerwise"),
        "what the storage system brings through a NIC; the paper says only that it saturates",
    ),
    Fitted(
        "whole_prefill_share",
        0.02,
        0.16,
        "of HBM",
        ("fig12.layerwise", "fig12.dual-path", "fig12.scheduling"),
        "how much less KV fits on Basic's prefill engines, which hold batches of all layers",
    ),
    Fitted(
        "front_end_s",
        0.1,
        1.0,
        "s",
        ("fig11.ttft",),
        "from an agent's request until the scheduler has it: HTTP, tokenising and hashing the whole prompt, "
        "looking up its blocks; the paper does not take TTFT apart",
    ),
)

HOW_FITTED = (
    "found together, by least squares of the logarithms of their figures, and then moved by hand, by up to a "
    "tenth, so that none of these is far off"
)

ASSUMED: tuple[Assumed, ...] = (
    Assumed("memory_share", "of the peak", "published kernels: 0.8 to 0.9"),
    Assumed("decode_launch_s", "s a layer", "decode steps are recorded and replayed: small"),
    Assumed("read_cap_bytes_s", "bytes/s", "of one read: what clients of such stores reach"),
    Assumed("read_latency_s", "s", "of one read, metadata included: assumed"),
    Assumed(
        "submit_s",
        "s",
        "a Layer Block of the copy to the device; paper: 5 to 7 us for a copy, about 1 us for "
        "an RDMA write: between them",
    ),
    Assumed("fetch_s", "s", "a leader's fetches: assumed; the paper gives no interval"),
    Assumed("reserved_share", "of HBM", "activations, recorded graphs and the runtime: usual"),
    Assumed("buffer_bytes", "bytes", "paper: 80 GB a node; 320 GB for Qwen2.5-32B"),
    Assumed("alpha_s", "s", "paper: alpha is what a node reads in 3 s"),
    Assumed("beta_s", "s", "paper: beta is what a GPU processes in 5 s"),
    Assumed("quota_s", "s", "paper: 300 ms"),
    Assumed("chunk_tokens", "tokens", "of a batch, usual; with the quota rarely reached"),
)


CHOICES: tuple[Choice, ...] = (
    Choice(
        ("table3.2p4d.jct",),
        "2,000 agents play the 48K trace",
        "the 64K or the 32K trace",
        "the paper names none; completion times on the others are far from the published one",
    ),
    Choice(
        ("fig12.layerwise", "fig12.dual-path", "fig12.scheduling"),
        "the ablation plays the 64K trace with 1,024 agents",
        "the 48K trace with 2,000 agents, on which it could be fitted as well",
        "the paper names them for its scaling of appends, and its speed-ups there hold the ablation's; "
        "fitted on the other, the best speed-up came out larger than published",
    ),
    Choice(
        ("fig11.ttft", "fig12.dual-path", "fig12.scheduling"),
        "leaders fetch twice a second, and a front end takes its time of every request",
        "a longer interval, fitted on TTFT, and nothing before it",
        "requests then went in bursts to the group that fetched first, and scheduling gained nothing over "
        "round robin",
    ),
    Choice(
        ("fig11.ttst", "table3.44p88d.ttst"),
        "submitting a Layer Block takes 3 us",
        "another value between those of the paper",
        "TTST is published for two clusters and differs; between the values that either would ask for",
    ),
    Choice(
        ("fig10.660b.capacity",),
        "prefill and decode reach shares of their own of what kernels reach",
        "one share of arithmetic and one of memory for both",
        "decode steps hardly grew with their batch then, and capacity was 3.2 times Basic's, not 2.25",
    ),
    Choice(
        ("fig7.660b.best",),
        "best speed-ups are over 512 and 1,024 agents",
        "2,048 agents too, which are shown beside",
        "the paper names 1,024 agents in one experiment; with 2,048 the speed-up was larger than published",
    ),
    Choice(
        ("fig13.round-robin", "fig13.scheduled", "fig14.scheduled"),
        "balance is over windows of ten seconds in which the mean is near its highest",
        "shorter windows, whose values are in the notes; single steps; or the whole run",
        "the paper does not say over what; a second holds few reads, and over single steps attention was 1.8",
    ),
)


def informed_ids() -> frozenset[str]:
    """Published figures that were in view when something was chosen."""
    return frozenset(id for each in CHOICES for id in each.ids)


def fitted_ids() -> frozenset[str]:
    """Published figures that something was fitted on."""
    return frozenset(id for each in FITTED for id in each.on)


def value_names() -> list[str]:
    """Of all values of `Assumptions`."""
    return [each.name for each in fields(Assumptions)]


def value_of(assumptions: Assumptions, name: str) -> float:
    return float(getattr(assumptions, name))


def with_value(assumptions: Assumptions, name: str, value: float) -> Assumptions:
    """Of the type that it has: whole numbers stay so."""
    return replace(assumptions, **{name: type(getattr(assumptions, name))(value)})
