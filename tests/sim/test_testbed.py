"""The prediction of a testbed: against times computed by hand, and against what was measured."""

from __future__ import annotations

import json

import msgspec
import pytest

from dualpath.base.errors import ConfigError
from dualpath.bench.cluster import systems
from dualpath.cli.main import main
from dualpath.sim.testbed import SYSTEMS, ComputeRates, TestbedRun, predict

RATES = ComputeRates(
    prefill_base_s=0.01,
    prefill_token_s=0.001,
    prefill_pair_s=0.0,
    decode_base_s=0.02,
    decode_sequence_s=0.0,
    decode_context_token_s=1e-5,
    join_token_s=0.0001,
    slowdown=(1.0,),
)
RUN = TestbedRun(
    agents=1,
    turns=1,
    context_tokens=1024,
    append_tokens=10,
    output_tokens=6,
    kv_bytes_token=1000,
    block_tokens=16,
    snic_bytes_s=102_400.0,
    cnic_bytes_s=1e12,
    request_s=0.5,
)


def jct_s(
    run: TestbedRun, rates: ComputeRates, system: str, prefill: int = 1, decode: int = 1
) -> float:
    return predict(run, rates, system=system, prefill=prefill, decode=decode).jct_s


@pytest.mark.parametrize(("system", "read_s"), [("basic", 10.0), ("split", 5.0), ("oracle", 0.0)])
def test_one_request_takes_the_sum_of_its_parts(system: str, read_s: float) -> None:
    prefill_s = 0.01 + 10 * 0.001
    # The first of six tokens comes from the prefill engine.
    contexts = sum(1024 + 10 + token for token in range(1, 6))
    decode_s = 5 * 0.02 + contexts * 1e-5 + 1024 * 0.0001
    expected = 0.5 + read_s + prefill_s + decode_s
    assert jct_s(RUN, RATES, system) == pytest.approx(expected, rel=1e-5)


def test_each_turn_finds_the_whole_conversation_and_costs_a_request() -> None:
    work = msgspec.structs.replace(RUN, turns=3, agents=2).work(1.0)
    assert work.prompt_tokens.tolist() == [1034, 1050, 1066] * 2
    assert work.reused_tokens.tolist() == [1024, 1040, 1056] * 2
    assert work.delay_s.tolist() == [0, 0.5, 0.5] * 2
    assert work.start_s.tolist() == [0.5, 0.5]


def test_more_nodes_read_faster_with_the_systems_that_use_them() -> None:
    run = msgspec.structs.replace(RUN, agents=8, turns=4)
    basic, split = jct_s(run, RATES, "basic"), jct_s(run, RATES, "split")
    assert basic / split == pytest.approx(2, rel=0.05)
    assert jct_s(run, RATES, "basic", decode=2) == pytest.approx(basic, rel=0.02)
    assert basic / jct_s(run, RATES, "split", decode=2) > 2.2


def test_slowdown_is_the_mean_over_how_many_compute_at_once() -> None:
    rates = msgspec.structs.replace(RATES, slowdown=(1.0, 1.5, 3.0))
    given: list[list[float]] = [[], [0.5], [1.0], [0.5, 0.5], [1.0, 1.0], [1.0, 1.0, 1.0]]
    assert [rates.slowdown_beside(each) for each in given] == [1.0, 1.25, 1.5, 1.75, 3.0, 4.5]
    assert RATES.slowdown_beside([1.0, 1.0]) == 1.0


def test_engines_that_share_cores_are_slower_as_far_as_they_compute_at_once() -> None:
    run = msgspec.structs.replace(RUN, agents=8, turns=4, request_s=0.0)
    crowded = msgspec.structs.replace(RATES, slowdown=(1.0, 2.0))
    alone = jct_s(run, RATES, "oracle")
    # Decoding is nearly all there is, so the decode engine mostly has its core for itself.
    assert 1.05 * alone < jct_s(run, crowded, "oracle") < 1.5 * alone


