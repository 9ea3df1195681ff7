"""What a plan takes for granted, for people: model, GPU and node, and the simulator's own assumptions."""

from __future__ import annotations

from collections.abc import Iterator

from dualpath.report.chart import shown
from dualpath.sim.calibration import ASSUMED, FITTED, value_names, value_of
from dualpath.sim.plan.question import Question
from dualpath.sim.plan.result import Premise

__all__ = ["premises"]

_BY_RULE = ("alpha_s", "beta_s", "buffer_bytes", "quota_s")
"""A plan's settings say these, with their reasons."""
_DEFAULT_NODE = "not in the hardware file: as the paper's node"


def premises(question: Question) -> tuple[Premise, ...]:
    return (*_of_hardware(question), *_of_assumptions(question))


def _of_hardware(question: Question) -> Iterator[Premise]:
    sources, hardware = question.hardware_sources, question.hardware
    yield Premise("GPU", hardware.gpu.name, "")
    for table, struct in (("gpu", hardware.gpu), ("node", hardware.node)):
        for field in struct.__struct_fields__:
            if field == "name":
                continue
            source = sources.get(f"{table}.{field}", _DEFAULT_NODE)
            yield Premise(
                f"{table}: {field.replace('_', ' ')}", _said(getattr(struct, field)), source
            )


def _of_assumptions(question: Question) -> Iterator[Premise]:
    origins = {each.name: f"fitted on {', '.join(each.on)}: {each.why}" for each in FITTED}
    origins |= {each.name: each.source for each in ASSUMED}
    units = {each.name: each.unit for each in FITTED} | {each.name: each.unit for each in ASSUMED}
    for name in value_names():
        if name in _BY_RULE:
            continue
        value = _said(value_of(question.assumptions, name))
        yield Premise(
            name.replace("_", " ").replace(".", ": "), f"{value} {units[name]}", origins[name]
        )


def _said(value: object) -> str:
    if isinstance(value, int | float):
        return shown(value) if value < 1e6 else f"{value:.4g}"
    return str(value)
