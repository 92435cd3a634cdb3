"""What is available, on machines and in containers made up for it; and the pool that is made of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from pagedec.config import CacheConfig
from pagedec.errors import InvalidArgument
from pagedec.kernels.fallback import ReferenceBackend
from pagedec.models.presets import PRESETS
from pagedec.models.registry import from_hf_config
from pagedec.runtime.memory import Memory, available_memory, sources
from pagedec.runtime.pool import KvPool, choose_pool
from pagedec.runtime.sizes import weight_bytes

MIB, GIB = 1 << 20, 1 << 30
MEMINFO = """\
MemTotal:       16384000 kB
MemFree:         1024000 kB
MemAvailable:    8388608 kB
Buffers:          102400 kB
Cached:          6291456 kB
"""
V1_NONE = 9223372036854771712
V2_MOUNT = "31 23 0:28 {top} /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"
V1_MOUNT = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
Machine = Callable[[Mapping[str, object]], Path]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Writes files below a root of their own; 8 GiB are available."""

    def write(files: Mapping[str, object]) -> Path:
        for name, content in {"proc/meminfo": MEMINFO, **files}.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{content}\n")
        return tmp_path

    return write


def v2_group(path: str, limit: object, usage: int = 0, inactive: int = 0, high: object = "max") -> dict[str, object]:
    place = f"sys/fs/cgroup/{path}".rstrip("/")
    stat = f"anon 5\nfile 7\ninactive_anon 3\ninactive_file {inactive}\nactive_file 11"
    return {
        f"{place}/memory.max": limit, f"{place}/memory.high": high, f"{place}/memory.current": usage,
        f"{place}/memory.stat": stat,
    }  # fmt: skip


def v1_group(path: str, limit: int, usage: int = 0, inactive: int = 0) -> dict[str, object]:
    place = f"sys/fs/cgroup/memory/{path}".rstrip("/")
    stat = f"cache 1\ninactive_file 3\ntotal_cache 2\ntotal_inactive_file {inactive}"
    return {
        f"{place}/memory.limit_in_bytes": limit, f"{place}/memory.usage_in_bytes": usage, f"{place}/memory.stat": stat,
    }  # fmt: skip


def test_page_cache_is_available(machine: Machine) -> None:
    assert available_memory(machine({})) == Memory(8 * GIB, "MemAvailable of /proc/meminfo")
    assert str(available_memory(machine({}))) == "8.00 GiB available (MemAvailable of /proc/meminfo)"


def test_kernels_that_do_not_say_what_is_available(machine: Machine) -> None:
    old = "\n".join(line for line in MEMINFO.splitlines() if "Available" not in line)
    kib = 1024000 + 102400 + 6291456
    assert available_memory(machine({"proc/meminfo": old})).num_bytes == kib << 10


