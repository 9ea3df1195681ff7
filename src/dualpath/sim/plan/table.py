"""A plan as tables and sentences on a terminal. Knows no simulation."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.table import Table

from dualpath.base.config import format_bytes
from dualpath.report.chart import shown
from dualpath.sim.plan.result import Advice, Figures, Plan, gain, measure_name
from dualpath.sim.plan.verdict import verdict_sentences

__all__ = ["load_sentences", "print_plan", "setting_rows", "times", "what_if_names"]


def print_plan(plan: Plan, console: Console) -> None:
    """To `console`; of a plan that was interrupted, what there is."""
    console.print(_splits(plan))
    if plan.best is not None:
        console.print(_systems(plan, plan.best))
    for sentence in (*verdict_sentences(plan), *load_sentences(plan)):
        console.print(sentence, highlight=False)
    if plan.best is None or plan.advice is None:
        if plan.was_interrupted:
            console.print("[yellow]interrupted before there was a best split: no advice")
        return
    console.print(_settings(plan.advice))
    serve = shlex.join(["dualpath", "serve", "MODEL", *plan.advice.serve])
    console.print(serve, highlight=False, markup=False, soft_wrap=True)
    if plan.what_if:
        console.print(_what_if(plan))
    if plan.was_interrupted:
        console.print("[yellow]interrupted: this is of the runs that had ended")


def times(value: float | None) -> str:
    """None: over nothing."""
    return "" if value is None else f"{value:.2f}x"


def what_if_names(plan: Plan) -> list[str]:
    return [
        "one storage NIC more a node"
        if each.extra == "storage NIC"
        else f"{each.added} {each.extra[:-1] if each.added == 1 else each.extra} more"
        for each in plan.what_if
    ]


def load_sentences(plan: Plan) -> list[str]:
    """What the best is, and where its ratio stands by the paper's analysis."""
    if plan.best is None or plan.loads is None:
        return []
    loads, split = plan.loads, plan.best.split
    what = (
        f"{plan.best.system} on {split.name}: prefill instances of {_nodes(split.prefill_instance_nodes)}, "
        f"decode instances of {_nodes(split.decode_instance_nodes)}."
    )
    fullest = f"{loads.fullest} is the fullest, at {loads.shares[loads.fullest]:.0%}"
    if loads.ratios is None:
        return [what, f"At no P/D ratio is storage the only bottleneck: at {split.name} {fullest}."]
    ratios = loads.ratios
    where = "is in" if loads.in_range else "is outside of"
    return [
        what,
        f"Free of bottlenecks but storage: P/D from {ratios.low:.2f} (below it {ratios.low_resource} is "
        f"full) to {ratios.high:.2f} ({ratios.high_resource}). {split.name} is "
        f"{split.prefill_nodes / split.decode_nodes:.2f}, which {where} it; with all storage NICs reading "
        f"{fullest}.",
    ]


def _nodes(count: int) -> str:
    return "one node" if count == 1 else f"{count} nodes"


def _splits(plan: Plan) -> Table:
    systems = list(dict.fromkeys(each.system for each in plan.figures))
    table = Table(
        title=f"{measure_name(plan.goal)}, by prefill and decode nodes", title_justify="left"
    )
    table.add_column("split")
    for system in systems:
        table.add_column(system, justify="right")
        if system != "basic":
            table.add_column("", justify="right")
    for split in sorted({each.split for each in plan.figures}, key=lambda each: each.prefill_nodes):
        by_system = plan.of_split(split)
        best = plan.best is not None and plan.best.split == split
        cells = [f"{split.name} *" if best else split.name]
        basic = by_system.get("basic")
        for system in systems:
            each = by_system.get(system)
            cells.append("" if each is None else shown(each.score(plan.goal)))
            if system != "basic":
                cells.append(_times(plan, basic, each))
        table.add_row(*cells, style="bold" if best else None)
    table.caption = f"{_mark(plan)}times basic on the same split"
    table.caption_justify = "left"
    return table


