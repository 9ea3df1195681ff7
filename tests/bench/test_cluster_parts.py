"""The pure parts of the benchmarks on a testbed."""

from __future__ import annotations

import json

import pytest

from dualpath.base.errors import ConfigError
from dualpath.bench.cluster.answers import wrong_tokens
from dualpath.bench.cluster.bounds import equal_pair_error, read_bound
from dualpath.bench.cluster.model import arithmetic
from dualpath.bench.cluster.nics import NicSeries, WindowRates, balance, utilisation
from dualpath.bench.cluster.online_results import OnlineMeasured, online_figures
from dualpath.bench.cluster.passes import Pass
from dualpath.bench.cluster.pooling_report import pooling_page
from dualpath.bench.cluster.reference import Sequenced, sequenced
from dualpath.bench.cluster.results import Measured, Measurements, utilisation_over_time
from dualpath.bench.cluster.workload import (
    Shape,
    paper_shape,
    shared_contexts,
    text_workload,
    workload,
)
from dualpath.bench.harness import BenchResult
from dualpath.bench.replay import Conversation, TokenSource
from dualpath.bench.replay.campaign import Found
from dualpath.bench.replay.records import RequestRecord, Run
from dualpath.bench.replay.slo import Slo
from dualpath.kv.layout import KVLayout, RowPart
from dualpath.report.page import render
from dualpath.store.block_file import HEADER_BYTES
from dualpath.traces.model import Session, TextPrompt, Trace, Turn

LAYOUT = KVLayout("gqa", 2, 4, (RowPart("key", 1, 8), RowPart("value", 1, 8)), "float32", 4)
SOURCE = TokenSource(3, 0, 256)
RATE = 1000.0


# Shapes and sessions.


def test_the_papers_shape_is_scaled_as_its_context() -> None:
    assert paper_shape(2048, 3) == Shape(2048, 27, 11, 3)
    assert paper_shape(32_721, 1) == Shape(32_721, 429, 176, 1)


def test_lengths_of_a_shape() -> None:
    shape = Shape(100, 5, 3, 2)
    assert shape.longest_tokens == 116
    assert shape.fed_tokens == 105 + 113


def test_what_is_stored_begins_the_first_prompt() -> None:
    work = workload(Shape(40, 5, 3, 2), agents=3, alone=2, long=1)
    assert [len(each) for each in (work.stored, work.agents, work.alone, work.long)] == [6, 3, 2, 1]
    stored = [json.loads(Conversation(each, SOURCE).prompt(0).json) for each in work.stored]
    measured = [
        json.loads(Conversation(each, SOURCE).prompt(0).json)
        for each in (*work.agents, *work.alone, *work.long)
    ]
    for before, after in zip(stored, measured, strict=True):
        assert after[: len(before)] == before
        assert len(after) > len(before)
    assert len({tuple(each[:8]) for each in measured}) == 6


def test_shared_contexts_have_tails_of_their_own() -> None:
    stored, sessions = shared_contexts(Shape(32, 5, 3, 2), sessions=5, contexts=2, block_tokens=16)
    assert [each.id for each in stored] == ["context 0", "context 1"]
    contexts = [json.loads(Conversation(each, SOURCE).prompt(0).json) for each in stored]
    assert [len(each) for each in contexts] == [32, 32]
    talks = [Conversation(each, SOURCE) for each in sessions]
    prompts = [json.loads(each.prompt(0).json) for each in talks]
    for number, prompt in enumerate(prompts):
        assert prompt[:32] == contexts[number % 2]
        assert len(prompt) == 37
    assert len({tuple(each[32:]) for each in prompts}) == 5
    talks[0].take_answer(0, [1, 2, 3])
    second = json.loads(talks[0].prompt(1).json)
    assert second[:40] == [*prompts[0], 1, 2, 3]
    assert len(second) == 45


