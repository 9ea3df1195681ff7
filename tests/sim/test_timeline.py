from __future__ import annotations

import json
from collections import defaultdict

import pytest
from plan_kit import small_question

pytest.importorskip("numba")

from dualpath.sim.plan.runs import prepared, simulate
from dualpath.sim.plan.search import task_of
from dualpath.sim.plan.splits import Split
from dualpath.sim.setting import System
from dualpath.sim.timeline import MAX_REQUESTS, timeline_events, write_timeline

PARTS = {"queued", "read", "prefill wait", "prefill", "hand-over", "decode"}


@pytest.fixture(scope="module")
def run():
    task = task_of(small_question(), Split(1, 2, 1, 1), System.SPLIT)
    return prepared(task)[0], simulate(task)


@pytest.fixture(scope="module")
def events(run):
    return list(timeline_events(*run, MAX_REQUESTS))


def spans_of(events):
    return [each for each in events if each["ph"] == "X"]


def test_events_are_as_the_format_says(events):
    assert {each["ph"] for each in events} == {"M", "X", "C"}
    for each in events:
        assert isinstance(each["name"], str) and each["name"]
        assert isinstance(each["ts"], int) and each["ts"] >= 0
        assert each["pid"] >= 1
    for each in spans_of(events):
        assert isinstance(each["dur"], int) and each["dur"] > 0
        assert each["tid"] >= 1 and each["cat"] in ("request", "part")
    for each in events:
        if each["ph"] == "C":
            assert 0 <= each["args"]["share"] <= 1.001
        if each["ph"] == "M":
            assert each["name"] in ("process_name", "process_sort_index", "thread_name")


def test_events_are_in_order_and_metadata_comes_first(events):
    timed = [each for each in events if each["ph"] != "M"]
    assert events[-len(timed) :] == timed
    times = [each["ts"] for each in timed]
    assert times == sorted(times)


def test_events_of_a_thread_nest(events):
    open_until = defaultdict(list)
    for each in spans_of(events):
        stack = open_until[each["pid"], each["tid"]]
        while stack and stack[-1] <= each["ts"]:
            stack.pop()
        end = each["ts"] + each["dur"]
        assert not stack or end <= stack[-1]
        stack.append(end)


def test_every_request_has_its_parts_on_both_sides(run, events):
    _, outcome = run
    spans = spans_of(events)
    assert {each["name"] for each in spans if each["cat"] == "part"} == PARTS
    requests = [each for each in spans if each["cat"] == "request"]
    several = (outcome.records.output_tokens > 1).sum()
    assert len(requests) == len(outcome.records) + several
    prefill_nodes = {each["pid"] for each in spans if each["name"] in ("queued", "prefill")}
    decode_nodes = {each["pid"] for each in spans if each["name"] == "decode"}
    assert prefill_nodes == {1} and decode_nodes == {2, 3}
    (first,) = (each for each in requests if each["name"] == "agent 3 turn 2" and each["pid"] == 1)
    (record,) = outcome.records[(outcome.records.agent == 3) & (outcome.records.turn == 2)]
    assert first["ts"] == pytest.approx(1e6 * record.arrived_s, abs=1)
    assert first["ts"] + first["dur"] == pytest.approx(1e6 * record.first_token_s, abs=1)
    assert first["args"]["prompt_tokens"] == record.prompt_tokens


def test_processes_and_threads_have_names(events):
    named = {each["pid"]: each["args"]["name"] for each in events if each["name"] == "process_name"}
    assert named == {1: "prefill node 0", 2: "decode node 0", 3: "decode node 1"}
    threads = {(each["pid"], each["tid"]) for each in events if each["name"] == "thread_name"}
    assert threads == {(each["pid"], each["tid"]) for each in spans_of(events)}


def test_counters_show_what_was_read(run, events):
    _, outcome = run
    counters = [each for each in events if each["ph"] == "C"]
    for each in counters:
        window = each["ts"] // 10**6
        served = outcome.snic_bytes[each["pid"] - 1, window]
        assert each["args"]["share"] == pytest.approx(served / outcome.snic_bytes_s, abs=1e-3)
    assert {each["pid"] for each in counters} == {1, 2, 3}


def test_the_file_is_one_json_object_that_says_what_is_left_out(run, tmp_path):
    path = tmp_path / "run.json"
    write_timeline(path, *run, title="a run", max_requests=10)
    body = json.loads(path.read_text())
    assert body["displayTimeUnit"] == "ms"
    other = body["otherData"]
    assert (other["requests"], other["requests_of_run"]) == (10, len(run[1].records))
    assert (other["title"], other["max_requests"]) == ("a run", 10)
    assert len({each["name"] for each in body["traceEvents"] if each.get("cat") == "request"}) == 10
    assert list(tmp_path.iterdir()) == [path]
