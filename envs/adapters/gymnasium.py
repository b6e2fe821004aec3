"""Any Gymnasium environment whose actions are a choice or text, as a world: `gymnasium:FrozenLake-v1`, or `wrap` in Python.

Promises:
- an action is said by its name or its number; observations are printed (`spaces.py`), rewards pass through as they are;
- the environment is seeded in each `reset` from the task, so an episode is reproduced as far as the environment keeps its
  own promise to be;
- a task is of the split that the text of its first observation belongs to, if the environment has more than one such text;
- an episode that the environment truncates is truncated, one that it terminates is terminated;
- an exception of the environment's `step`, of whatever type, is the world's failure and never the agent's.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakValueDictionary

from troupe.envs.adapters import pictures, tabular
from troupe.envs.adapters.openings import opening_of
from troupe.envs.adapters.spaces import Named, printer, reader, recurs
from troupe.envs.base import Task, TextWorld, Turn, rng_of
from troupe.protocol.errors import ConfigError, EnvironmentFailed, nearest

if TYPE_CHECKING:
    import gymnasium

SHOW = ("observation", "ansi", "both")
SPLIT_BY = ("opening", "seed")
NAMES = {
    "Acrobot": ("negative", "none", "positive"),
    "Blackjack": ("stick", "hit"),
    "CartPole": ("left", "right"),
    "CliffWalking": ("up", "right", "down", "left"),
    "FrozenLake": ("left", "down", "right", "up"),
    "LunarLander": ("nothing", "left", "main", "right"),
    "MountainCar": ("left", "none", "right"),
    "Taxi": ("south", "north", "east", "west", "pickup", "dropoff"),
}
"""What Gymnasium's own documentation calls the actions, in their order."""

_MOST_TURNS = 64  # where the environment itself names no limit
_QUICK = ("gymnasium.envs.toy_text", "gymnasium.envs.classic_control")  # microseconds a step

Player = Callable[[Any, random.Random], Any]
"""(raw observation, rng) → the action that a scripted player takes, as a number or a name."""


class GymnasiumWorld(TextWorld):
    """A Gymnasium environment. Options; what is none of these goes to the environment as it is made:

    actions: names of its actions, in their order; empty: those that are known, else numbers.
    show: "observation"; "ansi": what the environment renders as text; "both".
    split_by: "opening": a task is training or held out by its first observation; "seed": by its seed alone.
    success_at: the return that is a success; unset: the environment's own reward threshold, else anything above 0.
    """

    create: ClassVar[Callable[..., Any]]
    names: ClassVar[Sequence[str]] = ()
    player: ClassVar[Player | None] = None
    ansi: ClassVar[Mapping[str, str]] = {}
    """What makes the environment render as text."""
    splits_by: ClassVar[str] = "opening"
    _open: ClassVar[WeakValueDictionary[int, GymnasiumWorld]] = WeakValueDictionary()

    def __init__(
        self,
        actions: Sequence[str] = (),
        show: str = "observation",
        split_by: str = "",
        success_at: float | None = None,
        **environment: Any,
    ) -> None:
        where = self.name or type(self).__name__
        self.split_by = split_by or self.splits_by
        for option, value, known in (("show", show, SHOW), ("split_by", self.split_by, SPLIT_BY)):
            if value not in known:
                raise ConfigError(f"{where}: {option} is '{value}'; it is one of {', '.join(known)}.{nearest(value, known)}")
        self.env: gymnasium.Env[Any, Any] = _made(type(self), {**environment, **(self.ansi if show != "observation" else {})})
        renders = self.env.render_mode == "ansi" and "ansi" in self.env.metadata.get("render_modes", ())
        if show != "observation" and not renders:
            raise ConfigError(f"{where} does not render as text (render_mode 'ansi'): show can only be 'observation'")
        if id(self.env) in self._open:
            raise ConfigError(f"{where}: the same environment was given twice: make a new one each time")
        self._open[id(self.env)] = self
        self.show = show
        self.print = printer(self.env.observation_space, where) if show != "ansi" else lambda seen: ""
        self.actions = reader(self.env.action_space, actions or self.names or _names(self.env), where)
        threshold = self.env.spec.reward_threshold if self.env.spec else None
        self.success_at = threshold if success_at is None else float(success_at)
        self.key = printer(self.env.observation_space, where) if recurs(self.env.observation_space) else None
        self.recurring = self.split_by == "seed"
        self.seed = 0
        self.seen: Any = None
        self.total = 0.0
        self._best: list[list[int]] = []

    # -- the world ---------------------------------------------------------------------------------------------------

    def reset(self, task: Task) -> str:
        self.total = 0.0
        opening = opening_of(task.split, self._drawn, self.split_by == "seed")
        return f"{opening}\nactions: {self.actions.told}"

    def _drawn(self) -> str:
        self.seed = self.rng.getrandbits(31)
        self.seen, _ = self.env.reset(seed=self.seed)
        return self._shown()

    def step(self, text: str) -> Turn:
        action = self.actions.read(text)
        try:
            self.seen, reward, terminated, truncated, _ = self.env.step(action)
            shown = self._shown()
        except Exception as error:
            raise EnvironmentFailed(f"{self.name}: {type(error).__name__}: {error}") from error
        self.total += float(reward)
        if not terminated and not truncated:
            return Turn(shown, float(reward))
        success = self.total > 0 if self.success_at is None else self.total >= self.success_at
        return Turn(shown, float(reward), done=True, success=success, truncated=not terminated)

    def state_key(self) -> str:
        return self.key(self.seen) if self.key is not None and self.seen is not None else ""

    def close(self) -> None:
        self.env.close()
        self._open.pop(id(self.env), None)

    def _shown(self) -> str:
        parts = [self.print(self.seen)] if self.show != "ansi" else []
        if self.show != "observation":
            parts.append(pictures.without_escapes(str(self.env.render())))
        return "\n".join(parts)

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str | None:
        player: Player | None = type(self).player
        if isinstance(self.actions, Named) and rng.random() < noise:
            return rng.choice(self.actions.names)
        if player is not None:
            return self.actions.name(player(self.seen, rng))
        if not isinstance(self.actions, Named):
            return None
        return rng.choice([self.actions.names[i] for i in self._good()] or self.actions.names)

    def _good(self) -> list[int]:
        """The best actions of an environment that tells its transitions; none if it does not."""
        world: Any = self.env.unwrapped
        if not hasattr(world, "P") or not hasattr(world, "s"):
            return []
        self._best = self._best or tabular.best_actions(world.P)
        return self._best[int(world.s)]

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield "".join(f" {digit}" for digit in range(10)) + " -.:,"
        world = cls()
        try:
            yield f"actions: {world.actions.told}\n{' '.join(world.actions.names)} name one of:"
            for index in range(16):
                task = cls.task("train", index)
                world.rng = rng_of(task)
                yield world.reset(task)
                for _ in range(16):
                    said = world.play(world.rng, 0.5)
                    if said is None:
                        break
                    turn = world.step(said)
                    yield f"{said}\n{turn.text}"
                    if turn.done:
                        break
        finally:
            world.close()