def test_an_unknown_system_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"expected a system of .*oracle, got 'best'"):
        predict(RUN, RATES, system="best", prefill=1, decode=1)


def test_turns_without_decoding_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected turns that generate 2 tokens or more, got 1"):
        msgspec.structs.replace(RUN, output_tokens=1)


MEASURED = {
    "bench": "pooling",
    "figures": {
        "jct_s": {
            "1P1D": {"basic": 46.47, "shorter": 23.51, "split": 23.22, "oracle": 3.04},
            "1P2D": {"basic": 46.46, "shorter": 16.35, "oracle": 2.48},
            "2P1D": {"basic": 23.68, "shorter": 16.32, "oracle": 3.01},
        },
        "alone_s": {"basic": 1.58, "oracle": 0.15},
        "compute_rates": {
            "prefill_base_s": 0.00789,
            "prefill_token_s": 0.000147,
            "prefill_pair_s": 7.86e-7,
            "decode_base_s": 0.0050,
            "decode_sequence_s": 0.000498,
            "decode_context_token_s": 9.78e-6,
            "join_token_s": 2.86e-5,
            "slowdown": [1.0, 1.03, 1.54],
        },
    },
    "setup": {
        "model": "random",
        "kv_bytes_token": 65536,
        "cnic": "3200mbit",
        "snic_goodput_bytes_s": 47820343.5,
        "threads": 1,
        "block_tokens": 16,
        "agents": 8,
        "turns": 4,
        "context_tokens": 1024,
    },
}


"""Of a machine with two cores; what one engine's computing takes was measured while others computed, too."""


def written(tmp_path, result) -> str:
    path = tmp_path / "pooling.json"
    path.write_text(json.dumps(result))
    return str(path)


def test_the_command_compares_with_a_result(tmp_path, capsys) -> None:
    assert main(["sim", "testbed", "--results", written(tmp_path, MEASURED), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["bench"] == "sim-testbed"
    figures = result["figures"]
    assert figures["jct_predicted_s"].keys() == {"1P1D", "1P2D", "2P1D"}
    assert figures["testbed_error"] == max(
        abs(each) for by_system in figures["error"].values() for each in by_system.values()
    )
    assert figures["testbed_error"] <= 0.10
    assert result["setup"]["rates"] == "recorded in the result"


def test_the_command_shows_a_table(tmp_path, capsys) -> None:
    assert main(["sim", "testbed", "--results", written(tmp_path, MEASURED)]) == 0
    out = capsys.readouterr().out
    assert "46.47" in out
    assert "worst error" in out


def changed(*path, value=None):
    """`MEASURED` with one thing different, or left out."""
    result = json.loads(json.dumps(MEASURED))
    inner = result
    for key in path[:-1]:
        inner = inner[key]
    if value is None:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return result


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (changed("figures", "compute_rates"), "has no compute rates; use --measure"),
        (changed("figures", "alone_s", "oracle"), "no single requests of oracle"),
        (changed("bench", value="qos"), "got a result of 'qos'"),
        (changed("setup", "model", value="smollm2"), "with --model random"),
        (changed("setup", "agents"), "expected a result of `dualpath bench pooling --json`"),
    ],
)
def test_what_cannot_be_predicted_is_said(tmp_path, capsys, result, words) -> None:
    assert main(["sim", "testbed", "--results", written(tmp_path, result)]) == 2
    assert words in capsys.readouterr().err


def test_a_file_that_is_not_there_is_said(tmp_path, capsys) -> None:
    assert main(["sim", "testbed", "--results", str(tmp_path / "none.json")]) == 2
    assert "cannot read" in capsys.readouterr().err


def test_all_systems_of_the_benchmark_can_be_predicted() -> None:
    # What the decode side reads alone is only measured request by request.
    assert list(SYSTEMS) == [each for each in systems.SYSTEMS if each != "decode side"]
