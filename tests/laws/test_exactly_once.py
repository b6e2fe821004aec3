"""Law 3, exactly once: each dispatched episode reaches the store once, whatever dies and whatever is lost on the way.

And law 7 as far as rollouts go: no task is repeated or skipped, with the same seeds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.laws.plots import SEED, Plot, drawn
from tests.laws.rollouts import Run, Stage, every_seed, played
from tests.laws.watched import Troubled
from troupe.actors.groups import GROUPS_PER_STEP_LIMIT, seed_of, task_index
from troupe.actors.settings import RolloutSettings
from troupe.actors.simulated import Chaos
from troupe.actors.tree import drawn as drawn_place
from troupe.actors.tree import sibling_of, turns_of
from troupe.cluster.run import Run as RunFolder
from troupe.protocol.messages import CommitGroup, Fence
from troupe.protocol.trajectory import Task, Trajectory


@every_seed
def test_each_episode_is_stored_once_in_one_committed_group_with_one_end(run: Run) -> None:
    owner = Counter(episode for group in run.groups for episode in group.episodes)
    assert set(owner.values()) <= {1}, "an episode is in two groups, or twice in one"
    assert Counter(t.id for t in run.rows) == owner, "the rows are not those of the manifest"
    numbers = Counter((group.kind, group.group) for group in run.groups)
    assert set(numbers.values()) <= {1}, "a group is committed twice"
    for group in run.groups:
        rows = [t for t in run.rows if t.id in group.episodes]
        ends = Counter(t.status for t in rows)
        assert ends == +Counter(completed=group.completed, failed=group.failed, cancelled=group.cancelled)
        assert {(t.kind, t.group, t.step) for t in rows} <= {(group.kind, group.group, group.step)}


@every_seed
def test_nothing_that_was_dispatched_is_missing(run: Run) -> None:
    """But for what a dispatcher that died had begun beyond need, which its successor cannot know of: see `needless`."""
    if run.broken:
        return
    stored = {t.id for t in run.rows}
    lost = {m.episode: m for m in run.dispatched if m.episode not in stored}
    assert all(needless(run, m.attempt, m.kind) for m in lost.values()), f"lost: {sorted(lost)}"
    assert run.status is not None and run.status.in_flight == 0 and run.deposits_left == 0
    assert Counter(t.status for t in run.rows) == +Counter(
        completed=run.status.completed, failed=run.status.failed, cancelled=run.status.cancelled
    ), "the dispatcher counts other episodes than the store holds"


def needless(run: Run, attempt: int, kind: str) -> bool:
    """An episode of a dead dispatcher that nobody asks for again: of an evaluation, which is asked for under other names,
    or of a group that over-sampling had started, once enough others train."""
    return run.life(attempt) < run.lives["dispatcher"] - 1 and (kind == "eval" or run.plot.settings.oversample > 0)


@every_seed
def test_a_step_trains_exactly_its_groups_and_its_batch_stays_the_same(run: Run) -> None:
    settings = run.plot.settings
    trains = Counter(group.step for group in run.groups if group.trains)
    assert max(trains.values(), default=0) <= settings.groups_per_step
    assert run.broken or trains == dict.fromkeys(range(1, run.plot.steps + 1), settings.groups_per_step)
    for group in run.groups:
        if group.trains:
            assert len(group.episodes) == settings.group_size
            enough = min(2, settings.group_size) if settings.on_failure == "drop-episode" else settings.group_size
            assert group.completed >= enough
    for step, batches in run.batches.items():
        assert run.broken or len(batches) >= 2
        assert all(batch == [(t.id, t.attempt) for t in run.trained(step)] for batch in batches)


@every_seed
def test_of_several_attempts_one_is_recorded_and_the_writes_of_dead_ones_are_refused(run: Run) -> None:
    floor: dict[str, int] = {}
    accepted: dict[str, Trajectory] = {}
    committed: set[str] = set()
    for entry in run.written:
        if isinstance(entry, Fence):
            floor[entry.episode] = max(floor.get(entry.episode, 0), entry.attempt)
        elif isinstance(entry, CommitGroup):
            committed.update(entry.episodes)
        elif entry[1].accepted:
            written = entry[0].trajectory
            living = max(floor.get("", 0), floor.get(written.id, 0))
            assert written.attempt >= living, f"{written.id}: attempt {written.attempt} was dead, {living} lives"
            assert written.id not in committed, f"{written.id} was written again after its commit"
            accepted[written.id] = written
    for t in run.rows:
        offered = accepted[t.id]
        assert (t.attempt, t.status, t.reward) == (offered.attempt, offered.status, offered.reward)
        assert [n.tokens.tolist() for n in t.nodes] == [n.tokens.tolist() for n in offered.nodes]


@every_seed
def test_no_task_is_repeated_or_skipped(run: Run) -> None:
    """Law 7: a group's number fixes its task and seeds, and no number is left out without a word."""
    for t in run.rows:
        if t.kind == "train":
            assert (t.task, t.seed) == asked(t.group, t.member)
    if run.plot.settings.oversample == 0 and not run.broken:
        for step in range(1, run.plot.steps + 1):
            numbers = sorted(g.group for g in run.groups if g.kind == "train" and g.step == step)
            first = step * GROUPS_PER_STEP_LIMIT
            assert numbers == list(range(first, first + len(numbers))), "a group was skipped and nothing says why"


