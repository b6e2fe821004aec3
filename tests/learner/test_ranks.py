"""Two processes over gloo that share a trainer's work: the same gradients, metrics, weights, checkpoints and errors as one."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.learner.probe import Waiting, gradients
from troupe.learner.config import LearnerConfig, LoraSettings, ModelConfig
from troupe.learner.errors import BatchError, Diverged
from troupe.learner.packing import deal, pack
from troupe.learner.ranked import Ranked, RankedTrainer
from troupe.learner.trainer import Trainer
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, CheckpointError, ConfigError
from troupe.protocol.trajectory import Trajectory

pytestmark = pytest.mark.xdist_group("ranks")

LORA = {"lora": LoraSettings(rank=2)}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "all weights": ({}, {}),
    "adapters": ({}, LORA),
    "divergence": ({"kl": {"coef": 0.1}}, {}),
    "adapters, divergence": ({"kl": {"coef": 0.1}}, LORA),
    "critic on the policy": ({"advantage": "gae"}, {}),
    "separate critic": ({"advantage": "gae", "critic": {"kind": "separate"}}, {}),
    "checkpointing": ({"activation_checkpointing": True, "entropy_coef": 0.01}, {}),
    "minibatches": ({"minibatches": 3, "correct": "icepop", "correct_level": "sequence", "icepop_low": 0}, {}),
}


SLOW = pytest.mark.slow


def some(*quick: str, of: Iterable[str]) -> list[Any]:
    """All of these cases; those that are not named are for the slow suite."""
    return [kind if kind in quick else pytest.param(kind, marks=SLOW) for kind in of]


def config_of(kind: str, tiny: str, **more: Any) -> tuple[LearnerConfig, ModelConfig]:
    config, model = KINDS[kind]
    settings = {"device": "cpu", "lr": 1e-3, "tokens_per_micro_batch": 40, **config, **more}
    return LearnerConfig(**settings), ModelConfig(path=tiny, **model)


@pytest.mark.parametrize("kind", some("all weights", "adapters, divergence", "separate critic", "minibatches", of=KINDS))
def test_gradients_are_those_of_one_rank(tiny: str, batch: list[Trajectory], two_ranks: Ranked, kind: str) -> None:
    config, model = config_of(kind, tiny)
    alone = gradients(Trainer(config, model, seed=0), batch, passes=2)
    shared = two_ranks.call("gradients", two_ranks.call("trainer", config, model), batch, passes=2)
    assert alone.keys() == shared.keys()
    for whose, found in alone.items():
        assert float(found.norm()) > 0
        assert float((found - torch.tensor(shared[whose])).norm()) <= 1e-5 * float(found.norm()), whose


@pytest.mark.parametrize("kind", ["all weights", "separate critic"])
def test_a_rank_without_a_sequence_of_its_own_keeps_up(
    tiny: str, make_trajectory: Callable[..., Trajectory], two_ranks: Ranked, kind: str
) -> None:
    """One trajectory, that nothing is compared with but a value of 0 or the mean of its group."""
    config, model = config_of(kind, tiny, **({} if "critic" in kind else {"advantage": "reinforce"}))
    single = [make_trajectory(0, 0, 1.0, turns=1)]
    alone = gradients(Trainer(config, model, seed=0), single)
    shared = two_ranks.call("gradients", two_ranks.call("trainer", config, model), single)
    for whose, found in alone.items():
        assert float((found - torch.tensor(shared[whose])).norm()) <= 1e-5 * float(found.norm()), whose


@pytest.mark.parametrize("kind", some("all weights", of=["all weights", "adapters", "separate critic"]))
def test_training_and_checkpoints_are_those_of_one_rank(
    tiny: str, batch: list[Trajectory], two_ranks: Ranked, kind: str, tmp_path: Path
) -> None:
    """Two steps on two ranks, then from a checkpoint one more: alone, on them, and on two fresh ones."""
    config, model = config_of(kind, tiny, passes=2)
    shared = two_ranks.call("trainer", config, model, new="trained")
    alone = Trainer(config, model, seed=0)
    for _ in range(2):
        told, expected = two_ranks.call("call", shared, "train", batch), alone.train(batch)
        del expected["learn_s"]
        assert told == pytest.approx(expected, rel=1e-4, abs=1e-6)
    two_ranks.call("call", shared, "save", tmp_path / "of two")
    alone.save(tmp_path / "of one")
    assert files(tmp_path / "of two") == files(tmp_path / "of one")

    again, single = two_ranks.call("trainer", config, model, new="restored"), Trainer(config, model, seed=0)
    two_ranks.call("call", again, "restore", tmp_path / "of two")
    single.restore(tmp_path / "of two")
    assert checksum_of(single.tensors()) == two_ranks.call("checksum", shared) == two_ranks.call("checksum", again)
    told = two_ranks.call("call", shared, "train", batch)
    assert told == two_ranks.call("call", again, "train", batch)
    assert two_ranks.call("checksum", shared) == two_ranks.call("checksum", again)

    single.train(batch)
    assert near(single.tensors(), two_ranks.call("call", shared, "tensors"))
    single.save(tmp_path / "three")
    two_ranks.call("call", again, "restore", tmp_path / "three")
    assert two_ranks.call("checksum", again) == checksum_of(single.tensors())


def files(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {str(p.relative_to(folder)): "" for p in folder.rglob("*")}
    for path in folder.rglob("*config.json"):
        config = json.loads(path.read_text())
        for value in config.values():
            if isinstance(value, list):  # some were sets
                value.sort(key=str)
        found[str(path.relative_to(folder))] = config
    return found


def near(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.allclose(one[name], other[name], rtol=0, atol=2e-5) for name in one)


@SLOW
def test_in_bfloat16_ranks_sum_in_float32_and_resume_bit_by_bit(
    tiny: str, batch: list[Trajectory], two_ranks: Ranked, tmp_path: Path
) -> None:
    config, model = config_of("all weights", tiny)
    model = model.model_copy(update={"dtype": "bfloat16"})
    names = [two_ranks.call("trainer", config, model, new=new) for new in ("first", "second")]
    alone = gradients(Trainer(config, model, seed=0), batch)["policy"]
    shared = torch.tensor(two_ranks.call("gradients", names[0], batch)["policy"])
    assert shared.dtype == torch.float32
    assert float((alone - shared).norm()) < 2**-7 * float(alone.norm())  # each of two or more terms is rounded to 8 bits
    told = two_ranks.call("call", names[0], "train", batch)
    assert math.isfinite(told["loss"])
    two_ranks.call("call", names[0], "save", tmp_path / "c")
    two_ranks.call("call", names[1], "restore", tmp_path / "c")
    one, other = (two_ranks.call("call", name, "train", batch) for name in names)
    assert one == other and two_ranks.call("checksum", names[0]) == two_ranks.call("checksum", names[1])


def test_supervised_and_preference_steps_are_those_of_one_rank(tiny: str, batch: list[Trajectory], two_ranks: Ranked) -> None:
    config, model = config_of("all weights", tiny)
    shared, alone = two_ranks.call("trainer", config, model, new="taught"), Trainer(config, model, seed=0)
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 200, n).astype(np.int32) for n in (5, 9, 3, 12, 7)]
    masks = [(np.arange(len(t)) > 1).astype(np.int32) for t in tokens]
    expected = alone.cold_start(tokens, masks, steps=3, batch=3)
    told = two_ranks.call("cold_start", shared, tokens, masks, 3, 3)
    assert told == pytest.approx({k: v for k, v in expected.items() if k != "learn_s"}, rel=1e-4)
    for t in batch:
        if t.group % 2 == 0:
            t.task = batch[0].task
    told, expected = two_ranks.call("call", shared, "prefer", batch), alone.prefer(batch)
    del expected["learn_s"]
    assert told == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert near(alone.tensors(), two_ranks.call("call", shared, "tensors"))


def test_each_rank_holds_its_share_and_no_more(tiny: str, batch: list[Trajectory], two_ranks: Ranked) -> None:
    config, model = config_of("all weights", tiny)
    name = two_ranks.call("trainer", config, model)
    two_ranks.call("call", name, "train", batch)
    alone = Trainer(config, model, seed=0)
    weights = sum(p.numel() for p in alone.model.parameters())
    most, together = two_ranks.call("held", name)
    steps = 2 * len(list(alone.model.parameters()))  # Adam's counters, a number each
    assert together == 3 * weights + steps
    assert most < 0.55 * together


def test_errors_of_any_rank_are_raised_on_all_and_they_go_on(
    tiny: str, batch: list[Trajectory], two_ranks: Ranked, tmp_path: Path
) -> None:
    config, model = config_of("all weights", tiny)
    name = two_ranks.call("trainer", config, model, new="wrong")
    with pytest.raises(BatchError, match="empty batch"):
        two_ranks.call("call", name, "train", [])
    with pytest.raises(BatchError, match="rank 1 was given another batch than rank 0"):
        two_ranks.call("differ", name, [batch, batch[1:]])
    with pytest.raises(BatchError, match="empty batch"):
        two_ranks.call("differ", name, [batch, []])
    two_ranks.call("call", name, "save", tmp_path / "good")
    with pytest.raises(CheckpointError, match=r"none.* no complete checkpoint"):
        two_ranks.call("break_one", name, tmp_path / "good", tmp_path / "none")
    with pytest.raises(ConfigError, match="does not exist"):
        two_ranks.call("trainer", config, ModelConfig(path=str(tmp_path / "nothing")))
    before = two_ranks.call("checksum", name)
    two_ranks.call("call", name, "restore", tmp_path / "good")
    assert two_ranks.call("checksum", name) == before
    two_ranks.call("spoil", name)
    with pytest.raises(Diverged):
        two_ranks.call("call", name, "train", batch)
    two_ranks.call("call", name, "restore", tmp_path / "good")
    assert two_ranks.call("call", name, "train", batch)["grad_norm"] > 0


def test_sequences_are_dealt_evenly_and_alone_packed_as_ever() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).integers(1, 60, 40)]
    assert deal(lengths, 100, 1) == [pack(lengths, 100)]
    dealt = deal(lengths, 100, 3)
    assert sorted(i for rows in dealt for row in rows for i in row) == list(range(40))
    assert len({len(rows) for rows in dealt}) == 1
    tokens = [sum(lengths[i] for row in rows for i in row) for rows in dealt]
    assert max(tokens) - min(tokens) <= max(lengths)
    assert deal([5], 10, 2) == [[[0]], [[]]]


def test_more_ranks_than_came_are_refused(tiny: str) -> None:
    with pytest.raises(ConfigError, match=r"learner\.ranks = 2, but 1 of them came"):
        Trainer(LearnerConfig(ranks=2, device="cpu"), ModelConfig(path=tiny), seed=0)
    with pytest.raises(ConfigError, match="is one GPU"):
        Trainer(LearnerConfig(ranks=2, device="cuda:1"), ModelConfig(path=tiny), seed=0)


def gone(pids: list[int]) -> bool:
    return not any(os.path.exists(f"/proc/{pid}") for pid in pids)


def test_a_rank_that_is_killed_is_named_and_the_others_end() -> None:
    ranks = Ranked(2, Waiting, limit_s=60.0)
    assert ranks.call("fine") == 2
    pids = ranks.pids
    threading.Timer(0.3, os.kill, (pids[1], signal.SIGKILL)).start()
    with pytest.raises(ActorLost, match=rf"rank 1 of the learner \(process {pids[1]}\) was killed by SIGKILL"):
        ranks.call("sleep", 60.0)
    assert gone(pids)
    with pytest.raises(ActorLost, match="have ended"):
        ranks.call("fine")


@SLOW
def test_a_rank_that_fails_alone_or_is_silent_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranked(2, Waiting, limit_s=60.0)
    with pytest.raises(ActorLost, match="rank 1: MemoryError: no room for the activations"):
        ranks.call("fail")
    assert gone(ranks.pids)
    ranks = Ranked(2, Waiting, limit_s=20.0)
    ranks._limit_s = 1.0
    with pytest.raises(ActorLost, match="said nothing for 1 s"):
        ranks.call("sleep", 60.0)
    assert gone(ranks.pids)


@SLOW
def test_a_ranked_trainer_is_a_trainer(tiny: str, batch: list[Trajectory], tmp_path: Path) -> None:
    config = LearnerConfig(device="cpu", lr=1e-3)
    shared, alone = (
        RankedTrainer(config.model_copy(update={"ranks": 2}), ModelConfig(path=tiny), seed=0),
        Trainer(config, ModelConfig(path=tiny), seed=0),
    )
    tokens, masks = [np.arange(8, dtype=np.int32)] * 3, [np.array([0] * 4 + [1] * 4)] * 3
    seen: list[list[tuple[int, int, float]]] = [[], []]
    for trainer, said in zip((shared, alone), seen, strict=True):
        trainer.cold_start(tokens, masks, steps=2, batch=2, progress=lambda *a, said=said: said.append(a))
        trainer.train(batch)
    assert [s[:2] for s in seen[0]] == [(1, 2), (2, 2)] and np.allclose(seen[0], seen[1], rtol=1e-4)
    assert near(shared.tensors(), alone.tensors()) and shared.step == 1
    told = [[span.name for span in trainer.timings()] for trainer in (shared, alone)]
    assert told[0] == told[1] and told[0][0] == "pack"
    shared.save(tmp_path / "c")
    shared.train(batch)
    shared.restore(tmp_path / "c")
    assert shared.step == 1
    shared.close()
    with pytest.raises(ConfigError, match="does not exist"):
        RankedTrainer(config.model_copy(update={"ranks": 2}), ModelConfig(path="nowhere"), seed=0)


@SLOW
def test_ranks_end_with_an_owner_that_is_killed(tmp_path: Path) -> None:
    code = (
        "import sys, time; from troupe.learner.ranked import Ranked; from tests.learner.probe import Waiting\n"
        "r = Ranked(2, Waiting); print(*r.pids, flush=True); r.call('sleep', 600.0)"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, env={**os.environ, "TMPDIR": str(tmp_path)})
    assert owner.stdout is not None
    pids = [int(pid) for pid in owner.stdout.readline().split()]
    assert len(pids) == 2 and not gone(pids)
    owner.kill()
    owner.wait()
    until = time.monotonic() + 30
    while not gone(pids) and time.monotonic() < until:
        time.sleep(0.1)
    assert gone(pids) and list(tmp_path.iterdir()) == []


@SLOW
def test_torchrun_starts_ranks_too(tiny: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from troupe.learner import ranks; from troupe.learner.config import LearnerConfig, ModelConfig\n"
        "from troupe.learner.trainer import Trainer; from troupe.protocol.checksum import checksum_of\n"
        "with ranks.joined():\n"
        "    t = Trainer(LearnerConfig(device='cpu'), ModelConfig(path=sys.argv[1]), seed=0); found = t.tensors()\n"
        "    if ranks.first(): print(ranks.size(), checksum_of(found))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", str(script), tiny]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    expected = checksum_of(Trainer(LearnerConfig(device="cpu"), ModelConfig(path=tiny), seed=0).tensors())
    assert done.stdout.split() == ["2", expected]