def test_recorded_text_is_stored_up_to_the_turn_before() -> None:
    turns = tuple(Turn(TextPrompt("word " * n), 4) for n in (10, 20, 30, 4000))
    trace = Trace("text", "full-text", (Session("a", turns), Session("b", turns[:1])))
    work = text_workload(trace, max_context_tokens=100, agents=2, alone=1, turns=2)
    assert [each.turns[0].prompt for each in work.stored] == [
        TextPrompt(f"[{n}] " + "word " * 10) for n in range(3)
    ]
    assert [turn.prompt for turn in work.agents[1].turns] == [
        TextPrompt("[1] " + "word " * 20),
        TextPrompt("[1] " + "word " * 30),
    ]
    assert [turn.prompt for turn in work.alone[0].turns] == [TextPrompt("[2] " + "word " * 20)]
    assert work.long == ()
    with pytest.raises(ConfigError, match="raise --context"):
        text_workload(trace, max_context_tokens=5, agents=1, alone=1, turns=2)


# NICs.


def series(*received: tuple[int, ...]) -> NicSeries:
    """A sample each second."""
    nodes = ("pe0", "de0")[: len(received[0])]
    return NicSeries(nodes, tuple(map(float, range(len(received)))), received)


def test_reading_is_from_the_first_to_the_last_byte() -> None:
    seen = series(
        (0, 0), (10, 10), (1000, 900), (2000, 1800), (2005, 1810), (3000, 2700), (3001, 2700)
    )
    reading = seen.reading(RATE)
    assert reading.times_s == (1.0, 2.0, 3.0, 4.0, 5.0)
    assert utilisation(reading, RATE) == pytest.approx({"pe0": 2990 / 4000, "de0": 2690 / 4000})


def test_nothing_read_has_no_utilisation() -> None:
    idle = series((0, 0), (1, 1), (2, 2)).reading(RATE)
    assert idle.times_s == ()
    assert utilisation(idle, RATE) == {}
    assert balance(idle.windows(1.0)) is None


def test_windows_are_whole() -> None:
    seen = NicSeries(("pe0",), (0.0, 0.5, 0.99, 1.5, 1.9), ((0,), (100,), (198,), (300,), (380,)))
    (window,) = seen.windows(1.0)
    assert (window.from_s, window.to_s) == (0.0, 0.99)
    assert window.rates == pytest.approx((200.0,))


def test_since_starts_anew() -> None:
    later = series((0,), (1,), (2,), (3,)).since(1.5)
    assert later.times_s == (0.5, 1.5)
    assert later.received == ((2,), (3,))


def test_balance_is_the_mean_of_max_over_mean() -> None:
    windows = [WindowRates(0, 1, (10, 10)), WindowRates(1, 2, (30, 10)), WindowRates(2, 3, (0, 0))]
    assert balance(windows) == pytest.approx((1.0 + 1.5) / 2)


# Bounds and answers.


def test_read_bound_counts_whole_blocks_and_headers() -> None:
    bound = read_bound(9, LAYOUT, nics=2, rate_bytes_s=1000)
    assert bound.read_bytes == 3 * (2 * 4 * 64 + HEADER_BYTES)
    assert bound.seconds == bound.read_bytes / 2000


def test_equal_pair_error_is_the_worst() -> None:
    assert equal_pair_error([(10.0, 10.0), (9.0, 10.0), (11.0, 10.5)]) == pytest.approx(0.1)


def test_arithmetic_of_a_published_model() -> None:
    """Qwen2.5-32B in FP16: 117 GB/PFLOP at 16K cached and 429 appended tokens."""
    layout = KVLayout("gqa", 64, 16, (RowPart("k", 8, 128), RowPart("v", 8, 128)), "float16", 2)
    found = arithmetic(
        layout, weights=31_980_000_000, query_width=5120, cached_tokens=16_384, append_tokens=429
    )
    assert found.kv_bytes_token == 262_144
    assert found.gb_pflop == pytest.approx(117.2, rel=0.002)


