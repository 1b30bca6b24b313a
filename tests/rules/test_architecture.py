"""The house rules that a machine can check: arrows, doors, sizes, exports, words."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "forebay"
MODULES = sorted(PACKAGE.rglob("*.py"))

# What anyone may import.
COMMON = {"errors", "units", "config", "watch.events", ""}

# Each unit may import what stands beside it (and itself). A unit is a package or a module.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "units": set(),
    "config": set(),
    "watch": set(),
    "format": set(),
    "storage": set(),
    "capture": {"format"},
    "commit": {"storage", "format"},
    "restore": {"commit.catalog", "storage", "format", "capture"},
    "drain": {"commit", "storage", "format"},
    "snapshot": {"capture", "format"},
    "membership": {"capture", "storage", "format"},
    "checkpointer": {
        *("capture", "restore", "commit.catalog", "storage", "format", "snapshot", "membership"),
    },
    "reader": {"restore", "commit.catalog", "storage", "format"},
    "testing": {"storage", "format", "commit", "restore", "capture", "drain"},
    "demo": {"format", "storage", "capture", "snapshot"},
    "cli": {"reader", "commit", "drain", "storage", "format", "capture", "demo", "restore"},
    "": {"capture", "checkpointer", "reader", "snapshot"},
}

# The one way restore looks at a target is the way save does (see docs/decisions/0003).
RESTORE_FROM_CAPTURE = {
    "capture.state",
    "capture.copy",
    "capture.declare",
    "capture.optimizer",
    "capture.placement",
}

DOORS: dict[str, set[str]] = {
    "torch": {
        *(
            "capture/state.py",
            "capture/walk.py",
            "capture/recall.py",
            "capture/copy.py",
            "capture/agree.py",
            "capture/stage.py",
        ),
        *("restore/fill.py", "checkpointer.py"),
        *("demo/model.py", "demo/loader.py", "demo/train.py", "demo/report.py"),
    },
    "torchdata": {"demo/loader.py"},
    "obstore": {"storage/remote.py"},
    "pyarrow": {"format/index.py"},
    "typer": {"cli/*"},
    "aiohttp": {"drain/agent.py", "drain/mirror.py", "watch/page/*"},
}
NOWHERE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "multiprocessing"}


def name_of(path: Path) -> str:
    """Dotted name below the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def unit_of(name: str) -> str:
    """The unit a module belongs to."""
    return name.partition(".")[0]


def imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    """Every module imported anywhere in a file; True where it is for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing_only: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in typing_only
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                module = node.module or ""
                inner = PACKAGE / "/".join(f"{module}.{alias.name}".split(".")[1:])
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                if module.partition(".")[0] == "forebay" and is_module:
                    yield f"{module}.{alias.name}", id(node) in typing_only
                else:
                    yield module, id(node) in typing_only


def ours(name: str) -> str | None:
    """The part of a module name below the package; None for what is not ours."""
    if name == "forebay":
        return ""
    return name.removeprefix("forebay.") if name.startswith("forebay.") else None


def allowed(source: str, target: str) -> bool:
    unit = unit_of(source)
    if target in COMMON or unit_of(target) == unit:
        return True
    if unit == "restore" and unit_of(target) == "capture":
        return target in RESTORE_FROM_CAPTURE
    return target in ARROWS[unit] or unit_of(target) in ARROWS[unit]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_arrows(path: Path) -> None:
    source = name_of(path)
    wrong = [
        target
        for name, _ in imports_of(path)
        if (target := ours(name)) is not None and not allowed(source, target)
    ]
    assert not wrong, f"{source} imports {wrong}: no such arrow"


def test_no_cycle() -> None:
    graph = {
        name_of(path): {
            target
            for name, typing_only in imports_of(path)
            if not typing_only and (target := ours(name)) not in (None, "")
        }
        for path in MODULES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        if module in trail:
            pytest.fail("cycle: " + " -> ".join((*trail[trail.index(module) :], module)))
        if module in done or module not in graph:
            return
        for target in graph[module]:
            visit(target, (*trail, module))
        done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("door", sorted(DOORS))
def test_doors(door: str) -> None:
    for path in MODULES:
        where = path.relative_to(PACKAGE)
        if any(where.match(pattern) for pattern in DOORS[door]):
            continue
        bad = [
            name for name, typing in imports_of(path) if name.split(".")[0] == door and not typing
        ]
        assert not bad, f"{where} imports {bad}: a second door"


def test_nothing_executes_stored_bytes() -> None:
    for path in MODULES:
        bad = {name.split(".")[0] for name, _ in imports_of(path)} & NOWHERE
        assert not bad, f"{path} imports {bad}"
        calls = {
            node.func.id
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        assert not calls & {"eval", "exec", "compile", "__import__"}, path


def test_one_place_flushes() -> None:
    for path in MODULES:
        if path.relative_to(PACKAGE).as_posix() == "storage/durable.py":
            continue
        found = re.findall(r"\b(?:os\.)?(?:fsync|fdatasync|sync_file_range)\(", path.read_text())
        assert not found, f"{path}: {found}"


def test_modules_are_small() -> None:
    for path in MODULES:
        lines = len(path.read_text().splitlines())
        assert lines <= 500, f"{path}: {lines} lines: it has two jobs"


def test_names_say_what_a_module_is() -> None:
    bad = {"utils", "util", "helpers", "helper", "common", "misc", "manager"}
    assert not [path for path in MODULES if path.stem in bad]


def test_exports_are_the_documented_ones() -> None:
    import forebay

    documented = re.findall(r"^- `(\w+)`", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(documented) == sorted(forebay.__all__)
    for name in forebay.__all__:
        assert getattr(forebay, name).__doc__, name


def test_importing_forebay_and_its_agent_loads_no_torch() -> None:
    code = (
        "import sys, forebay, forebay.drain.agent, forebay.reader, forebay.cli; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_tree_speaks_of_the_project_alone() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    words = re.compile(rb"/" + rb"work/|/" + rb"root/")
    for name in filter(None, listed.stdout.split(b"\0")):
        path = ROOT / name.decode()
        if path.is_file():
            assert not words.search(path.read_bytes()), path
