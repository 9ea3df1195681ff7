"""The runner in virtual time: exact schedules, whatever the server does."""

from __future__ import annotations

import asyncio

import pytest
from replay_kit import FakeServer, PlainTalk, make_session

from dualpath.bench.replay.load import Limits, OfflineLoad, OnlineLoad, Tally
from dualpath.bench.replay.runner import CLIENT_LIMIT, run_load
from dualpath.bench.replay.steady import SteadyRule
from dualpath.testing import run_virtual

LEAD_S = 0.25


def play(load, server, limits=None, *, stop_at=None, converse=PlainTalk, tally=None):
    """The run, with the server's times from the run's start."""

    async def main():
        loop = asyncio.get_running_loop()
        stop = asyncio.Event()
        if stop_at is not None:
            loop.call_at(stop_at, stop.set)
        run = await run_load(
            load, server, converse, limits, stop=stop, clock=loop.time, tally=tally
        )
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []
        return run

    return run_virtual(main())


def online(sessions, arrivals, rate=1.0):
    return OnlineLoad(sessions, arrivals, rate)


def timeline(run):
    return [(run.sessions[r.session].id, r.turn, r.scheduled_s, r.sent_s) for r in run.requests]


def test_offline_all_start_at_once_and_turns_follow_each_other():
    sessions = [
        make_session("a", (10, 5, 0.0), (10, 1, 0.0), (10, 1, 2.0)),
        make_session("b", (10, 1, 9.0)),
    ]
    run = play(OfflineLoad(sessions), FakeServer(ttft_s=0.5, tpot_s=0.125))
    # a: first token at 0.5, four more; the second turn at once, the third after 2 s. b's delay means nothing.
    assert sorted(timeline(run)) == [
        ("a", 0, 0.0, 0.0),
        ("a", 1, 1.0, 1.0),
        ("a", 2, 3.5, 3.5),
        ("b", 0, 0.0, 0.0),
    ]
    first = next(r for r in run.requests if (r.session, r.turn) == (0, 0))
    assert (first.first_s, first.second_s, first.last_s) == (0.5, 0.625, 1.0)
    assert (first.ttft_s, first.ttst_s, first.tpot_s, first.e2e_s) == (0.5, 0.125, 0.125, 1.0)
    assert [(each.id, each.finished_s) for each in run.sessions] == [("a", 4.0), ("b", 0.5)]
    assert (run.mode, run.agents, run.rate_aps, run.ended) == ("offline", 2, None, "complete")
    assert run.duration_s == 4.0
    assert run.itl_s[0] == pytest.approx(0.125, rel=0.01)


def test_prompts_are_made_before_they_are_due():
    made = []

    class Timed(PlainTalk):
        def prompt(self, index):
            made.append((self._session.id, index, asyncio.get_running_loop().time() - LEAD_S))
            return super().prompt(index)

    sessions = [make_session("a", (10, 1, 0.0), (10, 1, 2.0)), make_session("b", (10, 1, 0.0))]
    run = play(online(sessions, [1.0, 5.0]), FakeServer(ttft_s=0.5), converse=Timed)
    assert made == [("a", 0, 0.75), ("a", 1, 1.5), ("b", 0, 4.75)]
    assert timeline(run) == [("a", 0, 1.0, 1.0), ("a", 1, 3.5, 3.5), ("b", 0, 5.0, 5.0)]
    assert (run.mode, run.agents, run.rate_aps) == ("online", None, 1.0)


def test_a_stalled_server_delays_no_arrival_and_its_stall_is_in_the_latencies():
    """Coordinated omission: the agent every second sees what a 10 s stall does to those who arrive in it."""
    sessions = [make_session(f"s{i}", (10, 1, 0.0)) for i in range(20)]
    arrivals = [float(i) for i in range(20)]
    server = FakeServer(ttft_s=0.5, stall=(3.0 + LEAD_S, 13.0 + LEAD_S))
    run = play(online(sessions, arrivals), server)
    assert [at - LEAD_S for at, _ in server.sends] == arrivals
    by_session = {r.session: r for r in run.requests}
    assert [by_session[i].ttft_s for i in range(20)] == [
        *[0.5] * 3,  # 0, 1, 2
        *[float(13 - i) for i in range(3, 13)],
        *[0.5] * 7,
    ]


def test_latencies_count_from_the_schedule_when_the_client_is_late():
    class Slow(PlainTalk):
        """Takes 3 s of the process for its prompt, as a client short of CPU would."""

        def prompt(self, index):
            asyncio.get_running_loop().jump(3.0)
            return super().prompt(index)

    run = play(online([make_session("a", (10, 1, 0.0))], [1.0]), FakeServer(), converse=Slow)
    (request,) = run.requests
    assert request.scheduled_s == 1.0
    assert request.sent_s == 0.75 + 3.0
    assert request.ttft_s == 2.75 + 0.5