def test_wrong_tokens() -> None:
    expected = {b"[1]": (1, 2, 3), b"[2]": (4, 5)}
    assert wrong_tokens(expected, dict(expected)) == 0
    assert wrong_tokens(expected, {b"[1]": (1, 9, 3), b"[2]": (4, 5)}) == 1
    assert wrong_tokens(expected, {b"[1]": (1, 2), b"[2]": (4, 5)}) == 1
    assert wrong_tokens(expected, {b"[1]": (1, 2, 3), b"[3]": (4, 5)}) == 4


def test_turns_of_one_agent_are_compared_in_one_sequence() -> None:
    turns = [((1, 2), (3, 4)), ((1, 2, 3, 4, 5), (6,)), ((7, 8), (9,))]
    assert sequenced(turns) == [
        Sequenced((1, 2, 3, 4, 5, 6), ((2, 4), (5, 6))),
        Sequenced((7, 8, 9), ((2, 3),)),
    ]


# Figures of pooling.


def one_pass(jct_s: float, *, answers: dict[bytes, tuple[int, ...]] | None = None) -> Pass:
    received = ((0, 0), (1000, 900), (2000, 1800))
    return Pass(
        jct_s=jct_s,
        requests=2,
        prompt_tokens=10,
        read_tokens=8,
        output_tokens=4,
        ttft_s_mean=1.0,
        nics=NicSeries(("pe0", "de0"), (0.0, 1.0, 2.0), received),
        answers={b"[1]": (1, 2)} if answers is None else answers,
    )


def measurements() -> Measurements:
    def of(topology: str, system: str, jct_s: float, **more: object) -> Measured:
        return Measured(topology=topology, system=system, offline=one_pass(jct_s), **more)  # type: ignore[arg-type]

    return Measurements(
        [
            of("1P1D", "basic", 20.0, alone_ttft_s=(2.0, 2.2, 2.1), alone_s=(2.5, 2.7),
               alone_read_over_compute=7.0, long=one_pass(9.9)),
            of("1P1D", "shorter", 11.0),
            of("1P1D", "split", 10.0, alone_ttft_s=(1.2,), long=one_pass(10.0)),
            of("1P1D", "oracle", 1.0),
            Measured(topology="1P1D", system="decode side", alone_ttft_s=(2.4,)),
            of("1P2D", "basic", 20.0),
            of("1P2D", "split", 7.0),
            of("2P1D", "basic", 10.5),
            of("2P1D", "split", 7.2),
        ],
        LAYOUT,
        RATE,
    )  # fmt: skip


def test_figures_of_pooling() -> None:
    figures = measurements().figures()
    assert figures["speedup_split_1p1d"] == 2.0
    assert figures["speedup_shorter_1p1d"] == pytest.approx(20 / 11)
    assert figures["speedup_split_1p2d"] == pytest.approx(20 / 7)
    assert figures["pool_utilisation"] == pytest.approx(0.95)
    assert figures["balance_max_avg"] == pytest.approx(1000 / 950)
    assert figures["equal_pair_error"] == pytest.approx(10.5 / 10 - 1, abs=0.01)
    assert figures["ttft_split_gain"] == pytest.approx(2.1 / 1.2)
    assert figures["compute_bound_ratio"] == pytest.approx(0.99)
    assert figures["read_over_compute"] == 7.0
    assert figures["alone_s"] == {"basic": 2.6}
    assert figures["jct_s"]["2P1D"] == {"basic": 10.5, "split": 7.2}  # type: ignore[index,call-overload]
    bytes_read = 2 * (2 * 4 * 64 + HEADER_BYTES)
    assert figures["bound_s"]["1P1D"]["basic"] == bytes_read / RATE  # type: ignore[index,call-overload]
    assert figures["bound_s"]["1P1D"]["split"] == bytes_read / RATE / 2  # type: ignore[index,call-overload]
    assert "oracle" not in figures["bound_s"]["1P1D"]  # type: ignore[index,call-overload,operator]


