"""Messages that no agent should write and that all of them will, and what a world does with them."""

from __future__ import annotations

import random
from time import perf_counter
from typing import TYPE_CHECKING

from troupe.envs.base import ToolCall
from troupe.envs.check.episodes import TOLD, Action, apply, sample
from troupe.envs.check.report import Found
from troupe.envs.drive import Driver
from troupe.protocol.errors import EpisodeError, TimedOut, UnknownTool

if TYPE_CHECKING:
    from troupe.envs.check.suite import Suite

GARBAGE = {
    "empty": "",
    "blank": " \n\t ",
    "huge": "x" * 1_000_000,
    "huge number": "9" * 100_000,
    "null bytes": "\x00\x00left\x00",
    "unicode": "→ 左 ｌｅｆｔ ٣ 🧊\u202e",
    "lone surrogate": "\ud800",
    "braces": "{[(" * 5_000,
    "markup": "<think><|im_end|></tool_call>",
    "no number": "nan inf -0 1e999 1_0 ² 0x1",
    "format": "%s %n {} {0.__class__} $HOME",
    "repeated letters": "a" * 64 + "!",
    "repeated words": "left " * 64 + "!",
    "repeated digits": "1" * 64 + "!",
    "many lines": "left\r\n" * 20_000,
    "other types": 'null true [1, "a"] {"action": null}',
}
"""name → message. The repeated ones find regular expressions that take for ever."""


async def garbage(suite: Suite) -> Found:
    """Each as the first action of an episode."""
    began, tried = perf_counter(), 0
    async with suite.open() as driver:
        for kind, action in await _rubbish(suite, driver):
            if perf_counter() - began > suite.share_s:
                break
            tried += 1
            await driver.reset(suite.task("train", 0))
            try:
                await apply(driver, action)
            except TOLD as told:
                if isinstance(told, UnknownTool):
                    return "broken", f"a tool that is offered cannot be called: {told}"
            except TimedOut as error:
                raise TimedOut(f"{kind}: {error}") from error
            except EpisodeError as error:
                return "broken", f"{kind}: {str(error)[:200]}"
    return "ok", f"{tried} actions"


async def _rubbish(suite: Suite, driver: Driver) -> list[tuple[str, Action]]:
    """Messages; and for each tool calls with no arguments, with wrong ones, and with each garbage in each text."""
    rubbish: list[tuple[str, Action]] = list(GARBAGE.items())
    await driver.reset(suite.task("train", 0))
    for found in driver.tools():
        name, schema = found["name"], found["parameters"]
        rubbish.append((f"{name} without arguments", ToolCall(name, {})))
        rubbish.append((f"{name} with objects", ToolCall(name, {key: {} for key in schema.get("properties", {})})))
        for kind, text in GARBAGE.items():
            arguments = sample(schema, schema, [text], random.Random(0))
            rubbish.append((f"{name} with {kind}", ToolCall(name, arguments)))
    return rubbish
