"""A Redis server of one's own on loopback, for tests and benchmarks: the real one, found on PATH.

It owns the process; its directory is the caller's.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import TracebackType

from dualpath.store.resp import ErrorReply, Reply, RespConnection, encode_command

__all__ = ["RedisServer", "redis_server_path"]

_START_S = 20.0
_CALL_S = 20.0


def redis_server_path() -> str | None:
    """The server's executable, of Redis or Valkey; None when there is none."""
    return shutil.which("redis-server") or shutil.which("valkey-server")


class RedisServer:
    """Runs on a port that stays the same over restarts. A context manager; leaving it kills the server.

    `settings` are those of redis.conf: `appendonly="yes"`, `maxmemory="20mb"`; an underscore is a dash.
    """

    def __init__(self, directory: Path, *, port: int | None = None, **settings: str) -> None:
        self.directory = directory
        self.port = _free_port() if port is None else port
        self._settings = {"appendonly": "no", "save": "", **settings}
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> RedisServer:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        where: TracebackType | None,
    ) -> None:
        self.kill()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def start(self) -> None:
        """Returns when it answers. Raises RuntimeError with the server's log."""
        program = redis_server_path()
        if program is None:
            raise RuntimeError("no redis-server on PATH; Debian has it in the package redis-server")
        command = [program, "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--dir", str(self.directory), "--logfile", "redis.log"]
        for name, value in self._settings.items():
            command += [f"--{name.replace('_', '-')}", value]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        limit = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > limit:
                self.kill()
                raise RuntimeError(f"{program} does not start: {self._log()}")
            time.sleep(0.01)

    def kill(self) -> None:
        """As a crash of its machine would. Idempotent."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def pause(self) -> None:
        """From now on it hangs: connections are accepted by the system, and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        state = Path(f"/proc/{self.pid}/stat")
        limit = time.monotonic() + _CALL_S
        while state.read_text().rpartition(")")[2].split()[0] != "T":
            if time.monotonic() > limit:
                raise RuntimeError(f"process {self.pid} does not stop")
            time.sleep(0.001)

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def command(self, *words: bytes | str | int) -> Reply:
        """One command on a connection of its own."""
        deadline = time.monotonic() + _CALL_S
        link = RespConnection(socket.create_connection(("127.0.0.1", self.port), timeout=_CALL_S))
        try:
            link.send([encode_command(*words)], deadline)
            return link.receive(deadline)
        finally:
            link.close()

    def _answers(self) -> bool:
        try:
            reply = self.command("PING")
        except OSError:
            return False
        # One that demands a password answers too.
        return not (isinstance(reply, ErrorReply) and reply.code == "LOADING")

    def _log(self) -> str:
        try:
            return (self.directory / "redis.log").read_text()[-2000:]
        except OSError as error:
            return str(error)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
