"""What fixes a group: its number and the run's seed, from which its task follows."""

from __future__ import annotations

from collections import Counter

import pytest

from troupe.actors.director import _DEMONSTRATIONS
from troupe.actors.groups import GROUPS_PER_STEP_LIMIT, INDICES_OF_A_SEED, task_index


def indices(seed: int, steps: int, groups: int) -> list[int]:
    return [task_index(seed, step * GROUPS_PER_STEP_LIMIT + n) for step in range(1, steps + 1) for n in range(groups)]


@pytest.mark.parametrize("tasks", [2, 9, 100, 128, 1000, 1319, 7473, 10_000])
@pytest.mark.parametrize("groups", [1, 8, 64])
def test_a_world_of_so_many_tasks_deals_all_of_them_equally_often(tasks: int, groups: int) -> None:
    dealt = Counter(index % tasks for index in indices(3, tasks, groups))
    assert dealt == dict.fromkeys(range(tasks), groups)


def test_no_two_groups_have_the_same_task_nor_does_a_demonstration_show_one() -> None:
    every = [indices(seed, 3, GROUPS_PER_STEP_LIMIT) for seed in (0, 1)]
    assert len({index for some in every for index in some}) == 2 * 3 * GROUPS_PER_STEP_LIMIT
    assert indices(0, 800_000, 1)[-1] < _DEMONSTRATIONS < INDICES_OF_A_SEED
