"""`dualpath bench replay` from flags to files, with an endpoint of the test's own."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time

import pytest

from dualpath.base.errors import ConfigError
from dualpath.bench import replay_command
from dualpath.bench.replay.endpoint import Answer, EndpointFacts
from dualpath.bench.replay.records import read_record
from dualpath.bench.replay.settings import settings_of
from dualpath.bench.replay_command import TokenRange
from dualpath.cli import main

URL = "http://127.0.0.1:9/v1"


class QuickEndpoint:
    """Answers at once; `misbehave(count)` may say an error for the request of that number."""

    def __init__(self, config, misbehave=lambda count: ""):
        self.config = config
        self.prompts = []
        self._misbehave = misbehave

    async def __aenter__(self):
        return self

    async def __aexit__(self, *exception):
        return None

    async def probe(self):
        return EndpointFacts(
            model="m",
            max_model_len=2000,
            vocab_size=256,
            returns_token_ids=True,
            reports_timings=False,
        )

    async def send(self, prompt, output_tokens, on_first=None):
        self.prompts.append(prompt.json)
        sent_s = time.perf_counter()
        error = self._misbehave(len(self.prompts))
        await asyncio.sleep(0.001)
        now_s = time.perf_counter()
        if error:
            return Answer(sent_s=sent_s, end_s=now_s, error=error)
        return Answer(
            sent_s=sent_s,
            first_s=now_s,
            second_s=now_s if output_tokens > 1 else None,
            last_s=now_s,
            end_s=now_s,
            token_ids=[1] * output_tokens,
            prompt_tokens=prompt.tokens,
            output_tokens=output_tokens,
            cached_tokens=0,
        )

    async def metrics(self):
        return {}


@pytest.fixture
def endpoints(monkeypatch):
    """The endpoints that the command made; `misbehave` may be set before."""
    made = []

    class Made(QuickEndpoint):
        misbehave = staticmethod(lambda count: "")

        def __init__(self, config):
            super().__init__(config, type(self).misbehave)
            made.append(self)

    monkeypatch.setattr(replay_command, "Endpoint", Made)
    made_class = Made
    return argparse.Namespace(made=made, cls=made_class)


@pytest.fixture
def trace(tmp_path):
    """Two sessions of two turns, and one that is too long from its second turn on."""
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"id": "a", "turns": [[100, 3, 0], [20, 2, 0]]}\n'
        '{"id": "b", "turns": [[100, 3, 0], [20, 2, 0]]}\n'
        '{"id": "long", "turns": [[100, 3, 0], [1900, 2, 0]]}\n'
    )
    return str(path)


def replay(*flags):
    return main.main(["bench", "replay", "--base-url", URL, *flags])


def test_offline_from_flags_to_files(endpoints, trace, tmp_path, capsys):
    output = tmp_path / "out.json"
    code = replay(
        *("--trace", trace, "--mode", "offline", "--agents", "2,5", "--no-delays", "--json"),
        *("--slo", "ttft=4s", "--output", str(output), "--label", "mine", "--api-key", "secret"),
    )
    captured = capsys.readouterr()
    assert code == 0, captured.err
    (line,) = captured.out.splitlines()
    result = json.loads(line)
    figures = result["figures"]
    assert figures["sessions"] == {"2": 2, "5": 5}
    # Of five: a, b, the first turn of long, and copies of a and b with a first round each.
    assert figures["requests"] == {"2": 4, "5": 2 + 2 + 1 + 3 + 3}
    assert figures["slo_attainment"] == {"2": 1.0, "5": 1.0}
    assert set(figures["jct_s"]) == {"2", "5"}
    assert result["setup"]["left_out"].startswith("1 of 6 turns and 0 of 3 sessions are left out")
    assert (result["setup"]["model"], result["setup"]["runs"]) == ("m", ["2", "5"])
    assert "secret" not in captured.out + captured.err
    record = read_record(output)
    assert (record.label, [run.agents for run in record.runs]) == ("mine", [2, 5])
    assert record.figures == figures
    assert "secret" not in output.read_text()
    assert endpoints.made[0].config.api_key == "secret"
    # The second run has other tokens than the first.
    prompts = endpoints.made[0].prompts
    assert len(set(prompts)) == len(prompts)


def test_the_same_command_sends_the_same_prompts(endpoints, trace):
    for _ in range(2):
        assert replay("--trace", trace, "--agents", "3", "--seed", "5") == 0
    first, second = endpoints.made
    assert sorted(first.prompts) == sorted(second.prompts)
    assert replay("--trace", trace, "--agents", "3", "--seed", "6") == 0
    assert not set(first.prompts) & set(endpoints.made[2].prompts)


def test_online_as_recorded_and_at_rates(endpoints, trace, capsys):
    assert (
        replay("--trace", trace, "--mode", "online", "--aps", "100,200", "--max-sessions", "6") == 0
    )
    out = capsys.readouterr().out
    assert "100 agents/s" in out and "200 agents/s" in out and "errors" in out
    with pytest.raises(ConfigError, match="does not tell when"):
        replay_command.run(
            parse("--base-url", URL, "--trace", trace, "--mode", "online", "--arrivals", "trace"),
            print,
        )


def test_find_max_aps(endpoints, trace, capsys):
    flags = ("--trace", trace, "--mode", "online", "--find-max-aps", "--aps", "50")
    flags += ("--slo", "ttft=4s", "--max-sessions", "4", "--precision", "0.5")
    endpoints.cls.misbehave = staticmethod(lambda count: "http 503" if count > 20 else "")
    assert replay(*flags, "--json") == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    tried = figures["tried_aps"]
    assert list(tried)[:3] == ["50", "100", "200"]
    assert tried["50"] == tried["100"] == "sustained"
    assert tried["200"].endswith("errors")
    assert 100 <= figures["max_aps"] < 200
    assert figures["max_aps_bounded"]
    assert replay(*flags) == 0
    assert "highest sustained rate" in capsys.readouterr().out


def test_ctrl_c_gives_the_partial_result_and_exit_code_130(endpoints, trace, tmp_path, capsys):
    output = tmp_path / "out.json"

    def press(count):
        if count == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return ""

    endpoints.cls.misbehave = staticmethod(press)
    code = replay(
        *("--trace", trace, "--mode", "online", "--aps", "20", "--max-sessions", "500", "--json"),
        *("--output", str(output)),
    )
    assert code == 130
    result = json.loads(capsys.readouterr().out)
    assert result["figures"]["ended"] == "interrupted"
    assert 2 <= result["figures"]["requests"] < 20
    (run,) = read_record(output).runs
    assert run.ended == "interrupted"
    assert len(run.requests) >= 3
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_errors_are_shown_by_kind(endpoints, trace, capsys):
    endpoints.cls.misbehave = staticmethod(lambda count: "timeout" if count % 2 else "")
    assert replay("--trace", trace) == 0
    assert "timeout" in capsys.readouterr().out
    endpoints.cls.misbehave = staticmethod(lambda count: "")
    assert replay("--trace", trace) == 0
    out = capsys.readouterr().out
    assert [row for row in out.splitlines() if "errors" in row and "none" in row]


def test_describe_needs_no_server(trace, capsys):
    assert main.main(["bench", "replay", "--trace", trace, "--describe", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert (figures["sessions"], figures["turns"]) == (3, 6)
    assert main.main(["bench", "replay", "--trace", trace, "--describe"]) == 0
    assert "hit_rate" in capsys.readouterr().out


def test_help_teaches(capsys):
    assert main.main(["bench", "replay", "--help"]) == 0
    out = capsys.readouterr().out
    for words in (
        "vLLM",
        "SGLang",
        "examples",
        "--find-max-aps",
        "the server:",
        "mooncake-conversation",
    ):
        assert words in out
    assert max(map(len, out.splitlines())) <= 115


def test_it_is_listed_with_what_it_needs(capsys):
    assert main.main(["bench", "--list"]) == 0
    assert "(needs a server and a trace)" in capsys.readouterr().out
    assert main.main(["bench", "--list", "--alone"]) == 0
    assert "replay" not in [row.split()[0] for row in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize(
    ("size", "first", "end"),
    [(None, 1000, 30_000), (256, 0, 256), (300, 0, 256), (100, 0, 100), (4096, 512, 3840)],
)
def test_token_range(size, first, end):
    assert TokenRange.of_vocabulary(size) == TokenRange(first, end)


def parse(*flags):
    parser = argparse.ArgumentParser()
    replay_command.add_arguments(parser)
    return parser.parse_args(flags)


def settings(*flags, environ=None):
    flags = ("--base-url", URL, "--trace", "smoke", *flags)
    return settings_of(parse(*flags), environ or {})


def test_settings():
    found = settings(
        *("--extra-body", '{"priority": 1}', "--cache-salt", "x", "--slo", "ttft=3s"),
        *("--mode", "online", "--aps", "0.5,1", "--duration", "60"),
        environ={"OPENAI_API_KEY": "k"},
    )
    assert found.endpoint.extra_body == {"priority": 1, "cache_salt": "x"}
    assert found.endpoint.api_key == "k"
    assert found.rates == (0.5, 1.0)
    assert found.limits.steady.ttft_limit_s == 3.0
    assert not found.limits.steady.steady_ends
    assert settings("--mode", "online", "--aps", "1").limits.steady.steady_ends
    assert settings().limits.steady is None
    environ = {"OPENAI_API_KEY": "k", "DUALPATH_API_KEY": "d"}
    assert settings(environ=environ).endpoint.api_key == "d"
    assert settings("--api-key", "a", environ=environ).endpoint.api_key == "a"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--agents", "1,x"], "--agents: expected numbers such as 1,2,4, got '1,x'"),
        (["--agents", "0"], "--agents: expected numbers above 0"),
        (["--agents", "1.5"], "--agents: expected numbers"),
        (["--agents", "2,2"], "the same"),
        (["--aps", "1"], "need --mode online"),
        (["--mode", "online", "--agents", "1"], "--agents is for --mode offline"),
        (["--mode", "online"], "--aps: how many agents a second"),
        (["--mode", "online", "--find-max-aps"], "needs a --slo"),
        (["--mode", "online", "--find-max-aps", "--slo", "ttft=1s", "--aps", "1,2"], "at most one"),
        (["--slo", "x=1s"], "unknown metric"),
        (["--speed", "0"], "--speed: expected a number above 0, got 0"),
        (["--speed", "nan"], "--speed"),
        (["--max-context", "0"], "--max-context: expected a number >= 1"),
        (["--warmup-s", "-1"], "--warmup-s: expected a number >= 0"),
        (["--extra-body", "[1]"], "--extra-body: expected a JSON object"),
        (["--output", "/nowhere/at/all.json"], "--output: there is no directory /nowhere/at"),
        (["--base-url", "127.0.0.1:8000"], "--base-url: expected http://"),
    ],
)
def test_wrong_flags(flags, words):
    with pytest.raises(ConfigError, match=words):
        settings(*flags)


def test_what_is_missing_is_asked_for():
    with pytest.raises(ConfigError, match="--trace"):
        settings_of(parse())
    with pytest.raises(ConfigError, match="--base-url"):
        replay_command.run(parse("--trace", "smoke"), print)
    flags = ("--base-url", URL, "--trace", "smoke", "--mode", "online", "--arrivals", "no.csv")
    with pytest.raises(ConfigError, match="--arrivals: expected poisson, trace or a CSV"):
        replay_command.run(parse(*flags), print)