def wrap(
    make: Callable[..., Any],
    actions: Sequence[str] = (),
    *,
    name: str = "",
    system: str = "",
    max_turns: int = _MOST_TURNS,
    player: Player | None = None,
    inline: bool = False,
) -> type[GymnasiumWorld]:
    """A world class of the environments that `make` gives, a new one with each call, with the options of a recipe.

    actions: names, in their order. name: of the class. player: a scripted player; without one, an environment with `P` and
    `s` as Gymnasium's toy text ones have is solved, and in any other the player moves at random. inline: see TextWorld.
    """
    own = {"name": name, "create": staticmethod(make), "names": tuple(actions), "system": system, "max_turns": max_turns}
    own["__module__"] = sys._getframe(1).f_globals.get("__name__", __name__)  # where it is found again
    if player is not None:
        own["player"] = staticmethod(player)
    return type(name or "GymnasiumWorld", (GymnasiumWorld,), {**own, "inline": inline, "__doc__": GymnasiumWorld.__doc__})


def world(env_id: str) -> type[TextWorld]:
    """The world of a registered environment, as in `gymnasium.make(env_id)`: "module:ID" imports a module before. Raises
    ConfigError."""
    name = f"gymnasium:{env_id}"
    if find_spec("gymnasium") is None:
        raise ConfigError(f"environment '{name}' needs the package gymnasium: pip install 'troupe-rl[gymnasium]'")
    import gymnasium

    atari = env_id.startswith("ALE/")
    if atari:
        if find_spec("ale_py") is None:
            raise ConfigError(f"environment '{name}' needs the package ale-py: pip install 'troupe-rl[atari]'")
        import ale_py

        ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
        gymnasium.register_envs(ale_py)
    module, _, registered = env_id.rpartition(":")
    try:
        if module:
            import_module(module)
        spec = gymnasium.spec(registered)
    except Exception as error:  # a name that is none, or a module before its colon that cannot be imported
        raise ConfigError(f"environment '{name}': {str(error).splitlines()[0]}") from error

    def create(**options: Any) -> Any:
        return gymnasium.make(spec, disable_env_checker=True, **options)

    quick = str(spec.entry_point).startswith(_QUICK)
    made = wrap(create, name=name, max_turns=spec.max_episode_steps or _MOST_TURNS, inline=quick)
    made.ansi = {"render_mode": "ansi"}
    made.splits_by = "seed" if atari else "opening"  # a cartridge opens alike, and takes a tenth of a second to
    made.system = f"You play {spec.name}. Answer each observation with the name of one action."
    return made


def _made(world: type[GymnasiumWorld], options: Mapping[str, Any]) -> Any:
    try:
        return world.create(**options)
    except Exception as error:
        why = (str(error).strip().splitlines() or ["no message"])[0]
        raise ConfigError(f"{world.name or world.__name__} cannot be made: {type(error).__name__}: {why}") from error


def _names(env: Any) -> Sequence[str]:
    """What the actions of a known environment are called; none if nobody says."""
    if hasattr(env.unwrapped, "get_action_meanings"):
        return [name.lower() for name in env.unwrapped.get_action_meanings()]
    return NAMES.get(env.spec.name, ()) if env.spec else ()
