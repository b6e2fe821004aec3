"""FrozenLake as text: walk over the ice to the goal without falling into a hole.

Promises:
- every lake is drawn at random and can be solved in 2 to `max_turns` moves;
- a lake is its holes and its goal; one in five, by its digest, is held out. The start is not part of it, because the
  player walks: no grid that is ever seen in training is a held-out one, whatever the seeds;
- every cell, and every word but the first of a message, has one leading space: a byte-level BPE tokenizer trained on
  `corpus` reads one token a cell, and a move is the same token in the thought and in the act.

An observation is a status word and, unless the episode is over, the way to the goal, what lies around the player, and
the grid (P player, G goal, O hole, . ice):

    moved goal right2 down1 left ice right ice up ice down ice
     . . O .
     . P . .
     O . . G
     . . . .
"""

from __future__ import annotations

import random
import re
from collections import deque
from collections.abc import Iterator
from typing import ClassVar

from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, belongs, rng_of
from troupe.protocol.errors import TaskFailed

Cell = tuple[int, int]

MOVES: dict[str, Cell] = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
THINK = ("none", "safe", "plan")
PLAYERS = ("greedy", "careful", "shortest")
_SLIPS = {"left": ("up", "down"), "right": ("up", "down"), "up": ("left", "right"), "down": ("left", "right")}
_WORD = re.compile(r"[A-Za-z]+")
_DRAWS = 20_000


