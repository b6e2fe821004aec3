"""Worlds as strangers write them: what they leave behind is not made when an episode begins."""

import asyncio
import socket
import subprocess
import sys
import tempfile
import threading

from tests.envs.strangers.good import Base
from tests.envs.strangers.groups import Player

kept = []
"""To be let go of by whoever has them checked."""


class SocketOnTheSecondStep(Base):
    def step(self, text):
        turn = super().step(text)
        if self.guesses == 2:
            kept.append(socket.socket())
        return turn


class FileAtTheEnd(Player):
    def step(self, text):
        turn = super().step(text)
        if turn.done:
            kept.append(open(__file__))  # noqa: SIM115 - the defect
        return turn


class ProcessAtTheEnd(Player):
    def step(self, text):
        turn = super().step(text)
        if turn.done:
            command = [sys.executable, "-c", "import time; time.sleep(60)"]
            self.process = subprocess.Popen(command, start_new_session=True)
        return turn


class SharesAHelper(Base):
    """One process for all its episodes, as a browser is; here it ends by itself."""

    helper = None

    def reset(self, task):
        if SharesAHelper.helper is None:
            SharesAHelper.helper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return super().reset(task)


class FolderAtTheEnd(Player):
    def step(self, text):
        turn = super().step(text)
        if turn.done:
            tempfile.mkdtemp(prefix="scratch-")
        return turn


class ThreadOnTheSecondStep(Base):
    stop = threading.Event()

    def step(self, text):
        turn = super().step(text)
        if self.guesses == 2:
            threading.Thread(target=self.stop.wait, name="left-behind", daemon=True).start()
        return turn


class TaskOnTheSecondStep(Base):
    async def step(self, text):
        turn = super().step(text)
        if self.guesses == 2:
            kept.append(asyncio.ensure_future(waits()))
        return turn


async def waits():
    await asyncio.sleep(60)


class OfOneTaskInMany(Player):
    """What it leaves in one episode of three."""

    def step(self, text):
        turn = super().step(text)
        if turn.done and self.task_id == "train/1":
            kept.append(socket.socket())
        return turn


class Grows(Base):
    def step(self, text):
        turn = super().step(text)
        if self.guesses == 2:
            kept.append(bytearray(b"x" * 3_000_000))
        return turn


class FileOfEachTask(Base):
    files = {}  # noqa: RUF012 - the defect

    def reset(self, task):
        if (task.split, task.seed) not in self.files:
            self.files[task.split, task.seed] = open(__file__)  # noqa: SIM115 - the defect
            kept.append(self.files[task.split, task.seed])
        return super().reset(task)


class Frees(Base):
    """Good: much of it, and all let go of; and one file that all of them read."""

    shared = None

    async def step(self, text):
        if type(self).shared is None:
            type(self).shared = open(__file__)  # noqa: SIM115 - for all episodes
            kept.append(self.shared)
        much, task = bytearray(b"x" * 4_000_000), asyncio.ensure_future(waits())
        with socket.socket(), tempfile.TemporaryDirectory():
            task.cancel()
            await asyncio.wait([task])
            del much
            return super().step(text)