def test_a_turn_that_fails_ends_its_session_only():
    sessions = [make_session(name, *[(10, 1, 0.0)] * 3) for name in ("a", "b", "c")]
    failing = {("a", 1): "http 503", ("c", 0): "timeout"}
    tally = Tally()
    server = FakeServer(fail=lambda name, turn: failing.get((name, turn), ""))
    run = play(OfflineLoad(sessions), server, tally=tally)
    asked = [(run.sessions[r.session].id, r.turn, r.error) for r in run.requests]
    assert sorted(asked) == [
        ("a", 0, ""),
        ("a", 1, "http 503"),
        *[("b", turn, "") for turn in range(3)],
        ("c", 0, "timeout"),
    ]
    assert [each.finished_s for each in run.sessions] == [None, 1.5, None]
    assert run.ended == "complete"
    assert (tally.requests, tally.in_flight, tally.sessions_ended) == (6, 0, 3)
    assert (tally.turns, tally.turns_skipped) == (9, 3)
    assert tally.errors == {"http 503": 1, "timeout": 1}


def test_too_many_in_flight_is_an_error_and_no_queue():
    sessions = [make_session(f"s{i}", (10, 1, 0.0)) for i in range(5)]
    server = FakeServer(ttft_s=10.0)
    run = play(online(sessions, [0.0, 1.0, 2.0, 3.0, 11.0]), server, Limits(max_in_flight=2))
    assert [(r.session, r.error) for r in sorted(run.requests, key=lambda r: r.session)] == [
        (0, ""),
        (1, ""),
        (2, CLIENT_LIMIT),
        (3, CLIENT_LIMIT),
        (4, ""),
    ]
    assert server.most_at_once == 2
    assert len(server.sends) == 3


def test_ctrl_c_gives_what_there_is_and_cuts_the_rest():
    sessions = [make_session(f"s{i}", (10, 1, 0.0), (10, 41, 0.0)) for i in range(4)]
    server = FakeServer(ttft_s=0.5)
    run = play(online(sessions, [0.0, 0.25, 1.0, 50.0]), server, stop_at=LEAD_S + 1.125)
    assert run.ended == "interrupted"
    assert run.duration_s == 1.125
    # s3 was never due. s0 and s1 are in their second turns, s0 has its first token already; s2 waits.
    assert [each.id for each in run.sessions] == ["s0", "s1", "s2"]
    assert all(each.finished_s is None for each in run.sessions)
    cut = [(r.session, r.turn, r.first_s) for r in run.requests if r.end_s is None]
    assert sorted(cut) == [(0, 1, 1.0), (1, 1, None), (2, 0, None)]
    assert all(not r.error for r in run.requests)
    assert server.at_once == 0


def test_duration_ends_arrivals_and_cuts_what_runs():
    sessions = [make_session(f"s{i}", (10, 1, 0.0)) for i in range(10)]
    server = FakeServer(ttft_s=1.5)
    run = play(online(sessions, [float(i) for i in range(10)]), server, Limits(duration_s=3.0))
    assert run.ended == "duration"
    assert run.duration_s == 3.0
    assert [(r.session, r.end_s) for r in sorted(run.requests, key=lambda r: r.session)] == [
        (0, 1.5),
        (1, 2.5),
        (2, None),
    ]


def test_a_run_lasts_for_its_duration_while_agents_are_to_come():
    sessions = [make_session(f"s{i}", (10, 1, 0.0)) for i in range(3)]
    limits = Limits(duration_s=8.0)
    quiet = play(online(sessions, [0.0, 1.0, 50.0]), FakeServer(), limits)
    assert (quiet.ended, quiet.duration_s, len(quiet.sessions)) == ("duration", 8.0, 2)
    over = play(online(sessions[:2], [0.0, 1.0]), FakeServer(), limits)
    assert (over.ended, over.duration_s) == ("complete", 1.5)


def test_warm_up_by_time_and_by_sessions():
    sessions = [make_session(f"s{i}", (10, 3, 0.0)) for i in range(10)]
    load = online(sessions, [2.0 * i for i in range(10)])
    assert play(load, FakeServer(), Limits(warmup_s=5.0)).from_s == 5.0
    run = play(load, FakeServer(), Limits(warmup_sessions=3))
    assert run.from_s == 6.0
    never = play(load, FakeServer(), Limits(warmup_sessions=30))
    assert never.from_s == never.duration_s
    assert never.itl_s == []


def test_gaps_of_the_warm_up_are_left_out():
    class Faster(FakeServer):
        async def send(self, prompt, output_tokens, on_first=None):
            self.tpot_s = 1.0 if asyncio.get_running_loop().time() < 5 else 0.25
            return await super().send(prompt, output_tokens, on_first)

    sessions = [make_session(f"s{i}", (10, 3, 0.0)) for i in range(4)]
    run = play(online(sessions, [0.0, 4.0, 8.0, 12.0]), Faster(), Limits(warmup_s=6.0))
    assert run.itl_s[100] == pytest.approx(0.25, rel=0.01)


