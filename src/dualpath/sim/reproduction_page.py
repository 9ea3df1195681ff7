"""The reproduction as a page in Markdown: every published number beside ours, and where the values are
from. Pure.

Good and bad alike: no number is left out. Why numbers are off is said beside them, in their experiment's
words (`gap`), however far off they came out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from dualpath.report.chart import shown
from dualpath.sim.calibration import (
    ASSUMED,
    CHOICES,
    FITTED,
    HOW_FITTED,
    fitted_ids,
    value_of,
)
from dualpath.sim.experiments import EXPERIMENTS
from dualpath.sim.experiments.experiment import Settings
from dualpath.sim.paper_traces import PAPER_TRACES, TraceMeans
from dualpath.sim.published import CLAIMS, LEFT_OUT, published
from dualpath.sim.reproduction import Reproduction, role_of
from dualpath.sim.sensitivity import BY, FIGURES, Moved

__all__ = ["HEADLINE", "markdown"]

HEADLINE = {
    "table1_gqa_error": ("cache-compute ratio, GQA models: worst error", "<= 0.01"),
    "table1_mla_error": ("cache-compute ratio, DeepSeek models: worst error", "<= 0.12"),
    "core_error": ("core figures: worst error", "<= 0.10"),
    "online_error": ("online figures: worst error", "<= 0.15"),
    "open_error": ("open figures: worst error", "reported"),
    "workingset_error": ("working set: worst error", "reported"),
    "orderings_hold": ("all published orderings and equal pairs hold", "true"),
    "identification": ("figures predicted by values fitted", ">= 2"),
    "scaleout_change": ("change of JCT from 2P4D to 48P96D; published +0.01", "-0.01 to 0.03"),
}
"""Of each headline figure: what it is, and its target."""

_INTRO = """\
# The published evaluation, simulated

The numbers that the paper (DualPath, arXiv 2602.21548) gives of its evaluation, and some of articles on it,
beside what the simulator gives with one calibration for all models, clusters and systems. What is not
compared stands below with the reason. Written by

    {command}

The simulator runs the scheduler of the product over models of GPUs, networks and storage
(`docs/simulator.md`). *Fitted* figures were used to find the values below and show only that such values
exist; *informed* ones were in view when a reading of the paper or the form of the model was chosen;
*predicted* ones were neither; *computed* ones are arithmetic without a run. Errors are relative to the
published number."""


def markdown(
    found: Reproduction,
    settings: Settings,
    *,
    traces: Mapping[str, TraceMeans],
    sensitivity: Sequence[Moved],
    images: Mapping[str, Sequence[str]],
    command: str,
) -> str:
    """Of a reproduction that is whole. `traces`: means of the sessions that were played, by length.
    `images`: links to charts, by experiment."""
    parts = [
        _INTRO.format(command=command),
        *_headline(found),
        *_experiments(found, images),
        *_left_out(),
        *_calibration(settings),
        *_choices(),
        *_sensitivity(sensitivity),
        *_traces(traces),
    ]
    return "\n\n".join(parts) + "\n"


def _headline(found: Reproduction) -> Iterator[str]:
    yield "## In short"
    values = found.headline()
    rows = [
        (what, f"`{name}`", _said(values[name]), target)
        for name, (what, target) in HEADLINE.items()
    ]
    yield _table(("what", "figure", "ours", "target"), rows)


def _experiments(found: Reproduction, images: Mapping[str, Sequence[str]]) -> Iterator[str]:
    figures, checks = found.figures, found.checks
    for name, experiment in EXPERIMENTS.items():
        yield f"## {experiment.title} (`{name}`)"
        yield experiment.shows
        rows = []
        for known in published(name):
            figure = figures.get(known.id)
            value = f"{shown(known.value)} {known.unit}".strip()
            if figure is None:
                rows.append((known.what, value, "", "", "not simulated", ""))
            else:
                ours = f"{shown(figure.ours)} {known.unit}".strip()
                error = f"{100 * figure.error:+.1f} %"
                rows.append((known.what, value, ours, error, role_of(figure).value, figure.note))
        if rows:
            yield _table(("", "published", "ours", "error", "", "note"), rows)
        if experiment.gap:
            yield f"**What is off.** {experiment.gap}"
        claims = [
            (claim.what, "yes" if checks[claim.id].holds else "**no**", checks[claim.id].detail)
            for claim in CLAIMS.values()
            if claim.id in checks and claim.experiment == name
        ]
        if claims:
            yield _table(("statement", "holds", "by"), claims)
        if links := images.get(name):
            yield "\n".join(f"![{experiment.title}]({link})" for link in links)


def _left_out() -> Iterator[str]:
    yield "## Not compared"
    yield _table(
        ("", "published", "because"), [(each.what, each.value, each.why) for each in LEFT_OUT]
    )


def _calibration(settings: Settings) -> Iterator[str]:
    yield "## Values that were fitted"
    rows = [
        (
            f"`{each.name}`",
            f"{_short(value_of(settings.assumptions, each.name))} {each.unit}",
            f"{_short(each.low)} to {_short(each.high)}",
            ", ".join(f"`{id}`" for id in each.on),
            each.why,
        )
        for each in FITTED
    ]
    yield _table(("value", "", "searched", "fitted on", "because it is not known"), rows)
    yield f"{len(FITTED)} values for {len(fitted_ids())} figures, {HOW_FITTED}."
    yield "## Values that were taken from elsewhere"
    rows_assumed = [
        (
            f"`{each.name}`",
            f"{_short(value_of(settings.assumptions, each.name))} {each.unit}",
            each.source,
        )
        for each in ASSUMED
    ]
    yield _table(("value", "", "source"), rows_assumed)
    yield "Models and hardware are data files with a source for each number."


def _choices() -> Iterator[str]:
    yield "## Choices that were made with results in view"
    rows = [
        (each.what, each.instead, each.why, ", ".join(f"`{id}`" for id in each.ids))
        for each in CHOICES
    ]
    yield _table(("chosen", "instead of", "because", "in view of"), rows)


def _sensitivity(sensitivity: Sequence[Moved]) -> Iterator[str]:
    if not sensitivity:
        return
    yield "## Sensitivity"
    yield f"How much figures change when one fitted value is {100 * BY:.0f} % less or more."
    rows = [
        (
            f"`{each.variation.name}`",
            _short(each.variation.value),
            *(f"{100 * each.changes[id]:+.1f} %" for id in FIGURES),
        )
        for each in sensitivity
    ]
    yield _table(("value", "is", *(f"`{id}`" for id in FIGURES)), rows)


def _traces(traces: Mapping[str, TraceMeans]) -> Iterator[str]:
    yield "## Traces"
    yield (
        "The paper's trajectories are not public. Those that are played are generated, and chosen so that "
        "their means are those of the paper's table of traces: ours / the paper's."
    )
    fields = ("turns", "append_tokens", "output_tokens", "total_tokens", "context_tokens")
    rows = [
        (
            length,
            *(
                f"{shown(round(getattr(means, each), 1))} / {shown(getattr(PAPER_TRACES[length], each))}"
                for each in fields
            ),
        )
        for length, means in traces.items()
    ]
    names = (each.removesuffix("_tokens") for each in fields)
    yield _table(("", *names), rows)


def _short(value: float) -> str:
    """Three digits; large and small ones with a power of ten."""
    return f"{value:.3g}"


def _said(value: float | bool | None) -> str:
    if value is None:
        return "not run"
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:.3f}"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(each.replace("|", "\\|") for each in cells) + " |"

    return "\n".join([line(columns), "|" + "---|" * len(columns), *map(line, rows)])
