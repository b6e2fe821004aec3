"""Sokoban as text: push every box onto a target; a box is never pulled, so a wrong push can be the end.

Promises:
- every room is drawn at random and made by playing backwards from its solved state: it can be solved, in 2 to `max_turns`
  moves, and no box starts on a target;
- a room is its walls and its targets; one in five, by its digest, is held out. Player and boxes are not part of it, because
  they move: no grid that is ever seen in training is a held-out one, whatever the seeds;
- every cell, and every word but the first of a message, has one leading space: a byte-level BPE tokenizer trained on
  `corpus` reads one token a cell, and a move is the same token in the thought and in the act.

An observation is a status word, for each box that is on no target the way to it and from it to the nearest free target,
what lies around the player, and the grid (# wall, _ floor, O target, X box, * box on target, P player, S player on target).
The room is RAGEN's (arXiv:2504.20073), six cells a side with one box, and its letters but for the *:

    moved box right1 target right1 down1 left floor right box up wall down floor
     # # # # # #
     # _ P X _ #
     # _ _ _ O #
     # _ # _ _ #
     # _ _ _ _ #
     # # # # # #
"""

from __future__ import annotations

import math
import random
import re
from collections import deque
from collections.abc import Iterator
from typing import ClassVar

from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, belongs, rng_of
from troupe.protocol.errors import TaskFailed

Cell = tuple[int, int]
State = tuple[Cell, frozenset[Cell]]
"""Where the player is, and the boxes."""

MOVES: dict[str, Cell] = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}
THINK = ("none", "plan")
_AROUND = {"#": "wall", "_": "floor", "O": "target", "X": "box", "*": "box"}
_WORD = re.compile(r"[A-Za-z]+")
_DRAWS = 2_000
_STATES = 20_000  # looked at in a room; those beyond count as lost


