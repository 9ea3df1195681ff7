"""A server that answers like an OpenAI endpoint, with no model: against it shows what a client itself costs.

    python -m dualpath.bench.replay.null_server --ttft-s 0.2 --tpot-s 0.04

Loopback only. It can be overloaded, stall, refuse and cut streams: by count, so alike in each run. This
module knows the process and its command line; what is answered is in `null_answers`.
"""

from __future__ import annotations

import argparse
import asyncio
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from dualpath.base.errors import DualPathError
from dualpath.bench.replay.null_answers import NullConfig, serve_null

__all__ = ["NullServer", "main"]

_LISTENING = "listening on "
_START_DEADLINE_S = 20.0
_STOP_DEADLINE_S = 10.0


class NullServer:
    """The server as a process of its own, running inside the context; none is left behind.

    DualPathError if it does not start.
    """

    def __init__(self, config: NullConfig | None = None) -> None:
        self._config = config or NullConfig()
        self._process: subprocess.Popen[str] | None = None
        self.base_url = ""
        """With /v1, once started."""

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self._process is not None
        return self._process.pid

    def __enter__(self) -> NullServer:
        command = [sys.executable, "-m", __name__, *self._config.arguments()]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], _START_DEADLINE_S)
        line = self._process.stdout.readline() if ready else ""
        if not line.startswith(_LISTENING):
            self._stop()
            raise DualPathError(f"the null server did not start: {' '.join(command)}")
        self.base_url = line.removeprefix(_LISTENING).strip()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.terminate()
        try:
            process.wait(_STOP_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        assert process.stdout is not None
        process.stdout.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. The address is the first line of standard output."""
    parser = argparse.ArgumentParser(prog="null_server", description=__doc__, allow_abbrev=False)
    parser.add_argument("--port", type=int, default=0, metavar="N", help="0: any free one")
    NullConfig.add_arguments(parser)
    args = parser.parse_args(arguments)
    asyncio.run(_serve(NullConfig.from_arguments(args), args.port))
    return 0


async def _serve(config: NullConfig, port: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop.set)
    async with serve_null(config, port=port) as address:
        print(f"{_LISTENING}{address}", flush=True)
        await stop.wait()


if __name__ == "__main__":
    sys.exit(main())
