"""Starts a run and ends it: the run folder, Ray, the director, and everything that must be gone afterwards.

Owns the processes of a run on this machine. Promises:
- a run folder is never written over, and two processes never lead the same one;
- Ctrl-C (or SIGTERM) at any moment ends the company, Ray and its temporary folder, and leaves a folder that resumes;
- a launcher that was killed outright leaves nothing for long: Ray's processes die with it, and the next start removes
  its temporary folder.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from troupe.actors.settings import RunConfig
from troupe.cluster import config as recipes
from troupe.protocol.errors import ActorLost, ConfigError, TimedOut, TroupeError
from troupe.protocol.messages import GetStatus, RunStatus, Stop

_TEMPORARY = "troupe-ray-"
_STOP_S = 20.0
_STRAGGLERS_S = 3.0
_SAME_SIGNAL_S = 1.0
"""Wrappers pass one Ctrl-C on twice: to the process and to its group."""
_LONGEST_TMPDIR = 50
"""Ray's sockets lie in its folder, and the name of a socket has at most 107 bytes."""


@dataclass(slots=True)
class Launched:
    """A run on its way: what other processes need to find it is also in RUN/run.json."""

    folder: Path
    address: str
    namespace: str


def check(config: RunConfig) -> None:
    """Raises ConfigError for what would only come to light once the actors are started, and settles what is "auto"."""
    from troupe.actors import loops, rendering
    from troupe.envs import registry

    world = registry.find(config.env.name)
    registry.make(world, config.env.options)
    loop = loops.choose(config.agent, world)
    check_learner(config)
    if config.model.path:
        from troupe.cluster.models import resolve

        found = rendering.load(str(resolve(config.model.path)), config.model.renderer)
        if loop is loops.react and not found.reads_calls:
            raise ConfigError(
                f"renderer '{found.name}' cannot read tool calls out of what this model says, and the world "
                f"'{config.env.name}' has tools: name the model's family with model.renderer, or set agent.loop = 'text'"
            )
        config.model.renderer = found.name
    elif config.model.renderer not in ("auto", "chatml"):
        raise ConfigError(
            f"model.renderer is '{config.model.renderer}', but a recipe's own small model speaks chatml: leave it out, or name "
            "a pretrained model with model.path"
        )
    elif next(iter(world.corpus()), None) is None:
        raise ConfigError(
            f"world '{config.env.name}' has no corpus() to make a small policy's tokenizer from: name a pretrained model "
            "instead, for example --model smollm2-135m (model.path in a recipe)"
        )


def check_learner(config: RunConfig) -> None:
    """What `check` asks of [learner]: it needs neither world nor model."""
    from troupe.learner import composition

    composition.check(config.learner, config.model_settings(""))
    _check_teacher(config)
    _check_groups(config)


def _check_groups(config: RunConfig) -> None:
    """Refuses groups in which there is nothing to compare."""
    from troupe.learner import advantages

    learner, size = config.learner, config.rollout.group_size
    preference = learner.objective == "preference"
    if size == 1 and (preference or advantages.traits(advantages.find(learner.advantage)).compares):
        what = "objective = 'preference'" if preference else f"advantage = '{learner.advantage}'"
        raise ConfigError(
            f"learner.{what} compares the members of a group, and rollout.group_size = 1 would teach nothing: make it 2 or more"
        )
    if learner.advantage == "pass_at_k" and learner.pass_k > size:
        raise ConfigError(
            f"learner.pass_k = {learner.pass_k} of groups of {size} would teach nothing: make rollout.group_size at least "
            f"{learner.pass_k}, or pass_k smaller"
        )
    trajectories = size * config.rollout.groups_per_step
    if learner.minibatches > trajectories:
        raise ConfigError(
            f"learner.minibatches = {learner.minibatches}, but a step has {trajectories} trajectories "
            "(rollout.groups_per_step * rollout.group_size): make it at most that"
        )


def _check_teacher(config: RunConfig) -> None:
    from troupe.cluster.models import resolve
    from troupe.learner import advantages

    if "teacher" not in advantages.traits(advantages.find(config.learner.advantage)).needs:
        return
    if not config.learner.teacher:
        raise ConfigError(
            f"learner.advantage = '{config.learner.advantage}' learns from a teacher: name its model with learner.teacher, for "
            "example RUN/checkpoints/step-100/model of another run"
        )
    config.learner.teacher = str(resolve(config.learner.teacher))


