"""An image of an OpenEnv environment is a world; its container is gone with the world, and with whoever started it."""

import asyncio
import importlib.util
import io
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from troupe.envs import registry, sandbox
from troupe.envs.drive import Driver
from troupe.envs.sandbox import docker, image, owner
from troupe.protocol.errors import ConfigError, EnvironmentFailed

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("docker")]

SERVER = """
import json, sys
from websockets.sync.server import serve
SCHEMA = {"type": "object", "properties": {"message": {"type": "string"}}, "required": ["message"]}
ABOUT = {"name": "boxed", "description": "In a box."}
HTTP = {"/health": {"status": "healthy"}, "/schema": {"action": SCHEMA}, "/metadata": ABOUT}

def http(socket, request):
    if request.path in HTTP:
        return socket.respond(200, json.dumps(HTTP[request.path]))

def session(socket):
    for said in socket:
        frame = json.loads(said)
        if frame["type"] == "close":
            return
        data = frame["data"]
        text = data.get("message") or f"seed {data['seed']}"
        told = {"observation": {"text": text}, "reward": 1.0, "done": frame["type"] == "step"}
        socket.send(json.dumps({"type": "observation", "data": told}))

if sys.argv[1:] == ["broken"]:
    sys.exit("it cannot start")
serve(session, "0.0.0.0", 8000, process_request=http).serve_forever()
"""


@pytest.fixture(scope="module")
def boxed():
    """(a good image, a broken one): the sandbox's own Python, the package websockets, and a small server."""
    if why := sandbox.missing("docker"):
        pytest.skip(why)
    if not any(network.name == "bridge" for network in docker._client().networks.list()):
        pytest.skip("the Docker daemon has no bridge network: no port can be published")
    made = io.BytesIO(image.root())
    with tarfile.open(fileobj=made, mode="a") as tar:
        package = importlib.util.find_spec("websockets").submodule_search_locations[0]
        tar.add(package, arcname="srv/websockets", filter=lambda e: None if "__pycache__" in e.name else e)
        entry = tarfile.TarInfo("srv/server.py")
        entry.size = len(SERVER)
        tar.addfile(entry, io.BytesIO(SERVER.encode()))
    api = docker._client().api
    command = 'CMD ["/usr/local/bin/python3", "/srv/server.py"{}]'
    names = []
    for tag, more in (("good", ""), ("broken", ', "broken"')):
        api.import_image_from_data(
            made.getvalue(), repository="troupe-test-openenv", tag=tag, changes=[command.format(more), "EXPOSE 8000"]
        )
        names.append(f"troupe-test-openenv:{tag}")
    yield names
    for name in names:
        docker._client().images.remove(name, force=True)


def containers():
    """Those of the test's image."""
    found = docker._client().containers.list(all=True, filters={"label": owner.LABEL}, ignore_removed=True)
    return [each for each in found if "troupe-test-openenv" in str(each.attrs["Config"]["Image"])]


def gone():
    for _ in range(600):
        if not containers():
            return True
        time.sleep(0.1)
    return False


def test_an_image_is_a_world_and_its_container_goes_with_it_on_docker(boxed):
    world = registry.find(f"openenv:image:{boxed[0]}")
    assert world.system == "In a box." and not containers(), "a look at the schema leaves nothing behind"

    async def play():
        drivers = [Driver(registry.make(world, {}), timeout_s=120.0) for _ in range(2)]
        try:
            for number, driver in enumerate(drivers):
                assert await driver.reset(world.task("train", number)) == f"seed {2 * number}"
            assert len(containers()) == 2, "each world has its own"
            ports = {port[0]["HostIp"] for each in containers() for port in each.ports.values() if port}
            assert ports == {"127.0.0.1"}
            return (await drivers[0].step("hello")).text
        finally:
            for driver in drivers:
                await driver.close()

    assert asyncio.run(play()) == "hello"
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

    with pytest.raises(EnvironmentFailed, match="does not answer"):
        container.start(boxed[1])
    with pytest.raises(ConfigError, match="no image 'troupe-test-none'"):
        registry.find("openenv:image:troupe-test-none")
    assert gone()


def test_without_docker_it_is_one_line(monkeypatch):
    monkeypatch.setattr(docker, "missing", lambda: "no Docker daemon answers")
    with pytest.raises(ConfigError, match="no Docker daemon answers"):
        registry.find("openenv:image:any")