def test_a_steady_server_ends_the_run_and_only_the_steady_window_counts():
    class Warming(FakeServer):
        """Faster from second to second, by half each, until 30 s."""

        async def send(self, prompt, output_tokens, on_first=None):
            now = asyncio.get_running_loop().time() - LEAD_S
            self.ttft_s = 0.0625 * 2.0 ** max((30 - now) / 5, 0)
            return await super().send(prompt, output_tokens, on_first)

    sessions = [make_session(f"s{i}", (10, 2, 0.0)) for i in range(1000)]
    load = online(sessions, [float(i) for i in range(1000)])
    run = play(load, Warming(), Limits(steady=SteadyRule(window_s=20.0, min_requests=3)))
    assert run.ended == "steady state"
    # Slices of 2 s. From 26 s on the first half has a mean of 0.0733 s, 15 % off; from 28 s 0.0654 s, 4.5 %.
    assert (run.from_s, run.duration_s) == (28.0, pytest.approx(48.0))
    assert run.itl_s[50] == pytest.approx(0.125, rel=0.01)


def test_overload_ends_the_run_even_when_nothing_comes_back():
    sessions = [make_session(f"s{i}", (10, 2, 0.0)) for i in range(1000)]
    load = online(sessions, [float(i) for i in range(1000)])
    rule = SteadyRule(window_s=20.0, ttft_limit_s=4.0)
    run = play(load, FakeServer(ttft_s=1e6), Limits(steady=rule))
    assert run.ended == "ttft limit"
    assert run.duration_s == pytest.approx(20.0)
    assert len(run.requests) in (20, 21)
    assert all(r.end_s is None and not r.error for r in run.requests)


def test_long_answers_are_not_taken_for_overload():
    sessions = [make_session(f"s{i}", (10, 1000, 0.0)) for i in range(1000)]
    load = online(sessions, [float(i) for i in range(1000)])
    rule = SteadyRule(window_s=20.0, ttft_limit_s=4.0)
    run = play(load, FakeServer(ttft_s=0.5, tpot_s=1.0), Limits(steady=rule, duration_s=50.0))
    assert run.ended == "duration"
    assert sum(r.first_s is not None for r in run.requests) == 50


def test_a_broken_server_ends_the_run():
    sessions = [make_session(f"s{i}", (10, 2, 0.0)) for i in range(1000)]
    load = online(sessions, [float(i) for i in range(1000)])
    server = FakeServer(fail=lambda name, turn: "http 500")
    run = play(load, server, Limits(steady=SteadyRule(window_s=20.0)))
    assert (run.ended, run.duration_s) == ("errors", pytest.approx(20.0))


def test_five_thousand_sessions():
    sessions = [make_session(f"s{i}", (10, 2, 0.0), (10, 1, 1.0)) for i in range(5000)]
    server = FakeServer(ttft_s=4.0)
    run = play(OfflineLoad(sessions), server)
    assert server.most_at_once == 5000
    assert len(run.requests) == 10_000
    assert all(r.sent_s == r.scheduled_s for r in run.requests)
    assert run.duration_s == pytest.approx(4.0 + 0.125 + 1.0 + 4.0)
    many = play(online(sessions, [i / 500 for i in range(5000)]), FakeServer(ttft_s=4.0))
    assert len(many.requests) == 10_000
    assert max(abs(r.sent_s - r.scheduled_s) for r in many.requests) < 1e-9


def test_conversations_exist_only_while_their_session_runs():
    alive: set[str] = set()
    most = 0

    class Counted(PlainTalk):
        def __init__(self, session):
            nonlocal most
            super().__init__(session)
            alive.add(session.id)
            most = max(most, len(alive))

        def __del__(self):
            alive.discard(self._session.id)

    sessions = [make_session(f"s{i}", (10, 1, 0.0)) for i in range(1000)]
    play(online(sessions, [float(i) for i in range(1000)]), FakeServer(), converse=Counted)
    assert most <= 3
    assert not alive


def test_the_servers_metrics_are_sampled_each_second():
    def metrics(now):
        return {'dualpath:snic_read_bytes_total{group="p0"}': now, "dualpath:engines_up": 1.0}

    session = make_session("a", (10, 1, 0.0))
    run = play(OfflineLoad([session]), FakeServer(ttft_s=2.5, metrics_now=metrics))
    name = 'dualpath:snic_read_bytes_total{group="p0"}'
    assert [(each.at_s, each.metrics) for each in run.samples] == [
        (at, {name: at}) for at in (0.0, 1.0, 2.0, 2.5)
    ]


def test_a_server_without_metrics_is_asked_three_times():
    asked = []
    server = FakeServer(ttft_s=20.0, metrics_now=lambda now: asked.append(now) or {})
    run = play(OfflineLoad([make_session("a", (10, 1, 0.0))]), server)
    assert run.samples == []
    assert asked == [0.0, 1.0, 2.0, 20.0]


def test_a_bug_is_not_hidden():
    class Broken(PlainTalk):
        def take_answer(self, index, token_ids):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        play(OfflineLoad([make_session("a", (10, 1, 0.0))]), FakeServer(), converse=Broken)


def test_nothing_to_play():
    assert play(OfflineLoad([]), FakeServer()).ended == "complete"
    assert play(online([], []), FakeServer()).requests == []


def test_waiting_for_nothing_is_an_error_in_virtual_time():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="nothing can happen"):
        run_virtual(main())