class Sokoban(TextWorld):
    """Options:

    size: cells a side, the walls around it included, 5 to 10. boxes: 1 to 3, and at most size - 3.
    walls: chance of a cell inside to be a wall, 0 to 0.5.
    step, box_on_target, box_off_target, finished: what a move is paid: always, for pushing a box onto a target, for pushing
    one off it, and for the last box in its place; each is a named part. The defaults are gym-sokoban's, which RAGEN takes.
    think: what the scripted player says before it acts: "none", or "plan" (the move that it means to make, and whether that
    is a walk or a push; or that the room is lost), which its hand then does not always do.
    """

    name: ClassVar[str] = "sokoban"
    max_turns: ClassVar[int] = 12

    def __init__(
        self,
        size: int = 6,
        boxes: int = 1,
        walls: float = 0.2,
        step: float = -0.1,
        box_on_target: float = 1.0,
        box_off_target: float = -1.0,
        finished: float = 10.0,
        think: str = "plan",
    ) -> None:
        if not 5 <= size <= 10:
            raise ValueError(f"size is {size}; it is 5 to 10 cells a side")
        if not 1 <= boxes <= min(3, size - 3):
            raise ValueError(f"boxes is {boxes}; it is 1 to {min(3, size - 3)} in a room of size {size}")
        if not 0.0 <= walls <= 0.5:
            raise ValueError(f"walls is {walls}; it is a chance from 0 to 0.5")
        if think not in THINK:
            raise ValueError(f"think is '{think}'; it is one of {', '.join(THINK)}")
        pay = {"step": step, "box_on_target": box_on_target, "box_off_target": box_off_target, "finished": finished}
        for option, value in pay.items():
            if not -100 <= value <= 100:
                raise ValueError(f"{option} is {value}; it is a reward from -100 to 100")
        self.size, self.box_count, self.wall_chance, self.think, self.pay = size, boxes, walls, think, pay
        self.floor: frozenset[Cell] = frozenset()
        self.targets: frozenset[Cell] = frozenset()
        self.at: Cell = (0, 0)
        self.boxes: frozenset[Cell] = frozenset()

    # -- the world ---------------------------------------------------------------------------------------------------

    def reset(self, task: Task) -> str:
        inside = [(row, column) for row in range(1, self.size - 1) for column in range(1, self.size - 1)]
        for _ in range(_DRAWS):
            floor = [cell for cell in inside if self.rng.random() >= self.wall_chance]
            if len(floor) <= self.box_count:
                continue
            self.floor, self.targets = frozenset(floor), frozenset(self.rng.sample(floor, self.box_count))
            if not belongs(self.room, task.split):
                continue
            self.left = self.distances()
            starts: dict[int, list[State]] = {}
            for state, moves in self.left.items():
                if 2 <= moves <= self.max_turns and state[1].isdisjoint(self.targets):
                    starts.setdefault(moves, []).append(state)
            if starts:
                self.at, self.boxes = self.rng.choice(starts[self.rng.choice(sorted(starts))])
                return self._observation("start")
        raise TaskFailed(
            f"no solvable room of size {self.size} with boxes {self.box_count} and walls {self.wall_chance} in {_DRAWS} draws"
        )

    def step(self, text: str) -> Turn:
        words = (found[0].lower() for found in _WORD.finditer(text))
        move = next((word for word in words if word in MOVES), None)
        if move is None:
            raise InvalidAction(self._observation("say left right up or down"))
        before, placed = (self.at, self.boxes), len(self.boxes & self.targets)
        self.at, self.boxes = self._after(move)
        change = len(self.boxes & self.targets) - placed
        solved = self.boxes == self.targets
        happened = {"step": True, "box_on_target": change > 0, "box_off_target": change < 0, "finished": solved}
        parts = {part: self.pay[part] for part, so in happened.items() if so}
        if solved:
            return Turn("solved", sum(parts.values()), done=True, success=True, parts=parts)
        status = "stayed" if before == (self.at, self.boxes) else "moved" if before[1] == self.boxes else "pushed"
        return Turn(self._observation(status), sum(parts.values()), parts=parts)

    def state_key(self) -> str:
        return "/".join("".join(self._symbol((row, column)) for column in range(self.size)) for row in range(self.size))

    @property
    def actions(self) -> list[str]:
        """What can be said, for a player of numbers."""
        return list(MOVES)

    def encode(self) -> list[float]:
        """What the observation says: the grid by kind of cell, the way to each loose box and from it to its target, and what
        lies around the player."""
        grid = self.state_key().replace("/", "")
        ways = [(there - here) / self.size for one, other in self._ways() for here, there in zip(one, other, strict=True)]
        ways += [0.0] * (4 * self.box_count - len(ways))
        around = [float(self._symbol(_beside(self.at, move)) in kind) for move in MOVES for kind in ("#", "X*", "O")]
        return [*(float(cell in kind) for kind in ("#", "OS*", "X*", "PS") for cell in grid), *ways, *around]

    @property
    def room(self) -> str:
        """The room without player and boxes: what a split is decided by."""
        return f"{self.size} {sorted(self.floor)} {sorted(self.targets)}"

    def distances(self) -> dict[State, int]:
        """Fewest moves to a solved room from each state that leads to one: breadth first, played backwards.

        At most about `_STATES` of them, the nearest ones. A state that is not among them is lost (or farther than those).
        """
        found: dict[State, int] = {(at, self.targets): 0 for at in sorted(self.floor - self.targets)}
        queue = deque(found)
        while queue and len(found) < _STATES:
            state = queue.popleft()
            for before in self._before(state):
                if before not in found:
                    found[before] = found[state] + 1
                    queue.append(before)
        return found

    def _before(self, state: State) -> Iterator[State]:
        """The states that one move makes into `state`: the player steps back, and may pull the box that it faces."""
        at, boxes = state
        for move in MOVES:
            ahead, behind = _beside(at, move), _beside(at, move, -1)
            if behind in self.floor and behind not in boxes:
                yield behind, boxes
                if ahead in boxes:
                    yield behind, boxes - {ahead} | {at}

    def _after(self, move: str) -> State:
        to, beyond = _beside(self.at, move), _beside(self.at, move, 2)
        if to not in self.floor or (to in self.boxes and (beyond not in self.floor or beyond in self.boxes)):
            return self.at, self.boxes
        return to, self.boxes - {to} | {beyond} if to in self.boxes else self.boxes

    def _symbol(self, cell: Cell) -> str:
        if cell == self.at:
            return "S" if cell in self.targets else "P"
        if cell in self.boxes:
            return "*" if cell in self.targets else "X"
        return "O" if cell in self.targets else "_" if cell in self.floor else "#"

    def _observation(self, status: str) -> str:
        rows = ("".join(f" {symbol}" for symbol in row) for row in self.state_key().split("/"))
        around = (f"{move} {_AROUND[self._symbol(_beside(self.at, move))]}" for move in MOVES)
        return "\n".join((" ".join((status, *self._loose(), *around)), *rows))

    def _loose(self) -> Iterator[str]:
        """Of each box that is on no target: the way to it, and from it to the nearest free target, walls or not."""
        ways = self._ways()
        for to_box, to_target in zip(ways, ways, strict=True):
            yield f"box {_way(*to_box)} target {_way(*to_target)}"

    def _ways(self) -> Iterator[tuple[Cell, Cell]]:
        """Of each box that is on no target: from the player to it, then from it to the nearest free target."""
        free = sorted(self.targets - self.boxes)
        for box in sorted(self.boxes - self.targets):
            yield self.at, box
            yield box, min(free, key=lambda cell: abs(cell[0] - box[0]) + abs(cell[1] - box[1]))

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        """Moves along a shortest solution; anywhere if there is none any more."""
        after = {move: self._after(move) for move in MOVES}
        moves = self.left.get((self.at, self.boxes), math.inf)
        good = [move for move, state in after.items() if self.left.get(state, math.inf) < moves]
        plan = rng.choice(good or list(MOVES))
        kind = "lost" if not good else "walk" if after[plan][1] == self.boxes else "push"
        move = rng.choice(list(MOVES)) if rng.random() < noise else plan
        return f"<think>{f'{kind} {plan}' if self.think == 'plan' else ''}</think> {move}"

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield "".join(f" {digit}" for digit in range(10))
        yield "".join(f" {word}" for word in (*MOVES, "walk", "push", "lost", *_AROUND.values()))
        yield from (*MOVES, "walk", "push", "lost", "start", "moved", "pushed", "stayed", "solved")
        for index in range(64):
            world = cls(boxes=1 + index % 2)
            task = cls.task("train", index)
            world.rng = rng_of(task)
            yield world.reset(task)
            yield world.play(world.rng, noise=1.0)
            yield world._observation(("say left right up or down", "moved", "pushed", "stayed")[index % 4])
            yield " # _ O X * P S"


def _beside(cell: Cell, move: str, steps: int = 1) -> Cell:
    return cell[0] + steps * MOVES[move][0], cell[1] + steps * MOVES[move][1]


def _way(here: Cell, there: Cell) -> str:
    """How far it is in each direction, for example "right2 down1"."""
    down, right = there[0] - here[0], there[1] - here[1]
    ways = (("left", -right), ("right", right), ("up", -down), ("down", down))
    return " ".join(f"{move}{steps}" for move, steps in ways if steps > 0)
