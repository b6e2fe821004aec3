"""Worlds of each kind that a driver knows, whose step is whatever a test wants."""

import asyncio
import threading

from troupe.envs.base import Task, TextWorld, Turn
from troupe.envs.drive import Driver

TASK = Task("train/118", "test", "train", 9)


class Sync(TextWorld):
    """`step` runs whatever function it is given."""

    def __init__(self, act=lambda text: Turn(text)):
        self.act = act
        self.threads = []
        self.closed = threading.Event()

    def reset(self, task):
        self.threads.append(threading.current_thread())
        return f"hello {self.rng.random()}"

    def step(self, text):
        self.threads.append(threading.current_thread())
        return self.act(text)

    def close(self):
        self.closed.set()


class Inline(Sync):
    inline = True


class Async(Sync):
    async def reset(self, task):
        return super().reset(task)

    async def step(self, text):
        await asyncio.sleep(0)
        return self.act(text)

    async def close(self):
        self.closed.set()


class Halfway(Sync):
    def step(self, text):  # a plain method that gives a coroutine
        async def later():
            return self.act(text)

        return later()


KINDS = [Sync, Inline, Async, Halfway]


def raises(error):
    def act(text):
        raise error

    return act


async def one_step(world, text="hi"):
    driver = Driver(world)
    try:
        await driver.reset(TASK)
        return await driver.step(text)
    finally:
        await driver.close()
