"""The games of OpenSpiel as worlds: `open_spiel:tic_tac_toe`, `open_spiel:kuhn_poker`, `open_spiel:hex(board_size=4)`.

Promises:
- the agent has one seat; the others, and chance, move by `self.rng`, so a task is the same luck for whoever plays it;
- the agent is shown what its seat may know, and the names of its legal moves; anything else is invalid and costs no move,
  but patience ends: who goes on so has given the game up, at the lowest return there is, so that stalling never beats losing;
- the reward is what OpenSpiel says the seat returns: at the end, or move by move in games that pay so;
- simultaneous games are played in turns, in which nobody is shown what the others have just chosen.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from typing import Any, ClassVar

from troupe.envs.adapters.spaces import mentioned
from troupe.envs.base import Task, TextWorld, Turn, rng_of
from troupe.protocol.errors import ConfigError, InvalidAction, TaskFailed, nearest

OPPONENTS = ("random", "rollout")
_MOST_TURNS = 64
_DEALS = 100  # that may be over before the agent has moved
_DEPTH = 200  # moves of one rollout


class OpenSpielWorld(TextWorld):
    """A game of OpenSpiel. Options:

    seat: the agent's, from 0; -1: drawn by the task. opponent: who has the other seats, "random" or "rollout".
    rollouts: games that are played at random for each of its legal moves by a rollout player, which takes the move that
    returned the most; it sees what is hidden. The scripted player is one, too. patience: messages of a game that are no legal
    move and are told so; the next one gives the game up.
    """

    game: ClassVar[Any] = None
    recurring = True

    def __init__(self, seat: int = 0, opponent: str = "random", rollouts: int = 8, patience: int = 2) -> None:
        players = self.game.num_players()
        if not -1 <= seat < players:
            raise ValueError(f"seat is {seat}; it is 0 to {players - 1}, or -1 for any")
        if opponent not in OPPONENTS:
            raise ValueError(f"opponent is '{opponent}'; it is one of {', '.join(OPPONENTS)}.{nearest(opponent, OPPONENTS)}")
        if not 1 <= rollouts <= 1000:
            raise ValueError(f"rollouts is {rollouts}; it is 1 to 1000")
        if not 0 <= patience <= 1000:
            raise ValueError(f"patience is {patience}; it is 0 to 1000")
        self.patience, self.illegal = patience, 0
        self.wanted, self.opponent, self.rollouts = seat, opponent, rollouts
        self.seat, self.position, self.paid = 0, self.game.new_initial_state(), 0.0
        kind = self.game.get_type()
        self.open = str(kind.information) == "Information.PERFECT_INFORMATION"
        self.as_it_goes = str(kind.reward_model) == "RewardModel.REWARDS"

    # -- the world ---------------------------------------------------------------------------------------------------

    def reset(self, task: Task) -> str:
        players = self.game.num_players()
        self.seat = self.rng.randrange(players) if self.wanted < 0 else self.wanted
        self.illegal = 0
        for _ in range(_DEALS):
            self.position, self.paid = self.game.new_initial_state(), 0.0
            self._others_move()
            if not self.position.is_terminal():
                return (f"you are player {self.seat} of {players}\n" if players > 1 else "") + self._shown()
        raise TaskFailed(f"{self.name} was over before player {self.seat} could move, in {_DEALS} deals")

    def step(self, text: str) -> Turn:
        legal = self._legal()
        said = mentioned(text, {name.lower(): action for name, action in legal.items()})
        if len(said) != 1:
            self.illegal += 1
            if self.illegal > self.patience:
                return Turn("you have given the game up", float(self.game.min_utility()) - self.paid, done=True, success=False)
            raise InvalidAction(f"name one of your legal moves: {_listed(legal)}")
        self.position.apply_action(said.pop())
        self._others_move()
        over = self.position.is_terminal()
        before = self.paid
        if over or self.as_it_goes:
            self.paid = float(self.position.returns()[self.seat])
        if not over:
            return Turn(self._shown(), self.paid - before)
        board = f"{self._board()}\n" if self.open else ""
        return Turn(f"{board}over: {self.paid:g}", self.paid - before, done=True, success=self.paid > 0)

    def state_key(self) -> str:
        return "" if self.position.is_terminal() or self.position.is_chance_node() else self._board()

    def _others_move(self) -> None:
        """Chance and the other seats, until it is the agent's turn or the game is over."""
        while not self.position.is_terminal() and self.position.current_player() != self.seat:
            wise = self.opponent == "rollout" and not self.position.is_chance_node()
            self.position.apply_action(self._best(self.rng) if wise else _any(self.position, self.rng))

    def _legal(self) -> dict[str, int]:
        """Name → action. Moves that are called alike are called by their numbers."""
        actions = self.position.legal_actions()
        names = [self.position.action_to_string(self.seat, action).strip() for action in actions]
        distinct = len({name.lower() for name in names}) == len(names) and all(names)
        return dict(zip(names if distinct else map(str, actions), actions, strict=True))

    def _shown(self) -> str:
        return f"{self._board()}\nmoves: {_listed(self._legal())}"

    def _board(self) -> str:
        kind = self.game.get_type()
        if not self.open and kind.provides_information_state_string:
            return str(self.position.information_state_string(self.seat)).rstrip("\n")
        if kind.provides_observation_string:
            return str(self.position.observation_string(self.seat)).rstrip("\n")
        return str(self.position).rstrip("\n")

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        legal = {action: name for name, action in self._legal().items()}
        return legal[_any(self.position, rng) if rng.random() < noise else self._best(rng)]

    def _best(self, rng: random.Random) -> int:
        """The move with the best mean return over rollouts, for whoever is to move."""
        player = self.position.current_player()

        def worth(action: int) -> float:
            return sum(_rollout(self.position.child(action), player, rng) for _ in range(self.rollouts))

        actions: list[int] = self.position.legal_actions()
        return max(actions, key=worth) if len(actions) > 1 else actions[0]

    @classmethod
    def corpus(cls) -> Iterator[str]:
        world = cls(seat=-1)
        yield "".join(f" {digit}" for digit in range(10)) + " over: -1 name one of your legal moves:"
        for index in range(64):
            task = cls.task("train", index)
            world.rng = rng_of(task)
            yield world.reset(task)
            for _ in range(cls.max_turns):
                said = world.play(world.rng, 1.0)
                turn = world.step(said)
                yield f"{said} {said}\n{turn.text}"
                if turn.done:
                    break


