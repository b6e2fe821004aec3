"""The real store, pools and engines, which write down what they do, and a world in which a plot's troubles are met."""

from __future__ import annotations

import asyncio
import math
import zlib
from typing import TYPE_CHECKING, Any, ClassVar

from tests.laws.conftest import SeededEngine
from tests.laws.plots import A_TURN, Trouble
from troupe.actors.env_pool import EnvPool
from troupe.actors.store import Store
from troupe.envs.echo import Echo
from troupe.protocol.errors import TaskFailed
from troupe.protocol.messages import Ack, CommitGroup, Deposit, EpisodeDone, Fence, Generate, Generated, Receipt, RunEpisode
from troupe.protocol.trajectory import Task

if TYPE_CHECKING:
    from tests.laws.rollouts import Stage


class Troubled(Echo):
    """A world in which an attempt may meet a trouble. Its return depends on what the agent said last."""

    name: ClassVar[str] = "troubled"

    def __init__(self, stage: Stage, pool: WatchedPool) -> None:
        super().__init__(turns=stage.plot.turns)
        self.stage, self.pool = stage, pool
        self.trouble: Trouble = ""

    async def reset(self, task: Task) -> str:
        self.stage.worlds.append(self)
        await asyncio.sleep(self.stage.dice.uniform(0.0, 0.1))
        self.trouble, self.at = self.stage.trouble(task)
        if self.trouble == "data":
            raise TaskFailed(f"task {task.id} cannot be run")
        if self.trouble == "reset":
            raise OSError("no space left to reset")
        return super().reset(task)

    async def step(self, text: str) -> Any:
        await asyncio.sleep(self.stage.dice.uniform(0.0, 0.3))
        turn = self.answer(text)
        if self.turn == self.at:
            if self.trouble == "step":
                raise RuntimeError(f"step {self.turn} fails by chance")
            if self.trouble in ("hang", "stuck"):
                self.pool.worn = self.trouble == "stuck"  # as if the thread of this step could not be ended
                await asyncio.Event().wait()
            if self.trouble == "nan":
                turn.parts["style"] = math.nan
        turn.reward = return_of(text) if turn.done else turn.reward + A_TURN
        turn.success = turn.reward > 0 if turn.done else None
        return turn

    def close(self) -> None:
        self.stage.worlds.remove(self)


def return_of(action: str) -> float:
    """What the last turn gives: it depends on what the agent said."""
    return zlib.crc32(action.encode()) % 3 / 2


class WatchedStore(Store):
    """Writes down what it accepted, refused and acknowledged."""

    def __init__(self, context: Any, stage: Stage, max_deposits: int) -> None:
        super().__init__(context, stage.folder, max_deposits=max_deposits)
        self.stage = stage

    async def deposit(self, message: Deposit) -> Receipt:
        receipt = await super().deposit(message)
        t, run = message.trajectory, self.stage.run
        run.written.append((message, receipt))
        run.most_deposits = max(run.most_deposits, len(self._deposits))
        self.stage.note("store", f"{t.id}/{t.attempt} {t.status}: {'accepted' if receipt.accepted else receipt.reason}")
        return receipt

    async def fence(self, message: Fence) -> Ack:
        answer = await super().fence(message)
        self.stage.run.written.append(message)
        self.stage.note("store", f"fences {message.episode or 'all'} below {message.attempt}")
        return answer

    async def commit(self, message: CommitGroup) -> Receipt:
        receipt = await super().commit(message)
        if receipt.accepted:
            self.stage.run.written.append(message)
        verdict = "accepted" if receipt.accepted else receipt.reason
        self.stage.note("store", f"commit of {message.group}, {'trains' if message.trains else 'stored'}: {verdict}")
        return receipt


class WatchedPool(EnvPool):
    """Writes down what it runs."""

    def __init__(self, context: Any, stage: Stage) -> None:
        options = {"stage": stage, "pool": self}
        super().__init__(context, Troubled.name, options, str(stage.model_folder), stage.plot.slots, generate_s=15.0)
        self.stage, self.worn = stage, False

    def _worn_out(self) -> bool:
        return self.worn  # the real count is of the process, which all pools of a simulation share

    async def run_episode(self, message: RunEpisode) -> EpisodeDone:
        name, run = self._context.name, self.stage.run
        run.dispatched.append(message)
        run.most_in_flight = max(run.most_in_flight, len(self._running) + 1)
        self.stage.note(name, f"{message.episode}/{message.attempt} begins")
        done = await super().run_episode(message)
        self.stage.note(name, f"{message.episode}/{message.attempt} ends: {done.status} {done.failure}")
        return done


class WatchedEngine(SeededEngine):
    """Writes down what it sampled, for which prompt."""

    def __init__(self, name: str, stage: Stage) -> None:
        super().__init__(name, stage)  # type: ignore[arg-type]
        self.token_s = stage.plot.token_s

    async def generate(self, request: Generate) -> Generated:
        self.world.note(self.name, f"{request.request} begins")
        await asyncio.sleep(self.world.plot.think)
        answer = await super().generate(request)
        prompt, tokens = tuple(request.prompt.tolist()), tuple(answer.tokens.tolist())
        self.world.run.sampled.add((prompt, tokens, tuple(answer.versions.tolist()), answer.logprobs.tobytes()))
        self.world.note(self.name, f"{request.request} ends: {len(tokens)} tokens, {answer.finish}")
        return answer
