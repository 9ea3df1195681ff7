"""A `dualpath serve` as users start it: a process of its own, its output in a log file, stopped by SIGINT.

What benchmarks and demonstrations measure goes through a real server and real HTTP. This module knows the
command line and the line that announces the address; it knows no requests. Invariant: leaving the context
leaves no process, neither the server nor its engines.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import psutil

from dualpath.base.errors import DualPathError
from dualpath.serve.app import LISTENING

__all__ = ["ServeProcess", "ServerFailed"]

_START_DEADLINE_S = 300.0
_STOP_DEADLINE_S = 60.0
_POLL_S = 0.02
_TAIL_LINES = 15
_ENGINE_MODULE = "dualpath.serve.engine_process"
_ADDRESS = re.compile(rf"^{re.escape(LISTENING)}(\S+)", re.MULTILINE)


class ServerFailed(DualPathError):
    """The server did not start, died, or did not end as it should; the message has the end of its log."""


class ServeProcess:
    """`dualpath serve ARGUMENTS --port 0`, running inside the context; `command` is what precedes ARGUMENTS.

    Standard output and error of the server and of its engines go to the file `log`. Entering waits until
    requests are taken, leaving sends SIGINT and waits for exit code 0; both raise ServerFailed otherwise.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        command: Sequence[str] = (sys.executable, "-m", "dualpath", "serve"),
        start_deadline_s: float = _START_DEADLINE_S,
        stop_deadline_s: float = _STOP_DEADLINE_S,
    ) -> None:
        self.log = log
        self.base_url = ""
        """Where the API is, with `/v1`, once started."""
        self._command = [*command, *arguments, "--port", "0"]
        self._start_deadline_s = start_deadline_s
        self._stop_deadline_s = stop_deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the frontend."""
        return self._started.pid

    @property
    def engine_pids(self) -> dict[int, str]:
        """Process ids of the engines that run now, with their command lines; empty when none does."""
        try:
            children = psutil.Process(self.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return {}
        found = {}
        for child in children:
            try:
                command = " ".join(child.cmdline())
            except psutil.Error:  # It ended meanwhile.
                continue
            if _ENGINE_MODULE in command:
                found[child.pid] = command
        return found

    def start(self) -> None:
        """Start and wait for the address; whatever goes wrong, no process is left."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
        try:
            self.base_url = self._wait_for_address()
        except BaseException:
            self._end_all()
            raise

    def stop(self) -> None:
        """End the server as Ctrl-C does. ServerFailed when it does not end, or not with 0. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGINT)
        try:
            code = process.wait(self._stop_deadline_s)
        except subprocess.TimeoutExpired:
            self._process = process
            self._end_all()
            raise self._failure(
                f"did not end within {self._stop_deadline_s:g} s of SIGINT"
            ) from None
        if code != 0:
            raise self._failure(f"ended with exit code {code}")

    def __enter__(self) -> ServeProcess:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except ServerFailed:
            # What happened inside says more than how the server ended.
            if error is None:
                raise

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailed("the server is not running")
        return self._process

    def _wait_for_address(self) -> str:
        until = time.monotonic() + self._start_deadline_s
        while True:
            found = _ADDRESS.search(self._text())
            if found is not None:
                return found[1]
            code = self._started.poll()
            if code is not None:
                raise self._failure(f"ended with exit code {code} before it took requests")
            if time.monotonic() > until:
                raise self._failure(f"took no requests within {self._start_deadline_s:g} s")
            time.sleep(_POLL_S)

    def _end_all(self) -> None:
        """SIGKILL; the engines end themselves when their frontend is gone."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _text(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def _failure(self, what: str) -> ServerFailed:
        tail = "\n".join(f"  {line}" for line in self._text().splitlines()[-_TAIL_LINES:])
        return ServerFailed(
            f"`{' '.join(self._command[2:])}` {what}. The end of {self.log}:\n{tail}"
        )
