"""`dualpath router`: flags to a `RouterConfig`, and the router started with it."""

from __future__ import annotations

import argparse

from dualpath.base.config_cli import add_config_arguments, config_from_args
from dualpath.cli.server_log import log_to_stderr
from dualpath.router.config import RouterConfig

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  dualpath router --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8000 http://10.0.0.3:8000
      Pairs of vLLM servers that run DualPathConnector, its KV endpoint on port 9000 of each host.
  dualpath router --prefill http://127.0.0.1:8101#kv=9401 --decode http://127.0.0.1:8102#kv=9402
      A pair on one machine.
  dualpath router --server http://10.0.0.1:8000 http://10.0.0.2:8000
      Plain vLLM, or `dualpath serve`: balanced, without KV between servers.

then:
  curl http://127.0.0.1:8080/v1/completions -H 'Content-Type: application/json' \\
       -d '{"model": "...", "prompt": "Hello", "max_tokens": 16}'
  curl -X POST 'http://127.0.0.1:8080/drain?engine=10.0.0.2:8000'

All flags are described in docs/router-flags.md, the rest in docs/router.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.usage = "dualpath router (--prefill URL... --decode URL... | --server URL...) [flags]"
    parser.epilog = _EPILOG
    add_config_arguments(parser, RouterConfig)


def run(args: argparse.Namespace) -> int:
    config = config_from_args(RouterConfig, args)
    log_to_stderr(config.log_level)
    # Imported here so that `dualpath router --help` needs no server library.
    from dualpath.router.service import run as run_router

    return run_router(config)
