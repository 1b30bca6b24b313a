"""Host memory, local disk and limits."""

from __future__ import annotations

import os
import resource
import shutil
import tempfile
import threading
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from forebay.doctor import disk, limits, memory
from forebay.doctor.finding import Finding, Verdict
from forebay.doctor.limits import Limits, read_limits
from forebay.doctor.numa import node_cpus
from forebay.doctor.samples import spread, summarize
from forebay.doctor.starved import starved
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


def test_memory_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "last_level_cache_bytes", lambda: 0)
    lines = by_name(memory.measure({}, seconds=0.02, size_bytes=8 * MIB, told=silent))
    traffic, copies = lines["host memory traffic"], lines["host copy"]
    assert traffic.field == "cluster.host_bandwidth"
    assert traffic.measured == pytest.approx(2 * (copies.measured or 0))
    assert all(each.measured for each in lines.values())
    assert {each.verdict for each in lines.values()} == {Verdict.MEASURED}
    assert lines["first touch by the kernel"].field == ""
    assert "3 rounds of" in traffic.note


def test_what_the_cache_gave_is_not_planned_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "last_level_cache_bytes", lambda: 64 * MIB)
    found = memory.measure({}, seconds=0.02, size_bytes=32 * MIB, told=silent)
    assert "partly in the cache of 67.1 MB" in found[0].note
    assert not any(each.field for each in found)


def test_the_spread_of_rounds() -> None:
    assert spread([2e9]) == "1 round"
    assert spread([2e9, 1.5e9, 1.9e9]) == "3 rounds of 1.5 GB/s to 2 GB/s"
    assert spread([2e9, 1e9]).startswith("noisy, 2 rounds of 1 GB/s")
    assert spread([2e9] * 500 + [1e9] + [2e9] * 499).startswith("1,000 rounds of 1.98 GB/s")
    assert spread([2e9] * 500 + [1e9] * 500).startswith("noisy, 1,000 rounds")


def test_cores_near_to_each_memory(tmp_path: Path) -> None:
    for number, cpus in ((0, "0-1,4"), (1, "2-3,5\n"), (2, ""), (10, "8-9"), (3, "what?")):
        place = tmp_path / f"sys/devices/system/node/node{number}"
        place.mkdir(parents=True)
        (place / "cpulist").write_text(cpus)
    every = set(range(10))
    assert node_cpus(every, tmp_path) == [{0, 1, 4}, {2, 3, 5}, {8, 9}]
    assert node_cpus({0, 3}, tmp_path) == [{0}, {3}]
    assert node_cpus(every, tmp_path / "none") == []


def test_each_thread_touches_its_own_memory_on_its_node(monkeypatch: pytest.MonkeyPatch) -> None:
    class Touched(list[Any]):
        """In place of memory: who wrote which part before anything was copied."""

        def __setitem__(self, part: Any, _: Any) -> None:
            self.append((threading.current_thread(), part.start, part.stop))

    bound: dict[threading.Thread, set[int]] = {}
    monkeypatch.setattr(
        "os.sched_setaffinity", lambda _, cpus: bound.update({threading.current_thread(): cpus})
    )
    copies = memory._Copies(4096, 4, [{0, 1}, {2, 3}])
    source, target = Touched(), Touched()
    copies._source, copies._target = source, target  # type: ignore[assignment]
    monkeypatch.setattr(copies, "_round", lambda _: 1.0)
    assert copies.rates(0.001) == [4.0] * 3
    for touched in (source, target):
        parts = {start: bound[thread] for thread, start, _ in touched}
        assert parts == {0: {0, 1}, 1024: {2, 3}, 2048: {0, 1}, 3072: {2, 3}}
        assert {end - start for _, start, end in touched} == {1024}
    assert threading.main_thread() not in bound


@pytest.mark.parametrize("after", [0, 1])
def test_no_threads_to_be_had(monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    start, left = threading.Thread.start, [after]

    def refuse(thread: threading.Thread) -> None:
        if not left[0]:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    monkeypatch.setattr(memory, "counts", lambda _: [2])
    (found,) = memory.measure({}, seconds=0.01, size_bytes=2 * MIB, told=silent)
    assert found.verdict is Verdict.FAILED
    assert "no thread" in found.note
    assert "pids" in found.to_do
    assert not [one for one in threading.enumerate() if one.name == "copies"]


def test_a_fault_in_a_thread_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(memory, "stay_near", fail)
    (found,) = memory.measure({}, seconds=0.01, size_bytes=2 * MIB, told=silent)
    assert "no memory" in found.note
    with pytest.raises(RuntimeError, match="a bug"):
        starved("memory", "any", RuntimeError("a bug"))


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
    "runtime": Path("/dev/shm/forebay-1000"),
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
        Limits(**{**HERE, **change}), expect(host_memory=2e12), arena_bytes=6e9, rdma=True
    )
    assert {each.name for each in found if not each.verdict.holds} == bad
    assert all(each.to_do for each in found if not each.verdict.holds)


def test_limits_that_nobody_needs() -> None:
    """Without a fabric nothing is registered, and without a plan nothing is known of arenas."""
    low = Limits(**{**HERE, "memlock_bytes": 65536, "shared_free_bytes": 64 * MIB})
    for arena_bytes, rdma in ((None, True), (None, False)):
        found = by_name(limits.judge(low, {}, arena_bytes=arena_bytes, rdma=rdma))
        assert found["locked memory"].verdict is Verdict.MEASURED
        assert found["shared memory"].verdict is Verdict.MEASURED
    found = by_name(limits.judge(low, {}, arena_bytes=1e6, rdma=False))
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


def test_shared_memory_is_where_the_arenas_lie(tmp_path: Path) -> None:
    def read(runtime: str) -> Limits:
        return read_limits(tmp_path, lambda _: None, Path(runtime))

    assert read("/dev/shm/forebay-1000").shared_bytes is None  # not the room of /dev
    assert "/dev/shm is not there" in limits._shared(read("/dev/shm/forebay-1000"), None).note
    (tmp_path / "dev/shm").mkdir(parents=True)
    assert read("/dev/shm/forebay-1000").shared_bytes
    (tmp_path / "scratch").mkdir()
    other = read("/scratch/jobs/forebay")  # made when a job starts
    assert other.shared_bytes == shutil.disk_usage(tmp_path).total
    assert "in /scratch/jobs/forebay" in limits._shared(other, None).note


def test_the_runtime_directory_in_use_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_RUNTIME_DIR", str(tmp_path))
    found = by_name(limits.measure({}, told=silent))["shared memory"]
    assert f"in {tmp_path};" in found.note


def test_limits_of_this_machine() -> None:
    found = limits.measure({}, told=silent)
    assert {each.hop for each in found} == {"limits"}
    assert by_name(found)["cores"].measured
