"""One door for each outside thing; no door at all for what runs stored bytes as code."""

from __future__ import annotations

import ast
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from tests.rules.source import MODULES, imports_of, name_of, tree_of, where

TORCH = {
    *("capture/state.py", "capture/walk.py", "capture/recall.py", "capture/copy.py"),
    *("capture/agree.py", "capture/stage.py", "restore/fill.py", "checkpointer.py", "adapters/*"),
    *(
        "demo/model.py",
        "demo/loader.py",
        "demo/train.py",
        "demo/report.py",
        "doctor/device.py",
        "testing/cluster.py",
    ),
}
HTTP = {"drain/agent.py", "drain/mirror.py", "watch/page/*", "testing/proxy.py"}
S3 = {"storage/s3.py"}  # what obstore has no call for: uploads in parts that outlive the process

# An outside package, and the modules that may import it.
DOORS: dict[str, set[str]] = {
    "torch": TORCH,
    "torchdata": {"demo/loader.py"},
    "obstore": {"storage/remote.py"},
    "pyarrow": {"format/index.py", "format/row_group.py"},
    "typer": {"cli/*"},
    "yaml": {"cli/*", "doctor/report.py"},
    "plotly": {"plan/plots.py", "plan/sim_plots.py"},
    "botocore": S3,
    "urllib3": S3,
    **dict.fromkeys(("aiohttp", "http", "httpx", "requests", "urllib.request"), HTTP),
}

FLUSHES = {"fsync", "fdatasync", "sync_file_range", "syncfs"}
NOWHERE = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "multiprocessing"}
RUNS_TEXT = {"eval", "exec", "compile", "__import__"}
# These pickle inside: what they are given, or what they find in a file or in a message.
PICKLES_INSIDE = {
    *("torch.load", "torch.save", "np.load", "np.save", "numpy.load", "numpy.save"),
    *("all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"),
    *("send_object_list", "recv_object_list"),
}


def within(name: str, door: str) -> bool:
    """Whether importing ``name`` is importing ``door`` or a part of it."""
    return name == door or name.startswith(f"{door}.")


def mentions(path: Path) -> set[str]:
    """Every name and dotted name in a module, and what its imports are called at home."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found |= {node.attr, ast.unparse(node)}
        elif isinstance(node, ast.ImportFrom):
            found |= {alias.name for alias in node.names}
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("door", sorted(DOORS))
def test_doors(door: str) -> None:
    for path in MODULES:
        if any(fnmatchcase(where(path), pattern) for pattern in DOORS[door]):
            continue
        bad = [
            name for name, typing_only in imports_of(path) if not typing_only and within(name, door)
        ]
        assert not bad, f"{where(path)} imports {bad}: a second door"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_nothing_executes_stored_bytes(path: Path) -> None:
    bad = {name.split(".")[0] for name, _ in imports_of(path)} & NOWHERE
    assert not bad, f"{where(path)} imports {bad}"
    calls = {
        node.func.id
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & RUNS_TEXT, f"{where(path)} calls {calls & RUNS_TEXT}"
    inside = mentions(path) & PICKLES_INSIDE
    assert not inside, f"{where(path)} uses {inside}, which pickles"


def test_one_place_flushes() -> None:
    for path in MODULES:
        found = mentions(path) & FLUSHES
        assert not found or where(path) == "storage/durable.py", f"{where(path)}: {found}"


@pytest.mark.parametrize(
    "module", ["forebay", "forebay.drain.agent", "forebay.reader", "forebay.cli"]
)
def test_loads_no_torch(module: str) -> None:
    code = f"import sys, {module}; sys.exit('torch is loaded' if 'torch' in sys.modules else 0)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
