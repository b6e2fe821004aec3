"""Games of TextArena as worlds: `textarena:ENV_ID`, for example `textarena:GuessTheNumber-v0`.

The agent has one seat, and reads what the game says to it since its last move. In a game for several, the other seats are
played by `opponent`.

Promises:
- an episode depends on its task only, however many are played at the same time in one process: TextArena draws from Python's
  global `random`, so its modules are given a stand-in which draws from the chance of the game that is being called;
- a move that the game refuses, and lets be repeated, is an invalid action; what the game pays at its end is the reward;
- an opening, hidden parts included, is of one split only. Where there are too few for that, the splits differ in chance alone
  (`recurring`);
- a game that would download word lists or ask a model over the network is refused, and nothing is printed.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import logging
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from troupe.envs.adapters.textarena_moves import MOVES
from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, belongs
from troupe.protocol.errors import ConfigError, EnvironmentFailed, TroupeError, nearest
from troupe.protocol.importing import module_at

_READ = 2_000  # characters of a message that a game is given
_DRAWS = 64
_SAME = 8  # openings in a row that are the same, until all are taken to be
_OTHERS = 200  # moves of other seats in a row
_TURNS = 40  # of a game that has no limit of its own
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_log = logging.getLogger(__name__)

Player = Callable[[str, random.Random], str]
"""(what the seat was told since its last move, its chance) → its move."""

_REASONS = {
    r"nltk|EnglishDictionary": "it downloads word lists at run time",
    r"OpenRouter|[Jj]ury": "it asks a language model over the network",
    r"np\.random": "it draws from numpy's global chance, so that no episode could be repeated",
}


def world(name: str) -> type[TextWorld]:
    """The world of the game `name`. Raises ConfigError: not installed, no such game, or one that cannot be played offline."""
    try:
        import textarena
        from textarena.envs.registration import ENV_REGISTRY
    except ImportError as error:
        raise ConfigError(f"'textarena:{name}' needs textarena ({error}): pip install 'troupe-rl[textarena]'") from error
    if name not in ENV_REGISTRY:
        raise ConfigError(f"textarena has no game '{name}'.{nearest(name, ENV_REGISTRY)} It has {len(ENV_REGISTRY)}")
    place, _, kind = str(ENV_REGISTRY[name].entry_point).partition(":")
    source = Path(str(textarena.__file__)).parent.parent.joinpath(*place.split(".")).with_suffix(".py")
    text = source.read_text() if source.is_file() else ""
    for pattern, reason in _REASONS.items():
        if re.search(pattern, text):
            raise ConfigError(f"'textarena:{name}' is refused: {reason}")
    try:
        game_class = getattr(importlib.import_module(place), kind)
        _stand_in()
        seats, turns = _probed(name)
    except Exception as error:  # another project's code: it may raise anything
        raise ConfigError(f"'textarena:{name}' cannot be played: {type(error).__name__}: {str(error)[:200]}") from error
    attributes = {"name": f"textarena:{name}", "game": name, "kind": game_class, "seats": seats, "max_turns": turns}
    return type("TextArena", (TextArena,), attributes | {"__doc__": f"The game {name} of TextArena."})


class TextArena(TextWorld):
    """Options: players: in a game that leaves it open. seat: the agent's, from 0. opponent: who has the others.

    It is "random" or "greedy" (which wins if it can at once), for games whose moves are known here, or your own function,
    "module:function" or "path/file.py:function", of what its seat was told and of a random.Random. All others are the game's.
    """

    game: ClassVar[str] = ""
    kind: ClassVar[type] = object
    seats: ClassVar[int] = 1
    """0: the game leaves it open."""
    system: ClassVar[str] = "You play a game by its rules. Reply with your move, in the form that the rules ask for."

    def __init__(self, players: int = 0, seat: int = 0, opponent: str = "random", **options: Any) -> None:
        self._players = self.seats or players
        if players and players != self._players:
            raise ValueError(f"players is {players}; this game is for {self.seats}")
        if not self._players:
            raise ValueError("this game is for several: say for how many with players")
        if not 0 <= seat < self._players:
            raise ValueError(f"seat is {seat}; it is 0 to {self._players - 1}")
        known = list(inspect.signature(self.kind).parameters)
        for key in options:
            if key not in known:
                raise ValueError(f"no option '{key}'.{nearest(key, known)} Known: players, seat, opponent, {', '.join(known)}")
        self._seat, self._options = seat, options
        self._opponent = self._player_named(opponent) if self._players > 1 else None
        self._env: Any = None

    # -- the world ---------------------------------------------------------------------------------------------------

    def reset(self, task: Task) -> str:
        openings = set()
        for draw in range(_DRAWS):
            seed = self.rng.randrange(2**31)
            self._begin_game(seed)
            opening = _plain(vars(self._base))
            openings.add(opening)
            if belongs(opening, task.split):
                break
            if draw >= _SAME and len(openings) == 1:
                self.recurring = True
                break
        else:
            self.recurring = True
        self._board = ""
        self._others()
        return self._told()

    def step(self, text: str) -> Turn:
        if len(text) > _READ:
            raise InvalidAction(f"at most {_READ} characters")
        self._called(lambda: self._env.step(action=text))
        state = self._base.state
        refused = _refused(state.observations[self._seat])
        if not state.done:
            if refused:
                raise InvalidAction(self._told())
            self._others()
        told = self._told()
        if not state.done:
            return Turn(told)
        reward = (state.rewards or {}).get(self._seat)
        if reward is None:
            raise EnvironmentFailed(f"{self.name} ended without a reward for seat {self._seat}")
        reason = str(state.game_info.get(self._seat, {}).get("reason") or "The game is over.")
        success = float(reward) >= 1.0 if self._players == 1 else float(reward) > 0.0
        return Turn(f"{told}\n{reason}".strip(), float(reward), done=True, success=success)

    def state_key(self) -> str:
        return self._board

    def play(self, rng: random.Random, noise: float) -> str | None:
        """In a game for several whose moves are known: wins if it can at once, else plays anything legal."""
        if self._players == 1 or self.kind.__name__ not in MOVES:
            return None
        return self._legal(rng, greedy=rng.random() >= noise)

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        if cls.seats != 2 or cls.kind.__name__ not in MOVES:
            return
        for index in range(64):
            made, task = cls(seat=index % 2), cls.task("train", index)
            made._begin(task)
            yield made.reset(task)
            done = False
            while not done:
                move = made.play(made.rng, noise=1.0) or ""
                yield move
                try:
                    turn = made.step(move)
                except InvalidAction as error:
                    yield str(error)
                    break
                yield turn.text
                done = turn.done

    # -- the other seats ---------------------------------------------------------------------------------------------

    def _others(self) -> None:
        """They move until it is the agent's turn, or the game is over."""
        state = self._base.state
        for _ in range(_OTHERS):
            if state.done or state.current_player_id == self._seat:
                return
            player, told = state.current_player_id, state.observations[state.current_player_id]
            state.observations[player] = []
            assert self._opponent is not None
            move = self._opponent(_text(told, player, state), self._chance)
            self._called(lambda: self._env.step(action=move))  # noqa: B023
        raise EnvironmentFailed(f"{self.name}: the others have made {_OTHERS} moves in a row")

    def _player_named(self, name: str) -> Player:
        if name in ("random", "greedy"):
            if self.kind.__name__ not in MOVES:
                raise ValueError(f"its moves are not known here, so there is no '{name}' opponent: name a function of your own")
            return lambda told, rng: self._legal(rng, greedy=name == "greedy")
        place, colon, attribute = name.rpartition(":")
        if not colon:
            raise ValueError(f"opponent is '{name}'; it is random, greedy, module:function or path/file.py:function")
        found: Player = getattr(module_at(place), attribute)
        return found

    def _legal(self, rng: random.Random, greedy: bool) -> str:
        """A legal move of whose turn it is, found by trying."""
        moves = MOVES[self.kind.__name__](self._base)
        rng.shuffle(moves)
        legal = []
        for move in moves:
            worth = self._tried(move)
            if worth is not None and (not greedy or worth > 0):
                return move
            legal += [move] if worth is not None else []
        if not legal:
            raise EnvironmentFailed(f"{self.name}: none of {len(moves)} moves is legal")
        return legal[0]

    def _tried(self, move: str) -> float | None:
        """What a copy of the game pays the mover for it at once; None if it refuses."""
        player = self._base.state.current_player_id
        trial = copy.deepcopy(self._base)
        trial.state.observations[player] = []
        self._called(lambda: trial.step(action=move), random.Random(0))
        if _refused(trial.state.observations[player]) or trial.state.game_info[player].get("invalid_move"):
            return None
        return float((trial.state.rewards or {}).get(player, 0.0)) if trial.state.done else 0.0

    # -- calling the game --------------------------------------------------------------------------------------------

    def _called(self, function: Callable[[], Any], chance: random.Random | None = None) -> Any:
        with _drawing_from(chance or self._chance):
            try:
                return function()
            except TroupeError:
                raise
            except Exception as error:
                raise EnvironmentFailed(f"{self.name} raised {type(error).__name__}: {str(error)[:500]}") from error

    def _begin_game(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._env, self._base = self._called(lambda: _begun(self.game, self._players, seed, self._options))

    def _told(self) -> str:
        """What the agent has not been told yet."""
        state = self._base.state
        messages, state.observations[self._seat] = state.observations[self._seat], []
        self._board = next((text for _, text, kind in reversed(_sound(messages)) if kind == "GAME_BOARD"), self._board)
        return _text(messages, self._seat, state)


def _begun(name: str, players: int, seed: int, options: dict[str, Any]) -> tuple[Any, Any]:
    """A game, and the same without its wrappers, which show all of the history in each turn: a conversation has it already."""
    import textarena

    env = textarena.make(name, **options)
    env.reset(num_players=players, seed=seed)
    base = env
    while isinstance(base, textarena.Wrapper):
        base = base.env
    return env, base


def _probed(name: str) -> tuple[int, int]:
    """(seats, 0 if the game leaves them open; turns)."""
    from textarena import SinglePlayerState, TwoPlayerState

    for players, kind in ((1, SinglePlayerState), (2, TwoPlayerState), (0, object)):
        try:
            with _drawing_from(random.Random(0)):
                _, base = _begun(name, players or 3, 0, {})
        except Exception:
            if not players:
                return 0, _TURNS
            continue
        if isinstance(base.state, kind):
            limit = getattr(base, "max_turns", None)
            return players, min(limit, 200) if isinstance(limit, int) and limit > 0 else _TURNS
    return 0, _TURNS


def _sound(messages: list[Any]) -> list[tuple[int, str, str]]:
    """(sender, text, kind). Some games mix up the three when they echo a move: such an echo says nothing new."""
    return [(sender, text, kind.name) for sender, text, kind in messages if isinstance(text, str) and hasattr(kind, "name")]


def _refused(messages: list[Any]) -> bool:
    return any(kind == "GAME_ADMIN" and "invalid move" in text for _, text, kind in _sound(messages))


def _text(messages: list[Any], seat: int, state: Any) -> str:
    """As the seat reads them: without its own moves, with the names of others."""
    lines = []
    for sender, text, kind in _sound(messages):
        if sender == seat and kind == "PLAYER_ACTION":
            continue
        lines.append(text if sender < 0 else f"[{state.role_mapping.get(sender, f'Player {sender}')}] {text}")
    return "\n".join(lines)


def _plain(value: Any, depth: int = 6) -> str:
    """What a game holds, the same in every process: no addresses, no order of sets."""
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{_plain(k, depth - 1)}:{_plain(v, depth - 1)}" for k, v in value.items())) + "}"
    if isinstance(value, set | frozenset):
        return "{" + ",".join(sorted(_plain(each, depth - 1) for each in value)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(_plain(each, depth - 1) for each in value) + "]"
    if depth > 0 and hasattr(value, "__dict__") and not callable(value):
        return type(value).__name__ + _plain(vars(value), depth - 1)
    return _ADDRESS.sub("", repr(value))


# -- chance ----------------------------------------------------------------------------------------------------------

_current = threading.local()


@contextmanager
def _drawing_from(chance: random.Random) -> Iterator[None]:
    """Games that this thread calls meanwhile draw from `chance`."""
    before = getattr(_current, "chance", None)
    _current.chance = chance
    try:
        yield
    finally:
        _current.chance = before


class _Chance:
    """Stands in for the module `random`: the chance of the game that this thread calls, else the module itself."""

    def __getattr__(self, name: str) -> Any:
        chance = getattr(_current, "chance", None)
        return getattr(chance if hasattr(chance, name) else random, name)


_chance = _Chance()


def _quiet(*values: object, **_: object) -> None:
    _log.debug("%s", " ".join(map(str, values)))


def _stand_in() -> None:
    """Gives TextArena's modules the stand-in, and takes `print` from its games."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "textarena":
            if vars(module).get("random") is random:
                module.random = _chance  # type: ignore[attr-defined]
            if name.startswith("textarena.envs."):
                module.print = _quiet  # type: ignore[attr-defined]
