"""A whole company in a simulation: the real director, dispatcher, pools, router, store, learner, generator and evaluator.

Only what needs a GPU or minutes is played by stand-ins that keep the same promises: an engine whose tokens depend on
the request's seed alone, and a trainer whose weights are a digest of everything it was trained on, in order. So two
runs are equal exactly when they trained the same tokens in the same order.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from troupe.actors.company import Parts
from troupe.actors.context import within
from troupe.actors.director import Director
from troupe.actors.learner import Trains
from troupe.actors.settings import RunConfig
from troupe.actors.simulated import Chaos, Simulation
from troupe.cluster import config as recipes
from troupe.learner.staleness import staleness
from troupe.learner.tiny import make_tiny
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, NotReady, TroupeError
from troupe.protocol.messages import Generate, Generated, Scale, Span
from troupe.protocol.trajectory import Finish, Trajectory


class SeededEngine:
    """An engine in virtual time. `liar`: probability that a load leaves other weights than were sent; it then says nothing but
    `LIE`. It samples on while what it has loaded is being summed, for `summing_s`."""

    LIE = 201

    def __init__(self, name: str, world: SimulatedRun) -> None:
        self.name, self.world = name, world
        self.version = -1
        self.tensors: dict[str, np.ndarray] = {}
        self.running: set[str] = set()
        self.token_s = 0.001
        """Seconds that a token takes at most."""
        self.lies = False

    async def start(self) -> None:
        await asyncio.sleep(0.1)

    async def generate(self, request: Generate) -> Generated:
        if self.version < 0:
            raise NotReady(f"{self.name} has no weights")
        dice = random.Random(request.seed)
        tokens: list[int] = []
        versions: list[int] = []
        finish: Finish = "length"
        self.running.add(request.request)
        for _ in range(dice.randint(1, request.sampling.max_tokens)):
            await asyncio.sleep(self.token_s * self.world.simulation.dice.random())
            if request.request not in self.running:
                finish = "abort"
                break
            token = dice.randrange(5, 200)
            tokens.append(self.LIE if self.lies else token)
            versions.append(self.version)
        self.running.discard(request.request)
        if finish != "abort" and dice.random() < 0.9:
            finish = "stop"
            tokens.append(request.sampling.stop_ids[0])
            versions.append(self.version)
        logprobs = np.asarray([-dice.random() for _ in tokens], np.float32)
        self.world.sampled.append((self.name, tuple(request.prompt.tolist()), tuple(tokens)))
        return Generated(np.asarray(tokens, np.int32), logprobs, np.asarray(versions, np.int32), finish, self.name)

    async def abort(self, request: str) -> None:
        self.running.discard(request)

    async def end_session(self, session: str) -> None:
        return

    async def load_weights(self, version: int, tensors: Any) -> str:
        await asyncio.sleep(0.05 * self.world.simulation.dice.random())
        self.tensors = {name: np.array(value) for name, value in tensors.items()}
        self.lies = self.world.simulation.dice.random() < self.world.liar
        if self.lies:
            self.tensors["w"] = self.tensors["w"] + 1
        self.version = version
        await asyncio.sleep(self.world.summing_s)
        held = checksum_of(self.tensors)
        self.world.loads.append((self.name, version, held))
        return held

    def stats(self) -> dict[str, float]:
        return {"load": 0.0, "busy": 0.0, "tokens": 0.0}

    async def close(self) -> None:
        return


class DigestTrainer:
    """A trainer whose weights are a digest of what it was trained on."""

    def __init__(self, world: SimulatedRun) -> None:
        self.world = world
        self.step, self.base = 0, ""
        self.digest = b"cold"
        self.settings: dict[str, Any] = {}

    def cold_start(self, tokens: Any, supervised: Any, *, steps: int, batch: int, progress: Any = None) -> dict[str, float]:
        for array in tokens:
            self.digest = hashlib.blake2b(self.digest + array.tobytes(), digest_size=16).digest()
        return {}

    def train(self, trajectories: list[Trajectory]) -> dict[str, float]:
        for trajectory in trajectories:
            for sample in trajectory.samples():
                content = sample.tokens.tobytes() + sample.mask.tobytes() + sample.logprobs.tobytes()
                self.digest = hashlib.blake2b(self.digest + content, digest_size=16).digest()
        self.digest += json.dumps(self.settings).encode() * bool(self.settings)
        self.step += 1
        self.world.treated[self.step] = dict(self.settings)
        self.world.trained.append((self.step, [t.id for t in trajectories]))
        for trajectory in trajectories:
            assert trajectory.kind == "train" and trajectory.status == "completed"
            oldest = trajectory.versions[0]
            self.world.staleness.append(self.step - 1 - oldest)
        versions = np.concatenate([node.versions for t in trajectories for node in t.nodes])
        return staleness(self.step - 1 - versions) | {
            "policy_tokens": float(sum(t.policy_tokens for t in trajectories)),
            "reward_mean": float(np.mean([t.reward for t in trajectories])),
            "success": float(np.mean([bool(t.success) for t in trajectories])),
            "entropy": 1.0 if self.step < self.world.collapse_at else 0.01,
        }

    def tensors(self) -> dict[str, np.ndarray]:
        return {"w": np.frombuffer(self.digest, np.uint8).astype(np.int32)}

    def save(self, folder: str) -> None:
        os.makedirs(folder + ".tmp", exist_ok=True)
        Path(folder + ".tmp", "state.json").write_text(json.dumps({"step": self.step, "digest": self.digest.hex()}))
        os.rename(folder + ".tmp", folder)

    def restore(self, folder: str) -> None:
        known = json.loads(Path(folder, "state.json").read_text())
        self.step, self.digest = known["step"], bytes.fromhex(known["digest"])

    def timings(self) -> list[Span]:
        return []

    def adjust(self, changes: Any) -> None:
        self.settings = dict(changes)

    def roll_back(self, folder: str) -> None:
        step = self.step
        self.restore(folder)
        self.step = step
        self.world.rolled_back.append((step, os.path.basename(folder)))


@dataclass
class SimulatedRun:
    """One run of the whole company, and what was seen of it."""

    folder: Path
    config: RunConfig
    model_folder: Path
    liar: float = 0.0
    summing_s: float = 0.0
    make_trainer: Callable[[], Trains] | None = None  # None: the digest
    trained: list[tuple[int, list[str]]] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    loads: list[tuple[str, int, str]] = field(default_factory=list)
    sampled: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    crashes: list[tuple[float, str]] = field(default_factory=list)
    collapse_at: float = math.inf
    """Step from which on the policy has next to no entropy."""
    treated: dict[int, dict[str, Any]] = field(default_factory=dict)
    rolled_back: list[tuple[int, str]] = field(default_factory=list)
    simulation: Any = None

    def play(
        self,
        seed: int,
        *,
        crashes: int = 0,
        chaos: Chaos | None = None,
        until_s: float = 60.0,
        scalings: int = 0,
        scaled: str = "env_actors",
    ) -> None:
        """Runs to the end, killing `crashes` random actors at random moments within `until_s`. scalings: how often one to
        four of `scaled` are asked for within that time; some actor dies in the middle of every second of them."""
        with Simulation(seed, chaos) as self.simulation:
            dice = random.Random(f"crashes/{seed}")
            moments = sorted(dice.uniform(0.0, until_s) for _ in range(crashes))

            async def killer() -> None:
                loop = asyncio.get_running_loop()
                for moment in moments:
                    await asyncio.sleep(max(0.0, moment - loop.time()))
                    victims = sorted(self.simulation.actors)
                    if victims:
                        self.simulation.crash(dice.choice(victims))

            async def scaler(context: Any) -> None:
                loop = asyncio.get_running_loop()
                for number, moment in enumerate(sorted(dice.uniform(1.0, until_s) for _ in range(scalings))):
                    await asyncio.sleep(max(0.0, moment - loop.time()))
                    asking = asyncio.ensure_future(
                        context.ref("director", Director).scale(Scale(**{scaled: dice.randint(1, 4)}))
                    )
                    if number % 2:
                        await asyncio.sleep(dice.choice([0.05, 0.2, 0.5, 1.0]))
                        self.simulation.crash(dice.choice(sorted(self.simulation.actors)))
                    with contextlib.suppress(TroupeError):
                        await within(5.0, "director.scale", asking)

            async def main(context: Any) -> None:
                killing = asyncio.gather(killer(), scaler(context))
                while True:
                    try:
                        await context.spawn(
                            "director",
                            Director,
                            config=self.config,
                            folder=str(self.folder),
                            parts=Parts(
                                str(self.model_folder),
                                lambda name: SeededEngine(name, self),
                                self.make_trainer or (lambda: DigestTrainer(self)),
                            ),
                        )
                        await context.ref("director", Director).run()
                        break
                    except ActorLost:
                        await asyncio.sleep(1.0)
                    await context.kill("director")
                killing.cancel()
                await asyncio.gather(killing, return_exceptions=True)

            self.simulation.run(main)
            self.crashes = self.simulation.crashes

    def events(self, kind: str) -> list[dict[str, Any]]:
        """Lines of the journal."""
        lines = (self.folder / "journal.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if row["event"] == kind]

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.folder / "summary.json").read_text())
        return found

    def weights(self) -> str:
        """Checksum of the final weights."""
        return str(self.summary()["weights"]["checksum"])


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny(folder, ["echo train heldout turn 0 1 2 3 4 5 6 7 8 9"], hidden=16, layers=1, heads=2)
    return folder


@pytest.fixture
def simulated_run(tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes runs: `simulated_run(steps=4, **{"env.actors": 3})`."""
    # A simulated crash never takes the machine down: what was written is read back without syncing the disk.
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    count = 0

    def make(liar: float = 0.0, **changes: Any) -> SimulatedRun:
        nonlocal count
        count += 1
        folder = tmp_path / f"run-{count}"
        (folder / "checkpoints").mkdir(parents=True)
        data: dict[str, Any] = {
            "name": "simulated",
            "steps": 4,
            "checkpoint_every": 2,
            "env": {"name": "echo", "actors": 2, "slots": 6, "options": {"turns": 2, "sleep": 0.2}, "max_turns": 3},
            "cold_start": {"steps": 2, "demonstrations": 4},
            "rollout": {"groups_per_step": 2, "group_size": 3, "max_tokens": 6, "attempts": 8},
            "generator": {"replicas": 2},
            "eval": {"tasks": 3},
        }
        for key, value in changes.items():
            *sections, last = key.split("__")
            here = data
            for section in sections:
                here = here.setdefault(section, {})
            here[last] = value
        config = RunConfig.model_validate(data)
        recipes.write(config, folder / "config.toml")
        return SimulatedRun(folder, config, model_folder, liar)

    return make
