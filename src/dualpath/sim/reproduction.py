"""The published evaluation beside ours: plays the experiments' cases and says how far each number is off.

Figures that something was fitted on are marked and are no predictions. An experiment some of whose runs are
missing, after Ctrl-C, is left out whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dualpath.base.errors import ConfigError
from dualpath.sim.calibration import FITTED, fitted_ids, informed_ids
from dualpath.sim.case import Case
from dualpath.sim.experiments import EXPERIMENTS
from dualpath.sim.experiments.experiment import (
    Check,
    Evaluation,
    Experiment,
    Figure,
    Results,
    Settings,
)
from dualpath.sim.published import PUBLISHED, Group

__all__ = ["Reproduction", "Role", "all_cases", "chosen", "reproduction_of", "role_of"]

_TABLE1_GQA = ("qwen2.5-32b", "gpt-oss-120b", "qwen3-235b")


class Role(StrEnum):
    FITTED = "fitted"
    INFORMED = "informed"
    """Not fitted, but in view when a reading or the form of the model was chosen: no prediction either."""
    PREDICTED = "predicted"
    COMPUTED = "computed"
    """Arithmetic, nothing simulated."""


@dataclass(frozen=True, slots=True)
class Reproduction:
    """`evaluations`: of the experiments whose runs all ended, by name. `runs`: how many those were."""

    evaluations: dict[str, Evaluation]
    runs: int
    was_interrupted: bool

    @property
    def is_whole(self) -> bool:
        """It has all experiments, and nothing was cut short."""
        return self.evaluations.keys() == EXPERIMENTS.keys() and not self.was_interrupted

    @property
    def figures(self) -> dict[str, Figure]:
        """By id."""
        return {each.id: each for found in self.evaluations.values() for each in found.figures}

    @property
    def checks(self) -> dict[str, Check]:
        """By id."""
        return {each.id: each for found in self.evaluations.values() for each in found.checks}

    def worst_error(self, group: Group) -> float | None:
        """Without sign; None when the group has no figure."""
        errors = [
            abs(each.error) for each in self.figures.values() if PUBLISHED[each.id].group is group
        ]
        return max(errors, default=None)

    def headline(self) -> dict[str, float | bool | None]:
        """The figures that say how good the reproduction is. None: an experiment that it needs is missing."""
        figures = self.figures
        gqa = [abs(each.error) for each in figures.values() if _is_gqa(each.id)]
        mla = [
            abs(each.error)
            for each in figures.values()
            if PUBLISHED[each.id].group is Group.TABLE1 and not _is_gqa(each.id)
        ]
        predicted = sum(_counts(each) for each in figures.values())
        change = figures.get("table3.jct-change")
        whole = self.evaluations.keys() == EXPERIMENTS.keys()
        wrong = not all(each.holds for each in self.checks.values())
        return {
            "table1_gqa_error": max(gqa, default=None),
            "table1_mla_error": max(mla, default=None),
            "core_error": self.worst_error(Group.CORE),
            "online_error": self.worst_error(Group.ONLINE),
            "open_error": self.worst_error(Group.OPEN),
            "workingset_error": self.worst_error(Group.WORKINGSET),
            "orderings_hold": False if wrong else (True if whole else None),
            "identification": predicted / len(FITTED) if whole else None,
            "scaleout_change": None if change is None else change.ours - 1,
        }


def role_of(figure: Figure) -> Role:
    if not figure.simulated:
        return Role.COMPUTED
    if figure.id in fitted_ids():
        return Role.FITTED
    return Role.INFORMED if figure.id in informed_ids() else Role.PREDICTED


def chosen(names: Sequence[str]) -> list[Experiment]:
    """In the order in which they are shown; `all` stands for all. Raises ConfigError."""
    for name in names:
        if name != "all" and name not in EXPERIMENTS:
            raise ConfigError(
                f"experiment {name!r}: expected all or some of {', '.join(EXPERIMENTS)}"
            )
    everything = not names or "all" in names
    return [each for name, each in EXPERIMENTS.items() if everything or name in names]


def all_cases(experiments: Iterable[Experiment], settings: Settings) -> list[Case]:
    """Each once."""
    return list(dict.fromkeys(case for each in experiments for case in each.cases(settings)))


def reproduction_of(
    experiments: Iterable[Experiment],
    settings: Settings,
    results: Results,
    *,
    was_interrupted: bool = False,
) -> Reproduction:
    """From the runs that there are."""
    evaluations = {
        each.name: each.evaluate(settings, results)
        for each in experiments
        if all(case in results for case in each.cases(settings))
    }
    return Reproduction(evaluations, len(results), was_interrupted)


def _counts(figure: Figure) -> bool:
    """Whether it is a prediction of something that the paper published, and that no other figure implies."""
    known = PUBLISHED[figure.id]
    own = known.group is not Group.ARTICLES and not known.follows
    return own and role_of(figure) is Role.PREDICTED


def _is_gqa(id: str) -> bool:
    return id.startswith("table1.") and id[len("table1.") :].rpartition(".")[0] in _TABLE1_GQA
