"""A taskset of verifiers with an environment: a user who says higher or lower."""

import verifiers.v1 as vf

__all__ = ["GuessEnv", "Guesses"]


class GuessData(vf.TaskData):
    number: int


class GuessTask(vf.Task[GuessData, vf.State, vf.TaskConfig]):
    pass


class Guesses(vf.Taskset[GuessTask, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        n = 0
        while True:
            yield GuessTask(
                GuessData(name=f"game {n}", prompt=f"Game {n}: guess my number, 0 to 9.", number=n % 10), self.config.task
            )
            n += 1


class GuessConfig(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class GuessEnv(vf.Env[GuessConfig]):
    async def run(self, task, agents):
        turns = 0
        async with agents.player.interaction(task) as interaction:
            segment = await interaction.turn()
            while not segment.terminated and segment.last_reply != str(task.data.number) and turns < 8:
                turns += 1
                said = int(segment.last_reply) if segment.last_reply.isdecimal() and len(segment.last_reply) < 4 else -1
                segment = await interaction.turn("higher" if said < task.data.number else "lower")
        interaction.trace.record_reward("found", float(segment.last_reply == str(task.data.number)))

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_metric("turns", float(trace.num_turns))
