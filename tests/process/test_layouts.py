"""Any layout in, any layout out: saved on some ranks, restored on others, equal bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.process.conftest import Ranks

WORLDS = (1, 2, 3, 5, 7)


@pytest.mark.parametrize("layout", ["fsdp", "fsdp_tp"])
def test_saved_on_four_ranks_restores_on_any_number(
    layout: str, tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    url = str(tmp_path / "run")
    saved = start_ranks("save_trained", 4, url=url, layout=layout, step=3).wait()[0]
    for world in WORLDS:
        other = "fsdp" if world % 2 else layout
        loaded = start_ranks("load_trained", world, url=url, layout=other, step=3).wait()[0]
        assert loaded == saved, f"{layout} on 4 ranks, {other} on {world}"


def test_layouts_exchange_their_checkpoints(
    tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    for number, (layout, other) in enumerate([("hsdp", "fsdp_tp"), ("fsdp_tp", "hsdp")]):
        url = str(tmp_path / f"run-{number}")
        saved = start_ranks("save_trained", 4, url=url, layout=layout, step=3).wait()[0]
        loaded = start_ranks("load_trained", 4, url=url, layout=other, step=3).wait()[0]
        assert loaded == saved, f"{layout} into {other}"


def test_same_layout_on_two_nodes(tmp_path: Path, start_ranks: Callable[..., Ranks]) -> None:
    url = str(tmp_path / "run")
    saved = start_ranks("save_trained", 4, local_size=2, url=url, layout="fsdp", step=3).wait()[0]
    loaded = start_ranks("load_trained", 4, local_size=2, url=url, layout="fsdp", step=3).wait()[0]
    assert loaded == saved


def test_one_process_without_torch_distributed_reads_it_too(
    tmp_path: Path, start_ranks: Callable[..., Ranks]
) -> None:
    import numpy as np

    import forebay

    url = str(tmp_path / "run")
    saved = start_ranks("save_trained", 2, url=url, layout="fsdp", step=3).wait()[0]
    run = forebay.open(url)
    assert run.steps() == [3]
    weight = run.read(3, "model/up.weight")
    assert weight.dtype == np.float32
    assert weight.tobytes().hex() == saved["up.weight"]
