"""An image of an OpenEnv server is a world, ours and OpenEnv's own; its container is gone with the world, and with whoever
started it."""

import asyncio
import io
import json
import random
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

from tests.envs.test_openenv_official import PYTHON as OFFICIAL
from troupe.envs import registry, sandbox
from troupe.envs.drive import Driver
from troupe.envs.sandbox import docker, image, owner
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("docker")]

HERE = Path(__file__).parent
NAME = "troupe-test-openenv"
UVICORN = "uvicorn.loops.auto, uvicorn.protocols.http.auto, uvicorn.protocols.websockets.auto"
OURS = f"troupe.cluster.env_commands, typer.rich_utils, troupe.envs.openenv.serve, {UVICORN}"
THEIRS = f"openenv_peer, {UVICORN}"
LOADED = "import json, sys, {}; print(json.dumps([m.__file__ for m in sys.modules.values() if getattr(m, '__file__', None)]))"


def packages(python, modules):
    """The installed packages that importing `modules` loads: whole, and what their wheels say of them."""
    asked = [python, "-c", LOADED.format(modules)]
    said = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=True, timeout=300, cwd=HERE).stdout
    parts = [Path(file).parts for file in json.loads(said.splitlines()[-1]) if "site-packages" in file]
    root = Path(*parts[0][: parts[0].index("site-packages") + 1])
    needed = {root / file[len(root.parts)] for file in parts}
    return {path.name: path for path in sorted(needed | {*root.glob("*.libs"), *root.glob("*.dist-info")})}


def root_with(files):
    """A tar of the local Python, and of files and folders (name in /srv → path) with the shared libraries that they want."""
    made = io.BytesIO(image.root())
    with tarfile.open(fileobj=made, mode="a", dereference=True) as tar:
        for name, path in files.items():
            tar.add(path, arcname=f"srv/{name}")  # with what is compiled: a server that compiles its packages starts late
        there = {f"/{name}" for name in tar.getnames()}
        for library in image._libraries([each for path in files.values() for each in path.rglob("*.so")]):
            if str(library) not in there and "site-packages" not in str(library):
                tar.add(library, arcname=str(library).lstrip("/"))
    return made.getvalue()


def imported(tag, root, *command):
    """The image's name."""
    told = [f"CMD {json.dumps(['/usr/local/bin/python3', *command])}", "EXPOSE 8000", "ENV PYTHONPATH=/srv", "ENV HOME=/tmp"]
    docker._client().api.import_image_from_data(root, repository=NAME, tag=tag, changes=told)
    return f"{NAME}:{tag}"


@pytest.fixture(scope="module")
def daemon():
    """Docker's client; what the tests here have imported goes with it."""
    if why := sandbox.missing("docker"):
        pytest.skip(why)
    if not any(network.name == "bridge" for network in docker._client().networks.list()):
        pytest.skip("the Docker daemon has no bridge network: no port can be published")
    yield docker._client()
    for made in docker._client().images.list(NAME):
        docker._client().images.remove(made.tags[0], force=True)


@pytest.fixture(scope="module")
def boxed(daemon):
    """(an image of `troupe env serve`, one whose server does not start)."""
    house = {f"troupe/{folder.name}": folder for folder in (HERE.parents[1] / "src" / "troupe").iterdir()}
    root = root_with(packages(sys.executable, OURS) | house)
    command = ("-m", "troupe", "env", "serve", "guess", "--host", "0.0.0.0", "--port", "8000")
    return imported("ours", root, *command), imported("broken", root, "-c", "raise SystemExit('it cannot start')")


@pytest.fixture(scope="module")
def theirs(daemon):
    """An image of OpenEnv's own server."""
    if not Path(OFFICIAL).exists():
        pytest.skip("OpenEnv's own package wants a venv of its own: make test-openenv makes it")
    root = root_with(packages(OFFICIAL, THEIRS) | {"openenv_peer.py": HERE / "openenv_peer.py"})
    return imported("theirs", root, "/srv/openenv_peer.py", "serve", "8000", "lines", "1", "0.0.0.0")


def containers():
    """Those of the test's image."""
    found = docker._client().containers.list(all=True, filters={"label": owner.LABEL}, ignore_removed=True)
    return [each for each in found if NAME in str(each.attrs["Config"]["Image"])]


def gone():
    for _ in range(600):
        if not containers():
            return True
        time.sleep(0.1)
    return False


async def asked(driver, message):
    """The text, the reward and the end."""
    try:
        turn = await driver.step(message)
    except InvalidAction as error:
        return str(error), 0.0, False
    return turn.text, turn.reward, turn.done


def test_our_own_server_in_an_image_plays_as_the_world_does_and_each_world_has_a_container_on_docker(boxed):
    world, home = registry.find(f"openenv:image:{boxed[0]}"), registry.find("guess")
    assert world.system == home.system and not containers(), "a look at the schema leaves nothing behind"

    async def play():
        there = [Driver(registry.make(world, {}), timeout_s=120.0) for _ in range(2)]
        here = Driver(registry.make(home, {}))
        rng, won = random.Random(0), 0
        try:
            for number in range(20):
                task, driver = home.task("heldout" if number % 3 else "train", number), there[number % 2]
                assert await driver.reset(task) == await here.reset(task)
                done = False
                for turn in range(home.max_turns):
                    message = "no number" if turn == 1 else here.play(rng, 0.2)
                    told = await asked(here, message)
                    assert await asked(driver, message) == told
                    _, reward, done = told
                    won += reward > 0
                    if done:
                        break
            assert len(containers()) == 2, "each world has its own"
            ports = {port[0]["HostIp"] for each in containers() for port in each.ports.values() if port}
            assert ports == {"127.0.0.1"}
            return won
        finally:
            for driver in there:
                await driver.close()

    assert 0 < asyncio.run(play()) < 20
    assert not containers()


def test_openenvs_own_server_in_an_image_is_a_world_on_docker(theirs):
    world = registry.find(f"openenv:image:{theirs}")

    async def play():
        driver = Driver(registry.make(world, {}), timeout_s=120.0)
        try:
            for number in range(10):
                assert await driver.reset(world.task("train", number)) == f"seed {2 * number}"
                turns = [await driver.step(f"say {turn}") for turn in range(3)]
                assert (turns[-1].text, turns[-1].reward, turns[-1].done) == (f"3 say 2 {2 * number}", 1.0, True)
        finally:
            await driver.close()

    asyncio.run(play())
    assert not containers()


def test_a_container_dies_with_whoever_started_it_on_docker(boxed):
    code = f"from troupe.envs.openenv import container; print(container.start({boxed[0]!r}).url, flush=True); input()"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline().startswith("http://127.0.0.1:") and containers()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert gone()


def test_a_server_that_does_not_start_is_told_with_its_last_words_on_docker(boxed):
    from troupe.envs.openenv import container

    with pytest.raises(EnvironmentFailed, match=r"does not answer .*; it wrote: it cannot start"):
        container.start(boxed[1])
    with pytest.raises(ConfigError, match="no image 'troupe-test-none'"):
        registry.find("openenv:image:troupe-test-none")
    assert gone()


def test_without_docker_it_is_one_line(monkeypatch):
    monkeypatch.setattr(docker, "missing", lambda: "no Docker daemon answers")
    with pytest.raises(ConfigError, match="no Docker daemon answers"):
        registry.find("openenv:image:any")
