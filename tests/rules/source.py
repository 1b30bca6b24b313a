"""The package as the rules see it: its modules, and what each of them imports."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "forebay"
MODULES = sorted(PACKAGE.rglob("*.py"))


def where(path: Path) -> str:
    """Path of a module below the package: ``storage/durable.py``."""
    return path.relative_to(PACKAGE).as_posix()


def name_of(path: Path) -> str:
    """Dotted name below the package; empty for the package itself."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a module; read only."""
    return ast.parse(path.read_text(), filename=str(path))


@functools.cache
def imports_of(path: Path) -> list[tuple[str, bool]]:
    """Every module imported anywhere in a file; True where it is for type checkers alone.

    ``from forebay.x import y`` is an import of ``forebay.x.y`` where that is a module.
    """
    return list(_imports_of(path))


def _imports_of(path: Path) -> Iterator[tuple[str, bool]]:
    tree = tree_of(path)
    typing_only: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            typing_only |= {id(inner) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, id(node) in typing_only
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{where(path)}: relative import"
            module = node.module or ""
            for alias in node.names:
                full = f"{module}.{alias.name}"
                inner = PACKAGE.parent.joinpath(*full.split("."))
                is_module = inner.with_suffix(".py").exists() or inner.is_dir()
                yield (full if is_module else module), id(node) in typing_only


def ours(name: str) -> str | None:
    """The part of a module name below the package; None for what is not ours."""
    if name == "forebay":
        return ""
    return name.removeprefix("forebay.") if name.startswith("forebay.") else None
