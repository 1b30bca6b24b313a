"""States at the edges: nothing in them, very many, very large, very deep, and every dtype."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

import forebay
from forebay.format import tree
from forebay.format.dtypes import ELEMENT_TYPES

TIMEOUT_S = 120.0
GIB = 2**30
DTYPES = sorted(
    {d for d in vars(torch).values() if isinstance(d, torch.dtype)}, key=lambda dtype: str(dtype)
)


def there_and_back(run: Path, state: dict[str, Any], target: dict[str, Any]) -> None:
    """Save ``state``, and restore it into ``target`` by another checkpointer, from the store."""
    with forebay.Checkpointer(run) as checkpointer:
        checkpointer.save(1, state).wait("durable", TIMEOUT_S)
    with forebay.Checkpointer(run) as checkpointer:
        assert checkpointer.restore(target) == 1


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor of any dtype."""
    flat = tensor.detach().contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).numpy()) if flat.numel() else b""


def test_a_state_without_tensors(tmp_path: Path, runtime: Path) -> None:
    state: dict[str, Any] = {"step": 7, "names": ["a", None], "empty": {}}
    target: dict[str, Any] = {"step": 0, "names": [], "empty": {}}
    there_and_back(tmp_path / "run", state, target)
    assert target == state
    there_and_back(tmp_path / "none", {}, {})
    print("states without tensors: 2, violations: 0")


