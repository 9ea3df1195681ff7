from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

import dualpath
from dualpath.base.errors import ConfigError, EngineLost
from dualpath.bench.harness import BenchResult
from dualpath.cli import bench, docs, main

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> int:
    return main.main(list(arguments))


@pytest.fixture
def command(monkeypatch):
    """A subcommand `probe` that does what the test says."""
    module = types.ModuleType("dualpath_probe_command")
    module.add_arguments = lambda parser: parser.add_argument("--number", type=int)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    probe = main.Command("probe", module.__name__, "a probe")
    monkeypatch.setattr(main, "COMMANDS", (probe,))
    return module


def test_help_lists_the_commands(capsys):
    assert run("--help") == 0
    text = capsys.readouterr().out
    for each in main.COMMANDS:
        assert f"    {each.name} " in text
        assert each.help in text
    assert "examples:" in text


def test_no_command_is_a_usage_error_with_the_help(capsys):
    assert run() == 2
    assert "usage: dualpath" in capsys.readouterr().out


def test_version(capsys):
    assert run("--version") == 0
    assert capsys.readouterr().out == f"dualpath {dualpath.__version__}\n"
    assert run("version") == 0
    assert "msgspec" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [("nonsense",), ("version", "--what"), ("serve",), ("serve", "tiny", "--prefil", "2")],
)
def test_usage_errors_end_with_2(arguments, capsys):
    assert run(*arguments) == 2
    assert "usage: dualpath" in capsys.readouterr().err


def test_config_errors_end_with_2_and_one_line(capsys):
    assert run("serve", "tiny", "--prefill", "0") == 2
    captured = capsys.readouterr()
    assert captured.err == ("dualpath: error: --prefill: expected a whole number >= 1, got 0\n")
    assert captured.out == ""


@pytest.mark.parametrize(
    ("outcome", "code", "words"),
    [
        (0, 0, ""),
        (1, 1, ""),
        (ConfigError("--x: no"), 2, "error: --x: no"),
        (EngineLost("none left"), 1, "EngineLost: none left"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(command, capsys, outcome, code, words):
    def outcome_of(args):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    command.run = outcome_of
    assert run("probe", "--number", "3") == code
    assert words in capsys.readouterr().err


def test_our_own_bugs_are_not_hidden(command):
    def fail(args):
        raise ZeroDivisionError

    command.run = fail
    with pytest.raises(ZeroDivisionError):
        run("probe")


def test_serve_gives_the_configuration_to_the_application(monkeypatch, tmp_path):
    seen = []
    app = types.ModuleType("dualpath.serve.app")
    app.run = lambda config: seen.append(config) or 0  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "dualpath.serve.app", app)
    monkeypatch.setattr("dualpath.serve.app", app, raising=False)
    monkeypatch.setenv("DUALPATH_API_KEY", "k")
    assert run("serve", "tiny", "--store", str(tmp_path), "--decode", "2") == 0
    (config,) = seen
    assert (config.model, config.store_address, config.decode) == ("tiny", str(tmp_path), 2)
    assert config.api_key == "k"


@pytest.mark.parametrize(
    "arguments", [["--help"], ["bench", "--list"], ["serve", "--help"], ["version"]]
)
def test_light_commands_import_neither_torch_nor_server_libraries(arguments):
    heavy = {"torch", "transformers", "fastapi", "uvicorn", "zmq", "numpy"}
    code = (
        "import sys, dualpath; from dualpath.cli.main import main\n"
        f"assert main({arguments!r}) == 0\n"
        f"assert not {heavy!r} & set(sys.modules), {heavy!r} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


BENCH = '''
"""A benchmark."""
import nothing_that_exists  # noqa
NAME = "{name}"
HELP = "measures {name}"
'''


def test_benchmarks_are_found_without_importing_them(tmp_path):
    (tmp_path / "b.py").write_text(BENCH.format(name="zeta"))
    (tmp_path / "c.py").write_text(BENCH.format(name="alpha"))
    (tmp_path / "harness.py").write_text("X = 1\n")
    found = bench.find_benchmarks([str(tmp_path)])
    assert [(each.name, each.help) for each in found] == [
        ("alpha", "measures alpha"),
        ("zeta", "measures zeta"),
    ]
    assert found[0].module == "dualpath.bench.c"


@pytest.fixture
def probe_bench(monkeypatch):
    module = types.ModuleType("dualpath_probe_bench")
    module.add_arguments = lambda parser: parser.add_argument("--factor", type=float, default=1.0)  # type: ignore[attr-defined]

    def measure(args, progress):
        print("a library's chatter")
        progress("working")
        return BenchResult("probe", {"ratio": 2.5 * args.factor, "ok": True, "parts": [1.0, 2.0]})

    module.run = measure  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    found = (bench.Benchmark("probe", "a probe", module.__name__),)
    monkeypatch.setattr(bench, "find_benchmarks", lambda: found)


def test_bench_with_json_writes_one_line_to_stdout(probe_bench, capsys):
    assert run("bench", "probe", "--factor", "2", "--json") == 0
    captured = capsys.readouterr()
    (line,) = captured.out.splitlines()
    result = json.loads(line)
    assert result["figures"] == {"ratio": 5.0, "ok": True, "parts": [1.0, 2.0]}
    assert result["bench"] == "probe"
    assert result["setup"]["dualpath"] == dualpath.__version__
    assert captured.err == "a library's chatter\nworking\n"


def test_bench_without_json_shows_a_table(probe_bench, capsys):
    assert run("bench", "probe") == 0
    out = capsys.readouterr().out
    assert "ratio" in out and "2.5" in out and "yes" in out
    assert "{" not in out


def test_bench_list_and_unknown_name(probe_bench, capsys):
    assert run("bench", "--list") == 0
    assert capsys.readouterr().out.split() == ["probe", "a", "probe"]
    assert run("bench") == 2
    assert run("bench", "other") == 2
    assert "unknown benchmark 'other'; there are: probe" in capsys.readouterr().err
    assert run("bench", "probe", "--wrong") == 2


def test_reference_pages_are_those_of_the_code():
    for name, content in docs.generated_pages().items():
        assert (ROOT / name).read_text(encoding="utf-8") == content, "run `dualpath docs`"


def test_docs_are_written_and_checked(tmp_path, capsys):
    root = ["--root", str(tmp_path)]
    assert run("docs", "--check", *root) == 1
    assert "docs/configuration.md, docs/router-flags.md, docs/metrics.md" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
    assert run("docs", *root) == 0
    assert run("docs", "--check", *root) == 0
    page = tmp_path / "docs" / "metrics.md"
    page.write_text(page.read_text() + "edited by hand\n")
    assert run("docs", "--check", *root) == 1


def test_model_prints_the_directory_of_a_model(tmp_path, capsys):
    (tmp_path / "config.json").write_text("{}")
    assert run("model", str(tmp_path)) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert run("model", str(tmp_path / "missing")) == 2
    assert "no model directory" in capsys.readouterr().err