@pytest.mark.parametrize("damage", ["", "MemAvailable: much\nMemTotal 12 kB", "\0\0"])
def test_systems_without_proc(damage: str, machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for root in (tmp_path / "nothing here", machine({"proc/meminfo": damage})):
        assert available_memory(root).num_bytes == total // 2
        assert "does not say what of it is free" in available_memory(root).source
    monkeypatch.delattr(os, "sysconf")
    assert available_memory(tmp_path / "nothing here").num_bytes == GIB


def test_a_container_of_version_2(machine: Machine) -> None:
    """Docker: the process's group is the top of what is mounted. Cache that nobody uses counts as usage, but can be
    had."""
    files = {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2_MOUNT.format(top="/")}
    root = machine(files | v2_group("", 2 * GIB, usage=900 * MIB, inactive=500 * MIB))
    assert available_memory(root) == Memory(
        2 * GIB - 400 * MIB, "limit of 2.00 GiB in the control group /sys/fs/cgroup"
    )


def test_the_tightest_of_all_groups_above(machine: Machine) -> None:
    files = {"proc/self/cgroup": "0::/slice/unit/own", "proc/self/mountinfo": V2_MOUNT.format(top="/")}
    files |= v2_group("slice", 4 * GIB, usage=3 * GIB) | v2_group("slice/unit", "max", usage=GIB)
    root = machine(files | v2_group("slice/unit/own", 2 * GIB, usage=100 * MIB))
    assert available_memory(root) == Memory(GIB, "limit of 4.00 GiB in the control group /sys/fs/cgroup/slice")
    assert [memory.num_bytes for memory in sources(root)] == [8 * GIB, 2 * GIB - 100 * MIB, GIB]


def test_a_group_is_slowed_down_above_its_high_mark(machine: Machine) -> None:
    files = {"proc/self/cgroup": "0::/a", "proc/self/mountinfo": V2_MOUNT.format(top="/")}
    assert available_memory(machine(files | v2_group("a", 2 * GIB, 0, 0, high=GIB))).num_bytes == GIB
    assert available_memory(machine(files | v2_group("a", "max", 0, 0, high=GIB))).num_bytes == GIB


@pytest.mark.parametrize("mounted", [True, False])
def test_a_container_of_version_1(mounted: bool, machine: Machine) -> None:
    """The group's path is the host's, what is mounted is the group itself; without mountinfo the usual place is looked
    at."""
    lines = "9:name=systemd:/docker/c0ffee\n4:cpu,memory:/docker/c0ffee\n0::/"
    files: dict[str, object] = {"proc/self/cgroup": lines}
    if mounted:
        files["proc/self/mountinfo"] = f"22 1 0:2 / /proc rw - proc proc rw\n{V1_MOUNT.format(top='/docker/c0ffee')}"
    root = machine(files | v1_group("", 2 * GIB, usage=GIB, inactive=256 * MIB))
    assert available_memory(root).num_bytes == GIB + 256 * MIB
    assert "/sys/fs/cgroup/memory" in available_memory(root).source


def test_groups_of_version_1_nest(machine: Machine) -> None:
    files = {"proc/self/cgroup": "4:memory:/a/b", "proc/self/mountinfo": V1_MOUNT.format(top="/")}
    root = machine(files | v1_group("", V1_NONE) | v1_group("a", GIB, usage=GIB // 2) | v1_group("a/b", V1_NONE))
    assert available_memory(root).num_bytes == GIB // 2


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/"},
        {"proc/self/cgroup": "0::/gone/away", "proc/self/mountinfo": V2_MOUNT.format(top="/")},
        {"proc/self/cgroup": "0::/../../elsewhere", "proc/self/mountinfo": V2_MOUNT.format(top="/")},
        {"proc/self/cgroup": "nonsense\n::\n:", "proc/self/mountinfo": "nonsense\n - \n1 2 3 - cgroup2"},
        {"proc/self/cgroup": "4:memory:/", "proc/self/mountinfo": V1_MOUNT.format(top="/"), **v1_group("", V1_NONE)},
        {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2_MOUNT.format(top="/"), **v2_group("", "max", 1)},
        {"proc/self/cgroup": "0::/", "sys/fs/cgroup/memory.max": 1, "sys/fs/cgroup/memory.stat": ""},
    ],
    ids=range(7),
)  # fmt: skip
def test_what_sets_no_limit(files: dict[str, object], machine: Machine) -> None:
    assert available_memory(machine(files)).num_bytes == 8 * GIB


def test_a_group_that_is_told_from_another_root(machine: Machine) -> None:
    files = {"proc/self/cgroup": "0::/../other", "proc/self/mountinfo": V2_MOUNT.format(top="/")}
    assert available_memory(machine(files | v2_group("", GIB) | v2_group("other", 1))).num_bytes == GIB


def test_a_group_over_its_limit_leaves_nothing(machine: Machine) -> None:
    files = {"proc/self/cgroup": "0::/", "proc/self/mountinfo": V2_MOUNT.format(top="/")}
    assert available_memory(machine(files | v2_group("", GIB, usage=2 * GIB))).num_bytes == 0
    assert available_memory(machine(files | v2_group("", GIB, usage=MIB, inactive=GIB))).num_bytes == GIB


def test_places_with_spaces(machine: Machine) -> None:
    files: dict[str, object] = {"proc/self/cgroup": "0::/"}
    files["proc/self/mountinfo"] = "31 23 0:28 / /my\\040groups rw - cgroup2 cgroup2 rw"
    files |= {"my groups/memory.max": GIB, "my groups/memory.current": 0}
    assert available_memory(machine(files)).num_bytes == GIB


def test_a_limit_on_the_address_space(machine: Machine) -> None:
    """There a pool counts in full."""
    line = "Max address space         {}           unlimited            bytes"
    status = "VmPeak:\t  999 kB\nVmSize:\t 1048576 kB\nVmRSS:\t 5 kB"
    root = machine({"proc/self/limits": line.format(3 * GIB), "proc/self/status": status})
    assert available_memory(root) == Memory(2 * GIB, "limit of 3.00 GiB on the address space (ulimit -v)")
    root = machine({"proc/self/limits": line.format("unlimited"), "proc/self/status": status})
    assert available_memory(root).num_bytes == 8 * GIB


def test_this_machine() -> None:
    memory = available_memory()
    assert 0 < memory.num_bytes <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


# ------------------------------------------------------------------------------------------------------------- the pool
BLOCK = 1 << 20


def pool(available: int = 0, length: int = 1600, seqs: int = 256, taken: int = 0, **fields: Any) -> KvPool:
    """A pool of blocks of 16 tokens in one MiB, where so many MiB are available."""
    memory = Memory(available * MIB, "so it is")
    return choose_pool(CacheConfig(**fields), BLOCK, length, seqs, lambda: memory, taken * MIB)


@pytest.mark.parametrize(
    ("available", "length", "seqs", "num_blocks", "reason"),
    [
        (8192, 1600, 256, 2048, "a quarter of the 8.00 GiB available (so it is)"),
        (65536, 1600, 256, 4096, "4 GiB are the most where nothing is said"),
        (8192, 1600, 4, 401, "all that 4 sequences of 1600 tokens can use"),
        (8192, 1600, 1, 101, "all that 1 sequence of 1600 tokens can use"),
        (8192, 48_000, 256, 3001, "one whole context"),
        (8192, 80_000, 256, 4096, "half of the 8.00 GiB available (so it is)"),
        (65536, 131_072, 256, 8193, "one whole context"),
        (0, 1600, 256, 2, "a quarter of the 0 MiB available (so it is)"),
    ],
)
def test_where_nothing_is_said(available: int, length: int, seqs: int, num_blocks: int, reason: str) -> None:
    found = pool(available, length, seqs)
    assert found == KvPool(num_blocks, 16, num_blocks * BLOCK, reason)
    assert (found.num_tokens, found.max_sequence) == (num_blocks * 16, (num_blocks - 1) * 16)
    assert (found.complaint(length) is None) == (found.max_sequence >= length)


def test_a_share_is_taken_in_full() -> None:
    assert pool(65536, seqs=1, memory_utilization=0.5).num_blocks == 32768
    assert pool(64, memory_utilization=0.25) == KvPool(16, 16, 16 * BLOCK, "0.25 of the 64 MiB available (so it is)")
    assert pool(100, memory_utilization=1).num_blocks == 100


def test_what_another_pool_takes_is_not_available() -> None:
    assert pool(8192, taken=4096).num_blocks == 1024
    assert pool(8192, taken=9000, length=16, seqs=1).num_blocks == 2


def test_what_is_said_needs_no_measuring() -> None:
    def fail() -> Memory:
        raise AssertionError("nobody needs to know")

    for fields, num_blocks in (({"num_blocks": 7}, 7), ({"kv_cache_memory": 5 * MIB + 9}, 5)):
        assert choose_pool(CacheConfig(**fields), BLOCK, 1600, 256, fail).num_blocks == num_blocks


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_blocks": 1}, "num_blocks is 1: must be at least 2 blocks of 1048576 bytes"),
        (
            {"kv_cache_memory": "1MiB"},
            "kv_cache_memory is 1048576: must be at least 2 blocks of 1048576 bytes",
        ),
        (
            {"memory_utilization": 0.1},
            "memory_utilization is 0.1: must be at least 2 blocks of 1048576 bytes; it is 0.1 of the 10 MiB available "
            "(so it is)",
        ),
    ],
)
def test_a_pool_of_less_than_two_blocks_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        pool(10, **fields)
    assert str(caught.value) == message


