"""Cases are played once, alike in this process and in others, and an interrupted sweep keeps what ended."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import psutil
import pytest

from dualpath.base.errors import ConfigError
from dualpath.sim.case import COUNTED_FROM, Case, play, workload_of
from dualpath.sim.experiments.grid import ds_27b, ds_660b
from dualpath.sim.plan.load import AtRate, Offline
from dualpath.sim.progress import Watch
from dualpath.sim.setting import Assumptions, System
from dualpath.sim.sweep import distinct, sweep
from dualpath.sim.workers import each_in_workers

TINY = Case(
    deployment=ds_27b(),
    system=System.DUAL,
    assumptions=Assumptions(),
    trace="generated:2k",
    load=Offline(4),
)
OTHER = replace(TINY, system=System.BASIC)


def squared(number):
    if number < 0:
        raise ConfigError("negative")
    return number * number


def test_a_case_is_deterministic():
    assert play(TINY) == play(replace(TINY))


def test_faster_systems_are_faster():
    """Even so few agents wait for reads, which the oracle has none of."""
    assert play(replace(TINY, system=System.ORACLE)).jct_s < play(TINY).jct_s


def test_all_of_a_batch_counts():
    found = play(TINY)
    assert (found.agents, found.unfinished_agents, found.from_s) == (4, 0, 0.0)
    assert found.requests == workload_of(TINY).requests
    assert found.until_s == found.jct_s


def test_the_last_third_of_arrivals_counts():
    case = replace(TINY, load=AtRate(0.5, 60.0))
    found = play(case)
    assert found.until_s == 60.0
    assert found.from_s == pytest.approx(COUNTED_FROM * 60)
    assert 0 < found.requests < workload_of(case).requests


def test_agents_arrive_alike_for_all_systems_and_not_for_other_seeds():
    load = AtRate(0.5, 60.0)
    starts = [
        workload_of(replace(TINY, load=load, system=system)).start_s.tolist()
        for system in (System.BASIC, System.DUAL)
    ]
    assert starts[0] == starts[1]
    other = replace(TINY, load=load, trace="smoke", seed=1)
    assert workload_of(other).start_s.tolist() != starts[0]


def test_no_arrival_is_an_error():
    with pytest.raises(ConfigError, match="raise the rate"):
        workload_of(replace(TINY, load=AtRate(1e-9, 1.0)))


def test_only_the_papers_traces_are_scaled():
    with pytest.raises(ConfigError, match="generated:2k"):
        workload_of(replace(TINY, append=2.0))


def test_scaled_appends_are_longer():
    plain = replace(TINY, trace="paper:32k", deployment=ds_660b())
    longer = replace(plain, append=3.0)
    assert workload_of(longer).requests < workload_of(plain).requests
    first = [int(workload_of(each).prompt_tokens[0]) for each in (plain, longer)]
    assert first[1] == 3 * first[0]


def test_equal_cases_are_played_once_and_long_ones_first():
    more = replace(TINY, load=Offline(8))
    assert distinct([TINY, OTHER, replace(TINY), more]) == [more, TINY, OTHER]


def test_workers_give_what_this_process_gives():
    cases = [TINY, OTHER]
    here = sweep(cases, workers=1, watch=Watch())
    there = sweep(cases, workers=2, watch=Watch())
    assert here.results == there.results
    assert not here.was_interrupted
    assert here.has(cases)


def test_the_watch_hears_of_every_run():
    class Hears(Watch):
        expected, heard = 0, ()

        def expect(self, runs):
            self.expected += runs

        def ended(self, sentence):
            self.heard += (sentence,)

    watch = Hears()
    sweep([TINY, replace(TINY), replace(TINY, load=AtRate(0.5, 20.0))], workers=1, watch=watch)
    assert watch.expected == 2
    assert [each.partition(":2k ")[2].partition(":")[0] for each in watch.heard] == [
        "0.5 APS",
        "4 agents",
    ]


def test_ctrl_c_keeps_what_has_ended():
    class Interrupts(Watch):
        def ended(self, sentence):
            raise KeyboardInterrupt

    found = sweep([TINY, OTHER], workers=1, watch=Interrupts())
    assert found.was_interrupted
    assert list(found.results) == [TINY]
    assert found.has([TINY])
    assert not found.has([TINY, OTHER])


def test_a_model_that_does_not_fit_is_an_error():
    one_node = replace(ds_660b(), prefill_instance_nodes=1, decode_instance_nodes=1)
    with pytest.raises(ConfigError, match="GPU"):
        sweep([replace(TINY, deployment=one_node)], workers=1, watch=Watch())


@pytest.mark.parametrize("workers", [1, 2])
def test_each_task_with_its_result(workers):
    assert dict(each_in_workers(squared, [3, 1, 2], workers)) == {3: 9, 1: 1, 2: 4}


@pytest.mark.parametrize("workers", [1, 2])
def test_an_error_of_a_task_is_raised(workers):
    with pytest.raises(ConfigError, match="negative"):
        list(each_in_workers(squared, [1, -1], workers))


def test_workers_end_with_their_parent():
    """Also when it cannot tell them."""
    code = (
        "import multiprocessing, sys, time\n"
        "from dualpath.sim.workers import each_in_workers\n"
        "if __name__ == '__main__':\n"
        "    results = each_in_workers(time.sleep, [0, 600, 600], 2)\n"
        "    next(results)\n"
        "    print(*[each.pid for each in multiprocessing.active_children()], flush=True)\n"
        "    sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        parent.kill()
    assert not psutil.wait_procs(workers, timeout=60)[1]


def test_no_tasks():
    assert list(each_in_workers(squared, [], 2)) == []
