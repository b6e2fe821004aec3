"""TextWorld's generated quests (arXiv:1806.11532): rooms, doors, boxes and keys, and an objective in words.

Games are made and played by TextWorld itself: its generator, its logic, its admissible commands and its quest's policy. They
are played as TextWorld's own state engine plays them, without the compiled Z-machine, whose prose takes a compiler and some
ten seconds a game; what is seen is told from the state instead: the room, its exits, what stands in it, what is carried.

Promises:
- the number of a game, its split and the options make the same game everywhere; a split has `games` of them, and no seed of a
  game is in both splits;
- a command that is not admissible is invalid, changes nothing and is told what is;
- `progress` cannot be earned by going in circles: it pays what share of the quest's remaining policy a command saves.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from functools import lru_cache
from importlib.util import find_spec
from threading import Lock
from typing import Any, ClassVar

from troupe.envs.base import SPLITS, InvalidAction, Task, TextWorld, Turn, rng_of
from troupe.protocol.errors import ConfigError, TaskFailed

_MADE = 512  # games that a process keeps
_SEEDS = 10  # tried for one game, because some cannot be made
_FOLLOWING = 1_000_000  # from one seed that is tried to the next
_LOOKING = ("examine ", "look", "inventory")  # admissible, and of no effect: everything is shown already
_DIRECTIONS = ("north", "south", "east", "west")
_making = Lock()


class Quests(TextWorld):
    """Options:

    rooms, objects: of a game. quest: commands that its quest takes at least (from the start that TextWorld gives it).
    games: how many each split has; task i plays game i modulo this. commands: are the admissible ones listed?
    progress: paid in all for coming nearer to the end of the quest, 0 to 1, beside the 1 for being there; charged for the
    way back. A named part of the reward, as is then the "outcome".
    """

    name: ClassVar[str] = "textworld"
    max_turns: ClassVar[int] = 16
    system: ClassVar[str] = "You play a text adventure. Answer with one command, like: open chest"

    def __init__(
        self, rooms: int = 3, objects: int = 6, quest: int = 3, games: int = 100, commands: bool = True, progress: float = 0.0
    ) -> None:
        if find_spec("textworld") is None:
            raise ConfigError("the world textworld needs the package textworld: pip install 'troupe-rl[textworld]'")
        bounds = {"rooms": (rooms, 1, 30), "objects": (objects, 1, 60), "quest": (quest, 1, 20), "games": (games, 1, 100_000)}
        for option, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise ValueError(f"{option} is {value}; it is {low} to {high}")
        if not 0.0 <= progress <= 1.0:
            raise ValueError(f"progress is {progress}; it is a reward from 0 to 1")
        self.size, self.games, self.commands, self.progress = (rooms, objects, quest), games, commands, progress
        self.game: Any = None
        self.quest: Any = None
        self.words: Any = None
        self.left = self.way = 0

    # -- the world ---------------------------------------------------------------------------------------------------

    def reset(self, task: Task) -> str:
        from textworld.generator.game import GameProgression

        if task.split not in SPLITS:
            raise TaskFailed(f"unknown split '{task.split}': it is one of {', '.join(SPLITS)}")
        with _making:  # TextWorld's generator is not made for several threads
            self.game, self.words = _made(*self.size, 2 * (task.seed % self.games) + SPLITS.index(task.split))
            self.quest = GameProgression(self.game, track_quests=True)
            self.left = self.way = len(self.quest.winning_policy or ())
        return f"{self.game.objective.strip()}\n{self._shown()}"

    def step(self, text: str) -> Turn:
        said = " ".join(text[:1000].split()).lower().rstrip(".")
        admissible = self._admissible()
        if said not in admissible:
            raise InvalidAction(f"nothing comes of it.\n{self._shown()}" if self.commands else "that is not possible here")
        scored = self.quest.score
        self.quest.update(admissible[said])
        reward = (self.quest.score - scored) / max(1, self.game.max_score)
        turn = Turn("the quest is done" if self.quest.completed else "the quest has failed", reward)
        turn.done = self.quest.completed or self.quest.failed
        turn.success = self.quest.completed if turn.done else None
        if not turn.done:
            turn.text = self._shown()
        if self.progress:
            policy = self.quest.winning_policy
            known = self.left if policy is None else len(policy)
            before, self.left = self.left, 0 if self.quest.completed else known
            turn.parts = {"outcome": reward, "progress": self.progress * (before - self.left) / max(1, self.way)}
            turn.reward = sum(turn.parts.values())
        return turn

    def state_key(self) -> str:
        if self.quest is None:
            return ""
        facts = "\n".join([self.game.objective, *sorted(map(str, self.quest.state.facts))])
        return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()

    def _admissible(self) -> dict[str, Any]:
        """Command → action, in the order of the alphabet: two actions that are said alike do alike."""
        actions = list(self.quest.valid_actions)
        said = self.words.gen_commands_from_actions(actions)
        return dict(sorted(zip(map(str.lower, said), actions, strict=True), key=lambda pair: pair[0]))

    def _useful(self) -> list[str]:
        return [command for command in self._admissible() if not command.startswith(_LOOKING)]

    def _shown(self) -> str:
        told = _seen(self.quest.state, {name: info.name or name for name, info in self.game.infos.items()})
        return f"{told}\ncommands: {', '.join(self._useful())}" if self.commands else told

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        policy = self.quest.winning_policy
        if not policy or rng.random() < noise:
            return rng.choice(self._useful())
        return str(self.words.gen_commands_from_actions(policy)[0]).lower()

    @classmethod
    def corpus(cls) -> Iterator[str]:
        world = cls()
        yield "".join(f" {digit}" for digit in range(10)) + " the quest is done has failed nothing comes of it ."
        for index in range(16):
            task = cls.task("train", index)
            world.rng = rng_of(task)
            yield world.reset(task)
            for _ in range(cls.max_turns):
                said = world.play(world.rng, 0.3)
                turn = world.step(said)
                yield f"{said} {said}\n{turn.text}"
                if turn.done:
                    break
        yield from _vocabulary(world.game)


@lru_cache(maxsize=_MADE)
def _made(rooms: int, objects: int, quest: int, number: int) -> tuple[Any, Any]:
    """(game, its words). Raises TaskFailed if TextWorld can make none with these numbers."""
    from textworld import GameOptions
    from textworld.generator import make_game
    from textworld.generator.inform7 import Inform7Game

    why = ""
    for attempt in range(_SEEDS):
        options = GameOptions()
        options.nb_rooms, options.nb_objects, options.quest_length = rooms, objects, quest
        options.seeds = number + attempt * _FOLLOWING
        try:
            game = make_game(options)
        except Exception as error:  # its generator gives up in many ways
            why = f"{type(error).__name__}: {error}"
            continue
        return game, Inform7Game(game)
    raise TaskFailed(f"no game of {rooms} rooms, {objects} objects and a quest of {quest} can be made: {why}")


def _seen(state: Any, called: dict[str, str]) -> str:
    """What the player sees and carries."""
    facts: dict[str, list[list[str]]] = {}
    for fact in sorted(state.facts, key=str):
        facts.setdefault(fact.name, []).append([variable.name for variable in fact.arguments])
    (here,) = (place for who, place in facts.get("at", ()) if who == "P")
    held = {what: place for kind in ("in", "on") for what, place in facts.get(kind, ())}
    how = {thing: kind for kind in ("open", "closed", "locked") for (thing,) in facts.get(kind, ())}

    def name(thing: str) -> str:
        inside = [name(what) for what, place in held.items() if place == thing and how.get(thing, "open") == "open"]
        more = [how[thing]] if thing in how else []
        more += [f"holds {' and '.join(inside)}"] if inside else []
        return called[thing] + (f" ({', '.join(more)})" if more else "")

    doors = {(one, other): door for one, door, other in facts.get("link", ())}
    ways = {direction: to for direction in _DIRECTIONS for to, by in facts.get(f"{direction}_of", ()) if by == here}
    exits = [direction + (f" by {name(doors[here, to])}" if (here, to) in doors else "") for direction, to in ways.items()]
    things = [name(what) for what, place in facts.get("at", ()) if place == here and what != "P"]
    carried = [name(what) for what, place in held.items() if place == "I"]
    lines = [f"you are in the {called[here]}", f"exits: {', '.join(exits) or 'none'}"]
    lines += [f"here: {', '.join(things) or 'nothing'}", f"you carry: {', '.join(carried) or 'nothing'}"]
    return "\n".join(lines)


def _vocabulary(game: Any) -> Iterator[str]:
    """What rooms and things may be called in games that are made alike."""
    for kind in "rdcsokf":
        for names in (game.grammar.get_all_nouns_for_type, game.grammar.get_all_adjective_for_type):
            yield from (f" {word}" for word in sorted(names(kind)))