@every_seed
def test_the_tree_of_a_group_follows_from_its_numbers(run: Run) -> None:
    """Law 7: who forks from whom does not depend on who was ready first; and a fork is of the record that is stored."""
    stored = {t.id: t for t in run.rows}
    for t in run.rows:
        before = sibling_of(t.member, run.plot.settings.tree) if t.kind == "train" else None
        if t.fork is not None:
            sibling = stored[t.fork.episode]
            assert (sibling.group, sibling.member, sibling.attempt) == (t.group, before, t.fork.attempt)
            assert sibling.status == "completed"
        elif before is not None and t.status == "completed" and t.group in run.training:
            sibling = next(other for other in run.rows if other.group == t.group and other.member == before)
            place = drawn_place(turns_of(sibling), run.plot.settings.tree_segment, t.seed)
            assert sibling.status != "completed" or place is None, f"{t.id} should have forked"


def asked(group: int, member: int) -> tuple[Task, int]:
    """The task and the seed that a run asks for under these numbers."""
    return Troubled.task("train", task_index(SEED, group)), seed_of(SEED, group, member)


def test_an_undisturbed_run_has_the_same_tasks_and_seeds_and_drops_nothing(model_folder: Path) -> None:
    run = Stage(Plot(), model_folder).play()
    assert [(t.task, t.seed) for t in run.rows] == [asked(t.group, t.member) for t in run.rows]
    assert {(t.group, t.status) for t in run.rows} == {(n, "completed") for n in (10_000, 10_001, 20_000, 20_001)}
    assert len(run.dispatched) == len(run.rows) == 12 and all(message.attempt == 0 for message in run.dispatched)


def test_a_generator_that_is_killed_with_eight_requests_live_costs_no_episode(model_folder: Path) -> None:
    class Strike(Stage):
        live = 0

        def note(self, who: str, what: str) -> None:
            super().note(who, what)
            if who == "generator-0" and "begins" in what:
                self.live += 1
                if self.live == 8:
                    self.simulation.loop.call_soon(self._crash, who)

    settings = RolloutSettings(groups_per_step=1, group_size=16, max_tokens=4)
    stage = Strike(Plot(settings=settings, steps=1, slots=8, turns=1, think=5.0), model_folder)
    run = stage.play()
    asked = [event.split()[1:3] for event in run.trace if "generator-" in event and event.endswith(" begins")]
    died = next(at for at, event in enumerate(run.trace) if "generator-0 dies" in event)
    assert not any("generator-0" in event and " ends: " in event for event in run.trace[:died])
    assert len(asked) == 16 + 8, "the eight were not issued again, or others were too"
    assert len(run.batches[1][0]) == 16 and all(message.attempt == 0 for message in run.dispatched)
    assert len(run.dispatched) == 16 and {len(t.steps) for t in run.rows} == {1}


