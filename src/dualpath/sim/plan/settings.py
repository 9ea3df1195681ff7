"""What `dualpath plan` can be told; flags and their help come from here. Knows nothing of how it is used."""

from __future__ import annotations

import os
from typing import Annotated

from dualpath.base.config import Config, Unit, option
from dualpath.base.errors import ConfigError
from dualpath.base.ids import GiB
from dualpath.base.slo import SLO_METRICS, parse_limits
from dualpath.qos.rates import parse_rate
from dualpath.sim.arrivals import POISSON
from dualpath.sim.model_config import MODEL_TYPES, WeightFormat
from dualpath.sim.paper_traces import PAPER_TRACES

__all__ = ["PAPER_PREFIX", "PlanSettings"]

PAPER_PREFIX = "paper:"
"""Before the length of one of the paper's traces."""
_PAPER_NAMES = ", ".join(PAPER_PREFIX + each for each in PAPER_TRACES)
_METRICS = ", ".join(SLO_METRICS)


class PlanSettings(Config, frozen=True, kw_only=True):
    """A None means: by a rule that the plan states."""

    model: Annotated[
        str,
        option(
            "A model of the package, such as deepseek-v3.2, or a config.json whose model_type is "
            f"{', '.join(MODEL_TYPES[:-1])} or {MODEL_TYPES[-1]}.",
            group="What is planned",
            metavar="NAME|FILE",
        ),
    ]
    weights: Annotated[
        WeightFormat | None,
        option(
            "How weights are kept where the model is served, instead of what its file says.",
            group="What is planned",
        ),
    ] = None
    gpu: Annotated[
        str | None,
        option(
            "A GPU of the package, such as h100, in nodes as the paper has them.",
            group="What is planned",
            metavar="NAME",
        ),
    ] = None
    hardware: Annotated[
        str | None,
        option(
            "Instead of --gpu: a TOML file with the GPU and the node that you have.",
            group="What is planned",
            metavar="FILE",
        ),
    ] = None
    nodes: Annotated[
        int,
        option(
            "Nodes to divide into prefill and decode nodes.",
            group="What is planned",
            metavar="N",
            ge=2,
        ),
    ]
    trace: Annotated[
        str,
        option(
            f"What agents do: {_PAPER_NAMES} (the paper's), "
            "generated:LENGTH, coding-agent, mooncake-conversation or another trace of the package, or a "
            "file or directory.",
            group="What is planned",
            metavar="NAME|FILE",
        ),
    ]

    agents: Annotated[
        int | None,
        option(
            "So many agents at once: how long until all have ended. Without --rate and --slo 256 a node.",
            group="Load",
            metavar="N",
            ge=1,
        ),
    ] = None
    rate: Annotated[
        float | None,
        option(
            "So many agents arrive a second: how long a request takes.",
            group="Load",
            metavar="R",
            gt=0,
        ),
    ] = None
    slo: Annotated[
        str | None,
        option(
            f"The highest rate of agents with means below these limits; of {_METRICS}, in "
            "seconds or with a unit.",
            group="Load",
            metavar="LIMITS",
            example="--slo ttft=4,tpot=50ms",
        ),
    ] = None
    arrivals: Annotated[
        str,
        option(
            "With --rate or --slo: at random, or as the sessions of a recorded trace started, scaled to the "
            "rate: azure-conversation, another trace of the package, or a file, as a CSV with TIMESTAMP.",
            group="Load",
            metavar="poisson|NAME|FILE",
        ),
    ] = POISSON
    horizon_s: Annotated[
        float | None,
        option(
            "How long an online run is, in simulated seconds; its last third counts. 2.25 times what a "
            "session takes at its limits if absent.",
            group="Load",
            metavar="SECONDS",
            gt=0,
        ),
    ] = None
    max_context: Annotated[
        int | None,
        option(
            "A session ends before its first turn of more tokens, prompt and output; what your model takes.",
            group="Load",
            metavar="TOKENS",
            ge=2,
        ),
    ] = None
    delays: Annotated[
        bool,
        option("Keep the trace's time between turns; the paper's have none.", group="Load"),
    ] = True
    seed: Annotated[
        int,
        option("Of generated traces and of arrivals at random.", group="Load", metavar="N", ge=0),
    ] = 0

    snic: Annotated[
        str | None,
        option(
            "Rate of one storage NIC, instead of what the hardware says.",
            group="Node",
            metavar="RATE",
            example="--snic 200gbit",
        ),
    ] = None
    snics: Annotated[
        int,
        option(
            "Storage NICs of a node, each with the rate of --snic or else the hardware's whole rate.",
            group="Node",
            metavar="N",
            ge=1,
        ),
    ] = 1
    cnic: Annotated[
        str | None,
        option(
            "Rate of one GPU's compute NIC, likewise; more than the hardware's PCIe link is of no use.",
            group="Node",
            metavar="RATE",
        ),
    ] = None
    memory: Annotated[
        int | None,
        option(
            "Size of a node's host memory, likewise.",
            group="Node",
            metavar="SIZE",
            unit=Unit.BYTES,
            ge=1 * GiB,
        ),
    ] = None

    prefill_instance: Annotated[
        int | None,
        option(
            "Nodes of one prefill instance, whose GPUs share the experts; the fewest that hold the model if "
            "absent.",
            group="Deployment",
            metavar="NODES",
            ge=1,
        ),
    ] = None
    decode_instance: Annotated[
        int | None,
        option(
            "Nodes of one decode instance; what generates most if absent.",
            group="Deployment",
            metavar="NODES",
            ge=1,
        ),
    ] = None
    block_tokens: Annotated[
        int | None,
        option(
            "Tokens of a stored block; by the mean context if absent.",
            group="Deployment",
            metavar="TOKENS",
            ge=1,
            le=990,
        ),
    ] = None
    splits: Annotated[
        int,
        option(
            "Try at most so many divisions of the nodes, spread evenly.",
            group="Search",
            metavar="N",
            ge=1,
        ),
    ] = 9
    workers: Annotated[
        int,
        option("Processes that simulate at once.", group="Search", metavar="N", ge=1),
    ] = os.cpu_count() or 1

    output: Annotated[
        str | None,
        option(
            "Directory for plan.json and plan.html, a page with charts.",
            group="Results",
            metavar="DIR",
        ),
    ] = None
    timeline: Annotated[
        str | None,
        option(
            "File for the best run as a timeline, which ui.perfetto.dev opens.",
            group="Results",
            metavar="FILE",
        ),
    ] = None

    def check(self) -> None:
        if (self.gpu is None) == (self.hardware is None):
            got = "none" if self.gpu is None else "both"
            raise ConfigError(f"--gpu NAME, --hardware FILE: expected one of them, got {got}")
        loads = {"--agents": self.agents, "--rate": self.rate, "--slo": self.slo}
        given = [flag for flag, value in loads.items() if value is not None]
        if len(given) > 1:
            raise ConfigError(
                f"{' and '.join(given)}: expected one kind of load, got {len(given)}; --agents is for a "
                "batch, --rate for a service whose load is known, --slo for what a service can take"
            )
        if self.arrivals != POISSON and not (self.rate or self.slo):
            raise ConfigError("--arrivals: expected with --rate or --slo, got it with --agents")
        if self.horizon_s is not None and not (self.rate or self.slo):
            raise ConfigError("--horizon-s: expected with --rate or --slo, got it with --agents")
        self.limits_s()
        for flag, rate in (("--snic", self.snic), ("--cnic", self.cnic)):
            if rate is not None:
                parse_rate(rate, flag)

    def limits_s(self) -> dict[str, float]:
        """Of `slo`; empty without."""
        return {} if self.slo is None else parse_limits(self.slo, bare_seconds=True)