def is_finished(folder: Path, config: RunConfig) -> bool:
    """Did the run in `folder` reach the last step of `config`?"""
    file = folder / "summary.json"
    if not file.exists():
        return False
    known = json.loads(file.read_text())
    return bool(known["finished"]) and int(known["steps"]) >= config.steps


def reached(folder: Path) -> int:
    """Step of the newest checkpoint of the run in `folder`; 0 if there is none."""
    from troupe.actors.learner import checkpoints

    return max((step for step, _ in checkpoints(str(folder / "checkpoints"))), default=0)


def new_folder(config: RunConfig, wanted: str | None) -> Path:
    """The folder of a new run, created. Raises ConfigError if it exists and is not empty."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    folder = Path(wanted) if wanted else Path("runs") / f"{config.name}-{stamp}"
    number = 1
    while not wanted and folder.exists():
        number += 1
        folder = Path("runs") / f"{config.name}-{stamp}-{number}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"run folder '{folder}' exists: go on with `troupe train --resume {folder}`, or name another with --run-dir"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "checkpoints").mkdir()
    except OSError as error:
        raise ConfigError(f"run folder '{folder}' cannot be made: {error.strerror}") from error
    recipes.write(config, folder / "config.toml")
    return folder.resolve()


def discard_if_unused(folder: Path) -> bool:
    """Removes the folder of a run in which nothing has happened yet; says whether it did."""
    if (folder / "journal.jsonl").exists():
        return False
    shutil.rmtree(folder, ignore_errors=True)
    return True


def known_folder(path: str) -> tuple[Path, RunConfig]:
    """An existing run folder and its configuration. Raises ConfigError if it is none."""
    folder = Path(path)
    if not (folder / "config.toml").is_file():
        raise ConfigError(f"'{path}' is no run folder: it has no config.toml")
    return folder.resolve(), recipes.read(str(folder / "config.toml"))


def prepare_model(config: RunConfig, folder: Path) -> Path:
    """The model folder of a run: the named one, or a small policy of our own made from the world's vocabulary."""
    if config.model.path:
        from troupe.cluster.models import resolve

        return resolve(config.model.path)
    made = folder / "model"
    if not made.exists():
        from troupe.envs import registry
        from troupe.learner.tiny import make_tiny

        tiny = config.model.tiny
        corpus = registry.find(config.env.name).corpus()
        make_tiny(str(made), corpus, hidden=tiny.hidden, layers=tiny.layers, heads=tiny.heads)
    return made


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Nobody else leads this run meanwhile."""
    with open(folder / ".lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"'{folder}' is being run by another process: wait for it, or stop it first") from error
        yield


def _is_led(folder: Path) -> bool:
    """Does some process lead the run in `folder` now?"""
    try:
        with locked(folder):
            return False
    except ConfigError:
        return True


@contextlib.contextmanager
def ray_session(address: str | None, namespace: str) -> Iterator[str]:
    """Ray for the time of the block: the cluster at `address` (or RAY_ADDRESS), else one on this machine that is gone
    afterwards. Yields the address under which other processes reach it."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = address or os.environ.get("RAY_ADDRESS")
    if address and "ray" not in sys.modules:
        authenticate()
    import ray

    _remove_abandoned()
    temporary, before = "", os.environ.get("TMPDIR")
    common: dict[str, Any] = {"namespace": namespace, "logging_level": logging.ERROR, "log_to_driver": False}
    try:
        if address:
            try:
                ray.init(address=address, **common)
            except (ConnectionError, RuntimeError) as error:
                raise ConfigError(f"no Ray cluster at '{address}': {str(error).splitlines()[0]}") from error
        else:
            short = tempfile.gettempdir() if len(tempfile.gettempdir()) <= _LONGEST_TMPDIR else "/tmp"
            temporary = tempfile.mkdtemp(prefix=f"{_TEMPORARY}{os.getpid()}-", dir=short)
            os.environ["TMPDIR"] = temporary  # so that what killed actors, torch and others leave behind goes with it
            for last in (False, True):  # Ray gives its own processes 30 s, which on a busy machine they may miss
                try:
                    ray.init(_temp_dir=temporary, include_dashboard=False, **common)
                    break
                except Exception as error:  # Ray raises a bare one
                    reason = str(error).strip().splitlines()[0]
                    if last:
                        raise TroupeError(
                            f"Ray did not start on this machine: {reason} Is it very busy? Then try again"
                        ) from error
                    ray.shutdown()
                    _end_stragglers(temporary)
        yield ray.get_runtime_context().gcs_address
    finally:
        ray.shutdown()
        if temporary:
            os.environ.pop("TMPDIR", None)
            if before is not None:
                os.environ["TMPDIR"] = before
            _end_stragglers(temporary)
            shutil.rmtree(temporary, ignore_errors=True)


