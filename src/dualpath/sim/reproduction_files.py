"""Writes a reproduction: for each experiment its figures as JSON, what is behind them as CSV, its charts; of
all of them a page.

DIRECTORY/reproduction.md
DIRECTORY/reproduction.json             the last line of `dualpath sim reproduce --json`
DIRECTORY/reproduction/NAME.json, NAME.csv, NAME-1.svg ...

Invariants: the first two are written only of a reproduction that is whole, so that a part never takes the
place of a page of all; an experiment's files are of one run, and older charts of it are removed.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from dualpath.report.svg import svg
from dualpath.sim.experiments import EXPERIMENTS
from dualpath.sim.experiments.experiment import Evaluation, Experiment, Settings
from dualpath.sim.paper_traces import PAPER_TRACES, TraceMeans, means_of, paper_trace
from dualpath.sim.published import CLAIMS, PUBLISHED
from dualpath.sim.reproduction import Reproduction, role_of
from dualpath.sim.reproduction_page import markdown
from dualpath.sim.sensitivity import Moved

__all__ = ["PAGE_FILES", "experiment_json", "write_reproduction"]

PAGE_FILES = ("reproduction.md", "reproduction.json")
"""Of all experiments together."""

_FOLDER = "reproduction"


def write_reproduction(
    directory: Path,
    found: Reproduction,
    settings: Settings,
    sensitivity: Sequence[Moved],
    *,
    line: str,
    command: str,
) -> list[Path]:
    """What was written, the page and its JSON last. `line`: the JSON line; `command`: that made all this."""
    folder = directory / _FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    images: dict[str, list[str]] = {}
    for name, evaluation in found.evaluations.items():
        texts = {f"{name}.json": experiment_json(EXPERIMENTS[name], evaluation)}
        for number, chart in enumerate(evaluation.charts, 1):
            texts[f"{name}-{number}.svg"] = svg(chart)
            images.setdefault(name, []).append(f"{_FOLDER}/{name}-{number}.svg")
        for old in set(folder.glob(f"{name}-[0-9]*.svg")) - {folder / file for file in texts}:
            old.unlink()
        written += [_write(folder / file, text) for file, text in texts.items()]
        written.append(_write_rows(folder / f"{name}.csv", evaluation.rows))
    if not found.is_whole:
        return written
    page = markdown(
        found,
        settings,
        traces=_played(settings),
        sensitivity=sensitivity,
        images=images,
        command=command,
    )
    texts = dict(zip(PAGE_FILES, (page, line + "\n"), strict=True))
    return [*written, *(_write(directory / file, text) for file, text in texts.items())]


def experiment_json(experiment: Experiment, evaluation: Evaluation) -> str:
    body = {
        "experiment": experiment.name,
        "title": experiment.title,
        "shows": experiment.shows,
        "figures": [
            {
                "id": each.id,
                "what": PUBLISHED[each.id].what,
                "unit": PUBLISHED[each.id].unit,
                "group": PUBLISHED[each.id].group.value,
                "published": PUBLISHED[each.id].value,
                "ours": each.ours,
                "error": each.error,
                "role": role_of(each).value,
                "note": each.note,
            }
            for each in evaluation.figures
        ],
        "statements": [
            {
                "id": each.id,
                "what": CLAIMS[each.id].what,
                "holds": each.holds,
                "by": each.detail,
            }
            for each in evaluation.checks
        ],
    }
    return msgspec.json.format(msgspec.json.encode(body), indent=2).decode() + "\n"


def _played(settings: Settings) -> Mapping[str, TraceMeans]:
    return {length: means_of(paper_trace(length, seed=settings.seed)) for length in PAPER_TRACES}


def _write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _write_rows(path: Path, rows: Sequence[Sequence[str | float]]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for row in rows:
            writer.writerow([f"{each:.6g}" if isinstance(each, float) else each for each in row])
    return path
