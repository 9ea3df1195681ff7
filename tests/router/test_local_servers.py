"""`dualpath serve --engine vllm`: the plan, and the processes, with a small program in vLLM's place."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from dualpath.base.errors import ConfigError
from dualpath.base.ids import Role
from dualpath.bench.server import ServeProcess, ServerFailed
from dualpath.router.local_plan import (
    free_ports,
    host_gpus,
    plan_servers,
    router_config,
    with_local_model,
)
from dualpath.serve.config import EngineKind, ServeConfig
from dualpath.vllm.step_quota import QuotaSettings

STAND_IN = """
import argparse, json, os, subprocess, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
args, _ = parser.parse_known_args()
if os.environ.get("STAND_IN_FAILS"):
    sys.exit("no such model")
# An engine core, which must not outlive the server.
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)  # stand-in core"])


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.reply({})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        params = (body.get("kv_transfer_params") or {}).get("dualpath") or {}
        answer = {"choices": [{"text": str(os.getpid())}], "usage": {"prompt_tokens": 3}}
        if params.get("role") == "prefill":
            answer["kv_transfer_params"] = {"dualpath": {**params, "role": "decode"}}
        answer["secret"] = len(os.environ["DUALPATH_KV_SECRET"])
        answer["key"] = os.environ.get("VLLM_API_KEY")
        self.reply(answer)

    def reply(self, content):
        data = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        pass


