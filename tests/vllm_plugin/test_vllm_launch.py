"""The command line and environment of a vLLM server."""

from __future__ import annotations

import dataclasses
import json

import pytest

from dualpath.vllm.launch import VllmLaunch, vllm_arguments, vllm_environment
from dualpath.vllm.settings import ConnectorSettings, connector_settings
from dualpath.vllm.step_quota import QuotaSettings, quota_settings

LAUNCH = VllmLaunch(
    model="/models/m",
    served_model_name="m",
    port=8101,
    connector=ConnectorSettings(store="/mnt/kv", kv_port=9001),
    load_failure_policy="recompute",
    block_tokens=64,
)


def flags_of(launch: VllmLaunch) -> dict[str, str]:
    arguments = vllm_arguments(launch)
    assert arguments[:2] == ["-m", "vllm.entrypoints.openai.api_server"]
    rest = [each for each in arguments[2:] if each != "--enable-prompt-tokens-details"]
    return dict(zip(rest[::2], rest[1::2], strict=True))


def test_the_connector_is_loaded_with_its_settings() -> None:
    flags = flags_of(LAUNCH)
    transfer = json.loads(flags.pop("--kv-transfer-config"))
    assert flags == {
        "--model": "/models/m",
        "--served-model-name": "m",
        "--host": "127.0.0.1",
        "--port": "8101",
        "--dtype": "auto",
        "--block-size": "64",
    }
    extra = transfer.pop("kv_connector_extra_config")
    assert extra == {"store": "/mnt/kv", "kv_port": 9001}
    assert connector_settings(extra) == LAUNCH.connector
    assert transfer == {
        "kv_connector": "DualPathConnector",
        "kv_connector_module_path": "dualpath.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
    }


def test_what_is_given_is_said_and_extra_comes_last() -> None:
    launch = VllmLaunch(
        model="m",
        served_model_name="n",
        port=1,
        connector=ConnectorSettings(),
        load_failure_policy="fail",
        block_tokens=32,
        revision="main",
        dtype="float32",
        max_model_len=100,
        chat_template="/t.jinja",
        gpus=("4", "5"),
        extra=("--dtype", "bfloat16"),
    )
    arguments = vllm_arguments(launch)
    assert arguments[-2:] == ["--dtype", "bfloat16"]
    for pair in (
        ["--revision", "main"],
        ["--max-model-len", "100"],
        ["--chat-template", "/t.jinja"],
        ["--tensor-parallel-size", "2"],
    ):
        start = arguments.index(pair[0])
        assert arguments[start : start + 2] == pair


def test_plain_vllm_has_neither_connector_nor_scheduler() -> None:
    flags = flags_of(dataclasses.replace(LAUNCH, connector=None))
    assert not {"--kv-transfer-config", "--scheduler-cls", "--additional-config"} & flags.keys()


@pytest.mark.parametrize(
    ("gpus", "extra", "scheduler"),
    [
        ((), (), "DualPathScheduler"),
        (("0",), (), "DualPathAsyncScheduler"),
        (("0",), ("--no-async-scheduling", "1"), "DualPathScheduler"),
    ],
)
def test_the_quota_has_the_scheduler_that_fits(
    gpus: tuple[str, ...], extra: tuple[str, ...], scheduler: str
) -> None:
    quota = QuotaSettings(quota_s=400_000, per_pair_s=1)
    flags = flags_of(dataclasses.replace(LAUNCH, quota=quota, gpus=gpus, extra=extra))
    assert flags["--scheduler-cls"] == f"dualpath.vllm.scheduler.{scheduler}"
    assert quota_settings(json.loads(flags["--additional-config"])) == quota


def test_keys_are_in_the_environment_alone() -> None:
    launch = VllmLaunch(
        model="m",
        served_model_name="n",
        port=1,
        connector=ConnectorSettings(),
        load_failure_policy="fail",
        block_tokens=32,
        gpus=("7",),
        threads=3,
        api_key="hunter2",
    )
    found = vllm_environment(launch, {"PATH": "/bin", "VLLM_CPU_OMP_THREADS_BIND": "0-2"})
    assert found == {
        "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "7",
        "OMP_NUM_THREADS": "3",
        "VLLM_CPU_OMP_THREADS_BIND": "0-2",
        "VLLM_API_KEY": "hunter2",
    }
    assert "hunter2" not in " ".join(vllm_arguments(launch))
    assert vllm_environment(LAUNCH, {"A": "b"}) == {"A": "b"}