def _mark(plan: Plan) -> str:
    """What the star means."""
    if plan.best is None:
        return ""
    choice = plan.verdict.recommended
    if choice is None or (choice.system, choice.split) == (plan.best.system, plan.best.split):
        return f"* {plan.best.system} on it is the best that can be had; "
    return f"* {plan.best.system} does best on it, but {choice.system} on {choice.split.name} is better; "


def _times(plan: Plan, basic: Figures | None, each: Figures | None) -> str:
    return "" if basic is None or each is None else times(gain(plan.goal, basic, each))


_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("TTFT mean, s", lambda each: shown(each.run.ttft.mean_s)),
    ("TTFT p99, s", lambda each: shown(each.run.ttft.p99_s)),
    ("TTST mean, s", lambda each: shown(each.run.ttst.mean_s)),
    ("TPOT mean, ms", lambda each: shown(1e3 * each.run.tpot.mean_s)),
    ("prompt tokens/s", lambda each: shown(round(each.prompt_tokens_s))),
    ("output tokens/s", lambda each: shown(round(each.output_tokens_s))),
    ("SNIC utilisation", lambda each: shown(each.run.snic_utilization, share=True)),
    ("SNIC max/mean", lambda each: shown(each.run.snic_balance.max_mean)),
    ("read by decode nodes", lambda each: shown(each.de_read_share, share=True)),
    ("attention max/mean", lambda each: shown(each.run.attention_balance.max_mean)),
    ("prefill busy", lambda each: shown(each.run.prefill_busy_share, share=True)),
    ("decode busy", lambda each: shown(each.run.decode_busy_share, share=True)),
)


def _systems(plan: Plan, best: Figures) -> Table:
    by_system = plan.of_split(best.split)
    table = Table(title=f"on {best.split.name}", title_justify="left")
    table.add_column("")
    for system in by_system:
        table.add_column(system, justify="right")
    table.add_row(
        measure_name(plan.goal), *(shown(each.score(plan.goal)) for each in by_system.values())
    )
    for name, text in _ROWS:
        table.add_row(name, *(text(each) for each in by_system.values()))
    return table


def _settings(advice: Advice) -> Table:
    table = Table(title="settings", title_justify="left")
    table.add_column("")
    table.add_column("", justify="right")
    table.add_column("because")
    for name, value, reason in setting_rows(advice):
        table.add_row(name, value, reason)
    return table


def setting_rows(advice: Advice) -> Iterator[tuple[str, str, str]]:
    """Name, value and reason of each."""
    reasons = advice.reasons
    yield "read path", advice.read_path, reasons["read_path"]
    yield "block size", f"{advice.block_tokens} tokens", reasons["block_tokens"]
    yield "PE buffer of an engine", format_bytes(advice.pe_buffer_bytes), reasons["buffers"]
    yield "DE buffer of an engine", format_bytes(advice.de_buffer_bytes), "likewise"
    yield "KV on a decode device", f"{advice.kv_device_bytes / 2**30:.1f}GiB", reasons["kv_device"]
    yield "alpha", f"{advice.alpha_tokens:,} tokens", reasons["alpha_tokens"]
    yield "beta", f"{advice.beta_tokens:,} tokens", reasons["beta_tokens"]
    yield "compute quota", f"{advice.quota_s * 1e3:.3g} ms", reasons["quota_s"]
    yield "running requests of an engine", f"{advice.max_running}", reasons["max_running"]


def _what_if(plan: Plan) -> Table:
    table = Table(title="what one more would give", title_justify="left")
    table.add_column("")
    table.add_column(measure_name(plan.goal), justify="right")
    table.add_column("times as good", justify="right")
    for name, each in zip(what_if_names(plan), plan.what_if, strict=True):
        table.add_row(name, shown(each.figures.score(plan.goal)), times(each.gain))
    return table
