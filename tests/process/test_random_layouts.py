"""Any layout in, any layout out: random ones, bit for bit, against torch's own cuts."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch

import forebay
from forebay.commit.publish import commit_step
from forebay.format.slices import Box
from forebay.storage.memory import MemoryStore
from tests import paper
from tests.build import ATTEMPT, STEP, Rank, entries_of, put_nodes
from tests.layouts import DTYPES, Laid, Memory, bits, noise, random_layout, random_shape

# Torch's own words about types that only few operators know; here they are copied or refused.
pytestmark = [
    pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
]

CASES, SOAK_CASES = 80, 10_000


class Case:
    """Some tensors, how they lie when saved, how they lie when restored."""

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.world_in, self.world_out = draw.randint(1, 8), draw.randint(1, 8)
        if draw.random() < 0.3:
            self.world_out = self.world_in
        self.wholes: dict[str, torch.Tensor] = {}
        self.lies_in: dict[str, Laid] = {}
        self.lies_out: dict[str, Laid] = {}
        self.ties: dict[str, str] = {}
        self.own = [
            noise(draw, draw.choice(DTYPES), random_shape(draw)) for _ in range(self.world_in)
        ]
        for number in range(draw.randint(1, 6)):
            self._add(f"t{number}")
        for name in list(self.wholes):
            if draw.random() < 0.25:
                self.ties[f"{name}-tied"] = name
        # another tensor over the same memory, as a state dict gives it, not the same tensor
        self.aliases = {name for name in self.ties if draw.random() < 0.5}

    def _add(self, name: str) -> None:
        shape = random_shape(self.draw)
        self.wholes[name] = noise(self.draw, self.draw.choice(DTYPES), shape)
        self.lies_in[name] = random_layout(self.draw, self.world_in, len(shape))
        self.lies_out[name] = random_layout(self.draw, self.world_out, len(shape))

    def saved(self) -> list[paper.State]:
        """The state of each rank that saves."""
        return [self._saved_by(rank) for rank in range(self.world_in)]

    def _saved_by(self, rank: int) -> paper.State:
        state: paper.State = {"step": 3, "own": {"x": forebay.per_rank(self.own[rank])}}
        locals_: dict[str, torch.Tensor] = {}
        for name, whole in self.wholes.items():
            lies = self.lies_in[name]
            if lies.holds(rank):
                part = lies.cut(whole, rank)
                memory = Memory(self.draw, part)
                memory.tensor.view(_carried(part)).copy_(part.view(_carried(part)))
                locals_[name] = memory.tensor
                state[name] = {"w": lies.put(memory.tensor, whole.shape, rank)}
        for name, first in self.ties.items():
            if first in state:
                held, again = state[first]["w"], locals_[first].detach()
                if name in self.aliases:
                    held = self.lies_in[first].put(again, self.wholes[first].shape, rank)
                state[name] = {"w": held}
        return state

    def restore(self, store: MemoryStore, manifest: Any) -> int:
        """Restore and compare; returns how many local tensors were compared."""
        targets: list[paper.State] = []
        held: list[tuple[str, int, torch.Tensor, Memory]] = []
        names = {name: name for name in self.wholes} | self.ties
        for rank in range(self.world_out):
            state: paper.State = {"step": 0}
            for name, first in names.items():
                whole, lies = self.wholes[first], self.lies_out[first]
                if lies.holds(rank):
                    part = lies.cut(whole, rank)
                    memory = Memory(self.draw, part)
                    state[name] = {"w": lies.put(memory.tensor, whole.shape, rank)}
                    held.append((name, rank, part, memory))
            targets.append(state)
        same = self.world_in == self.world_out
        for rank, state in enumerate(targets):
            if same:
                state["own"] = {"x": forebay.per_rank(torch.zeros_like(self.own[rank]))}
        held_before = [bits(memory.tensor).clone() for *_, memory in held]

        def untouched(_: object) -> None:
            for (name, *_rest, memory), was in zip(held, held_before, strict=True):
                assert torch.equal(bits(memory.tensor), was), f"{name} changed before all was read"

        paper.restore(store, manifest, targets, strict=same, before=untouched)
        for name, rank, part, memory in held:
            assert torch.equal(bits(memory.tensor), bits(part)), f"{name} on rank {rank}"
            assert not memory.overrun(), f"{name} on rank {rank}: wrote beside it"
        for rank, state in enumerate(targets):
            assert state["step"] == 3
            if same:
                (own,) = (forebay_value(state["own"]["x"]),)
                assert torch.equal(bits(own), bits(self.own[rank])), f"per rank, rank {rank}"
        return len(held)


def forebay_value(item: Any) -> torch.Tensor:
    """What was declared per rank."""
    from forebay.capture.declare import unwrap

    found: torch.Tensor = unwrap(item)[0]
    return found


def _carried(tensor: torch.Tensor) -> torch.dtype:
    from forebay.capture.copy import carried_as

    return carried_as(tensor.dtype)


def run(seeds: range) -> Counter[str]:
    counts: Counter[str] = Counter()
    for seed in seeds:
        case = Case(seed)
        store = MemoryStore()
        try:
            manifest = paper.save(
                store,
                case.saved(),
                3,
                nodes=case.draw.randint(1, min(3, case.world_in)),
                agree=case.draw.random() < 0.7,
            )
            counts["local tensors"] += case.restore(store, manifest)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {case.lies_in} -> {case.lies_out}") from error
        counts["cases"] += 1
        counts["tensors"] += len(case.wholes)
        counts["tied"] += len(case.ties)
        counts["slices"] += manifest.slices
        counts["resized"] += case.world_in != case.world_out
        for lies in (*case.lies_in.values(), *case.lies_out.values()):
            counts["strided shards"] += any("Strided" in repr(type(p)) for p in lies.placements)
            counts["3-D meshes"] += len(lies.mesh) == 3
            counts["stages"] += 0 < len(lies.ranks) < case.world_in
    return counts


def _zeros() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.complex64)


@pytest.mark.parametrize(
    "target",
    [torch.zeros(1).expand(4), _zeros().conj(), _zeros().conj().imag],
    ids=["expanded", "conjugated", "negated"],
)
def test_a_target_that_cannot_be_written_is_refused_before_any_is(target: torch.Tensor) -> None:
    store = MemoryStore()
    saved = {"a": torch.ones(3), "x": torch.ones(4, dtype=target.dtype)}
    manifest = paper.save(store, [saved], 3)
    first = torch.zeros(3)
    with pytest.raises(forebay.MismatchError, match="x: the target cannot be written in place"):
        paper.restore(store, manifest, [{"a": first, "x": target}])
    assert not first.any()


def test_what_cannot_be_written_can_be_saved() -> None:
    store, base = MemoryStore(), torch.randn(4, dtype=torch.complex64)
    views = {"conj": base.conj(), "neg": base.conj().imag, "wide": torch.ones(1).expand(4)}
    manifest = paper.save(store, [dict(views)], 3)
    target = {name: torch.zeros(4, dtype=view.dtype) for name, view in views.items()}
    paper.restore(store, manifest, [target])
    for name, view in views.items():
        assert torch.equal(target[name], view.resolve_conj().resolve_neg()), name


def test_every_dtype_is_saved_or_refused_with_its_path() -> None:
    saved, refused = 0, 0
    for dtype in {found for found in vars(torch).values() if isinstance(found, torch.dtype)}:
        whole = torch.empty(6, dtype=dtype)
        if dtype not in DTYPES:
            with pytest.raises(forebay.StateError, match="x: a tensor of dtype"):
                paper.save(MemoryStore(), [{"x": whole}], 3)
            refused += 1
            continue
        whole = noise(random.Random(1), dtype, (6,))
        store, target = MemoryStore(), noise(random.Random(2), dtype, (6,))
        paper.restore(store, paper.save(store, [{"x": whole}], 3), [{"x": target}])
        assert torch.equal(bits(target), bits(whole)), dtype
        saved += 1
    print(f"dtypes: {saved} saved and restored, {refused} refused, violations: 0")
    assert saved == len(DTYPES)


def told(counts: Counter[str]) -> str:
    rest = ", ".join(f"{what}: {n}" for what, n in sorted(counts.items()) if what != "cases")
    return f"cases: {counts['cases']}, {rest}, violations: 0"


def test_random_layouts_into_others() -> None:
    counts = run(range(CASES))
    print(told(counts))
    assert counts["cases"] >= CASES
    assert counts["local tensors"] >= 2 * CASES
    assert counts["strided shards"] >= 5


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_many_random_layouts_into_others() -> None:
    counts = run(range(CASES, CASES + SOAK_CASES))
    print(told(counts))
    assert counts["cases"] >= SOAK_CASES


def test_a_piece_that_two_ranks_of_a_node_stored_comes_back() -> None:
    assert run(range(276, 277))["cases"] == 1  # replicas that did not agree, on one node


def test_two_copies_of_a_half_are_not_the_whole() -> None:
    array = torch.arange(32.0).reshape(8, 4)
    whole = array.numpy()
    halves = Box((0, 0), (4, 4)), Box((4, 0), (4, 4))
    rows = [
        {rank: Rank(entries=entries_of(("w", whole))).part("w", whole, half) for rank in ranks}
        for half, ranks in zip(halves, ((0, 1), (2, 3)), strict=True)
    ]
    store = MemoryStore()
    put_nodes(store, rows)
    _, manifest = commit_step(store, STEP, ATTEMPT, nodes=2, timeout_s=0.0)
    targets = [{"w": torch.zeros(8, 4)} for _ in range(4)]
    paper.restore(store, manifest, targets)
    for target in targets:
        assert torch.equal(target["w"], array)
