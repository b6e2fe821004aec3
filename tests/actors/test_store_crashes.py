"""The store on disk: whenever it is cut off, its groups are whole or absent, and none that was acknowledged is lost."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest

from tests.actors.stored import deposit, group, ids, on_store, put
from troupe.actors import store as module
from troupe.actors.store import Store
from troupe.protocol.errors import StoreError
from troupe.protocol.messages import GetCommitted
from troupe.protocol.stored import committed, manifest

ROOT = str(Path(__file__).parents[2])
GROUPS = {number: [f"{number}-{member}" for member in range(3)] for number in range(4)}


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "lock"}


def _cuts(first: int, last: int) -> Iterable[int]:
    """Lengths that a crash may leave: both ends, just beside them, and some in between."""
    inside = random.Random(first).sample(range(first, last + 1), min(3, last - first + 1))
    return sorted({first, min(first + 1, last), max(last - 1, first), last, *inside})


def _check_recovery(folder: Path, durable: int) -> None:
    """The first `durable` groups are there and whole, the others absent; and the run can go on."""
    expected = [episode for number in range(durable) for episode in GROUPS[number]]
    assert committed(folder)["id"].to_pylist() == expected  # a reader that does not wait for recovery

    async def work(store: Store) -> None:
        known = await store.committed(GetCommitted())
        assert known.groups == ({1: list(range(durable))} if durable else {})
        await asyncio.gather(*(put(store, number, *GROUPS[number]) for number in range(durable, len(GROUPS))))
        assert await ids(store, 1, len(GROUPS)) == sorted(e for episodes in GROUPS.values() for e in episodes)

    on_store(folder, work)
    assert committed(folder)["id"].to_pylist() == [e for episodes in GROUPS.values() for e in episodes]
    for segment in sorted(folder.glob("*.arrow")):  # readable without Troupe, too
        assert pa.ipc.open_stream(segment).read_all().num_rows % 3 == 0


@pytest.mark.parametrize("segment_bytes", [1, 2**20], ids=["a segment a write", "one segment"])
def test_a_crash_at_any_byte_of_a_commit_leaves_whole_groups_only(
    tmp_path: Path, segment_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "fsync", lambda descriptor: None)  # the crash is played by cutting files
    stages: list[dict[str, int]] = []
    live = tmp_path / "live"

    async def work(store: Store) -> None:
        stages.append(_sizes(live))
        for number, episodes in GROUPS.items():
            await put(store, number, *episodes)
            stages.append(_sizes(live))

    on_store(live, work, segment_bytes=segment_bytes)

    crashes = []
    for durable, (before, after) in enumerate(pairwise(stages)):
        segment = next(name for name in sorted(after, reverse=True) if name.endswith(".arrow"))
        for length in _cuts(before.get(segment, 0), after[segment]):
            crashes.append((durable, before | {segment: length}))
        for length in _cuts(before["manifest.jsonl"], after["manifest.jsonl"]):
            whole = length == after["manifest.jsonl"]
            crashes.append((durable + whole, after | {"manifest.jsonl": length}))

    for index, (durable, lengths) in enumerate(crashes):
        crashed = tmp_path / str(index)
        crashed.mkdir()
        for name, length in lengths.items():
            (crashed / name).write_bytes((live / name).read_bytes()[:length])
        _check_recovery(crashed, durable)
        shutil.rmtree(crashed)


def test_data_is_on_disk_before_the_manifest_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}  # inode → bytes
    named: set[str] = set()
    checked = []

    def fsync(descriptor: int) -> None:
        stat = os.fstat(descriptor)
        synced[stat.st_ino] = stat.st_size
        if stat.st_ino == tmp_path.stat().st_ino:
            named.update(path.name for path in tmp_path.iterdir())
        for entry in manifest(tmp_path).groups:
            assert synced[(tmp_path / entry.segment).stat().st_ino] >= entry.end
            assert {entry.segment, "manifest.jsonl"} <= named
            checked.append(entry.group)

    async def work(store: Store) -> None:
        for number, episodes in GROUPS.items():
            await put(store, number, *episodes)
            assert synced[(tmp_path / "manifest.jsonl").stat().st_ino] == (tmp_path / "manifest.jsonl").stat().st_size

    monkeypatch.setattr(module.os, "fsync", fsync)
    on_store(tmp_path, work, segment_bytes=12_000)
    assert set(checked) == set(GROUPS) and len(list(tmp_path.glob("*.arrow"))) > 1


def test_a_torn_last_line_is_discarded_and_a_damaged_earlier_one_is_an_error(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        for number, episodes in GROUPS.items():
            await put(store, number, *episodes)

    live = tmp_path / "live"
    on_store(live, work)
    torn = tmp_path / "torn"
    shutil.copytree(live, torn)
    path = torn / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + b"\0" * 40 + b"\n")  # a file system may extend a file before it fills it
    _check_recovery(torn, 3)

    (live / "manifest.jsonl").write_bytes(lines[0] + b"{}\n" + b"".join(lines[2:]))
    with pytest.raises(StoreError, match="line 2 is damaged"):
        on_store(live, work)


def test_a_lost_segment_is_an_error_and_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    on_store(tmp_path, lambda store: put(store, 1, "a"))
    foreign = tmp_path / "export.arrow"
    foreign.write_bytes(b"mine")
    on_store(tmp_path, lambda store: put(store, 2, "b"))
    assert foreign.read_bytes() == b"mine"

    os.truncate(tmp_path / "000000.arrow", 100)
    with pytest.raises(StoreError, match=r"000000.arrow' has 100 bytes, the manifest names \d+"):
        on_store(tmp_path, lambda store: put(store, 3, "c"))
    with pytest.raises(StoreError, match=r"000000.arrow' has 100 bytes"):
        committed(tmp_path)


PROCESS = textwrap.dedent(
    """
    import asyncio, sys
    sys.path.insert(0, sys.argv[1])
    from tests.actors.stored import Host, put
    from troupe.actors.store import Store

    async def main():
        store = Store(Host(), sys.argv[2], segment_bytes=20_000)
        await store.start()
        for number in range(100_000):
            await put(store, number, *(f"{number}-{member}" for member in range(3)))
            print(number, flush=True)

    asyncio.run(main())
    """
)


def test_kill_9_loses_no_acknowledged_group_and_readers_see_whole_groups_meanwhile(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROCESS, ROOT, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        seen = 0
        for line in process.stdout:
            table = committed(tmp_path)  # while it writes
            assert table.num_rows % 3 == 0 and table.num_rows >= 3 * (int(line) + 1) and table.num_rows >= seen
            seen = table.num_rows
            if int(line) >= 30:
                break
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_LOCK_TRIES", 1)
            with pytest.raises(StoreError, match="another process writes"):
                on_store(tmp_path, lambda store: deposit(store, "a"))
        process.send_signal(signal.SIGKILL)
        acknowledged = [int(line), *map(int, process.stdout.read().split())]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()

    async def work(store: Store) -> None:
        known = (await store.committed(GetCommitted())).groups[1]
        assert known == list(range(len(known))) and len(known) in (acknowledged[-1] + 1, acknowledged[-1] + 2)
        await put(store, len(known), *(f"{len(known)}-{member}" for member in range(3)))

    on_store(tmp_path, work)
    assert committed(tmp_path).num_rows == 3 * len(manifest(tmp_path).groups)


def test_commits_that_arrive_together_share_a_write_and_segments_stay_few(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        episodes = {number: [f"{number}-{member}" for member in range(2)] for number in range(50)}
        for number, names in episodes.items():
            await deposit(store, *names, group=number)
        await asyncio.gather(*(store.commit(group(number, *names)) for number, names in episodes.items()))

    on_store(tmp_path, work)
    assert committed(tmp_path).num_rows == 100
    assert len((tmp_path / "manifest.jsonl").read_bytes().splitlines()) <= 2
    assert [path.name for path in sorted(tmp_path.glob("*.arrow"))] == ["000000.arrow"]
