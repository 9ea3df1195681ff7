from __future__ import annotations

import argparse

import pytest

from dualpath.base.errors import DualPathError
from dualpath.bench import client, peers
from dualpath.bench.harness import Figure, Progress
from dualpath.bench.replay.null_answers import NullConfig
from dualpath.traces import context_tokens


def arguments(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    client.add_arguments(parser)
    return parser.parse_args(["--no-agreement", "--seconds", "0.5", *given])


def test_all_figures_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_TPOT_S", 0.002)
    monkeypatch.setattr(client, "_RATE_RPS", 100.0)
    said: list[str] = []
    result = client.run(arguments("--streams", "20"), said.append)
    assert result.bench == "client"
    figures = result.figures
    for name in ("", "_8k", "_1k", "_one_event"):
        cores, rps = figures[f"client_cores{name}"], figures[f"achieved_rps{name}"]
        assert isinstance(cores, float) and cores > 0
        assert isinstance(rps, float) and rps > 0
    late = [figures[f"schedule_error_ms_{name}"] for name in ("p50", "p99", "max")]
    assert late == sorted(late) and late[0] >= 0  # type: ignore[type-var, operator]
    assert figures["streams_in_flight"] <= 20  # type: ignore[operator]
    assert "agreement_error" not in figures
    assert len(said) == 6


@pytest.mark.parametrize("tokens", [1024, 8192, 32_721])
def test_loads_have_the_prompts_they_say(tokens: int) -> None:
    load = client._Load(
        context_tokens=tokens, output_tokens=176, turns=5, rate_rps=1000, duration_s=1, seed=0
    )
    online = load.online()
    assert len(online.sessions) == 200 and online.rate_aps == 200
    lengths = context_tokens(online.sessions[0])
    assert sum(lengths) / len(lengths) == pytest.approx(tokens, rel=0.001)
    assert lengths[0] > 0 and list(lengths) == sorted(lengths)


def test_failed_requests_give_no_figure() -> None:
    load = client._Load(
        context_tokens=64, output_tokens=8, turns=1, rate_rps=50, duration_s=0.2, seed=0
    )
    with pytest.raises(
        DualPathError, match="of 10 requests to the null server failed, the first: http 503"
    ):
        client._run(NullConfig(error_share=0.5), load, None)


def test_agreement_is_what_the_peers_say(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[peers.AgreementOptions] = []
    found = peers.Agreement(
        error=0.04,
        differences={"aiperf": {"ttft_mean_s": -0.04}},
        versions={"aiperf": "0.13.0"},
        commands={"aiperf": "aiperf profile"},
    )

    def measure(progress: Progress, options: peers.AgreementOptions) -> peers.Agreement:
        asked.append(options)
        return found

    monkeypatch.setattr(peers, "measure_agreement", measure)
    setup: dict[str, Figure] = {}
    figures = client._agreement(arguments("--aiperf", "a", "--no-install"), print, setup)
    assert figures == {"agreement_error": 0.04, "agreement_aiperf": {"ttft_mean_s": -0.04}}
    assert setup == {"version_aiperf": "0.13.0", "command_aiperf": "aiperf profile"}
    assert (asked[0].aiperf, asked[0].vllm, asked[0].install) == ("a", None, False)


def test_without_another_tool_there_is_no_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        peers, "measure_agreement", lambda progress, options: peers.Agreement(error=None)
    )
    assert client._agreement(arguments(), print, {}) == {}
