"""The command line and environment of a vLLM server, as a rule with `DualPathConnector`. Pure.

Knows vLLM's flags, and neither processes nor who starts them. What is not said here vLLM decides; `extra`
comes last, so it overrides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import msgspec

from dualpath.vllm.settings import ConnectorSettings
from dualpath.vllm.step_quota import QUOTA_KEY, QuotaSettings

__all__ = ["VllmLaunch", "transfer_config", "vllm_arguments", "vllm_environment"]

_MODULE = "vllm.entrypoints.openai.api_server"
"""Not the command `vllm`, which builds of other names do not have in working order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmLaunch:
    """One server on this host. `gpus`: ids of its devices, one a tensor-parallel rank; () on the CPU.

    `connector`: None for plain vLLM. `load_failure_policy`: "recompute" or "fail". `threads`: OpenMP threads
    on the CPU. `api_key`: what clients must send. `quota`: of each step. A None leaves the choice to vLLM.
    """

    model: str
    served_model_name: str
    port: int
    connector: ConnectorSettings | None
    load_failure_policy: str
    block_tokens: int
    host: str = "127.0.0.1"
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    chat_template: str | None = None
    gpus: tuple[str, ...] = ()
    threads: int | None = None
    api_key: str | None = None
    quota: QuotaSettings | None = None
    extra: tuple[str, ...] = ()


def vllm_arguments(launch: VllmLaunch) -> list[str]:
    """What follows the Python interpreter."""
    flags: dict[str, object] = {
        "--model": launch.model,
        "--served-model-name": launch.served_model_name,
        "--host": launch.host,
        "--port": launch.port,
        "--dtype": launch.dtype,
        "--block-size": launch.block_tokens,
        "--revision": launch.revision,
        "--max-model-len": launch.max_model_len,
        "--chat-template": launch.chat_template,
        "--tensor-parallel-size": len(launch.gpus) if len(launch.gpus) > 1 else None,
        "--kv-transfer-config": _transfer(launch),
        **_scheduler(launch),
    }
    given = [
        text for flag, value in flags.items() if value is not None for text in (flag, str(value))
    ]
    # So that answers say how many tokens were found stored.
    return ["-m", _MODULE, *given, "--enable-prompt-tokens-details", *launch.extra]


def transfer_config(connector: Mapping[str, object], load_failure_policy: str) -> str:
    """The JSON of `--kv-transfer-config`; `connector`: our settings, as in `ConnectorSettings`."""
    return json.dumps(
        {
            "kv_connector": "DualPathConnector",
            "kv_connector_module_path": "dualpath.vllm.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": load_failure_policy,
            "kv_connector_extra_config": connector,
        }
    )


def vllm_environment(launch: VllmLaunch, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` with what this server needs; keys are kept from the command line, which others can read."""
    found = dict(environ)
    if launch.gpus:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(launch.gpus)
    if launch.threads is not None:
        found["OMP_NUM_THREADS"] = str(launch.threads)
        # Servers that share the host's cores must not bind to the same ones.
        found.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    if launch.api_key is not None:
        found["VLLM_API_KEY"] = launch.api_key
    return found


def _transfer(launch: VllmLaunch) -> str | None:
    if launch.connector is None:
        return None
    return transfer_config(_settings(launch.connector), launch.load_failure_policy)


def _scheduler(launch: VllmLaunch) -> dict[str, object]:
    """vLLM schedules asynchronously unless it runs on the CPU or is told not to, and our class must match."""
    if launch.quota is None:
        return {}
    synchronous = not launch.gpus or "--no-async-scheduling" in launch.extra
    name = "DualPathScheduler" if synchronous else "DualPathAsyncScheduler"
    return {
        "--scheduler-cls": f"dualpath.vllm.scheduler.{name}",
        "--additional-config": json.dumps({QUOTA_KEY: msgspec.structs.asdict(launch.quota)}),
    }


def _settings(connector: ConnectorSettings) -> dict[str, object]:
    """Only what differs from the defaults."""
    defaults = ConnectorSettings()
    return {
        name: value
        for name, value in msgspec.structs.asdict(connector).items()
        if value != getattr(defaults, name)
    }