class FrozenLake(TextWorld):
    """Options:

    size: cells a side, 3 to 10.
    slippery: a move goes as meant one time in three, else to either side of it (as in Gymnasium).
    holes: chance of a cell other than start and goal to be a hole.
    think: what the scripted player says before it acts, each level adding to the one before: "none"; "safe" (moves that
    stay out of holes and on the map); "plan" (the move that it means to make, which its hand then does not always do).
    player: "greedy" (towards the goal, blind to holes), "careful" (towards the goal if that is safe, else any safe
    move), "shortest" (along a shortest path).
    progress: paid in all for the way to the goal, 0 to 1, beside the 1 for being there: each move is paid what share of the
    way it is nearer on a shortest path, or charged what it is farther (of a fall: nothing), so that no loop pays. A named
    part of the reward, as is then the "outcome".
    """

    name: ClassVar[str] = "frozen_lake"
    max_turns: ClassVar[int] = 8
    inline: ClassVar[bool] = True

    def __init__(
        self,
        size: int = 4,
        slippery: bool = False,
        holes: float = 0.22,
        think: str = "plan",
        player: str = "careful",
        progress: float = 0.0,
    ) -> None:
        if not 3 <= size <= 10:
            raise ValueError(f"size is {size}; it is 3 to 10 cells a side")
        if not 0.0 <= holes <= 0.6:
            raise ValueError(f"holes is {holes}; it is a chance from 0 to 0.6")
        if think not in THINK:
            raise ValueError(f"think is '{think}'; it is one of {', '.join(THINK)}")
        if player not in PLAYERS:
            raise ValueError(f"player is '{player}'; it is one of {', '.join(PLAYERS)}")
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress is {progress}; it is a reward from 0 to 1")
        self.progress = progress
        self.size, self.slippery, self.hole_chance, self.think, self.player = size, slippery, holes, think, player
        self.holes: frozenset[Cell] = frozenset()
        self.goal: Cell = (0, 0)
        self.at: Cell = (0, 0)

    # -- the world ---------------------------------------------------------------------------------------------------

    def reset(self, task: Task) -> str:
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        for _ in range(_DRAWS):
            self.at, self.goal = self.rng.sample(cells, 2)
            self.holes = frozenset(
                cell for cell in cells if self.rng.random() < self.hole_chance and cell not in (self.at, self.goal)
            )
            if not belongs(self.lake, task.split):
                continue
            self.left = self.distances()
            self.way = self.left.get(self.at, 0)
            if 2 <= self.way <= self.max_turns:
                return self._observation("start")
        raise TaskFailed(f"no solvable lake of size {self.size} with holes {self.hole_chance} in {_DRAWS} draws")

    def step(self, text: str) -> Turn:
        words = (found[0].lower() for found in _WORD.finditer(text))
        move = next((word for word in words if word in MOVES), None)
        if move is None:
            raise InvalidAction(self._observation("say left right up or down"))
        if self.slippery:
            move = self.rng.choice((move, *_SLIPS[move]))
        before, self.at = self.at, self._neighbour(self.at, move)
        if self.at in self.holes:
            return self._paid(Turn("hole", reward=0.0, done=True, success=False), before)
        if self.at == self.goal:
            return self._paid(Turn("goal", reward=1.0, done=True, success=True), before)
        return self._paid(Turn(self._observation("stayed" if self.at == before else "moved")), before)

    def _paid(self, turn: Turn, before: Cell) -> Turn:
        if self.progress:
            nearer = self.left[before] - self.left.get(self.at, self.left[before])
            turn.parts = {"outcome": turn.reward} if turn.done else {}
            turn.parts["progress"] = self.progress * nearer / self.way
            turn.reward += turn.parts["progress"]
        return turn

    def state_key(self) -> str:
        return "/".join("".join(self._symbol((row, column)) for column in range(self.size)) for row in range(self.size))

    @property
    def actions(self) -> list[str]:
        """What can be said, for a player of numbers."""
        return list(MOVES)

    def encode(self) -> list[float]:
        """What the observation says: the grid (player, goal, holes), the way to the goal, what lies around the player."""
        grid = self.state_key().replace("/", "")
        way = [steps / self.size for _, steps in self._way()]
        around = [float(self._beside(move) == thing) for move in MOVES for thing in ("edge", "hole", "goal")]
        return [*(float(cell == symbol) for symbol in "PGO" for cell in grid), *way, *around]

    @property
    def lake(self) -> str:
        """The map without the player: what a split is decided by."""
        return f"{self.size} {sorted(self.holes)} {self.goal}"

    def distances(self) -> dict[Cell, int]:
        """Moves to the goal from each cell that can reach it (breadth first, no slipping)."""
        found = {self.goal: 0}
        queue = deque([self.goal])
        while queue:
            cell = queue.popleft()
            for move in MOVES:
                beside = self._neighbour(cell, move)
                if beside not in found and beside not in self.holes:
                    found[beside] = found[cell] + 1
                    queue.append(beside)
        return found

    def _neighbour(self, cell: Cell, move: str) -> Cell:
        row, column = cell[0] + MOVES[move][0], cell[1] + MOVES[move][1]
        return (row, column) if 0 <= row < self.size and 0 <= column < self.size else cell

    def _symbol(self, cell: Cell) -> str:
        return "P" if cell == self.at else "G" if cell == self.goal else "O" if cell in self.holes else "."

    def _observation(self, status: str) -> str:
        rows = ("".join(f" {symbol}" for symbol in row) for row in self.state_key().split("/"))
        goal = " ".join(f"{move}{steps}" for move, steps in self._way() if steps > 0)
        around = " ".join(f"{move} {self._beside(move)}" for move in MOVES)
        return "\n".join((f"{status} goal {goal} {around}", *rows))

    def _way(self) -> list[tuple[str, int]]:
        """How far the goal is in each direction, holes or not."""
        down, right = self.goal[0] - self.at[0], self.goal[1] - self.at[1]
        return [("left", -right), ("right", right), ("up", -down), ("down", down)]

    def _beside(self, move: str) -> str:
        to = self._neighbour(self.at, move)
        return "edge" if to == self.at else "hole" if to in self.holes else "goal" if to == self.goal else "ice"

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        safe = [m for m in MOVES if (to := self._neighbour(self.at, m)) != self.at and to not in self.holes]
        toward = [move for move, steps in self._way() if steps > 0]
        plan = rng.choice(self._good(safe, toward))
        move = rng.choice(list(MOVES)) if rng.random() < noise else plan
        thought = {"none": [], "safe": ["safe", *safe], "plan": ["safe", *safe, "so", plan]}[self.think]
        return f"<think>{' '.join(thought)}</think> {move}"

    def _good(self, safe: list[str], toward: list[str]) -> list[str]:
        if self.player == "greedy":
            return toward
        if self.player == "careful":
            return [m for m in toward if m in safe] or safe or toward
        left = self.distances()
        return [m for m in safe if left.get(self._neighbour(self.at, m), self.size**2) < left[self.at]]

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield "".join(f" {digit}" for digit in range(10))
        yield "".join(f" {word}" for word in (*MOVES, "goal", "safe", "so", "edge", "hole", "ice"))
        yield from (*MOVES, "hole", "goal", "start", "moved", "stayed")
        for index in range(64):
            world = cls(think=THINK[index % len(THINK)])
            task = cls.task("train", index)
            world.rng = rng_of(task)
            yield world.reset(task)
            yield world.play(world.rng, noise=1.0)
            yield world._observation(("say left right up or down", "moved", "stayed")[index % 3])
