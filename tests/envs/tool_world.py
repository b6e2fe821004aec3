"""A world with tools, and how to play it: what the tests of tools share."""

import asyncio
import dataclasses
import enum
from typing import Annotated, Any, Literal

from pydantic import Field

from troupe.envs.base import Task
from troupe.envs.drive import Driver
from troupe.envs.tools import ToolWorld, tool

TASK = Task("train/7", "desk", "train", 7, {"goal": 3})


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Place:
    title: str
    floor: int = 0


class Desk(ToolWorld):
    inline = True
    judged = 1.0

    def reset(self, task):
        self.log = []
        return "hello"

    @tool
    def find_order(self, order_id: str, at_most: Annotated[int, Field(description="how many", ge=1)] = 5) -> list[str]:
        """Look an order up
        by its number.

        Not for the agent.
        """
        self.log.append((order_id, at_most))
        return [order_id] * at_most

    @tool
    async def move(self, to: Place, colour: Colour | None = None, speed: Literal["slow", "fast"] = "slow") -> Any:
        """Move something."""
        return to

    @tool
    def say(self, what: Any) -> Any:
        """Give back what came."""
        return what

    @tool
    def give(self, name: str) -> Any:
        """Give one of the things that a test has put there."""
        thing = self.things[name]
        if isinstance(thing, BaseException):
            raise thing
        return thing

    def helper(self):
        """No tool."""

    def verify(self):
        return self.judged


def driven(play, world=None, task=TASK):
    async def run():
        driver = Driver(world or Desk(), timeout_s=20)
        await driver.reset(task)
        try:
            return await play(driver)
        finally:
            await driver.close()

    return asyncio.run(run())


def called(name, arguments, world=None):
    return driven(lambda driver: driver.call(name, arguments), world)
