"""What a generator gives: sections of configuration with the reasons, as text to apply and as JSON.

In the text only sections that belong where it is applied stand bare; the rest (another machine, environment
of processes) is commented, so that the whole can be piped into its tool.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from dualpath.base.traffic_class import QosPlan, TrafficClass

__all__ = ["ClassEnvironment", "FabricConfig", "Section"]


@dataclass(frozen=True, slots=True)
class Section:
    """`lines` are applied `where` ("here" or another place, in words); `notes` are the reasons."""

    title: str
    notes: tuple[str, ...]
    lines: tuple[str, ...]
    where: str = "here"


@dataclass(frozen=True, slots=True)
class ClassEnvironment:
    """What puts a process's traffic into the class."""

    traffic_class: TrafficClass
    variables: dict[str, str]
    note: str = ""


@dataclass(frozen=True, slots=True)
class FabricConfig:
    """Configuration of one fabric for one plan. `apply` says how; `tested` how far it was tried."""

    fabric: str
    plan: QosPlan
    apply: str
    tested: str
    sections: tuple[Section, ...]
    environment: tuple[ClassEnvironment, ...] = ()

    def to_text(self) -> str:
        return "\n".join(self._text_lines()) + "\n"

    def to_json(self) -> str:
        """One line: this object, with `text`."""
        return msgspec.json.encode({**msgspec.to_builtins(self), "text": self.to_text()}).decode()

    def _text_lines(self) -> Iterator[str]:
        yield f"# Traffic classes of dualpath: {self.fabric}"
        yield f"# Apply: {self.apply}"
        yield f"# Tested: {self.tested}"
        yield "#"
        yield from _class_table(self.plan)
        for section in self.sections:
            bare = section.where == "here"
            yield ""
            yield f"# {section.title}" + ("" if bare else f" ({section.where})")
            yield from (f"# {note}" for note in section.notes)
            yield from (line if bare else f"#   {line}" for line in section.lines)
        if self.environment:
            yield ""
            yield "# Environment of the processes that send"
            for each in self.environment:
                note = f"  ({each.note})" if each.note else ""
                yield f"#   {each.traffic_class}:{note}"
                yield from (f"#     {name}={value}" for name, value in each.variables.items())


def _class_table(plan: QosPlan) -> Iterator[str]:
    yield "# class      urgency  DSCP  priority  SO_PRIORITY  SL  VL  lossless"
    for each in plan.classes:
        yield (
            f"# {each.traffic_class:<10} {each.urgency:<7} {each.dscp:>5} {each.priority:>9} "
            f"{each.so_priority:>12} {each.service_level:>3} {each.virtual_lane:>3}  "
            f"{'yes' if each.lossless else 'no'}"
        )
