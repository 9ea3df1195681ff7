"""A small question for tests of the planner: three nodes of two GPUs, a small model, short sessions."""

from __future__ import annotations

import msgspec
import numpy as np

from dualpath.sim.arrivals import Arrivals
from dualpath.sim.hardware import Hardware, load_hardware
from dualpath.sim.model_config import load_model
from dualpath.sim.plan.load import Goal, Offline, Sessions
from dualpath.sim.plan.question import Question
from dualpath.sim.plan.result import Figures, Held
from dualpath.sim.plan.splits import InstanceNodes, Split
from dualpath.sim.setting import Assumptions
from dualpath.sim.summary import POINTS, Spread, Summary, balance_of
from dualpath.traces import AppendPrompt, Session, Trace, Turn

ANY = dict.fromkeys(range(1, 17), 1.0)
"""Instances of any size are as good."""

MODEL = {
    "model_type": "qwen2",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def small_hardware() -> Hardware:
    hardware = load_hardware("h100")
    node = msgspec.structs.replace(hardware.node, gpus=2, snic_bytes_s=2e9, cnic_bytes_s=20e9)
    return Hardware(hardware.gpu, node)


def small_trace(sessions: int = 6, turns: int = 5) -> Trace:
    return Trace(
        "small",
        "generated",
        tuple(
            Session(
                f"{number}",
                tuple(
                    Turn(AppendPrompt(3000 if turn == 0 else 200 + 10 * number), 20)
                    for turn in range(turns)
                ),
            )
            for number in range(sessions)
        ),
    )


def small_question(goal: Goal | None = None, **changes: object) -> Question:
    values: dict[str, object] = {
        "model": load_model(MODEL),
        "hardware": small_hardware(),
        "hardware_sources": {"node.gpus": "made up"},
        "snics": 1,
        "nodes": 3,
        "prefill_instance": InstanceNodes(ANY),
        "decode_instance": InstanceNodes(ANY),
        "most_splits": 9,
        "block_tokens": 64,
        "trace_name": "small",
        "max_context": None,
        "delays": True,
        "sessions": Sessions.of(small_trace()),
        "goal": goal or Offline(24),
        "assumptions": Assumptions(),
        "arrivals": Arrivals(),
        "seed": 0,
    }
    return Question(**(values | changes))  # type: ignore[arg-type]


def some_figures(
    split: Split, system: str, *, jct_s: float | None = None, rate_aps: float | None = None
) -> Figures:
    """All but the score made up."""
    spread = Spread(1.0, 0.9, 1.5, 2.0)
    balance = balance_of(np.ones((2, 100)), 2)
    run = Summary(
        jct_s=jct_s or 100.0,
        from_s=0.0,
        until_s=100.0,
        events=1000,
        agents=24,
        unfinished_agents=0,
        requests=120,
        prompt_tokens=1_000_000,
        hit_tokens=900_000,
        output_tokens=10_000,
        ttft=spread,
        ttst=Spread(0.1, 0.1, 0.1, 0.2),
        tpot=Spread(0.02, 0.02, 0.02, 0.03),
        request=spread,
        parts_s={"queued": 0.1, "read": 0.5, "wait": 0.1, "prefill": 0.3},
        halves_differ=0.01,
        snic_utilization=0.5,
        prefill_snic=(0.5,) * POINTS,
        decode_snic=(0.25,) * POINTS,
        snic_balance=balance,
        attention_balance=balance,
        prefill_busy_share=0.6,
        decode_busy_share=0.9,
    )
    held = Held(pe_staging_tokens=10_000, de_staging_tokens=20_000, decoding=9)
    return Figures(split=split, system=system, rate_aps=rate_aps, run=run, held=held)
