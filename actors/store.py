"""The store: owns `RUN/trajectories/`, where every episode ends up exactly once: completed, failed or cancelled.

Promises:
- a group is durable exactly when its manifest line is complete; `commit` answers after that, never before. At start-up
  whatever lies behind the last complete line is discarded: a crash at any instant leaves whole groups only;
- of several writes of one episode the first accepted one wins; those of other attempts, and of fenced ones, are refused
  with a reason. A writer that did not hear its receipt may ask again. What is committed never changes; to commit a
  committed group again is accepted and does nothing;
- `batch` is deterministic: the first `groups` training groups of a step in the order of the manifest, completed
  trajectories only, ordered by id. Evaluations never train;
- deposits wait in memory for their commit, at most `max_deposits` of them (then `Overloaded`), and die with the
  process: a commit that names lost ones is refused and says which, so that they are run again. Fences are durable;
- one process writes a folder; any number may read it meanwhile (`protocol/stored.py`), from other processes too.

On disk: `000012.arrow` is an Arrow IPC stream to which each group appends one record batch; `manifest.jsonl` gets a
line a write, naming the groups in it and the bytes where each lies. A segment ends at 64 MiB and at each restart, so
there are few files however small the groups are. The order of a write is: segment, fsync, manifest line, fsync; commits
that arrive during a write share the next one, so that fsync (in a thread) costs the same for one group or fifty.
Readers map the segments and never look behind the bytes that the manifest names, so they need no lock.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import math
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from troupe.actors.context import Context
from troupe.protocol import arrow
from troupe.protocol.errors import NotReady, Overloaded, StoreError, TroupeError
from troupe.protocol.messages import (
    Ack,
    Batch,
    CommitGroup,
    Committed,
    Deposit,
    Deposited,
    Fence,
    GetBatch,
    GetCommitted,
    GetDeposit,
    GetSpans,
    Health,
    Ping,
    Receipt,
    Spans,
)
from troupe.protocol.spans import SpanLog
from troupe.protocol.stored import MANIFEST, VERSION, Group, Manifest, fenced, manifest, short, training
from troupe.protocol.trajectory import Kind, Trajectory

_MESSAGE_CHARS = 300
_MAX_FENCES = 100_000
_LOCK_TRIES, _LOCK_PAUSE_S = 20, 0.25

_Key = tuple[Kind, int, int]


@dataclass(slots=True)
class _Deposited:
    attempt: int
    kind: Kind
    status: str
    tokens: int
    data_failure: tuple[str, str] | None  # task id and message
    row: pa.RecordBatch


@dataclass(slots=True)
class _Write:
    message: CommitGroup | Fence
    deposits: list[_Deposited] = field(default_factory=list)
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Store:
    """The trajectory store of one run.

    folder: `RUN/trajectories`, made if it is missing. Every message raises NotReady before `start`, and StoreError once
    the disk has failed (full, gone): after a failed fsync nobody knows what is on disk; a restart looks, and goes on.
    """

    def __init__(
        self,
        context: Context,
        folder: str,
        *,
        max_deposits: int = 16_384,
        segment_bytes: int = 64 * 2**20,
    ) -> None:
        self._context = context
        self._folder = Path(folder)
        self._max_deposits = max_deposits
        self._segment_bytes = segment_bytes

        self._deposits: dict[str, _Deposited] = {}
        self._fences: dict[str, int] = {}  # episode → its first living attempt; "" → that of all episodes
        self._owner: dict[str, _Key] = {}  # episode → its group, from the moment that its commit is taken on
        self._groups: dict[_Key, Group] = {}
        self._training: dict[int, list[Group]] = {}  # step → groups, in the order of the manifest
        self._writing: dict[_Key, _Write] = {}
        self._queue: list[_Write] = []
        self._writer: asyncio.Task[None] | None = None
        self._news = asyncio.Condition()
        self._broken: TroupeError | None = NotReady("the store has not looked at its folder yet; ask again")
        self._lock = -1
        self._busy, self._pinged = 0.0, context.clock.now()
        self._log = SpanLog(context.clock.now)

    async def start(self) -> None:
        """Takes the folder over. Raises StoreError if another process writes there or what lies there is damaged."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lock = await _lock(self._folder)
        found = _recover(self._folder)
        self._fences = found.fences
        for group in found.groups:
            self._index(group)
        for episode in self._fences.keys() & self._owner.keys():
            del self._fences[episode]
        self._number = max((int(path.stem) for path in _segments(self._folder)), default=-1)
        self._end = self._segment_bytes  # as if full: a restart opens a new segment
        self._broken = None

    async def close(self) -> None:
        """Finishes the writes under way and lets another process write here."""
        if self._writer is not None:
            await self._writer
        self._broken = NotReady("the store is closed")
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    # -- what others may say -----------------------------------------------------------------------------------------

    async def deposit(self, message: Deposit) -> Receipt:
        """Keeps a finished trajectory until its group is committed.

        Raises StoreError for a trajectory that contradicts itself, Overloaded at the limit.
        """
        self._check_ready()
        trajectory = message.trajectory
        episode, attempt = trajectory.id, trajectory.attempt
        living = self._living(episode)
        if episode in self._owner:
            return Receipt(False, f"episode {episode} is already committed, with {_name(self._owner[episode])}")
        if attempt < living:
            return Receipt(False, f"attempt {attempt} of episode {episode} is dead: those below {living} are fenced")
        if first := self._deposits.get(episode):
            if first.attempt == attempt:
                return Receipt(True, "deposited before")  # the sender did not hear the first receipt
            return Receipt(False, f"episode {episode} is already deposited, by attempt {first.attempt}")
        if len(self._deposits) >= self._max_deposits:
            raise Overloaded(f"the store holds {self._max_deposits} trajectories whose groups are not committed yet")
        _check(trajectory)
        # Encoded now, so that what is accepted can certainly be written.
        row = arrow.to_table([trajectory]).to_batches()[0]
        failure = trajectory.failure if trajectory.status == "failed" else None
        data = (trajectory.task.id, failure.message[:_MESSAGE_CHARS]) if failure and failure.kind == "data" else None
        self._deposits[episode] = _Deposited(attempt, trajectory.kind, trajectory.status, trajectory.sampled_tokens, data, row)
        return Receipt(True)

    async def deposited(self, message: GetDeposit) -> Deposited:
        """Gives back what waits for its commit, if it is of that attempt."""
        self._check_ready()
        held = self._deposits.get(message.episode)
        if held is None or held.attempt != message.attempt:
            return Deposited(None)
        (trajectory,) = arrow.from_table(pa.Table.from_batches([held.row]))
        return Deposited(trajectory)

    async def fence(self, message: Fence) -> Ack:
        """Refuses attempts below `message.attempt` from now on, durably; of all episodes if `message.episode` is empty.

        An uncommitted deposit of such an attempt is forgotten: the caller gave the attempt up, and what it believes of
        the episode must be what is stored.
        """
        self._check_ready()
        episode = message.episode
        if episode in self._owner or message.attempt < self._living(episode):
            return Ack()
        if len(self._fences) >= _MAX_FENCES and episode:
            raise Overloaded(f"{_MAX_FENCES} episodes are fenced and were never committed")
        self._fences = fenced(self._fences, {episode: message.attempt})
        for dead in [episode] if episode else list(self._deposits):
            if dead in self._deposits and self._deposits[dead].attempt < message.attempt:
                del self._deposits[dead]
        await self._durable(self._enqueue(_Write(message)))
        return Ack()

    async def commit(self, message: CommitGroup) -> Receipt:
        """Makes a group durable; answers once it is.

        Refused, with the reason: deposits that are unknown or of another kind, an evaluation that would train, other
        episodes than those committed under this number.
        """
        self._check_ready()
        key: _Key = (message.kind, message.step, message.group)
        if reason := self._refusal(key, message):
            return Receipt(False, reason)
        if key in self._groups:
            return Receipt(True, "already committed")
        write = self._writing.get(key)
        if write is None:
            write = self._enqueue(_Write(message, [self._deposits.pop(episode) for episode in message.episodes]))
            self._writing[key] = write
            for episode in message.episodes:
                self._owner[episode] = key
                self._fences.pop(episode, None)
        await self._durable(write)
        return Receipt(True)

    async def batch(self, message: GetBatch) -> Batch:
        """What to train step `message.step` on, as a table; no table if it is not there within `wait_s`."""

        def ready() -> bool:
            self._check_ready()
            return len(self._training.get(message.step, ())) >= message.groups

        if not ready():
            try:
                async with asyncio.timeout(message.wait_s), self._news:
                    await self._news.wait_for(ready)
            except TimeoutError:
                return Batch(message.step, None)
        groups = self._training.get(message.step, [])[: message.groups]
        began = self._context.clock.now()

        def read() -> Batch:
            table = training(self._folder, groups)
            return Batch(message.step, self._context.blobs.put(table), table.num_rows)

        batch = await asyncio.to_thread(read)
        self._log.add("read batch", began, beside=True, step=message.step, trajectories=batch.count)
        return batch

    async def committed(self, message: GetCommitted) -> Committed:
        """Which groups are durable, and what is counted in them."""
        self._check_ready()
        groups = self._groups.values()
        data_failures: dict[str, list[str]] = {}
        for group in groups:
            for task, messages in group.data_failures.items():
                data_failures.setdefault(task, []).extend(messages)
        return Committed(
            groups={step: [group.group for group in of_step] for step, of_step in sorted(self._training.items())},
            dropped=[group.group for group in groups if group.kind == "train" and not group.trains],
            completed=sum(group.completed for group in groups),
            failed=sum(group.failed for group in groups),
            cancelled=sum(group.cancelled for group in groups),
            tokens=sum(group.tokens for group in groups),
            data_failures=data_failures,
        )

    async def health(self, message: Ping) -> Health:
        """`load`: deposits that wait for their commit. Raises StoreError once the disk has failed."""
        self._check_ready()
        now = self._context.clock.now()
        busy = self._busy / (now - self._pinged) if now > self._pinged else 0.0
        self._busy, self._pinged = 0.0, now
        detail = {"groups": len(self._groups), "episodes": len(self._owner), "fenced": len(self._fences)}
        return Health("store", os.getpid(), load=len(self._deposits), busy=min(busy, 1.0), detail=detail)

    async def spans(self, message: GetSpans) -> Spans:
        """When it committed groups and read batches."""
        return self._log.told(self._context.name, message)

    # -- private -----------------------------------------------------------------------------------------------------

    def _check_ready(self) -> None:
        if self._broken is not None:
            raise type(self._broken)(str(self._broken))

    def _living(self, episode: str) -> int:
        """The first attempt of `episode` that may write."""
        return max(self._fences.get("", 0), self._fences.get(episode, 0))

    def _refusal(self, key: _Key, message: CommitGroup) -> str:
        """Why the group cannot be committed, or an empty string."""
        name, episodes = _name(key), message.episodes
        known = self._groups.get(key) or (self._writing[key].message if key in self._writing else None)
        if known is not None:
            assert not isinstance(known, Fence)  # only commits are in `_writing`
            same = set(known.episodes) == set(episodes) and known.trains == message.trains
            return "" if same else f"{name} is already committed with other episodes, or with another `trains`"
        if message.trains and message.kind != "train":
            return f"{name} is of kind '{message.kind}': it never trains"
        if message.trains and not episodes:
            return f"{name} has no episodes to train on"
        if len(set(episodes)) < len(episodes):
            return f"{name} names an episode twice"
        if taken := [episode for episode in episodes if episode in self._owner]:
            return f"{name}: {_some(taken)} already committed with {_name(self._owner[taken[0]])}"
        if unknown := [episode for episode in episodes if episode not in self._deposits]:
            return f"{name}: {_some(unknown)} not deposited here; run again"
        if foreign := [episode for episode in episodes if self._deposits[episode].kind != message.kind]:
            return f"{name}: {_some(foreign)} deposited as another kind than '{message.kind}'"
        return ""

    def _index(self, group: Group) -> None:
        key: _Key = (group.kind, group.step, group.group)
        self._groups[key] = group
        self._owner.update(dict.fromkeys(group.episodes, key))
        if group.trains:
            self._training.setdefault(group.step, []).append(group)

    def _enqueue(self, write: _Write) -> _Write:
        self._queue.append(write)
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write_queue())
        return write

    async def _durable(self, write: _Write) -> None:
        """Returns once `write` is on disk (which goes on even if this is cancelled). Raises StoreError if it fails."""
        await write.done.wait()
        self._check_ready()

    async def _write_queue(self) -> None:
        """Writes until nothing is queued. One runs at a time, so writes keep the order of their messages."""
        while self._queue:
            writes, self._queue = self._queue, []
            began = self._context.clock.now()
            try:
                groups = await asyncio.to_thread(self._append, writes)
            except Exception as error:
                self._broken = StoreError(f"the trajectory store cannot write to '{self._folder}': {error}")
                writes, self._queue = writes + self._queue, []
            else:
                for group in groups:
                    self._index(group)
                    del self._writing[(group.kind, group.step, group.group)]
            self._busy += self._context.clock.now() - began
            self._log.add("commit", began, writes=len(writes))
            for write in writes:
                write.done.set()
            async with self._news:
                self._news.notify_all()

    def _append(self, writes: list[_Write]) -> list[Group]:
        """Makes `writes` durable, all of them or none. Runs in a thread, one at a time."""
        if self._end >= self._segment_bytes:
            header = arrow.SCHEMA.serialize()
            self._number, self._end = self._number + 1, header.size
            _append_bytes(self._folder / self._segment, header)
            _fsync_folder(self._folder)
        groups: list[Group] = []
        fences: dict[str, int] = {}
        data: list[pa.Buffer] = []
        end = self._end
        for write in writes:
            if isinstance(write.message, Fence):
                fences = fenced(fences, {write.message.episode: write.message.attempt})
                continue
            start = end
            if write.deposits:
                data.append(pa.concat_batches([deposit.row for deposit in write.deposits]).serialize())
                end += data[-1].size
            statuses = [deposit.status for deposit in write.deposits]
            data_failures: dict[str, list[str]] = {}
            for deposit in write.deposits:
                if deposit.data_failure is not None:
                    task, message = deposit.data_failure
                    data_failures.setdefault(task, []).append(message)
            groups.append(
                Group(
                    segment=self._segment,
                    start=start,
                    end=end,
                    rows=len(statuses),
                    group=write.message.group,
                    kind=write.message.kind,
                    step=write.message.step,
                    trains=write.message.trains,
                    episodes=write.message.episodes,
                    completed=statuses.count("completed"),
                    failed=statuses.count("failed"),
                    cancelled=statuses.count("cancelled"),
                    tokens=sum(deposit.tokens for deposit in write.deposits),
                    data_failures=data_failures,
                )
            )
        if data:
            _append_bytes(self._folder / self._segment, *data)
        line = {"version": VERSION, "groups": [asdict(group) for group in groups], "fences": fences}
        _append_bytes(self._folder / MANIFEST, json.dumps(line, separators=(",", ":")).encode() + b"\n")
        self._end = end
        return groups

    @property
    def _segment(self) -> str:
        return f"{self._number:06d}.arrow"


