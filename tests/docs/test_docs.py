"""What the documentation mentions exists: links, flags, files, commands, codes, metrics."""

from __future__ import annotations

import ast
import contextlib
import io
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from dualpath.cli import sim
from dualpath.cli.bench import find_benchmarks
from dualpath.cli.main import COMMANDS, main
from dualpath.cli.testbed import ACTIONS
from dualpath.monitor.metrics import TABLE

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]

FOREIGN_FLAGS = {"--no-deps", "--fix", "--strict", "--net"}
"""Of pip, ruff, mypy and nsenter."""

FOREIGN_PAGES = {"load-tools.md", "peers.md", "vllm.md"}
"""Full of flags of other programs."""


@pytest.fixture(params=PAGES, ids=NAMES)
def page(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def _blocks(page: Path, *languages: str) -> Iterator[str]:
    for language, code in re.findall(
        r"^```(\w*)\n(.*?)^```", _text(page), re.DOTALL | re.MULTILINE
    ):
        if language in languages:
            yield code


def _code(page: Path) -> str:
    """All that stands in code, inline or in blocks."""
    text = _text(page)
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return "\n".join([*blocks, *re.findall(r"`([^`]+)`", rest)])


def test_relative_links_resolve(page: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", _text(page))
    local = [t.partition("#")[0] for t in targets if not re.match(r"[a-z]+:|#", t)]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Every flag of every command and benchmark, from their help."""
    calls = [[each.name] for each in COMMANDS] + [
        ["bench", each.name] for each in find_benchmarks()
    ]
    calls += [["testbed", each.name] for each in ACTIONS]
    calls += [["sim", each.name] for each in sim.COMMANDS]
    calls += [["qos", each] for each in ("infiniband", "roce", "ethernet", "check")]
    flags = set(FOREIGN_FLAGS)
    for call in calls:
        flags |= set(re.findall(r"--[a-z][a-z0-9-]*", _help(call)))
    return flags


def _help(call: list[str]) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        assert main([*call, "--help"]) == 0
    return said.getvalue()


def _own_code(page: Path) -> str:
    """Without what pages on other people's programs are about."""
    return "" if page.name in FOREIGN_PAGES else _code(page)


def test_flags_exist(page: Path, known_flags: set[str]) -> None:
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*", _own_code(page)))
    assert mentioned - known_flags == set()


def test_commands_and_make_targets_exist(page: Path) -> None:
    commands = set(re.findall(r"(?:^|/|\s)dualpath ([a-z]+)\b", _code(page), re.MULTILINE))
    assert commands <= {each.name for each in COMMANDS}
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"(?:^|\s)make ([a-z-]+)\b", _code(page), re.MULTILINE)) <= targets


def test_benchmarks_exist(page: Path) -> None:
    named = set(re.findall(r"dualpath bench ([a-z]+)\b", _code(page)))
    named |= set(re.findall(r"make bench BENCH=([a-z]+)\b", _code(page)))
    assert named <= {each.name for each in find_benchmarks()} | {"name"}


def test_python_blocks_are_python(page: Path) -> None:
    for code in _blocks(page, "python"):
        ast.parse(code)


def test_metrics_exist(page: Path) -> None:
    exported = {each.exported_name for each in TABLE}
    mentioned = set(re.findall(r"\bdualpath:[a-z0-9_]+", _code(page))) - {"dualpath:"}
    assert mentioned - exported == set()


def test_the_file_map_is_right() -> None:
    section = _text(ROOT / "README.md").split("## File map")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    paths = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    packages = {
        f"src/dualpath/{path.parent.name}" for path in (ROOT / "src/dualpath").glob("*/__init__.py")
    }
    assert packages == {path for path in paths if path.startswith("src/")}


def test_the_readme_leads_to_every_page() -> None:
    linked = set(re.findall(r"\]\(([^)#]+)\)", _text(ROOT / "README.md")))
    pages = {name for name in NAMES if "/adr/" not in name and name != "README.md"}
    assert pages <= linked


def test_every_package_is_in_the_architecture() -> None:
    page = _text(ROOT / "docs/architecture.md")
    packages = {path.parent.name for path in (ROOT / "src/dualpath").glob("*/__init__.py")}
    assert set(re.findall(r"^\| `([a-z]+)` \|", page, re.MULTILINE)) == packages


def test_error_codes_exist() -> None:
    source = "\n".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "src/dualpath/serve").rglob("*.py")
    )
    page = _text(ROOT / "docs/errors.md")
    rows = re.findall(r"^\| \d{3} ([^|]*)\|", page, re.MULTILINE)
    codes = {code for row in rows for code in re.findall(r"`([a-z_]+)`", row)}
    assert len(codes) > 10
    assert {code for code in codes if f'code="{code}"' not in source} == set()
    causes = set(re.findall(r"cause[^|`]*`([a-z_]+)`", page))
    assert {cause for cause in causes if f'= "{cause}"' not in source} == set()


def test_the_glossary_is_in_order() -> None:
    rows = re.findall(r"^\| ([^|]+) \|", _text(ROOT / "docs/glossary.md"), re.MULTILINE)
    words = [row.lower() for row in rows if row not in ("word", "---")]
    assert len(words) > 40
    assert len(set(words)) == len(words)
    assert words == sorted(words)


def test_decisions_are_listed_and_name_what_was_rejected() -> None:
    folder = ROOT / "docs/adr"
    index = _text(folder / "README.md")
    files = sorted(path for path in folder.glob("0*.md"))
    assert [path.name[:4] for path in files] == [f"{n:04}" for n in range(1, len(files) + 1)]
    for path in files:
        assert f"]({path.name})" in index
        text = _text(path)
        assert text.startswith(f"# {path.name[:4]}: ")
        assert "**Rejected.**" in text