@pytest.mark.parametrize("limit_s", [0.0, 60.0])
def test_a_pool_that_drains_costs_no_episode_a_failure(model_folder: Path, limit_s: float) -> None:
    """It finishes what it has; what its time does not suffice for runs elsewhere, though only one attempt is allowed."""
    settings = RolloutSettings(groups_per_step=2, group_size=6, max_tokens=4, on_failure="drop-group")
    plot = Plot(settings=settings, turns=3, think=1.0, slots=8, drains=[(1.5, "env-0", limit_s), (4.0, "env-1", limit_s)])
    run = Stage(plot, model_folder).play()
    moved = {message.episode for message in run.dispatched if message.attempt}
    assert run.status is not None and (run.status.failed, run.status.retried, run.status.dropped_groups) == (0, 0, 0)
    assert {t.status for t in run.rows} == {"completed"} and len(run.rows) == 24
    assert run.status.moved == len(run.dispatched) - 24 and bool(moved) == (limit_s == 0.0)
    drained = [at for at, event in enumerate(run.trace) if "env-0: is drained" in event]
    begun = [at for at, event in enumerate(run.trace) if "env-0:" in event and event.endswith("begins")]
    drains = next(at for at, event in enumerate(run.trace) if "env-0: drains" in event)
    assert begun[0] < drains and not any(drains + 12 < at < drained[0] for at in begun), "it took more episodes"


# -- the storms themselves -------------------------------------------------------------------------------------------


def test_the_same_seed_gives_the_same_events_in_any_process(model_folder: Path) -> None:
    """Sets are ordered by hashes, which differ from process to process: nothing may depend on that."""
    seeds = [3, 5, 8]
    here = [Stage(drawn(seed), model_folder).play().trace for seed in seeds]
    code = (
        "import sys, zlib; from pathlib import Path\n"
        "from tests.laws.plots import drawn; from tests.laws.rollouts import Stage\n"
        f"for s in {seeds}: print(zlib.crc32(repr(Stage(drawn(s), Path(sys.argv[1])).play().trace).encode()))"
    )
    root = Path(__file__).resolve().parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": str(root)}
    there = subprocess.run(
        [sys.executable, "-c", code, str(model_folder)], env=environment, cwd=root, capture_output=True, text=True, check=True
    )
    assert [int(line) for line in there.stdout.split()] == [zlib.crc32(repr(trace).encode()) for trace in here]
    assert here[0] != here[1] and all(len(trace) > 20 for trace in here)


def test_a_seed_that_fails_says_how_to_replay_it(model_folder: Path, request: pytest.FixtureRequest) -> None:
    @every_seed
    def law(run: Run) -> None:
        assert run.plot.seed < 2

    with pytest.raises(AssertionError) as caught:
        law(range(4), model_folder, request)
    assert caught.value.__notes__ == ["seed 2; replay it with: TROUPE_SEED=2 pytest tests/laws/test_exactly_once.py"]


def test_the_storms_hold_all_that_they_promise(model_folder: Path) -> None:
    """Else the laws would be checked in fair weather."""
    seen: Counter[str] = Counter()
    for seed in range(50):
        run = played(seed, model_folder)
        seen.update(who.rpartition("-")[0] or who for _, who in run.crashes[: len(run.plot.crashes)])
        seen.update(t.status for t in run.rows)
        seen.update(t.failure.kind for t in run.rows if t.failure)
        seen.update(trouble for trouble in ("reset", "step", "not returned", "nan") if any(trouble in e for e in run.trace))
        seen["late write"] += any("is dead" in event for event in run.trace)
        seen["written twice"] += any("already" in event for event in run.trace)
        seen["retried"] += any(message.attempt % 1000 for message in run.dispatched)
        seen["forked"] += any(t.fork and t.status == "completed" for t in run.rows)
        seen["forked within a turn"] += run.plot.settings.tree_segment > 0
        seen["evaluated"] += bool(run.evaluated)
        seen["whole"] += not run.broken
    assert seen["whole"] >= 45
    wanted = "store dispatcher env generator completed failed cancelled infrastructure data reset step nan evaluated retried"
    rare = ["not returned", "late write", "written twice", "forked", "forked within a turn"]
    assert not {name for name in [*wanted.split(), *rare] if not seen[name]}, seen


@pytest.mark.parametrize("seed", range(16))
def test_each_episode_is_stored_exactly_once_in_a_whole_company(simulated_run: Any, seed: int) -> None:
    run = simulated_run()
    run.play(seed, crashes=4, until_s=20.0, chaos=Chaos(lose_request=0.01, lose_reply=0.01))
    rows = RunFolder(str(run.folder)).trajectories().select(["id", "kind", "step", "status", "trains"]).to_pylist()
    counts = Counter(row["id"] for row in rows)
    assert set(counts.values()) == {1}
    trained = [row for row in rows if row["trains"] and row["status"] == "completed"]
    assert len(trained) == run.config.steps * 2 * 3
