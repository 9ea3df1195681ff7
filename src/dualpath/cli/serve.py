"""`dualpath serve`: flags to a `ServeConfig`, and the server started with it."""

from __future__ import annotations

import argparse

from dualpath.base.config_cli import add_config_arguments, config_from_args
from dualpath.cli.server_log import log_to_stderr
from dualpath.serve.config import EngineKind, ServeConfig

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  dualpath serve tiny
      Random weights and a byte-level tokenizer; needs no download.
  dualpath serve smollm2 --prefill 1 --decode 2 --read-path split
      A small real chat model; stored KV is read by both sides at once.
  DUALPATH_API_KEY=secret dualpath serve ./Qwen3-8B --host 0.0.0.0 --store /mnt/shared/kv
      Reachable from other hosts, with a key.
  dualpath serve ./Qwen3-8B --engine vllm --prefill 1 --decode 2 --store /mnt/nvme/kv
      vLLM servers with the connector, one GPU each, and the router before them.

then:
  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \\
       -d '{"model": "tiny", "prompt": "Hello", "max_tokens": 16}'

All flags are described in docs/configuration.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dualpath serve MODEL [flags]"
    parser.epilog = _EPILOG
    add_config_arguments(parser, ServeConfig)


def run(args: argparse.Namespace) -> int:
    config = config_from_args(ServeConfig, args)
    log_to_stderr(config.log_level)
    if config.engine is EngineKind.VLLM:
        from dualpath.router.local_service import run_with_servers

        return run_with_servers(config)
    # Imported here so that `dualpath serve --help` needs no server library.
    from dualpath.serve.app import run as run_server

    return run_server(config)
