"""Other people's load generators: found or installed, run unchanged, their results read.

Each replays the same Mooncake trace against an OpenAI endpoint, greedy, with exactly the tokens that the
trace asks for. Knows their command lines; no server of ours. Invariant: a tool that does not end in its time
is killed, and no other process is.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dualpath.base.errors import ConfigError, DualPathError
from dualpath.bench.harness import Progress
from dualpath.bench.peers.figures import LoadFigures, read_aiperf, read_vllm
from dualpath.engine.model_source import cache_directory, publish_directory

__all__ = [
    "AIPERF_VERSION",
    "Aiperf",
    "PeerFailed",
    "PeerTask",
    "PeerTool",
    "VllmBench",
    "shown_command",
]

AIPERF_VERSION = "0.13.0"
_INSTALL_DEADLINE_S = 900.0
_RUN_DEADLINE_S = 300.0
_TAIL_LINES = 15


class PeerFailed(DualPathError):
    """Another tool could not be installed, or did not end well; the message has the end of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerTask:
    """One run. `base_url` with /v1; `output_tokens` of every request; `seed`: other seeds, other prompts."""

    base_url: str
    model: str
    tokenizer: Path
    trace: Path
    requests: int
    output_tokens: int
    seed: int
    directory: Path
    """For what the tool writes; made for the run."""

    @property
    def shown(self) -> dict[str, str]:
        """What commands show in place of paths and addresses of one machine."""
        return {
            str(self.tokenizer): f'"$(dualpath model {self.model})"',
            str(self.trace): "trace.jsonl",
            str(self.directory): "out",
            self.base_url: "http://127.0.0.1:8000/v1",
            self.base_url.removesuffix("/v1"): "http://127.0.0.1:8000",
        }


class PeerTool(Protocol):
    """A load generator."""

    @property
    def name(self) -> str: ...

    def version(self) -> str:
        """As it says itself."""

    def command(self, task: PeerTask) -> list[str]:
        """Program and arguments."""

    def run(self, task: PeerTask) -> LoadFigures:
        """Raises PeerFailed."""


@dataclass(frozen=True, slots=True)
class Aiperf:
    """NVIDIA AIPerf. `program`: what starts it."""

    program: tuple[str, ...] = ("aiperf",)
    name: str = "aiperf"

    @staticmethod
    def home() -> Path:
        """Where `installed` has it."""
        return cache_directory() / "tools" / f"aiperf-{AIPERF_VERSION}"

    @classmethod
    def installed(cls, progress: Progress) -> Aiperf:
        """In an environment of its own in the cache directory, made on first use. Raises PeerFailed."""
        home = cls.home()
        if not home.is_dir():
            progress(f"installing aiperf {AIPERF_VERSION} into {home}, once; a few minutes")

        def install(made: Path) -> None:
            _run([sys.executable, "-m", "venv", str(made)], _INSTALL_DEADLINE_S)
            pip = [str(made / "bin" / "python"), "-m", "pip", "install", "--quiet"]
            _run([*pip, f"aiperf=={AIPERF_VERSION}"], _INSTALL_DEADLINE_S)

        publish_directory(home, install)
        # Not its script, which names the directory that it was installed in before the renaming.
        return cls((str(home / "bin" / "python"), "-m", "aiperf"))

    def version(self) -> str:
        return _run([*self.program, "--version"], _RUN_DEADLINE_S).strip().rsplit(" ", 1)[-1]

    def command(self, task: PeerTask) -> list[str]:
        # min_tokens, as it times tokens by their text, and the end of a text has none.
        fields = ("temperature:0", "ignore_eos:true", f"min_tokens:{task.output_tokens}")
        return [
            *self.program,
            "profile",
            *("--model", task.model),
            *("--url", task.base_url.removesuffix("/v1")),
            *("--endpoint-type", "completions", "--streaming"),
            *("--input-file", str(task.trace)),
            *("--custom-dataset-type", "mooncake_trace", "--fixed-schedule"),
            *("--tokenizer", str(task.tokenizer), "--use-server-token-count"),
            *(word for each in fields for word in ("--extra-inputs", each)),
            *("--random-seed", str(task.seed)),
            *("--workers-max", "1", "--record-processors", "1"),
            *("--no-gpu-telemetry", "--no-server-metrics", "--ui", "none"),
            *("--artifact-dir", str(task.directory)),
        ]

    def run(self, task: PeerTask) -> LoadFigures:
        _run(self.command(task), _RUN_DEADLINE_S)
        return read_aiperf((task.directory / "profile_export_aiperf.json").read_bytes())


@dataclass(frozen=True, slots=True)
class VllmBench:
    """`vllm bench serve`. `python`: the interpreter of an environment that has vLLM."""

    python: str
    name: str = "vllm"

    def version(self) -> str:
        code = "import vllm; print(vllm.__version__)"
        return _run([self.python, "-c", code], _RUN_DEADLINE_S).strip().splitlines()[-1]

    def command(self, task: PeerTask) -> list[str]:
        return [
            *(self.python, "-m", "vllm.entrypoints.cli.main", "bench", "serve"),
            *("--backend", "openai", "--endpoint", "/v1/completions"),
            *("--base-url", task.base_url.removesuffix("/v1")),
            *("--model", task.model, "--tokenizer", str(task.tokenizer)),
            *("--dataset-name", "timed_trace", "--dataset-path", str(task.trace)),
            *("--self-timed", "--timed-trace-chunk-hash-size", "512"),
            *("--timed-trace-sec-multiplier", "0.001"),
            *("--num-prompts", str(task.requests)),
            *("--temperature", "0", "--ignore-eos"),
            *("--extra-body", json.dumps({"min_tokens": task.output_tokens})),
            *("--percentile-metrics", "ttft,tpot,itl,e2el"),
            *("--save-result", "--result-dir", str(task.directory)),
            *("--result-filename", "result.json", "--disable-tqdm"),
        ]

    def run(self, task: PeerTask) -> LoadFigures:
        _run(self.command(task), _RUN_DEADLINE_S)
        return read_vllm((task.directory / "result.json").read_bytes())


def shown_command(tool: PeerTool, task: PeerTask) -> str:
    """For people: what to type, whatever the machine."""
    program, *rest = tool.command(task)
    words = [task.shown.get(word) or shlex.quote(word) for word in rest]
    return " ".join([Path(program).name, *words])


def _run(command: Sequence[str], deadline_s: float) -> str:
    """Standard output. PeerFailed when the program is not there, fails, or does not end in time."""
    # aiperf looks for a path in its hub cache, and not on disk, when it is told to be offline.
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    words = " ".join(command[:4])
    try:
        done = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=deadline_s,
            check=False,
        )
    except OSError as error:
        raise ConfigError(f"{command[0]} cannot be run: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise PeerFailed(f"`{words} ...` did not end within {deadline_s:g} s") from error
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).strip().splitlines()[-_TAIL_LINES:]
        tail = "\n".join(f"  {line}" for line in lines)
        raise PeerFailed(f"`{words} ...` ended with exit code {done.returncode}:\n{tail}")
    return done.stdout
