"""Moves of some games of TextArena for several: all that could be legal, by the class of the game. The game says which are."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

_FILES = "abcdefghijklmnopqrst"


def _nim(game: Any) -> list[str]:
    return [f"[{pile} {count}]" for pile, size in enumerate(game.state.game_state["piles"]) for count in range(1, size + 1)]


def _othello(game: Any) -> list[str]:
    return [f"[{row}, {column}]" for row, column in product(range(game.N), repeat=2)]


def _cells(game: Any) -> list[str]:
    return [f"[{cell}]" for cell in range(9)]


def _wild(game: Any) -> list[str]:
    return [f"[{mark} {cell}]" for mark, cell in product("XO", range(9))]


def _columns(game: Any) -> list[str]:
    return [f"[col {column}]" for column in range(game.num_cols)]


def _breakthrough(game: Any) -> list[str]:
    size = game.board_size
    steps = product(range(size), range(size), (-1, 0, 1), (-1, 1))
    return [
        f"[{_FILES[x]}{y + 1}{_FILES[x + dx]}{y + dy + 1}]"
        for x, y, dx, dy in steps
        if 0 <= x + dx < size and 0 <= y + dy < size
    ]


def _words(*words: str) -> Callable[[Any], list[str]]:
    return lambda game: [f"[{word}]" for word in words]


MOVES: dict[str, Callable[[Any], list[str]]] = {
    "BreakthroughEnv": _breakthrough,
    "ConnectFourEnv": _columns,
    "IteratedMatchingPenniesEnv": _words("heads", "tails"),
    "IteratedPrisonersDilemmaEnv": _words("Cooperate", "Defect"),
    "IteratedRockPaperScissorsEnv": _words("rock", "paper", "scissors"),
    "KuhnPokerEnv": _words("check", "bet", "call", "fold"),
    "NimEnv": _nim,
    "OthelloEnv": _othello,
    "PigDiceEnv": _words("roll", "hold"),
    "ReverseTicTacToeEnv": _cells,
    "TicTacToeEnv": _cells,
    "WildTicTacToeEnv": _wild,
}