# -- helpers ---------------------------------------------------------------------------------------------------------


def _recover(folder: Path) -> Manifest:
    """Discards what was not committed; returns what was."""
    found = manifest(folder)
    ends: dict[str, int] = {}
    for group in found.groups:
        if group.rows:
            ends[group.segment] = max(group.end, ends.get(group.segment, 0))
    for name, end in ends.items():
        path = folder / name
        size = path.stat().st_size if path.exists() else 0
        if size < end:
            raise short(path, size, end)
        with pa.OSFile(str(path)) as file:
            arrow.check(pa.ipc.read_schema(file))
        _truncate(path, end)
    for path in _segments(folder):
        if path.name not in ends:
            path.unlink()
    _truncate(folder / MANIFEST, found.length)
    _fsync_folder(folder)
    return found


def _segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9]" * 6 + ".arrow"))


def _truncate(path: Path, size: int) -> None:
    with open(path, "ab") as file:
        if file.tell() != size:
            file.truncate(size)
            os.fsync(file.fileno())


def _append_bytes(path: Path, *data: Any) -> None:
    with open(path, "ab") as file:
        file.writelines(data)
        file.flush()
        os.fsync(file.fileno())


def _fsync_folder(folder: Path) -> None:
    """Makes the names of new files durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


async def _lock(folder: Path) -> int:
    """A lock that dies with this process. It is the process's: a store that crashed inside a simulation lets it go."""
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    for _ in range(_LOCK_TRIES):  # the predecessor may be dying right now
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except OSError:
            await asyncio.sleep(_LOCK_PAUSE_S)
    os.close(handle)
    raise StoreError(f"another process writes to '{folder}': stop that run first, or choose another run folder")


