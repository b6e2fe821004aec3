"""The run's eye on its own health: tells of a collapse that comes, and does about it what the recipe allows.

Owned by the director; what was told and done is in the ledger. Promises:
- an alarm is told once, whichever director dies in between, and so is what is done about it;
- what is done depends on the journal alone: a step that is replayed is trained with the same settings (law 7);
- nothing is done that `health.on_collapse` does not name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, get_args

from troupe.actors.learner import checkpoints
from troupe.actors.ledger import Ledger
from troupe.actors.settings import RunConfig
from troupe.learner.health import Action, Alarm, Remedy, alarms, choose, fresh, in_force
from troupe.protocol.errors import Unhealthy


class Watch:
    """Of one run. `state`: "ok", or the alarms that hold now. `tell` is given sentences for people."""

    def __init__(self, config: RunConfig, ledger: Ledger, tell: Callable[[str], None]) -> None:
        self._config, self._ledger, self._tell = config, ledger, tell
        self.state = "ok"

    def look(self) -> None:
        """To be called when a step was measured; it is the ledger's newest. Raises Unhealthy if the run is to stop."""
        rows = list(self._ledger.rows)
        if not rows:
            return
        step = int(rows[-1]["step"])
        holding = alarms(rows, self._config.health)
        self.state = ", ".join(f"{_words(a.kind)} since step {a.since_step}" for a in holding) or "ok"
        idle = [row["step"] for row in rows if row.get("grad_norm") == 0]
        if idle == [step]:
            self._tell(
                f"step {step} taught nothing: the members of its groups did not differ (only the first such step is told)"
            )
        for alarm in fresh(rows, self._config.health):
            if not self._ledger.warn(step, **asdict(alarm)):
                continue
            actions = self._config.health.on_collapse if step < self._config.steps else ()
            remedy, restart = self._remedy(alarm, step, actions)
            if remedy is None:
                possible, _ = self._remedy(alarm, step, get_args(Action))
                hint = f" --on-collapse {possible.action} would act by itself." if possible else ""
                self._tell(f"health: {alarm}{hint}")
                continue
            changes = remedy.changes(self._effective(step + 1))
            self._ledger.treat(step, remedy.action, changes, restart)
            what = ", ".join(f"{key} = {value!r}" for key, value in changes.items())
            where = f" (step {restart})" if restart is not None else ""
            self._tell(f"health: {alarm.seen}. Done about it: {remedy.say}{where}{': ' + what if what else ''}.")
            if remedy.action == "stop":
                raise Unhealthy(
                    f"stopped at step {step}, because health.on_collapse says so: {alarm.seen}. Read some trajectories: "
                    f"troupe trace {self._ledger.folder} --step {step}"
                )

    def treatment(self, step: int) -> tuple[dict[str, Any], int | None]:
        """For training `step`: keys of [learner] that remedies have changed, and the checkpoint it restarts from."""
        return in_force(self._ledger.remedies, step)

    def _remedy(self, alarm: Alarm, step: int, actions: Iterable[Action]) -> tuple[Remedy | None, int | None]:
        allowed = set(actions)
        saved = [at for at, _ in checkpoints(self._ledger.path("checkpoints")) if at <= alarm.since_step]
        if not saved:
            allowed.discard("roll_back")
        taken = [row["action"] for row in self._ledger.remedies if step - row["step"] <= self._config.health.memory]
        remedy = choose(alarm.kind, self._effective(step + 1), allowed, taken)
        return remedy, saved[-1] if remedy and remedy.action == "roll_back" else None

    def _effective(self, step: int) -> Any:
        return self._config.learner.model_copy(update=self.treatment(step)[0])


def _words(kind: str) -> str:
    return kind.replace("_", " ")
