"""Any layout in, any layout out: saved on some ranks, restored on others, equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import forebay
from tests.process.conftest import Ranks

WORLDS = (1, 2, 3, 5, 7)


@pytest.mark.parametrize(
    ("layout", "worlds"),
    [
        ("fsdp_tp", (2, 3)),
        pytest.param("fsdp_tp", WORLDS, marks=pytest.mark.soak),
        pytest.param("fsdp", WORLDS, marks=pytest.mark.soak),
    ],
)
def test_saved_on_four_ranks_restores_on_any_number(
    layout: str, worlds: tuple[int, ...], tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    url = str(tmp_path / "run")
    saved = start_ranks("save_trained", 4, url=url, layout=layout, step=3).wait()[0]
    for world in worlds:
        other = "fsdp" if world % 2 else layout
        loaded = start_ranks("load_trained", world, url=url, layout=other, step=3).wait()[0]
        assert loaded == saved, f"{layout} on 4 ranks, {other} on {world}"


@pytest.mark.parametrize(
    ("layout", "other"),
    [
        ("hsdp", "fsdp_tp"),
        pytest.param("fsdp_tp", "plain", marks=pytest.mark.soak),
        pytest.param("plain", "hsdp", marks=pytest.mark.soak),
    ],
)
def test_layouts_exchange_their_checkpoints(
    layout: str, other: str, tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    url = str(tmp_path / "run")
    saved = start_ranks("save_trained", 4, url=url, layout=layout, step=3).wait()[0]
    loaded = start_ranks("load_trained", 4, url=url, layout=other, step=3).wait()[0]
    assert loaded == saved


def test_replicas_are_divided_among_their_holders(
    tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    """Plain replicated tensors: stored once in all, by several ranks, optimizer state included."""
    url = str(tmp_path / "run")
    saved = start_ranks("save_trained", 4, url=url, layout="plain", step=3).wait()[0]
    run = forebay.open(url)
    stored = list(run.catalog.slices(run.manifest(3)))
    assert len({piece.rank for piece in stored}) > 1
    written = sum(piece.nbytes for piece in stored)
    assert written == sum(len(data) // 2 for data in saved.values())
    images = sum(p.stat().st_size for p in (tmp_path / "run" / "data").rglob("*.safetensors"))
    assert images < written + 4 * 16 * 4096, "no rank wrote what another one wrote"


def test_same_layout_on_two_nodes(tmp_path: Path, start_ranks: Callable[..., Ranks]) -> None:
    url = str(tmp_path / "run")
    saved = start_ranks("save_trained", 4, local_size=2, url=url, layout="fsdp", step=3).wait()[0]
    loaded = start_ranks("load_trained", 4, local_size=2, url=url, layout="fsdp", step=3).wait()[0]
    assert loaded == saved


def test_one_process_without_torch_distributed_reads_it_too(
    tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    import numpy as np

    url = str(tmp_path / "run")
    saved = start_ranks("save_trained", 2, url=url, layout="fsdp", step=3).wait()[0]
    run = forebay.open(url)
    assert run.steps() == [3]
    weight = run.read(3, "model/up.weight")
    assert weight.dtype == np.float32
    assert weight.tobytes().hex() == saved["up.weight"]