def test_figures_that_were_not_measured_are_absent() -> None:
    found = Measurements(
        [Measured(topology="1P1D", system="split", offline=one_pass(3.0))], LAYOUT, RATE
    )
    assert (
        not {"speedup_split_1p1d", "ttft_split_gain", "equal_pair_error"} & found.figures().keys()
    )


def test_the_answers_of_oracle_do_not_count() -> None:
    wrong = one_pass(1.0, answers={b"[1]": (1, 3)})
    measured = [
        Measured(topology="1P1D", system=name, offline=wrong)
        for name in ("oracle", "split", "basic")
    ]
    assert Measurements(measured, LAYOUT, RATE).wrong_tokens({b"[1]": (1, 2)}) == 2


def test_utilisation_over_time() -> None:
    assert utilisation_over_time(one_pass(2.0), RATE) == {"pe0": [1.0, 1.0], "de0": [0.9, 0.9]}


def test_the_report_has_every_topology() -> None:
    found = measurements()
    setup = {"agents": 2, "turns": 1, "snic": "400mbit"}
    page = pooling_page(BenchResult("pooling", found.figures(), setup), found)  # type: ignore[arg-type]
    text = render(page)
    for name in ("1P1D", "1P2D", "2P1D", "speedup_split_1p1d", "Storage NICs over time"):
        assert name in text


# Figures of online.


def online_run(rate: float | None, ttft_s: float, gap_s: float) -> Run:
    request = RequestRecord(
        session=0, turn=0, scheduled_s=0.0, sent_s=0.0, first_s=ttft_s, second_s=ttft_s + gap_s,
        last_s=ttft_s + 3 * gap_s, end_s=ttft_s + 3 * gap_s, prompt_tokens=10, output_tokens=3,
        cached_tokens=8, timings={"read_s": ttft_s / 2},
    )  # fmt: skip
    return Run(mode="online", rate_aps=rate, requests=[request])


def online(
    system: str, best: float | None, gap_s: float, answer: tuple[int, ...] = (1,)
) -> OnlineMeasured:
    return OnlineMeasured(
        system=system,
        slo=Slo({"ttft": 1.0}),
        alone=online_run(None, 0.2, gap_s),
        common=online_run(0.5, 0.4, gap_s),
        found=Found(best_aps=best, bounded=True, problems={1.0: "", 2.0: "too slow"},
                    runs=[online_run(1.0, 0.6, gap_s)]),
        bound_aps=2.0,
        answers={b"[1]": answer},
    )  # fmt: skip


def test_figures_of_online() -> None:
    figures = online_figures(
        [online("basic", 1.0, 0.1), online("shorter", 1.8, 0.1), online("split", 1.9, 0.08, (2,))]
    )
    assert figures["aps_gain_split"] == 1.9
    assert figures["aps_gain_shorter"] == 1.8
    assert figures["ttst_ratio"] == pytest.approx(0.8)
    assert figures["tpot_ratio"] == pytest.approx(0.8)
    assert figures["ttst_ratio_p50"] == pytest.approx(0.8)
    assert figures["wrong_tokens"] == 1
    assert figures["tried_aps"]["basic"] == {"1": "sustained", "2": "too slow"}  # type: ignore[index,call-overload]
    assert figures["ttft_s_mean"]["split"] == {"0.5": 0.4, "1": 0.6}  # type: ignore[index,call-overload]
    assert figures["ttft_parts_s"]["basic"]["0.5"] == pytest.approx({"read": 0.2, "other": 0.2})  # type: ignore[index,call-overload]
    assert figures["hit_rate"] == {"basic": 0.8, "shorter": 0.8, "split": 0.8}


def test_no_gain_over_nothing() -> None:
    figures = online_figures([online("basic", None, 0.1), online("split", 1.0, 0.1)])
    assert "aps_gain_split" not in figures
    assert figures["max_aps"] == {"basic": 0.0, "split": 1.0}