ThreadingHTTPServer(("127.0.0.1", args.port), Handler).serve_forever()
"""
SERVE = """
import sys
from dualpath.base.config_cli import add_config_arguments, config_from_args
from dualpath.router.local_service import run_with_servers
from dualpath.serve.config import ServeConfig
import argparse, logging
logging.basicConfig(level="INFO", stream=sys.stderr)
parser = argparse.ArgumentParser()
add_config_arguments(parser, ServeConfig)
config = config_from_args(ServeConfig, parser.parse_args(sys.argv[2:]))
sys.exit(run_with_servers(config, (sys.executable, sys.argv[1])))
"""


@pytest.fixture
def serve(tmp_path: Path):
    """`dualpath serve` with the stand-in; whatever happens, no process is left."""
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN)
    others = psutil.Process().children(recursive=True)

    def make(*arguments: str, **more: float) -> ServeProcess:
        command = [sys.executable, "-c", SERVE, str(program)]
        given = ["model", "--engine", "vllm", "--gpus-per-server", "0", *arguments]
        return ServeProcess(given, tmp_path / "serve.log", command=command, **more)

    yield make
    assert psutil.Process().children(recursive=True) == others


def cores() -> list[psutil.Process]:
    """Of all stand-ins that run."""
    found = []
    for process in psutil.process_iter():
        try:
            if "stand-in core" in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def config(**settings: object) -> ServeConfig:
    return ServeConfig(model="m", engine=EngineKind.VLLM, **settings)


# The plan.


def test_each_server_gets_ports_devices_and_its_share() -> None:
    given = config(
        decode=2,
        gpus_per_server=2,
        store="/mnt/kv",
        store_capacity=6 * 2**30,
        vllm_args="--enforce-eager --seed '7'",
        api_key="k",
        served_model_name="name",
    )
    servers = plan_servers(given, itertools.count(9000, 10), list("abcdef"))
    assert [(each.name, each.role) for each in servers] == [
        ("prefill0", Role.PREFILL),
        ("decode0", Role.DECODE),
        ("decode1", Role.DECODE),
    ]
    assert [each.launch.gpus for each in servers] == [("a", "b"), ("c", "d"), ("e", "f")]
    assert [each.url for each in servers] == [
        "http://127.0.0.1:9010#kv=9000",
        "http://127.0.0.1:9030#kv=9020",
        "http://127.0.0.1:9050#kv=9040",
    ]
    launch = servers[0].launch
    assert launch.connector.store == "/mnt/kv"
    assert launch.connector.store_capacity_bytes == 2**30
    assert launch.extra == ("--enforce-eager", "--seed", "7")
    assert (launch.served_model_name, launch.api_key) == ("name", "k")
    router = router_config(given, servers)
    assert router.prefill == (servers[0].url,)
    assert router.decode == (servers[1].url, servers[2].url)


def test_on_the_cpu_the_cores_are_divided() -> None:
    servers = plan_servers(config(gpus_per_server=0, threads=3), itertools.count(1), [])
    assert [(each.launch.threads, each.launch.gpus) for each in servers] == [(3, ())] * 2


def test_prefill_servers_alone_have_the_quota() -> None:
    servers = plan_servers(
        config(decode=2, gpus_per_server=0, quota_pairs=10**9), itertools.count(1), []
    )
    quotas = {each.role: each.launch.quota for each in servers}
    assert quotas == {
        Role.PREFILL: QuotaSettings(quota_s=10**9, per_pair_s=1),
        Role.DECODE: None,
    }
    assert plan_servers(config(gpus_per_server=0), itertools.count(1), [])[0].launch.quota is None


def test_too_few_devices() -> None:
    with pytest.raises(ConfigError, match="2 servers need 2 GPUs, and there are 1"):
        plan_servers(config(), itertools.count(1), ["0"])


def test_devices_are_those_that_may_be_seen() -> None:
    assert host_gpus({"CUDA_VISIBLE_DEVICES": "3, GPU-4,"}) == ["3", "GPU-4"]
    assert host_gpus({"CUDA_VISIBLE_DEVICES": ""}) == []


def test_ports_are_free_and_in_rows() -> None:
    ports = list(itertools.islice(free_ports(4), 20))
    taken = [port + rank for port in ports for rank in range(4)]
    assert len(set(taken)) == 80


def test_models_that_vllm_knows_stay_as_they_are() -> None:
    given = config()
    assert with_local_model(given) is given


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quota_s": 1.0}, "--quota-s: has no meaning with --engine vllm; .* --vllm-args"),
        ({"scheduler": "oracle"}, "--scheduler oracle"),
        ({"vllm_args": "'"}, "--vllm-args: No closing quotation"),
    ],
)
def test_what_vllm_would_ignore_is_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        config(**settings)


def test_what_only_vllm_knows_is_refused_without_it() -> None:
    with pytest.raises(ConfigError, match="--vllm-args: has no meaning with --engine dualpath"):
        ServeConfig(model="m", vllm_args="--x")


# The processes.


def test_servers_are_started_served_and_ended(serve) -> None:
    before = len(cores())
    with serve("--decode", "2", "--api-key", "k") as served:
        body = {"model": "model", "prompt": "Hi"}
        with httpx.Client(trust_env=False, headers={"Authorization": "Bearer k"}) as client:
            answer = client.post(f"{served.base_url}/completions", json=body)
            assert answer.status_code == 200
            assert len(answer.headers["x-dualpath-servers"].split(", ")) == 2
            assert (answer.json()["secret"], answer.json()["key"]) == (64, "k")
        assert len(cores()) == before + 3
    assert len(cores()) == before


def test_a_server_that_dies_is_started_again(serve) -> None:
    before = len(cores())
    with serve() as served, httpx.Client(trust_env=False) as client:
        url, body = f"{served.base_url}/completions", {"model": "model", "prompt": "Hi"}
        pid = int(client.post(url, json=body).json()["choices"][0]["text"])
        os.kill(pid, signal.SIGKILL)
        until_s = time.monotonic() + 60
        while True:
            answer = client.post(url, json=body)
            if answer.status_code == 200:
                break
            assert answer.status_code == 503 and time.monotonic() < until_s
            time.sleep(0.05)
        assert int(answer.json()["choices"][0]["text"]) != pid
        assert len(cores()) == before + 2
    assert len(cores()) == before


def test_servers_that_do_not_stay_up_end_it(serve, monkeypatch) -> None:
    monkeypatch.setenv("STAND_IN_FAILS", "1")
    with pytest.raises(ServerFailed, match="exit code 1") as caught:
        serve().start()
    assert "does not stay up" in str(caught.value)


def test_servers_end_with_a_router_that_is_killed(serve) -> None:
    before = len(cores())
    served = serve()
    served.start()
    assert len(cores()) == before + 2
    os.kill(served.pid, signal.SIGKILL)
    with pytest.raises(ServerFailed):
        served.stop()
    for process in psutil.process_iter():
        try:
            if "stand_in.py" in " ".join(process.cmdline()):
                process.wait(20)
        except psutil.NoSuchProcess:
            continue
    for core in cores()[before:]:
        core.kill()  # A real engine core notices by itself.


def test_the_command_refuses_what_cannot_be() -> None:
    command = [sys.executable, "-m", "dualpath", "serve", "m", "--engine", "vllm"]
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environ
    )
    assert done.returncode == 2
    assert "2 servers need 2 GPUs, and there are 1" in done.stderr