def authenticate() -> None:
    """To join somebody's cluster: Ray sends its token only in this mode, which it reads when it is first imported."""
    token = os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    if os.environ.get("RAY_AUTH_TOKEN") or Path(token).is_file():
        os.environ.setdefault("RAY_AUTH_MODE", "token")


def _end_stragglers(temporary: str) -> None:
    """Ray's own helpers outlive `ray.shutdown` by seconds: waits for those of the session in `temporary`, then ends them."""
    deadline = time.monotonic() + _STRAGGLERS_S
    while left := [int(p.name) for p in Path("/proc").iterdir() if p.name.isdigit() and _is_of_ray(p, temporary)]:
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            return
        time.sleep(0.05)


def _is_of_ray(process: Path, temporary: str) -> bool:
    """Is it a process of Ray, started for the session in `temporary`?"""
    try:
        command = (process / "cmdline").read_bytes().decode(errors="replace")
        ours = temporary in command or temporary in (process / "environ").read_bytes().decode(errors="replace")
    except OSError:  # gone, or somebody else's
        return False
    return ours and (command.startswith("ray::") or "/ray/" in command)


def _remove_abandoned() -> None:
    """Removes temporary folders of launchers that were killed."""
    for path in [*Path(tempfile.gettempdir()).glob(f"{_TEMPORARY}*"), *Path("/tmp").glob(f"{_TEMPORARY}*")]:
        pid = path.name.removeprefix(_TEMPORARY).split("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(path, ignore_errors=True)


Watch = Callable[[RunStatus], None]


def train(
    config: RunConfig,
    folder: Path,
    *,
    address: str | None = None,
    watch: Watch | None = None,
    asked: Mapping[str, int] | None = None,
    beside: Callable[[Launched], contextlib.AbstractContextManager[Any]] | None = None,
) -> RunStatus:
    """Leads the run in `folder` to its end; `watch` is shown its status twice a second. `beside` is entered while it
    runs (the public door, for example). asked: numbers of actors that count from now on, though `troupe scale` may have said
    others. Raises what broke the run, or KeyboardInterrupt; the folder resumes either way."""
    with locked(folder):
        if asked:
            _ask(folder, asked)
        model_folder = prepare_model(config, folder)
        namespace = f"troupe-{folder.name}"
        with ray_session(address, namespace) as reached:
            place(config)
            launched = Launched(folder, reached, namespace)
            announce = folder / "run.json"
            announce.write_text(json.dumps({"address": reached, "namespace": namespace, "pid": os.getpid()}) + "\n")
            try:
                with beside(launched) if beside else contextlib.nullcontext():
                    return asyncio.run(_lead(config, launched, model_folder, watch or (lambda status: None)))
            finally:
                announce.unlink(missing_ok=True)
                shutil.rmtree(folder / "weights", ignore_errors=True)  # what was on its way to generators


def _ask(folder: Path, numbers: Mapping[str, int]) -> None:
    from troupe.actors.host import WallClock
    from troupe.actors.ledger import Ledger

    ledger = Ledger(str(folder), WallClock())
    if known := ledger.wanted():
        ledger.note("scale", wanted={**known, **numbers}, why="asked for at --resume")


def place(config: RunConfig) -> None:
    """Chooses devices: a GPU for learner and generators where the cluster has enough of them."""
    import ray

    gpus = int(ray.cluster_resources().get("GPU", 0))
    if config.learner.device == "auto":
        config.learner.device = "cuda" if gpus >= config.generator.replicas + config.learner.ranks else "cpu"
    learner = config.learner.ranks if config.learner.device.startswith("cuda") else 0
    generators = config.generator.replicas if config.generator.device.startswith("cuda") else 0
    if learner + generators > gpus:
        raise ConfigError(
            f"learner.device = '{config.learner.device}' and generator.device = '{config.generator.device}' need "
            f"{learner + generators} GPUs and this Ray cluster has {gpus}: set them to 'cpu', or join another cluster"
        )


async def _lead(config: RunConfig, launched: Launched, model_folder: Path, watch: Watch) -> RunStatus:
    from troupe.actors.company import Parts
    from troupe.actors.director import Director
    from troupe.actors.factories import make_engine, make_trainer
    from troupe.actors.host import RayContext

    context = RayContext.launch(launched.namespace, config.seed)
    model = config.model_settings(str(model_folder))
    director = context.ref("director", Director)
    async with interruptible() as interrupted:
        while True:
            await context.spawn(
                "director",
                Director,
                config=config,
                folder=str(launched.folder),
                parts=Parts(
                    model_folder=str(model_folder),
                    make_engine=partial(make_engine, settings=config.generator, model=model, seed=config.seed),
                    make_trainer=partial(make_trainer, config=config.learner, model=model, seed=config.seed),
                ),
            )
            run = asyncio.ensure_future(director.run())
            try:
                status = await _follow(director, run, interrupted, watch)
                await run
                return status
            except ActorLost as error:
                watch(_note(f"the director died ({error}); starting a new one"))
                await asyncio.sleep(1.0)
            except asyncio.CancelledError:
                run.cancel()
                raise
            finally:
                if interrupted.is_set():
                    await _stop(director, run)
            await context.kill("director")


async def _follow(director: Any, run: asyncio.Future[Any], interrupted: asyncio.Event, watch: Watch) -> RunStatus:
    """Shows the status until the run ends. Raises KeyboardInterrupt when the user wants it to stop."""
    seen = 0
    waiter = asyncio.ensure_future(interrupted.wait())
    try:
        while True:
            done, _ = await asyncio.wait({run, waiter}, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
            if waiter in done:
                raise KeyboardInterrupt
            status: RunStatus = await asyncio.wait_for(director.status(GetStatus(seen)), 60.0)
            seen = status.events_total
            watch(status)
            if run in done:
                return status
    except TimeoutError as error:
        raise TimedOut("director.status has not answered for 60 s") from error
    finally:
        waiter.cancel()


async def _stop(director: Any, run: asyncio.Future[Any]) -> None:
    with contextlib.suppress(TroupeError, TimeoutError, asyncio.CancelledError):
        await asyncio.wait_for(director.stop(Stop("interrupted")), _STOP_S)
        await asyncio.wait_for(run, _STOP_S)
    run.cancel()
    await asyncio.gather(run, return_exceptions=True)  # or what became of it is told in a traceback at the end


@contextlib.asynccontextmanager
async def interruptible() -> AsyncIterator[asyncio.Event]:
    """An event that is set by Ctrl-C or SIGTERM; a second signal ends the process at once."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()

    first = 0.0

    def on_signal() -> None:
        nonlocal first
        if not interrupted.is_set():
            first = loop.time()
            interrupted.set()
        elif loop.time() - first > _SAME_SIGNAL_S:
            os._exit(130)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        yield interrupted
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _note(text: str) -> RunStatus:
    return RunStatus("restarting", 0, 0, -1, 0.0, {}, [], {}, [text], 0)


@contextlib.contextmanager
def attached(path: str) -> Iterator[Any]:
    """Connects to the live run in the folder `path`; yields its `RayContext`. Raises ConfigError if it is not running."""
    folder, config = known_folder(path)
    file = folder / "run.json"
    if not file.exists() or not _is_led(folder):
        if is_finished(folder, config):
            raise ConfigError(f"'{path}' is finished. For more of it: troupe train --resume {path} --steps N")
        raise ConfigError(f"'{path}' is not running. Go on with: troupe train --resume {path}")
    known = json.loads(file.read_text())
    if "ray" not in sys.modules:
        authenticate()
    import ray

    from troupe.actors.host import RayContext

    try:
        ray.init(address=known["address"], namespace=known["namespace"], logging_level=logging.ERROR, log_to_driver=False)
    except (ConnectionError, RuntimeError) as error:
        raise ConfigError(f"'{path}' does not answer at {known['address']}: {str(error).splitlines()[0]}") from error
    try:
        yield RayContext("visitor", known["namespace"], None, config.seed)
    finally:
        ray.shutdown()
