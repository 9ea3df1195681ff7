"""`dualpath testbed` as users run it."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import urllib.request

import pytest

from dualpath.cli.main import main
from dualpath.serve.app import LISTENING
from dualpath.testbed import existing_testbeds

UNPRIVILEGED = """
import os, sys
from dualpath.cli.main import main
from dualpath.testbed.unprivileged import become_root_of_a_user_namespace
if os.environ.pop("DUALPATH_TEST_OUTSIDE", None):
    become_root_of_a_user_namespace()
sys.exit(main(["testbed", *sys.argv[1:]]))
"""


def run_testbed(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dualpath", "testbed", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "--topology", "1P", "--", "true"], "--topology: expected"),
        (["run"], "give the command after --"),
        (["serve", "tiny", "--prefill", "2"], "--prefill: the testbed decides it"),
        (["serve", "tiny", "--store", "/tmp"], "--store: the testbed decides it"),
        (["serve", "tiny", "--transfer", "shm"], "--transfer shm: nodes of a testbed share no"),
        (["serve", "tiny", "--threads", "0"], "--threads: expected"),
    ],
)
def test_wrong_usage(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["testbed", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_what_needs_root_says_what_does_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    for action in ("up", "down", "status"):
        assert main(["testbed", action]) == 2
        assert "use `dualpath testbed run`" in capsys.readouterr().err


def test_run_gives_the_exit_code_and_the_environment(testbed_possible: None) -> None:
    script = 'echo "$DUALPATH_TESTBED $DUALPATH_TESTBED_STORE"; cat "$DUALPATH_TESTBED_PLACEMENT"; exit 7'
    done = run_testbed("run", "--topology", "1P2D", "--", "sh", "-c", script)
    assert done.returncode == 7, done.stderr
    assert re.match(r"dp-[0-9a-f]{6} redis://198\.18\.\d+\.2:6379/0\n\{", done.stdout)
    assert '"de-node1"' in done.stdout


def test_run_on_a_node(testbed_possible: None) -> None:
    done = run_testbed("run", "--node", "de0", "--", "ip", "-brief", "addr")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^cnic@\S+ +UP +198\.19\.1\.12/24", done.stdout, re.MULTILINE)
    assert run_testbed("run", "--node", "de1", "--", "true").returncode == 2


def test_up_status_down(testbed_possible: None) -> None:
    up = run_testbed("up", "--testbed-name", "dp-cli", "--topology", "2P1D", "--snic", "50mbit")
    try:
        assert up.returncode == 0, up.stderr
        assert "dualpath serve MODEL --prefill 2 --decode 1 --placement /run/" in up.stdout
        status = run_testbed("status").stdout
        assert "dp-cli  2P1D  snic 50mbit, cnic 3200mbit  until it is taken down\n" in status
        assert run_testbed("up", "--testbed-name", "dp-cli").returncode == 2
    finally:
        down = run_testbed("down", "dp-cli")
    assert (down.returncode, down.stdout) == (0, "testbed dp-cli is removed\n")
    assert "dp-cli" not in run_testbed("status").stdout
    assert run_testbed("down", "dp-cli").returncode == 2


def test_without_root_all_is_in_a_user_namespace(testbed_possible: None) -> None:
    """Here by root, who enters a user namespace like anyone else."""
    done = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, "run", "--topology", "1P1D", "--", "ip", "netns"],
        env={**os.environ, "DUALPATH_TEST_OUTSIDE": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if "forbidden here" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    names = set(re.findall(r"^(dp-[0-9a-f]{6})-(\w+)", done.stdout, re.MULTILINE))
    assert {part for _, part in names} == {"fab", "store", "pe0", "de0"}
    outside = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout
    assert next(iter(names))[0] not in outside


def test_serve_answers_and_leaves_nothing(testbed_possible: None) -> None:
    flags = "--testbed-name dp-serve --port 0 --threads 1 --log-level warning"
    process = subprocess.Popen(
        [sys.executable, "-m", "dualpath", "testbed", "serve", "tiny", *shlex.split(flags)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        said = process.stdout.readline()  # The test's deadline bounds this.
        assert said.startswith(LISTENING), said
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        request = urllib.request.Request(
            said.removeprefix(LISTENING).split()[0] + "/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] == 4
        (state,) = [state for state, _ in existing_testbeds() if state.name == "dp-serve"]
        assert state.topology == "1P1D"
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)
    assert code == 0
    assert "dp-serve" not in run_testbed("status").stdout
