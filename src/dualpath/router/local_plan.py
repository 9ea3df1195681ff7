"""Which vLLM servers `dualpath serve --engine vllm` starts on this host, and the router before them.

From the configuration, free ports and devices to one `VllmLaunch` a server and a `RouterConfig`. Starts
nothing.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from dualpath.base.errors import ConfigError
from dualpath.base.ids import Role
from dualpath.engine.model_source import ModelSpec, resolve_model
from dualpath.router.config import RouterConfig
from dualpath.serve.config import ServeConfig
from dualpath.vllm.launch import VllmLaunch
from dualpath.vllm.settings import ConnectorSettings
from dualpath.vllm.step_quota import QuotaSettings

__all__ = [
    "LocalServer",
    "free_ports",
    "host_gpus",
    "plan_servers",
    "router_config",
    "with_local_model",
]

_LOOPBACK = "127.0.0.1"
_BUILT_IN_MODELS = ("tiny", "smollm2")


@dataclass(frozen=True, slots=True)
class LocalServer:
    """`name` such as prefill0."""

    name: str
    role: Role
    launch: VllmLaunch

    @property
    def url(self) -> str:
        """As the router is told."""
        connector = self.launch.connector
        kv = f"#kv={connector.kv_port}" if connector is not None else ""
        return f"http://{self.launch.host}:{self.launch.port}{kv}"


def plan_servers(
    config: ServeConfig, ports: Iterator[int], gpus: Sequence[str]
) -> list[LocalServer]:
    """`ports` that are free; a KV endpoint takes as many in a row as a server has ranks, from one of them on.
    `gpus`: ids of the host's devices. ConfigError when there are too few."""
    count = config.prefill + config.decode
    each_gpus = config.gpus_per_server
    if count * each_gpus > len(gpus):
        raise ConfigError(
            f"--gpus-per-server {each_gpus}: {count} servers need {count * each_gpus} GPUs, and there are "
            f"{len(gpus)}; start fewer servers, or set CUDA_VISIBLE_DEVICES to the ids of those there are; 0 "
            "runs them on the CPU"
        )
    names = [(Role.PREFILL, n) for n in range(config.prefill)]
    names += [(Role.DECODE, n) for n in range(config.decode)]
    servers = []
    for place, (role, number) in enumerate(names):
        buffer_bytes = config.pe_buffer if role is Role.PREFILL else config.de_buffer
        connector = ConnectorSettings(
            store=config.store_address or "",
            store_capacity_bytes=config.store_capacity // (count * max(1, each_gpus)),
            buffer_bytes=buffer_bytes // max(1, each_gpus),
            kv_port=next(ports),
        )
        threads = config.threads
        if threads is None and not each_gpus:
            threads = max(1, (os.cpu_count() or 1) // count)
        launch = VllmLaunch(
            model=config.model,
            served_model_name=config.model_name,
            host=_LOOPBACK,
            port=next(ports),
            connector=connector,
            load_failure_policy=config.kv_load_failure_policy.value,
            block_tokens=config.block_tokens,
            revision=config.revision,
            dtype=config.dtype.value,
            max_model_len=config.max_model_len,
            chat_template=config.chat_template,
            gpus=tuple(gpus[place * each_gpus : (place + 1) * each_gpus]),
            threads=threads,
            api_key=config.api_key,
            quota=_quota(config) if role is Role.PREFILL else None,
            extra=tuple(shlex.split(config.vllm_args)),
        )
        servers.append(LocalServer(f"{role.value}{number}", role, launch))
    return servers


def _quota(config: ServeConfig) -> QuotaSettings | None:
    if config.quota_pairs is None:
        return None
    return QuotaSettings(quota_s=config.quota_pairs, per_pair_s=1)


def router_config(config: ServeConfig, servers: Sequence[LocalServer]) -> RouterConfig:
    """The router before them, with what `dualpath serve` was told."""
    return RouterConfig(
        prefill=tuple(each.url for each in servers if each.role is Role.PREFILL),
        decode=tuple(each.url for each in servers if each.role is Role.DECODE),
        read_path=config.read_path,
        scheduler=config.scheduler,
        seed=config.seed,
        alpha_tokens=config.alpha_tokens,
        beta_tokens=config.beta_tokens,
        host=config.host,
        port=config.port,
        api_key=config.api_key,
        max_concurrent_requests=config.max_concurrent_requests,
        max_body=config.max_body,
        request_timeout_s=config.request_timeout_s,
        drain_timeout_s=config.drain_timeout_s,
        log_level=config.log_level,
    )


def with_local_model(config: ServeConfig) -> ServeConfig:
    """A built-in model by its directory, since vLLM does not know its name."""
    if config.model not in _BUILT_IN_MODELS:
        return config
    directory = resolve_model(ModelSpec(model=config.model)).directory
    return msgspec.structs.replace(
        config, model=str(directory), served_model_name=config.model_name
    )


def free_ports(run: int) -> Iterator[int]:
    """Ports of loopback that nobody listens on now, each the first of `run` in a row."""
    given: set[int] = set()
    while True:
        with contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind((_LOOPBACK, 0))
            port: int = first.getsockname()[1]
            wanted = set(range(port, port + run))
            if wanted & given or port + run > 65535:
                continue
            try:
                for each in range(port + 1, port + run):
                    stack.enter_context(socket.socket()).bind((_LOOPBACK, each))
            except OSError:
                continue
        given |= wanted
        yield port


def host_gpus(environ: Mapping[str, str]) -> list[str]:
    """Ids of the devices: those of CUDA_VISIBLE_DEVICES, else all that the driver shows."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [each.strip() for each in visible.split(",") if each.strip()]
    try:
        names = os.listdir("/dev")
    except OSError:
        return []
    return sorted((name.removeprefix("nvidia") for name in names if _is_gpu(name)), key=int)


def _is_gpu(name: str) -> bool:
    return name.startswith("nvidia") and name.removeprefix("nvidia").isdecimal()
