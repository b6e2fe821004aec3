"""Screens as text: a frame as a coarse picture of characters, a terminal's colours as brackets.

Promises: the same frame gives the same text; a cell of the picture shows the rarest colour in it, so that a ball of a few
pixels is not lost; what has the frame's commonest colour is ".".
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np

CELL = (8, 8)
"""Pixels of a cell, down and across."""
COLOURS = {
    "k": (0, 0, 0),
    "w": (236, 236, 236),
    "a": (142, 142, 142),
    "r": (200, 72, 72),
    "o": (213, 130, 74),
    "y": (210, 210, 64),
    "g": (92, 186, 92),
    "c": (84, 184, 200),
    "b": (66, 72, 200),
    "p": (160, 70, 190),
    "n": (120, 70, 20),
}
"""black, white, grey, red, orange, yellow, green, cyan, blue, purple, brown: a colour is called after the nearest of these."""

_SMALLEST = 32  # pixels a side of what is a frame
_COLOUR = re.compile(r"\x1b\[([0-9;]*)m(.*?)\x1b\[0?m", re.DOTALL)
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_INKS = ("black", "red", "green", "yellow", "blue", "magenta", "cyan", "white")


def is_frame(shape: tuple[int, ...], dtype: Any) -> bool:
    """Are arrays of `shape` and `dtype` frames of pixels: bytes, height by width, or by 3 colours as well?"""
    sides = len(shape) == 2 or (len(shape) == 3 and shape[2] == 3)
    return sides and np.dtype(dtype) == np.uint8 and min(shape[:2]) >= _SMALLEST


def drawn(frame: Any) -> str:
    """`frame`, uint8 [height, width] or [height, width, 3], as lines of characters, one for each `CELL`."""
    pixels = np.asarray(frame)
    if pixels.ndim == 2:
        pixels = np.repeat(pixels[:, :, None], 3, axis=2)
    coarse = (pixels >> 3).astype(np.int32)
    kinds = _nearest()[coarse[..., 0] << 10 | coarse[..., 1] << 5 | coarse[..., 2]]
    counts = np.bincount(kinds.ravel(), minlength=len(COLOURS))
    rank = np.empty(len(COLOURS), dtype=np.int8)
    rank[np.argsort(-counts, kind="stable")] = np.arange(len(COLOURS))  # 0 is the commonest colour
    down, across = CELL
    height, width = kinds.shape[0] // down, kinds.shape[1] // across
    cells = rank[kinds][: height * down, : width * across].reshape(height, down, width, across).max(axis=(1, 3))
    letters = np.array(list(COLOURS))[np.argsort(rank)]
    letters[0] = "."
    return "\n".join("".join(row) for row in letters[cells])


@cache
def _nearest() -> Any:
    """For each colour of 5 bits a part, which of `COLOURS` is the nearest."""
    levels = np.arange(32) * 8 + 4
    every = np.stack(np.meshgrid(levels, levels, levels, indexing="ij"), axis=-1).reshape(-1, 1, 3)
    return ((every - np.array(list(COLOURS.values()))) ** 2).sum(-1).argmin(-1).astype(np.int8)


def without_escapes(text: str) -> str:
    """What a terminal would show, with its colours said: [x] has a coloured ground, blue(x) is written in blue."""
    return _ESCAPE.sub("", _COLOUR.sub(_said, text)).strip("\n")


def _said(found: re.Match[str]) -> str:
    codes, inner = [int(code) for code in found[1].split(";") if code], found[2]
    if any(40 <= code <= 47 or 100 <= code <= 107 for code in codes):
        return f"[{inner}]"
    ink = next((_INKS[code % 10] for code in codes if 30 <= code <= 37 or 90 <= code <= 97), "")
    return f"{ink}({inner})" if ink else inner