def world(named: str) -> type[TextWorld]:
    """The world of a game as `pyspiel.load_game` names it, parameters included. Raises ConfigError."""
    name = f"open_spiel:{named}"
    if find_spec("pyspiel") is None:
        raise ConfigError(f"environment '{name}' needs the package open-spiel: pip install 'troupe-rl[open_spiel]'")
    import pyspiel

    known = pyspiel.registered_names()
    short = named.partition("(")[0]
    if short not in known:  # asked first, because pyspiel prints the whole list to the terminal
        raise ConfigError(f"environment '{name}': OpenSpiel has no game '{short}'.{nearest(short, known)}")
    try:
        game = pyspiel.load_game(named)
        kind = game.get_type()
        if kind.dynamics == pyspiel.GameType.Dynamics.SIMULTANEOUS:
            game = pyspiel.convert_to_turn_based(game)
        game.new_initial_state()
    except Exception as error:  # a parameter that is none, or a game that needs some
        raise ConfigError(f"environment '{name}': {str(error).strip().splitlines()[0]}") from error
    if kind.dynamics == pyspiel.GameType.Dynamics.MEAN_FIELD:
        raise ConfigError(f"environment '{name}' is a mean field game: it has no seat for one agent")
    if kind.chance_mode == pyspiel.GameType.ChanceMode.SAMPLED_STOCHASTIC:
        raise ConfigError(f"environment '{name}' draws its chance itself, so a task could not be played twice")
    members = {"name": name, "game": game, "__doc__": OpenSpielWorld.__doc__, "max_turns": _turns(game)}
    members["system"] = f"You play {kind.long_name}. Answer with one of your legal moves."
    return type("OpenSpielWorld", (OpenSpielWorld,), members)


def _turns(game: Any) -> int:
    return max(1, min(int(game.max_game_length()), _MOST_TURNS))


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    return (", " if any(" " in name for name in listed) else " ").join(listed)


def _any(state: Any, rng: random.Random) -> int:
    if state.is_chance_node():
        outcomes, chances = zip(*state.chance_outcomes(), strict=True)
        return int(rng.choices(outcomes, chances)[0])
    return int(rng.choice(state.legal_actions()))


def _rollout(state: Any, player: int, rng: random.Random) -> float:
    """What `player` returns if all moves from here on are random. state: used up."""
    for _ in range(_DEPTH):
        if state.is_terminal():
            break
        state.apply_action(_any(state, rng))
    return float(state.returns()[player])
