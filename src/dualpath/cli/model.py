"""`dualpath model`: the directory that MODEL stands for, for tools that want a path.

Load generators count tokens with a tokenizer of their own, which they load from a directory: that of a
built-in model or of a converted GGUF file lies in the cache directory.
"""

from __future__ import annotations

import argparse

__all__ = ["add_arguments", "run"]

_EPILOG = """\
examples:
  aiperf profile --tokenizer "$(dualpath model tiny)" ...
  vllm bench serve --tokenizer "$(dualpath model smollm2)" ...
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the directory with the configuration, weights and tokenizer of MODEL; it is made or "
        "downloaded if it is not there yet."
    )
    parser.epilog = _EPILOG
    parser.add_argument("model", metavar="MODEL", help="As for `dualpath serve`.")
    parser.add_argument("--revision", metavar="REV", help="Branch, tag or commit of a hub model.")


def run(args: argparse.Namespace) -> int:
    # Imported here so that `dualpath model --help` needs no model library.
    from dualpath.engine.model_source import ModelSpec, resolve_model

    print(resolve_model(ModelSpec(model=args.model, revision=args.revision)).directory.absolute())
    return 0