def test_what_a_small_pool_is_told() -> None:
    assert pool(num_blocks=101).complaint(1600) is None
    assert pool(num_blocks=100).complaint(1600) == (
        "the KV pool holds less than one context: sequences end at 1584 tokens, max_model_len is 1600; the pool has "
        "100 blocks, 1600 tokens, 100.0 MiB (as num_blocks says): give it more with num_blocks, kv_cache_memory or "
        "memory_utilization, or lower max_model_len"
    )


@pytest.mark.parametrize(
    ("quantization", "gib"),
    [(None, 38.96), ("int8", 19.48), ("mxfp4", 13.37), ("int4", 10.96), ("int4_128", 38.57), ("gptq", 12.29)],
)
def test_what_weights_take(quantization: str | None, gib: float) -> None:
    """Of gpt-oss-20b in bfloat16: 19 of its 21 billion weights are experts', and rows of 2,880 are no multiple of 128:
    of what int4_128 divides there is the projection behind attention alone."""
    arch = from_hf_config(PRESETS["gpt-oss-20b"])
    size = weight_bytes(arch, backend := ReferenceBackend(torch.bfloat16, quantization))
    assert size / GIB == pytest.approx(gib, abs=0.01)
    # of a checkpoint's integers alone, which are its layers', it matters how many bits they have, and if they stay
    others = (21.71, 38.96) if quantization == "gptq" else (gib, gib)
    assert [weight_bytes(arch, backend, bits) / GIB for bits in (8, None)] == pytest.approx(others, abs=0.01)
