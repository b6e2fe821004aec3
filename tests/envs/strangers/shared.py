"""Worlds as strangers write them: what they change is everybody's."""

import asyncio
import contextlib
import gc
import io
import json
import os
import signal
import socket
import sys

from tests.envs.strangers.good import Base


class ClosesFilesToAll(Base):
    def reset(self, task):
        os.umask(0o777)
        return super().reset(task)


class IgnoresSignals(Base):
    inline = True  # a signal's handler is set by the main thread

    def reset(self, task):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return super().reset(task)


class Mutes(Base):
    def reset(self, task):
        sys.stdout = sys.stderr = io.StringIO()
        return super().reset(task)


class ShortOfTime(Base):
    def reset(self, task):
        socket.setdefaulttimeout(0.001)
        return super().reset(task)


class KeepsGarbage(Base):
    def reset(self, task):
        gc.disable()
        return super().reset(task)


class ReplacesJson(Base):
    def reset(self, task):
        json.loads = lambda text: {}
        return super().reset(task)


class ReplacesOpen(Base):
    def reset(self, task):
        os.getpid = lambda: 1
        return super().reset(task)


class BreaksTheCheck(Base):
    """What it replaces is nothing that is watched, and the check needs it."""

    def step(self, text):
        asyncio.gather = None
        return super().step(text)


class AddsToThePath(Base):
    def reset(self, task):
        sys.path.append(f"/nowhere/{len(sys.path)}")
        return super().reset(task)


class RaisesTheLimit(Base):
    def reset(self, task):
        sys.setrecursionlimit(100_000)
        return super().reset(task)


class Borrows(Base):
    """Good: each is put back."""

    inline = True

    def step(self, text):
        mask, handler = os.umask(0o077), signal.signal(signal.SIGTERM, signal.SIG_IGN)
        gc.disable()
        sys.path.append("/nowhere")
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                return super().step(text)
        finally:
            os.umask(mask)
            signal.signal(signal.SIGTERM, handler)
            gc.enable()
            sys.path.remove("/nowhere")
