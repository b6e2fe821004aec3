"""Worlds as strangers write them, with one defect each: they leave something behind, are slow, hang or die."""

import asyncio
import os
import re
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from tests.envs.strangers.good import Base


class LeavesThread(Base):
    stop = threading.Event()

    def reset(self, task):
        threading.Thread(target=self.stop.wait, name="left-behind", daemon=True).start()
        return super().reset(task)


class LeavesProcess(Base):
    def reset(self, task):
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        return super().reset(task)


class LeavesFile(Base):
    kept = []  # noqa: RUF012 - the defect

    def reset(self, task):
        self.kept.append(open(__file__))  # noqa: SIM115 - the defect
        return super().reset(task)


class LeavesFolder(Base):
    def reset(self, task):
        Path(tempfile.mkdtemp(prefix="scratch-"), "log").write_text("")
        return super().reset(task)


class OneThreadForAll(Base):
    stop, thread = threading.Event(), None

    def reset(self, task):
        if type(self).thread is None:
            type(self).thread = threading.Thread(target=self.stop.wait, name="for-all", daemon=True)
            type(self).thread.start()
        return super().reset(task)


class ClosesNeverWell(Base):
    def close(self):
        raise OSError("device busy")


class ClosesOnce(Base):
    open = True

    def close(self):
        if not self.open:
            raise RuntimeError("closed already")
        self.open = False


class ClosesWhatItHasNot(Base):
    def reset(self, task):
        self.connection = sqlite3.connect(":memory:")
        return super().reset(task)

    def close(self):
        self.connection.close()


class ClosesAtTheEndOnly(Base):
    def close(self):
        assert getattr(self, "guesses", 4) == 4 or self.guesses == 0


class SlowInline(Base):
    inline = True
    max_turns = 1

    def step(self, text):
        time.sleep(0.02)
        return super().step(text)


class AwaitsInline(Base):
    inline = True
    max_turns = 1

    async def step(self, text):
        await asyncio.sleep(0.05)
        return super().step(text)


class BlocksInline(Base):
    inline = True
    max_turns = 1

    async def step(self, text):
        time.sleep(0.05)  # noqa: ASYNC251 - the defect
        return super().step(text)


class BlocksTheLoop(Base):
    max_turns = 1

    async def step(self, text):
        time.sleep(0.07)  # noqa: ASYNC251 - the defect
        return super().step(text)


class HangsInReset(Base):
    def reset(self, task):
        while True:
            pass


class HangsInStep(Base):
    calls = 0

    def step(self, text):
        type(self).calls += 1
        while True:
            pass


class HangsInClose(Base):
    calls = 0

    def close(self):
        type(self).calls += 1
        while True:
            time.sleep(0.01)


class DiesElsewhere(Base):
    def step(self, text):
        if "PYTHONHASHSEED" in os.environ:
            os._exit(3)
        return super().step(text)


class FailsElsewhere(Base):
    def step(self, text):
        if "PYTHONHASHSEED" in os.environ:
            raise KeyError(text)
        return super().step(text)


class HangsWhenMade(Base):
    def __init__(self):
        threading.Event().wait()


class HangsInline(Base):
    inline = True

    def step(self, text):
        threading.Event().wait()


class HangsInARegularExpression(Base):
    def step(self, text):
        return "ok" if re.match(r"(\w+)+$", text[:100]) else "no"


class EndsTheProcess(Base):
    def step(self, text):
        os._exit(3)
