"""A taskset of verifiers: sums, with two rewards."""

import verifiers.v1 as vf


class SumsConfig(vf.TasksetConfig):
    largest: int = 20


class SumsData(vf.TaskData):
    answer: str


class SumsTask(vf.Task[SumsData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=1.0)
    async def right(self, trace) -> float:
        return float(self.data.answer in trace.last_reply.split())

    @vf.reward(weight=0.5)
    async def short(self, trace) -> float:
        return float(len(trace.last_reply) < 20)


class Sums(vf.Taskset[SumsTask, SumsConfig]):
    def load(self):
        for a in range(self.config.largest):
            for b in range(self.config.largest):
                data = SumsData(prompt=f"What is {a} + {b}?", system_prompt="Answer with a number.", answer=str(a + b))
                yield SumsTask(data, self.config.task)


class Broken(Sums):
    def load(self):
        class Failing(SumsTask):
            @vf.reward
            async def right(self, trace) -> float:
                raise RuntimeError("the scorer is away")

        for task in super().load():
            yield Failing(task.data, task.config)


class Runner(SumsTask):
    @vf.reward
    async def right(self, trace, runtime) -> float:
        return float((await runtime.run(["true"], {})).exit_code == 0)


class NeedsRuntime(vf.Taskset[Runner, SumsConfig]):
    def load(self):
        yield Runner(SumsData(prompt="x", answer="x"), self.config.task)


# -- with tools, which share a state with the rewards --


class Shelf(vf.State):
    looked: int = 0


class ShelfTools(vf.Toolset[vf.ToolsetConfig, Shelf]):
    TOOL_PREFIX = None

    async def setup_task(self, task):
        self.answer = task.answer

    @vf.tool
    async def look_up(self, word: str) -> str:
        """Look a word up."""
        if word != "sum":
            raise ValueError("there is only 'sum'")
        self.state.looked += 1
        return self.answer


class ShelfTask(vf.Task[SumsData, Shelf, vf.TaskConfig]):
    @classmethod
    def toolsets(cls, config):
        return [ShelfTools(vf.ToolsetConfig())]

    @vf.reward
    async def right(self, trace) -> float:
        assert len(trace.tool_messages) == trace.state.looked
        return float(trace.state.looked > 0 and trace.last_reply == self.data.answer)


class Shelves(vf.Taskset[ShelfTask, vf.TasksetConfig]):
    def load(self):
        for n in range(50):
            yield ShelfTask(SumsData(prompt=f"Look up the sum of {n}.", answer=str(n * 7)), self.config.task)
