"""vLLM's API server as a process, with or without the connector, and a pair of them as the router uses it.

For measurements and tests on the CPU. It knows no model and no figures. Whoever makes a server stops it.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dualpath.base.errors import EngineLost, RequestError
from dualpath.vllm.launch import VllmLaunch, vllm_arguments, vllm_environment
from dualpath.vllm.params import KvPeer, prefill_params
from dualpath.vllm.settings import connector_settings

__all__ = ["BLOCK_TOKENS", "Answer", "VllmPair", "VllmServer", "get_text", "metric_sum"]

BLOCK_TOKENS = 128
_TINY = ("--skip-tokenizer-init", "--enforce-eager", "--max-num-batched-tokens", "2048")
_READY_S = 240.0
_ANSWER_S = 240.0
_GET_S = 10.0
_STOP_S = 30.0


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class Answer:
    """`cached`: prompt tokens that vLLM says it did not compute."""

    tokens: list[int]
    cached: int
    params: dict[str, Any] | None


class VllmServer:
    """One API server in processes of its own, `log` its output. `connector`: our settings, or plain vLLM.

    `policy` is vLLM's for failed loads, `kv_bytes` the size of its cache.
    """

    def __init__(
        self,
        model: Path,
        log: Path,
        *,
        connector: dict[str, Any] | None = None,
        policy: str = "recompute",
        kv_bytes: int = 128 << 20,
        arguments: tuple[str, ...] = (),
        python: str = sys.executable,
    ) -> None:
        """Starts it. `python` is an interpreter that has vLLM; `arguments` come last, and so prevail."""
        self.port = _free_port()
        self.kv_port = _free_port()
        self.log = log
        settings = None
        if connector is not None:
            settings = connector_settings({"kv_port": self.kv_port, **connector})
        launch = VllmLaunch(
            model=str(model),
            served_model_name="tiny",
            port=self.port,
            connector=settings,
            load_failure_policy=policy,
            block_tokens=BLOCK_TOKENS,
            dtype="float32",
            max_model_len=8192,
            threads=1,
            extra=(*_TINY, "--kv-cache-memory-bytes", str(kv_bytes), *arguments),
        )
        self._command = [python, *vllm_arguments(launch)]
        self._environ = vllm_environment(launch, {**os.environ, "VLLM_TARGET_DEVICE": "cpu"})
        self.process = self._started()

    def restart(self) -> None:
        """Another one in its place, after `stop` or `kill`: the same ports, the same log."""
        self.process = self._started()

    def _started(self) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as out:
            return subprocess.Popen(
                self._command,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=self._environ,
                start_new_session=True,
            )

    @property
    def kv_peer(self) -> KvPeer:
        return KvPeer("127.0.0.1", self.kv_port)

    def wait_ready(self) -> VllmServer:
        until_s = time.monotonic() + _READY_S
        while time.monotonic() < until_s:
            if self.process.poll() is not None:
                raise EngineLost(f"vLLM ended: {self.log.read_text()[-3000:]}")
            try:
                self.get("/health")
                return self
            except OSError:
                time.sleep(0.2)
        raise EngineLost(f"vLLM is not ready in {_READY_S} s: {self.log.read_text()[-3000:]}")

    def get(self, path: str) -> str:
        return get_text(f"http://127.0.0.1:{self.port}{path}")

    def complete(
        self,
        prompt: list[int],
        max_tokens: int,
        params: dict[str, Any] | None = None,
        timeout_s: float = _ANSWER_S,
        **fields: Any,
    ) -> Answer:
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            **fields,
        }
        if params is not None:
            body["kv_transfer_params"] = params
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as reply:
                answer = json.load(reply)
        except urllib.error.HTTPError as error:
            said = error.read().decode()[:2000]
            raise RequestError(f"vLLM answers {error.code}: {said}", status=error.code) from error
        details = answer["usage"].get("prompt_tokens_details") or {}
        return Answer(
            answer["choices"][0]["token_ids"],
            details.get("cached_tokens") or 0,
            answer.get("kv_transfer_params"),
        )

    def metric(self, name: str) -> float:
        """As `metric_sum`."""
        return metric_sum(self.get("/metrics"), name)

    def stop(self) -> None:
        self._signal(15)
        try:
            self.process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """As a machine that fails: all its processes at once."""
        self._signal(9)
        self.process.wait(_STOP_S)

    def _signal(self, number: int) -> None:
        try:
            os.killpg(self.process.pid, number)
        except ProcessLookupError:
            pass


class VllmPair:
    """A prefill and a decode server, and what the router does with them."""

    def __init__(self, pe: VllmServer, de: VllmServer) -> None:
        self.pe, self.de = pe, de
        self._count = 0

    def complete(
        self, prompt: list[int], max_tokens: int, *, hit_tokens: int = 0, pe_tokens: int = 0
    ) -> tuple[Answer, Answer]:
        """The PE's answer and the DE's."""
        self._count += 1
        name = f"r{self._count}-{len(prompt)}"
        params = prefill_params(
            name, 1, self.de.kv_peer, hit_tokens=hit_tokens, pe_tokens=pe_tokens
        )
        first = self.pe.complete(prompt, 1, params)
        return first, self.de.complete(prompt, max_tokens, first.params)


def get_text(url: str) -> str:
    with urllib.request.urlopen(url, timeout=_GET_S) as reply:
        return str(reply.read().decode())


def metric_sum(metrics: str, name: str) -> float:
    """The sum over the samples of that name in Prometheus' text format; 0 if there are none."""
    pattern = re.compile(rf"^{re.escape(name)}(?:\{{[^}}]*\}})? (\S+)$", re.MULTILINE)
    return sum(float(value) for value in pattern.findall(metrics))
