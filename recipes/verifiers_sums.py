"""A taskset of verifiers (its v1 API): sums of two numbers, paid 1 for exactly the right one."""

from collections.abc import Iterator
from itertools import product

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumsConfig(vf.TasksetConfig):
    largest: int = 20


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.last_reply == self.data.answer)


class Sums(vf.Taskset[SumsTask, SumsConfig]):
    def load(self) -> Iterator[SumsTask]:
        for a, b in product(range(self.config.largest), repeat=2):
            yield SumsTask(SumsData(prompt=f"What is {a} + {b}?", answer=str(a + b)), self.config.task)
