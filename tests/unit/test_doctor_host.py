"""Host memory, local disk and limits."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from forebay.doctor import disk, limits, memory
from forebay.doctor.finding import Finding, Verdict
from forebay.doctor.limits import Limits, read_limits
from forebay.doctor.samples import summarize
from forebay.errors import UsageError
from forebay.plan.figure import Figure
from forebay.storage import durable

MIB = 2**20


def silent(_: str) -> None:
    pass


def by_name(found: list[Finding]) -> dict[str, Finding]:
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def expect(**values: float) -> dict[str, Figure]:
    return {f"cluster.{name}": Figure(value=v, source="test") for name, v in values.items()}


def test_median_and_p99_are_times_that_were_seen() -> None:
    seen = summarize([float(number) for number in range(1, 101)])
    assert (seen.median_s, seen.p99_s, seen.count) == (50.0, 99.0, 100)
    one = summarize([3.0])
    assert (one.median_s, one.p99_s) == (3.0, 3.0)


def test_numbers_of_threads() -> None:
    assert memory.counts(1) == [1]
    assert memory.counts(2) == [1, 2]
    assert memory.counts(6) == [1, 2, 4, 6]
    assert memory.counts(8) == [1, 2, 4, 8]


def test_memory_is_measured() -> None:
    lines = by_name(memory.measure({}, seconds=0.02, size_bytes=8 * MIB, told=silent))
    traffic, copies = lines["host memory traffic"], lines["host copy"]
    assert traffic.field == "cluster.host_bandwidth"
    assert traffic.measured == pytest.approx(2 * (copies.measured or 0))
    assert all(each.measured for each in lines.values())
    assert {each.verdict for each in lines.values()} == {Verdict.MEASURED}
    assert lines["first touch by the kernel"].field == ""


def test_memory_below_what_the_plan_assumes() -> None:
    expected = expect(host_bandwidth=1e15)
    found = memory.measure(expected, seconds=0.01, size_bytes=2 * MIB, told=silent)
    assert found[0].verdict is Verdict.SLOW
    assert "NUMA" in found[0].to_do


def test_caches_are_counted_once(tmp_path: Path) -> None:
    for cpu, shared in ((0, "0-1"), (1, "0-1"), (2, "2-3")):
        place = tmp_path / f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
        place.mkdir(parents=True)
        (place / "shared_cpu_list").write_text(shared + "\n")
        (place / "size").write_text("32768K\n")
    assert memory.last_level_cache_bytes(tmp_path) == 64 * MIB
    assert memory.last_level_cache_bytes(tmp_path / "none") == 0


def test_a_disk_is_measured_and_left_clean(tmp_path: Path) -> None:
    told: list[str] = []
    expected = expect(nvme=1.0, nvme_read=1.0, nvme_capacity=1.0)
    found = disk.measure(tmp_path, expected, seconds=0.02, size_bytes=8 * MIB, told=told.append)
    lines = by_name(found)
    assert set(lines) == {
        *("room", "write, O_DIRECT", "read, O_DIRECT", "write, page cache and fsync"),
        "a small durable file",
    }
    assert all(each.measured for each in found)
    fields = {each.field for each in found if each.field}
    assert fields == {"cluster.nvme", "cluster.nvme_read", "cluster.nvme_capacity"}
    assert lines["room"].verdict is Verdict.GOOD
    assert len(told) == 4
    assert list(tmp_path.iterdir()) == []


def test_memory_is_no_disk() -> None:
    if disk.filesystem_of(Path("/dev/shm")) != "tmpfs":
        pytest.skip("/dev/shm is no tmpfs")
    expected = expect(nvme=1.0, nvme_capacity=1.0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:  # others may measure beside us
        place = Path(name)
        found = disk.measure(place, expected, seconds=0.01, size_bytes=4 * MIB, told=silent)
        assert not list(place.iterdir())
    lines = by_name(found)
    assert lines["write, O_DIRECT"].verdict is Verdict.OFF
    assert "nothing survives" in lines["write, O_DIRECT"].note
    assert not any(each.field for each in found)


def test_a_full_disk_is_not_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")  # noqa: PYI024 - as shutil's own
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**12, 10**12 - MIB, MIB))
    found = disk.measure(tmp_path, {}, seconds=0.01, size_bytes=8 * MIB, told=silent)
    assert [each.verdict for each in found] == [Verdict.MEASURED, Verdict.FAILED]
    assert "needed" in found[1].note
    assert "--size" in found[1].to_do


def test_the_kernels_own_filesystems_are_no_disk() -> None:
    (found,) = disk.measure(Path("/proc"), {}, seconds=0.01, size_bytes=8 * MIB, told=silent)
    assert found.verdict is Verdict.FAILED
    assert "proc, which is no disk" in found.note
    assert "own disks" in found.to_do


def test_what_a_killed_doctor_left_is_removed_after_a_day(tmp_path: Path) -> None:
    old, new, other, link = (
        tmp_path / name
        for name in (
            *(".forebay-doctor-0123456789ab", ".forebay-doctor-ba9876543210"),
            *(".forebay-doctor-mine", ".forebay-doctor-00000000000a"),
        )
    )
    for place in (old, new, other):
        place.mkdir()
        (place / "part-0").write_bytes(b"x")
    link.symlink_to(other)
    for place in (old, other, link):
        os.utime(place, (1.0, 1.0), follow_symlinks=False)
    told: list[str] = []
    disk.measure(tmp_path, {}, seconds=0.01, size_bytes=4 * MIB, told=told.append)
    assert sorted(tmp_path.iterdir()) == sorted([new, other, link])
    assert (other / "part-0").exists()
    assert sum("earlier doctor" in line for line in told) == 1


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), KeyboardInterrupt()])
def test_trouble_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def write(path: Path, view: memoryview) -> None:
        path.write_bytes(b"half")
        raise error

    monkeypatch.setattr(durable, "write_cached", write)
    if isinstance(error, OSError):
        found = disk.measure(tmp_path, {}, seconds=0.01, size_bytes=4 * MIB, told=silent)
        assert found[-1].verdict is Verdict.FAILED
        assert "Input/output error" in found[-1].note
    else:
        with pytest.raises(KeyboardInterrupt):
            disk.measure(tmp_path, {}, seconds=0.01, size_bytes=4 * MIB, told=silent)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--local .*gone: expected a directory"):
        disk.measure(tmp_path / "gone", {}, told=silent)


def test_the_filesystem_is_that_of_the_nearest_mount(tmp_path: Path) -> None:
    inner = tmp_path / "a b" / "c"
    inner.mkdir(parents=True)
    mounts = tmp_path / "mounts"
    escaped = str(tmp_path / "a b").replace(" ", "\\040")
    mounts.write_text(
        f"/dev/vda / ext4 rw 0 0\n/dev/nvme0n1 {tmp_path} xfs rw 0 0\n"
        f"none {escaped} tmpfs rw 0 0\n/dev/sdb {tmp_path}x ext3 rw 0 0\n"
        f"/dev/md0 {escaped} xfs rw 0 0\n"
    )
    assert disk.filesystem_of(inner, mounts) == "xfs"  # mounted over the tmpfs
    assert disk.filesystem_of(tmp_path, mounts) == "xfs"
    assert disk.filesystem_of(Path("/"), mounts) == "ext4"
    assert disk.filesystem_of(inner, tmp_path / "none") == ""


HERE: dict[str, Any] = {
    "memlock_bytes": None,
    "open_files": 65536,
    "shared_bytes": 10**12,
    "shared_free_bytes": 10**12,
    "memory_bytes": 2 * 10**12,
    "cgroup_bytes": None,
    "cores": 96,
    "cores_online": 96,
    "huge_shared": "advise",
}


@pytest.mark.parametrize(
    ("change", "bad"),
    [
        ({}, set()),
        ({"memlock_bytes": 65536}, {"locked memory"}),
        ({"memlock_bytes": 10**12}, set()),
        ({"open_files": 1024}, {"open files"}),
        ({"open_files": None}, set()),
        ({"shared_free_bytes": 64 * MIB}, {"shared memory"}),
        ({"shared_bytes": None, "shared_free_bytes": None}, {"shared memory"}),
        ({"cgroup_bytes": 10**9}, {"host memory"}),
        ({"cgroup_bytes": 3 * 10**12}, set()),
        ({"memory_bytes": 10**12}, {"host memory"}),
        ({"cores": 2}, set()),
    ],
)
def test_limits(change: dict[str, Any], bad: set[str]) -> None:
    found = limits.judge(
        Limits(**{**HERE, **change}), expect(host_memory=2e12), arena_bytes=6e9, pins=True
    )
    assert {each.name for each in found if not each.verdict.holds} == bad
    assert all(each.to_do for each in found if not each.verdict.holds)


def test_limits_that_nobody_needs() -> None:
    """Without a GPU nothing is pinned, and without a plan nothing is known of arenas."""
    low = Limits(**{**HERE, "memlock_bytes": 65536, "shared_free_bytes": 64 * MIB})
    for arena_bytes, pins in ((None, True), (None, False)):
        found = by_name(limits.judge(low, {}, arena_bytes=arena_bytes, pins=pins))
        assert found["locked memory"].verdict is Verdict.MEASURED
        assert found["shared memory"].verdict is Verdict.MEASURED
    found = by_name(limits.judge(low, {}, arena_bytes=1e6, pins=False))
    assert found["locked memory"].verdict is Verdict.MEASURED


def test_limits_are_read(tmp_path: Path) -> None:
    def put(path: str, text: str) -> None:
        place = tmp_path / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    put("proc/meminfo", "MemTotal:       2113517048 kB\nMemFree: 1 kB\n")
    put("proc/self/cgroup", "0::/kubepods/pod7/main\n")
    put("sys/fs/cgroup/kubepods/pod7/main/memory.max", "max\n")
    put("sys/fs/cgroup/kubepods/pod7/memory.max", "549755813888\n")
    put("sys/fs/cgroup/kubepods/memory.max", "1099511627776\n")
    put("sys/kernel/mm/transparent_hugepage/shmem_enabled", "always within_size [advise] never\n")
    given = {resource.RLIMIT_MEMLOCK: 8 * MIB, resource.RLIMIT_NOFILE: 1024}
    found = read_limits(tmp_path, given.get)
    assert found.memory_bytes == 2113517048 * 1024
    assert found.cgroup_bytes == 2**39  # the tightest on the way up counts
    assert (found.memlock_bytes, found.open_files) == (8 * MIB, 1024)
    assert found.huge_shared == "advise"
    assert found.shared_bytes is None
    put("proc/self/cgroup", "12:cpu:/\n5:memory:/docker/abc\n")
    put("sys/fs/cgroup/memory/docker/abc/memory.limit_in_bytes", "4294967296\n")
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    assert read_limits(tmp_path, given.get).cgroup_bytes == 2**32


def test_limits_of_this_machine() -> None:
    found = limits.measure({}, told=silent)
    assert {each.hop for each in found} == {"limits"}
    assert by_name(found)["cores"].measured
