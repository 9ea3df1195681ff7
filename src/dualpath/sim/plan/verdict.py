"""What the figures of a plan say: whether objectives are held, what is best, whether loading KV limits.

Pure: from figures alone, so that no sentence claims what they do not. Knows no simulation, no advice and
no tables. Invariant: what there is no figure of is None, never a number.
"""

from __future__ import annotations

from collections.abc import Sequence

from dualpath.report.chart import shown
from dualpath.sim.plan.load import Capacity, Goal
from dualpath.sim.plan.result import Choice, Figures, Nearest, Plan, Verdict, gain, measure_name

__all__ = ["SAME", "best_among", "limits_text", "verdict_of", "verdict_sentences"]

SAME = 0.02
"""Ratios within this of 1 are no difference worth a word."""
_TIE = 0.001
"""Scores that differ by no more are a tie."""
_REAL = ("split", "dual", "basic")
"""Systems that can be had; on a tie the first."""


def best_among(goal: Goal, figures: Sequence[Figures], systems: Sequence[str]) -> Figures | None:
    """On a tie the first system's, on the first split; None: there is none, or none that holds the limits."""
    best: Figures | None = None
    for system in systems:
        for each in figures:
            if each.system == system and each.holds and _is_better(goal, best, each):
                best = each
    return best


def _is_better(goal: Goal, best: Figures | None, each: Figures) -> bool:
    ratio = None if best is None else gain(goal, best, each)
    return ratio is None or ratio > 1 + _TIE


def verdict_of(
    goal: Goal, figures: Sequence[Figures], best: Figures | None, *, was_interrupted: bool
) -> Verdict:
    """`best`: the one of dual and split that settings are for."""
    leader = best_among(goal, figures, _REAL)
    slo_met = None
    if isinstance(goal, Capacity) and (leader is not None or not was_interrupted):
        slo_met = leader is not None
    of_split = {each.system: each for each in figures if best and each.split == best.split}
    basic, oracle = of_split.get("basic"), of_split.get("oracle")
    oracle_gain, limits = None, None
    if basic is not None and oracle is not None:
        oracle_gain = gain(goal, basic, oracle)
        limits = oracle.holds if oracle_gain is None else oracle_gain > 1 + SAME
    return Verdict(
        slo_met=slo_met,
        nearest=_nearest(goal, figures) if slo_met is False else None,
        recommended=None if leader is None else Choice(system=leader.system, split=leader.split),
        gain_over_basic=gain(goal, basic, best) if basic and best else None,
        oracle_gain_over_basic=oracle_gain,
        loading_limits=limits,
    )


def _nearest(goal: Goal, figures: Sequence[Figures]) -> Nearest | None:
    """Whose worst mean is the least beyond its limit, as a share of it; None: no run counted a request."""
    assert isinstance(goal, Capacity)
    found: list[tuple[float, Nearest]] = []
    for each in figures:
        if each.system not in _REAL or each.nearest_aps is None:
            continue
        means_s = {metric: each.mean_s(metric) for metric in goal.limits_s}
        excess = max(means_s[metric] / limit_s for metric, limit_s in goal.limits_s.items())
        nearest = Nearest(
            system=each.system, split=each.split, rate_aps=each.nearest_aps, means_s=means_s
        )
        found.append((excess, nearest))
    return min(found, key=lambda each: each[0])[1] if found else None


def limits_text(limits_s: dict[str, float]) -> str:
    return ", ".join(f"{metric} <= {limit_s:g} s" for metric, limit_s in limits_s.items())


def verdict_sentences(plan: Plan) -> list[str]:
    """For people; empty where the best of dual and split is the best there is, and gains over basic."""
    verdict = plan.verdict
    if isinstance(plan.goal, Capacity) and plan.best is None:
        if verdict.slo_met is False:
            return _unmet(plan, plan.goal)
        if verdict.recommended is not None:
            return [
                f"Neither dual nor split holds {limits_text(plan.goal.limits_s)} on any division, "
                f"{_named(verdict.recommended)} does; settings are for dual and split, so there are none."
            ]
    if plan.best is None:
        return []
    return _beside_basic(plan, plan.best)


def _unmet(plan: Plan, goal: Capacity) -> list[str]:
    sentences = [f"No division holds {limits_text(goal.limits_s)}."]
    nearest = plan.verdict.nearest
    if nearest is not None:
        means = ", ".join(f"{metric} {shown(each)} s" for metric, each in nearest.means_s.items())
        sentences.append(
            f"Nearest is {_named(nearest)}: {means} on average at {nearest.rate_aps:g} agents/s."
        )
    oracles = plan.of_system("oracle")
    if oracles and not any(each.holds for each in oracles):
        sentences.append("A cluster that need not read would not hold that either.")
    return [*sentences, "So no settings are advised, and not one more of anything."]


def _beside_basic(plan: Plan, best: Figures) -> list[str]:
    verdict, sentences = plan.verdict, []
    ratio, oracle = verdict.gain_over_basic, verdict.oracle_gain_over_basic
    if ratio is not None and ratio <= 1 + SAME:
        if oracle is not None:
            free = f"a cluster that need not read is {oracle:.2f} times as good as basic"
            limits = "costs something" if verdict.loading_limits else "is not what limits"
            sentences.append(f"Loading KV {limits} here: on {best.split.name} {free}.")
        basic = plan.of_split(best.split)["basic"]
        scores = f"{shown(basic.score(plan.goal))} against {shown(best.score(plan.goal))}"
        how = "better than" if ratio < 1 - SAME else "as good as"
        sentences.append(
            f"There basic is {how} {best.system}, {1 / ratio:.2f} times: {measure_name(plan.goal)} {scores}."
        )
        if oracle is not None and oracle < 1 - SAME:
            sentences.append(
                "It is simulated without the compute quota that the others have: here a larger quota may "
                "gain more than any way of reading."
            )
    choice = verdict.recommended
    if choice is not None and (choice.system, choice.split) != (best.system, best.split):
        sentences.append(
            f"The best that can be had is {_named(choice)}; the settings are for {best.system} on "
            f"{best.split.name}."
        )
    return sentences


def _named(each: Choice | Nearest) -> str:
    return f"{each.system} on {each.split.name}"