@pytest.mark.parametrize("letter", ["n", "/", "ä"])
def test_long_names(tmp_path: Path, runtime: Path, letter: str) -> None:
    names = [letter * (4096 // len(letter.encode()) - 1) + end for end in "xyz"]
    state = {name: torch.full((3,), float(n)) for n, name in enumerate(names)}
    target = {name: torch.zeros(3) for name in names}
    there_and_back(tmp_path / "run", state, target)
    assert all(torch.equal(state[name], target[name]) for name in names)


def nested(depth: int, inner: Any, kind: type = dict) -> dict[str, Any]:
    for _ in range(depth):
        inner = {"d": inner} if kind is dict else kind([inner])
    return {"top": inner}


@pytest.mark.parametrize("kind", [dict, list, tuple])
@pytest.mark.parametrize("inner", [1, "tensor"])
def test_deep_trees_work_or_are_refused_in_one_line(
    tmp_path: Path, runtime: Path, kind: type, inner: Any
) -> None:
    def state(depth: int, value: float) -> dict[str, Any]:
        item = torch.full((3,), value) if inner == "tensor" else int(value)
        return nested(depth, item, kind)

    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        for depth in (500, 5_000, 100_000):
            with pytest.raises(forebay.StateError, match="nested deeper than") as caught:
                checkpointer.save(1, state(depth, 1.0))
            assert "\n" not in str(caught.value)
    target = state(tree.MAX_DEPTH - 2, 0.0)
    there_and_back(tmp_path / "run", state(tree.MAX_DEPTH - 2, 5.0), target)
    item = target["top"]
    while isinstance(item, dict | list | tuple):
        item = item["d"] if isinstance(item, dict) else item[0]
    assert float(item if inner == 1 else item[0]) == 5.0


@pytest.mark.parametrize("count", [5_000, pytest.param(100_000, marks=pytest.mark.soak)])
@pytest.mark.timeout(900)
def test_very_many_tensors(tmp_path: Path, runtime: Path, count: int) -> None:
    state = {f"t{n:06d}": torch.full((2,), float(n)) for n in range(count)}
    target = {name: torch.zeros(2) for name in state}
    there_and_back(tmp_path / "run", state, target)
    different = sum(not torch.equal(state[name], target[name]) for name in state)
    print(f"tensors: {count}, violations: {different}")
    assert not different


def test_tensors_without_elements_or_dimensions(tmp_path: Path, runtime: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        made = {
            f"{dtype}".removeprefix("torch."): torch.full((), value, dtype=torch.float32).to(dtype)
            for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool)
        }
        for number, shape in enumerate([(0,), (0, 3), (3, 0), (2, 0, 5), (1, 1, 1, 1, 1)]):
            made[f"shape{number}"] = torch.full(shape, value)
        made["strided"] = torch.full((6, 6), value)[::2, ::3]
        made["expanded"] = torch.full((1,), value)
        return made

    saved, target = state(1.0), state(0.0)
    there_and_back(tmp_path / "run", saved, target)
    for name, tensor in saved.items():
        assert target[name].shape == tensor.shape, name
        assert torch.equal(target[name], tensor), name
    print(f"tensors of odd shapes: {len(saved)}, violations: 0")


def of_dtype(dtype: torch.dtype) -> torch.Tensor:
    """Random bits as a tensor of this type. Raises whatever torch does where it cannot."""
    if dtype.is_floating_point or dtype.is_complex or "int" in str(dtype):
        bits = torch.randint(0, 256, (7 * 16,), dtype=torch.uint8)
        return bits.view(dtype)
    return torch.randint(0, 2, (7,), dtype=torch.uint8).to(dtype)


@pytest.mark.filterwarnings("ignore:.*quantized tensor creation:UserWarning")
@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")
def test_every_dtype_comes_back_bit_by_bit_or_is_refused_by_name(
    tmp_path: Path, runtime: Path
) -> None:
    state: dict[str, torch.Tensor] = {}
    refused: list[str] = []
    checkpointer = forebay.Checkpointer(tmp_path / "refused")
    for dtype in DTYPES:
        name = str(dtype).removeprefix("torch.")
        if name in ELEMENT_TYPES:
            state[name] = of_dtype(dtype)
            continue
        try:
            odd = torch.empty(4, dtype=dtype)
        except (RuntimeError, TypeError):
            try:
                odd = torch.quantize_per_tensor(torch.ones(4), 0.1, 0, dtype)
            except (RuntimeError, TypeError):
                continue  # torch itself can make none
        with pytest.raises(forebay.StateError, match=f"^{name}: .*{name}") as caught:
            checkpointer.save(1, {name: odd})
        assert "\n" not in str(caught.value)
        refused.append(name)
    checkpointer.close()
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    there_and_back(tmp_path / "run", dict(state), dict(target))
    different = [name for name in state if raw(target[name]) != raw(state[name])]
    print(f"dtypes: {len(state)}, refused: {len(refused)}, violations: {len(different)}")
    assert not different
    assert set(state) == set(ELEMENT_TYPES)
    assert {"qint8", "quint8", "qint32"} <= set(refused)


@pytest.fixture
def roomy(tmp_path: Path) -> Iterator[Path]:
    """A directory whose files go at once: what lies there is large."""
    (tmp_path / "large").mkdir()
    yield tmp_path / "large"
    shutil.rmtree(tmp_path / "large", ignore_errors=True)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_tensor_of_eight_gib(roomy: Path, runtime: Path) -> None:
    """It and the target are files in memory's place, so that only its slot has to be in memory."""
    nbytes = 8 * GIB
    if min(psutil.virtual_memory().available, shutil.disk_usage("/dev/shm").free) < 2 * nbytes:
        pytest.skip("a slot of 8 GiB in shared memory and a buffer of 8 GiB need 16 GiB")
    if shutil.disk_usage(roomy).free < 4 * nbytes:
        pytest.skip("a tensor of 8 GiB, its target and its checkpoint need 32 GiB of disk")

    def on_disk(name: str) -> torch.Tensor:
        return torch.from_file(str(roomy / name), shared=True, size=nbytes, dtype=torch.uint8)

    tensor, target = on_disk("saved"), on_disk("target")
    block = torch.randint(0, 256, (2**20 + 3,), dtype=torch.uint8)
    for at in range(0, nbytes, block.numel()):
        part = tensor[at : at + block.numel()]
        part.copy_(block[: part.numel()])
        part[0] = (at // block.numel()) % 251
    with forebay.Checkpointer(roomy / "run", slots=1) as checkpointer:
        checkpointer.save(1, {"w": tensor}).wait("durable", 1800.0)
    with forebay.Checkpointer(roomy / "run", slots=1) as checkpointer:
        assert checkpointer.restore({"w": target}) == 1
    assert torch.equal(tensor, target)
    print(f"one tensor of {nbytes} bytes, violations: 0")


def test_a_wait_without_end_is_one_and_what_is_no_time_is_refused(
    tmp_path: Path, runtime: Path
) -> None:
    endless, target = float("inf"), {"w": torch.zeros(3)}
    with forebay.Checkpointer(tmp_path / "run") as checkpointer:
        snapshot = checkpointer.save(1, {"w": torch.ones(3)})
        snapshot.wait("durable", timeout_s=endless)
        checkpointer.wait(timeout_s=1e12)
        for wrong in (float("nan"), -1.0, "60"):
            with pytest.raises(forebay.UsageError, match="timeout_s: expected 0 s or more"):
                snapshot.wait(timeout_s=wrong)  # type: ignore[arg-type]
            with pytest.raises(forebay.UsageError, match="restore: timeout_s: expected 0 s"):
                checkpointer.restore(target, timeout_s=wrong)  # type: ignore[arg-type]
        assert checkpointer.restore(target, timeout_s=endless) == 1
        checkpointer.close(timeout_s=endless)
    assert target["w"].tolist() == [1.0] * 3
