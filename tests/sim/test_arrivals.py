"""Arrivals of online runs: at random, or recorded ones scaled to a rate, the same in every run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dualpath.base.errors import ConfigError
from dualpath.cli.main import main
from dualpath.sim.arrivals import POISSON, Arrivals, open_arrivals
from dualpath.sim.case import Case, simulate, workload_of
from dualpath.sim.experiments.grid import ds_27b
from dualpath.sim.plan.load import AtRate
from dualpath.sim.plan.question import question_of
from dualpath.sim.plan.runs import simulate as simulate_task
from dualpath.sim.plan.search import task_of
from dualpath.sim.plan.settings import PlanSettings
from dualpath.sim.plan.splits import Split
from dualpath.sim.setting import Assumptions, System
from dualpath.traces import poisson

AZURE = "azure-conversation"
CSV = """\
TIMESTAMP
2023-11-16 18:15:50
2023-11-16 18:15:46
2023-11-16 18:15:47
"""
ONLINE = Case(
    deployment=ds_27b(),
    system=System.DUAL,
    assumptions=Assumptions(),
    trace="generated:2k",
    load=AtRate(0.5, 60.0),
    arrivals=AZURE,
)


def test_recorded_arrivals_have_the_rate_and_their_burstiness() -> None:
    azure = open_arrivals(AZURE)
    count = len(azure.times_s)
    assert count == 5000
    for rate_aps in (0.4, 20.0):
        half_a_gap_s = 0.5 / rate_aps
        once = azure.before(count / rate_aps - half_a_gap_s, rate_aps, seed=0)
        twice = azure.before(2 * count / rate_aps - half_a_gap_s, rate_aps, seed=0)
        assert (len(once), len(twice)) == (count, 2 * count)
        assert once[0] == 0.0
        assert np.all(np.diff(twice) >= 0)
        recorded_s = np.array(azure.times_s)
        assert once / once[-1] == pytest.approx(recorded_s / recorded_s[-1])
        assert len(once) / (once[-1] + 1 / rate_aps) == pytest.approx(rate_aps, rel=1e-3)


def test_at_random_is_what_poisson_says() -> None:
    found = open_arrivals(POISSON)
    assert found == Arrivals()
    assert found.before(50.0, 0.5, 3).tolist() == [
        at_s for at_s, _ in zip(poisson(0.5, 3), range(1000), strict=False) if at_s < 50
    ]


def test_of_a_csv_only_times_are_needed(tmp_path: Path) -> None:
    file = tmp_path / "times.csv"
    file.write_text(CSV, encoding="utf-8")
    found = open_arrivals(str(file))
    assert found.times_s == (0.0, 1.0, 4.0)
    # Mean gap 2 s; again from the start after another one.
    assert found.before(14.0, 0.5, 0).tolist() == [0.0, 1.0, 4.0, 6.0, 7.0, 10.0, 12.0, 13.0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("generated:2k", "do not tell when they start: .*azure-conversation"),
        ("nothing.csv", "there is no such file"),
    ],
)
def test_arrivals_that_cannot_be(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        open_arrivals(name)


def test_one_time_is_no_rate(tmp_path: Path) -> None:
    file = tmp_path / "times.csv"
    file.write_text("".join(CSV.splitlines(keepends=True)[:2]), encoding="utf-8")
    with pytest.raises(ConfigError, match="at least two at different times"):
        open_arrivals(str(file))


def test_the_same_recorded_arrivals_give_the_same_run() -> None:
    first = simulate(ONLINE)
    again = simulate(replace(ONLINE))
    assert first.records.tobytes() == again.records.tobytes()
    assert first.records.tobytes() != simulate(replace(ONLINE, arrivals=POISSON)).records.tobytes()
    starts_s = workload_of(ONLINE).start_s
    assert starts_s.tolist() == open_arrivals(AZURE).before(60.0, 0.5, 0).tolist()


def test_a_plan_plays_recorded_arrivals() -> None:
    settings = PlanSettings(
        model="qwen2.5-32b",
        gpu="h100",
        nodes=2,
        trace="smoke",
        rate=2.0,
        horizon_s=20.0,
        arrivals=AZURE,
    )
    question = question_of(settings)
    assert question.setup()["arrivals"] == AZURE
    task = task_of(question, Split(1, 1, 1, 1), System.SPLIT)
    outcome = simulate_task(task, 2.0)
    assert outcome.records.tobytes() == simulate_task(task, 2.0).records.tobytes()
    other = replace(task, arrivals=Arrivals())
    assert outcome.records.tobytes() != simulate_task(other, 2.0).records.tobytes()


def test_as_flags(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["sim", "run", "--model", "ds-27b", "--trace", "generated:2k", "--json"]
    online = [*run, "--rate", "0.5", "--until", "30", "--arrivals", AZURE]
    assert main(online) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["setup"]["arrivals"], result["setup"]["rate_aps"]) == (AZURE, 0.5)
    assert main([*run, "--agents", "2", "--arrivals", AZURE]) == 2
    assert "--arrivals: expected with --rate" in capsys.readouterr().err
