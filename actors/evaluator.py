"""Scores the policy on held-out tasks.

Owns the held-out tasks, their sampling settings and the scores (`RUN/evals.jsonl`). Promises:
- the tasks are the same for every version of a run, and none of them is ever trained on (law 8);
- a broken episode is not a trial: it is counted beside the score;
- a version is evaluated once, however often it is asked for;
- an evaluation is waited for as long as episodes end.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict

from troupe.actors.context import Context, within
from troupe.actors.dispatcher import Dispatcher
from troupe.actors.patience import while_it_moves
from troupe.actors.settings import EvalSettings
from troupe.envs import registry
from troupe.learner.evaluation import wilson
from troupe.protocol.messages import Evaluate, EvaluateVersion, Evaluation, Health, Limits, Ping, Sampling

_SLACK_S = 300.0
"""Seconds beyond an episode's own in which none need end: actors that are replaced, retries that wait."""


class Evaluator:
    """Asks the dispatcher to run held-out episodes between the training ones."""

    def __init__(
        self,
        context: Context,
        world: str,
        settings: EvalSettings,
        limits: Limits,
        max_tokens: int,
        stop: list[str],
        seed: int,
        file: str,
    ) -> None:
        self._context = context
        self._settings, self._limits, self._seed, self._file = settings, limits, seed, file
        self._sampling = Sampling(temperature=settings.temperature, max_tokens=max_tokens, stop=stop)
        found = registry.find(world)
        self._tasks = [found.task("heldout", index) for index in range(settings.tasks)]
        self._evaluating = asyncio.Lock()
        self._dispatcher = context.ref("dispatcher", Dispatcher)

    async def evaluate(self, message: EvaluateVersion) -> Evaluation:
        """Runs the held-out tasks with the weights that the generators hold."""
        async with self._evaluating:  # whoever asks again, as its director died, waits for what the first one began
            for known in read_evaluations(self._file):
                if known.version == message.version:
                    return known
            return await self._evaluate(message)

    async def _evaluate(self, message: EvaluateVersion) -> Evaluation:
        began = self._context.clock.now()
        run = await while_it_moves(
            self._context,
            "dispatcher.evaluate",
            self._dispatcher.evaluate(
                Evaluate(
                    name=f"e{message.version:06d}",
                    version=message.version,
                    tasks=self._tasks,
                    trials=self._settings.trials,
                    sampling=self._sampling,
                    limits=self._limits,
                    seed=self._seed,
                )
            ),
            self._moves,
            self._limits.episode_s + _SLACK_S,
            f"no episode has ended; if one may take longer than {self._limits.episode_s:g} s, raise rollout.episode_s",
        )
        trials = len(run.successes)
        low, high = wilson(sum(run.successes), trials) if trials else (None, None)
        score = Evaluation(
            version=message.version,
            success=sum(run.successes) / trials if trials else None,
            low=low,
            high=high,
            reward=sum(run.rewards) / trials if trials else None,
            turns=run.turns,
            trials=trials,
            failed=run.failed,
            sampling=run.sampling,
            seconds=self._context.clock.now() - began,
        )
        with open(self._file, "a") as file:
            file.write(json.dumps(asdict(score)) + "\n")
            file.flush()
            os.fsync(file.fileno())
        return score

    async def _moves(self) -> object:
        """What changes with every attempt at an episode, those for training too: they share the slots, and there is an end of
        them while the run waits for an evaluation."""
        s = await within(60.0, "dispatcher.status", self._dispatcher.status(Ping()))
        return s.completed, s.failed, s.cancelled, s.retried, s.tokens

    async def health(self, message: Ping) -> Health:
        """Alive."""
        return Health(self._context.name, os.getpid())


def read_evaluations(file: str) -> list[Evaluation]:
    """The scores of a run so far, oldest first; a half-written last line is ignored."""
    if not os.path.exists(file):
        return []
    found = []
    with open(file) as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            found.append(Evaluation(**{**row, "sampling": Sampling(**row["sampling"])}))
    return found