def _check(trajectory: Trajectory) -> None:
    """Raises StoreError if `trajectory` contradicts itself."""
    try:
        for index, node in enumerate(trajectory.nodes):
            node.check()
            if not -1 <= node.parent < index:
                raise ValueError(f"node {index} has parent {node.parent}, which does not come before it")
            if not -1 <= node.step < len(trajectory.steps):
                raise ValueError(f"node {index} is of step {node.step} of {len(trajectory.steps)}")
        if trajectory.fork and not 0 <= trajectory.fork.tokens <= trajectory.policy_tokens:
            raise ValueError(f"{trajectory.fork.tokens} of its {trajectory.policy_tokens} tokens are said to be a sibling's")
        rewards = [trajectory.reward, *(step.reward for step in trajectory.steps)]
        if trajectory.status == "completed" and not all(map(math.isfinite, rewards)):
            raise ValueError("it is completed, yet a reward is not a number: such an episode has failed")
    except ValueError as error:
        raise StoreError(f"trajectory {trajectory.id}, attempt {trajectory.attempt}: {error}") from error


def _name(key: _Key) -> str:
    kind, step, group = key
    return f"{kind} group {group} of step {step}"


def _some(episodes: list[str]) -> str:
    """The first few ids. For a reader; a dispatcher knows what it asked for."""
    more = f" and {len(episodes) - 8} more" if len(episodes) > 8 else ""
    return f"episodes {', '.join(episodes[:8])}{more}"
