"""`dualpath router` as users start it: a process of its own, also before a real `dualpath serve`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import httpx
import pytest

from dualpath.bench.replay.null_answers import NullConfig
from dualpath.bench.replay.null_server import NullServer
from dualpath.bench.server import ServeProcess

ROUTER = (sys.executable, "-m", "dualpath", "router")


def test_it_routes_until_a_signal_and_ends_well(tmp_path: Path) -> None:
    with (
        NullServer() as one,
        NullServer() as two,
        ServeProcess(
            ["--prefill", one.base_url, "--decode", two.base_url],
            tmp_path / "router.log",
            command=ROUTER,
        ) as router,
    ):
        body = {"model": "null", "prompt": "Hello", "max_tokens": 3}
        answer = httpx.post(f"{router.base_url}/completions", json=body, trust_env=False)
        assert answer.json()["choices"][0]["text"] == " null null null"
        assert len(answer.headers["x-dualpath-servers"].split(", ")) == 1
    log = (tmp_path / "router.log").read_text()
    assert "answers without kv_transfer_params" in log
    assert log.rstrip().endswith("stopped")


def test_a_signal_lets_what_runs_end(tmp_path: Path) -> None:
    with NullServer(NullConfig(tpot_s=0.2)) as slow:
        router = ServeProcess(["--server", slow.base_url], tmp_path / "router.log", command=ROUTER)
        router.start()
        body = {"model": "null", "prompt": "Hello", "max_tokens": 6, "stream": True}
        url = f"{router.base_url}/completions"
        with httpx.stream("POST", url, json=body, trust_env=False) as answer:
            lines = answer.iter_lines()
            next(lines)
            os.kill(router.pid, signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        router.stop()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "expected --prefill URL... and --decode URL..."),
        (("--server", "localhost:8000"), "--server: expected http://"),
    ],
)
def test_wrong_flags_end_it_with_code_2(arguments: tuple[str, ...], message: str) -> None:
    done = subprocess.run(
        [*ROUTER, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 2
    assert message in done.stderr


def test_before_dualpath_serve_answers_are_the_same(tmp_path: Path) -> None:
    arguments = ["tiny", "--store", str(tmp_path / "store"), "--block-tokens", "16"]
    with (
        ServeProcess(arguments, tmp_path / "serve.log") as served,
        ServeProcess(
            ["--server", served.base_url], tmp_path / "router.log", command=ROUTER
        ) as router,
        httpx.Client(trust_env=False, timeout=60) as client,
    ):
        completion = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 12}
        chat = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "Hi"}],
            "max_tokens": 12,
            "temperature": 0,
        }
        for path, body in (
            ("completions", completion | {"temperature": 0}),
            ("chat/completions", chat),
        ):
            for more in ({}, {"n": 2}):
                direct, routed = (
                    client.post(f"{url}/{path}", json=body | more)
                    for url in (served.base_url, router.base_url)
                )
                assert routed.status_code == direct.status_code == 200
                assert routed.json()["choices"] == direct.json()["choices"]
            streams = [
                client.post(f"{url}/{path}", json=body | {"stream": True}).text
                for url in (served.base_url, router.base_url)
            ]
            assert next(text.count("data: ") for text in streams) > 2
            assert streams[0].count("data: ") == streams[1].count("data: ")
        wrong = client.post(f"{router.base_url}/completions", json=completion | {"top_p": 7})
        assert wrong.status_code == 400
        assert wrong.json()["error"]["param"] == "top_p"


_WITHOUT = """
import sys
import tomllib

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1].split(","):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocked())
from dualpath.cli.main import main

assert main(["router", "--help"]) == 0
import dualpath.router.service
print("imported")
"""


def test_it_needs_no_more_than_its_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {name: {re.split(r"[<>=;\[ ]", each)[0] for each in extras[name]} for name in extras}
    assert names["router"] <= names["serve"]
    modules = {"pyzmq": "zmq", "huggingface-hub": "huggingface_hub"}
    blocked = {modules.get(each, each) for each in names["serve"] - names["router"]} | {"vllm"}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT, ",".join(blocked)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("imported\n")
