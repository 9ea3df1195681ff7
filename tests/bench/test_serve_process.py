"""`ServeProcess` with small programs in the server's place."""

from __future__ import annotations

import sys

import psutil
import pytest

from dualpath.bench.server import ServeProcess, ServerFailed

_GOOD = """
import signal, sys, time
print("loading", file=sys.stderr, flush=True)
signal.signal(signal.SIGINT, lambda *_: sys.exit({code}))
print("listening on http://127.0.0.1:1234/v1 (model " + sys.argv[1] + ")", flush=True)
time.sleep(60)
"""
_STUBBORN = """
import signal, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
print("listening on http://127.0.0.1:1/v1", flush=True)
time.sleep(60)
"""
_SILENT = "import time; time.sleep(60)"
_BROKEN = "import sys; sys.exit('no such model')"


@pytest.fixture
def serve(tmp_path):
    """ServeProcess of a program; whatever happens, none is left."""
    log = tmp_path / "logs" / "server.log"
    # Of other tests: what multiprocessing keeps for the whole process.
    others = psutil.Process().children(recursive=True)

    def make(program, **more):
        return ServeProcess(["tiny"], log, command=[sys.executable, "-c", program], **more)

    yield make
    assert psutil.Process().children(recursive=True) == others


def test_it_waits_for_the_address_and_ends_as_ctrl_c_does(serve):
    with serve(_GOOD.format(code=0)) as server:
        assert server.base_url == "http://127.0.0.1:1234/v1"
        assert psutil.pid_exists(server.pid)
        assert server.engine_pids == {}
        assert server.log.read_text().splitlines() == [
            "loading",
            "listening on http://127.0.0.1:1234/v1 (model tiny)",
        ]
    with pytest.raises(ServerFailed, match="not running"):
        _ = server.pid


def test_a_server_that_ends_at_once_is_told_with_its_log(serve):
    with pytest.raises(
        ServerFailed, match=r"(?s)exit code 1 before it took requests.*no such model"
    ):
        serve(_BROKEN).start()


def test_a_server_that_says_nothing_is_ended(serve):
    with pytest.raises(ServerFailed, match=r"took no requests within 0\.2 s"):
        serve(_SILENT, start_deadline_s=0.2).start()


def test_another_exit_code_than_0_is_a_failure(serve):
    server = serve(_GOOD.format(code=3))
    server.start()
    with pytest.raises(ServerFailed, match="exit code 3"):
        server.stop()
    server.stop()


def test_one_that_does_not_end_is_killed(serve):
    server = serve(_STUBBORN, stop_deadline_s=0.2)
    server.start()
    with pytest.raises(ServerFailed, match=r"did not end within 0\.2 s"):
        server.stop()


def test_an_error_inside_is_not_hidden_by_how_the_server_ends(serve):
    with pytest.raises(KeyError), serve(_GOOD.format(code=3)):
        raise KeyError
