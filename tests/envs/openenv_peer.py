"""OpenEnv's own server and its own clients, for the tests and benchmarks that need them. Run by an interpreter that has
`openenv`, never imported here.

    python openenv_peer.py serve PORT echo|lines|colours|pairs|till [SESSIONS [HOST]]   its server, with a small environment
    python openenv_peer.py drive URL EPISODES                                   its clients play a served `guess`; prints JSON
    python openenv_peer.py call URL                                             its MCP client plays a served `stockroom`
    python openenv_peer.py bench URL SESSIONS SECONDS [tools]                   its client steps as fast as it can; prints JSON
"""

import asyncio
import json
import sys
import time
from typing import Any, Literal

from fastmcp import FastMCP
from openenv.core import GenericEnvClient
from openenv.core.env_server import Action, Environment, Observation, State, create_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.mcp_client import MCPToolClient

# -- environments ----------------------------------------------------------------------------------------------------


class Base(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True
    live = 0

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0
        self.seed = None
        Base.live += 1

    def reset(self, seed: int | None = None, episode_id: str | None = None, **more: Any) -> Any:
        self.turn, self.seed = 0, seed
        return self.seen(f"seed {seed}", None)

    def seen(self, text: str, reward: float | None) -> Any:
        return self.observation(text=text, reward=reward, done=self.turn >= 3)

    @property
    def state(self) -> State:
        return State(step_count=self.turn)

    def close(self) -> None:
        Base.live -= 1


class Said(Observation):
    text: str


class Line(Action):
    message: str


class Lines(Base):
    """Says back what it hears, three times."""

    observation = Said

    def step(self, action: Line, **more: Any) -> Said:
        if action.message == "break":
            raise RuntimeError("it is broken")
        self.turn += 1
        return self.seen(f"{self.turn} {action.message} {self.seed}", float(self.turn == 3))


class Echo(Base):
    """Says back what it hears, eight times."""

    def observation(self, text: str, reward: float | None, done: bool) -> Said:
        return Said(text=text, reward=reward, done=self.turn >= 8)

    def step(self, action: Line, **more: Any) -> Said:
        self.turn += 1
        return self.seen(action.message, 0.0)


class Colour(Action):
    colour: Literal["red", "green", "dark blue"]


class Colours(Base):
    """Knows three colours."""

    observation = Said

    def step(self, action: Colour, **more: Any) -> Said:
        self.turn += 1
        return self.seen(f"{self.turn} {action.colour}", 1.0)


class Grid(Observation):
    """No text in it."""

    cells: list[int]


class Two(Action):
    x: int
    y: int


class Pairs(Base):
    """Adds two numbers."""

    def reset(self, seed: int | None = None, **more: Any) -> Grid:
        self.turn = 0
        return Grid(cells=[seed or 0])

    def step(self, action: Two, **more: Any) -> Grid:
        self.turn += 1
        return Grid(cells=[action.x, action.y], reward=action.x + action.y, done=self.turn == 3)


class Till(MCPEnvironment):
    """Tools only, as OpenEnv's echo environment has them."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server = FastMCP("till")

        @server.tool
        def echo_message(message: str) -> str:
            """Says it back."""
            return message

        @server.tool
        def add(a: int, b: int = 1) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(server)

    def reset(self, seed: int | None = None, **more: Any) -> Observation:
        return Observation(done=False, reward=0.0, metadata={"ready": True})

    def _step_impl(self, action: Action, **more: Any) -> Observation:
        return Observation(metadata={"error": "call a tool"})

    @property
    def state(self) -> State:
        return State()


ENVIRONMENTS = {
    "echo": (Echo, Line, Said),
    "lines": (Lines, Line, Said),
    "colours": (Colours, Colour, Said),
    "pairs": (Pairs, Two, Grid),
    "till": (Till, CallToolAction, CallToolObservation),
}


def serve(port: int, name: str, sessions: int = 64, host: str = "127.0.0.1") -> None:
    import uvicorn

    env, action, observation = ENVIRONMENTS[name]
    app = create_app(env, action, observation, env_name=name, max_concurrent_envs=sessions)

    @app.get("/live")
    def live() -> int:
        return Base.live

    uvicorn.run(app, host=host, port=port, log_level="error", access_log=False)


# -- clients ---------------------------------------------------------------------------------------------------------


def guesses() -> Any:
    """A player of `guess` that halves the range that it is told."""
    low, high = 1, 20

    def next_guess(text: str) -> dict[str, str]:
        nonlocal low, high
        if "between" in text:
            words = text.rpartition("between")[2].replace(".", " ").split()
            low, high = int(words[0]), int(words[2])
        return {"message": str((low + high) // 2)}

    return next_guess


async def drive(url: str, episodes: int) -> None:
    done = []

    async def play(seeds: range) -> None:
        async with GenericEnvClient(base_url=url) as env:
            for seed in seeds:
                done.append(await one(env, seed))

    async def one(env: Any, seed: int) -> list[Any]:
        result, total, guess = await env.reset(seed=seed), 0.0, guesses()
        while not result.done:
            result = await env.step(guess(result.observation["text"]))
            total += result.reward
        return [seed, total, result.observation["success"], (await env.state())["step_count"]]

    await asyncio.gather(*(play(range(first, episodes, 8)) for first in range(8)))
    print(json.dumps({"async": sorted(done)}))


def drive_sync(url: str) -> None:
    with GenericEnvClient(base_url=url).sync() as env:
        result, guess, total = env.reset(seed=3), guesses(), 0.0
        refused = ""
        try:
            env.step({"nonsense": 1})
        except RuntimeError as error:
            refused = str(error)
        while not result.done:
            result = env.step(guess(result.observation["text"]))
            total += result.reward
        print(json.dumps({"sync": [3, total, result.observation["success"], env.state()["step_count"]], "refused": refused}))


async def call(url: str) -> None:
    async with MCPToolClient(base_url=url) as env:
        opened = await env.reset(seed=5)
        tools = [tool.name for tool in await env.list_tools()]
        name = " ".join(opened.observation.text.split()[2:4])[:-1]
        found = await env.step(CallToolAction(tool_name="find_item", arguments={"name": name}))
        first = found.observation.result
        count = await env.call_tool("stock", item_id=first, warehouse="north")
        wrong = await env.step(CallToolAction(tool_name="stock", arguments={"item_id": first}))
        state = await env.state()
        print(
            json.dumps(
                {
                    "opened": opened.observation.text,
                    "tools": tools,
                    "found": first,
                    "count": count,
                    "wrong": wrong.observation.error.error_type.value,
                    "steps": state.step_count,
                }
            )
        )


async def bench(url: str, sessions: int, seconds: float, tools: bool = False) -> None:
    """Episodes on all sessions at once: a reset, then eight steps, which are counted. tools: of `till`, by its MCP client."""
    opening = time.perf_counter()
    envs = [(MCPToolClient if tools else GenericEnvClient)(base_url=url) for _ in range(sessions)]
    action: Any = {"message": "hello"}
    if tools:
        action = CallToolAction(tool_name="echo_message", arguments=action)
    for env in envs:
        await env.connect()
    opened = time.perf_counter() - opening

    async def play(env: Any, until: float) -> int:
        steps = 0
        while time.perf_counter() < until:
            await env.reset(seed=steps)
            for _ in range(8):
                await env.step(action)
                steps += 1
        return steps

    await asyncio.gather(*(play(env, time.perf_counter() + seconds / 4) for env in envs))
    print("warm", flush=True)
    sys.stdin.readline()  # whoever watches the server's time begins now
    began, cpu = time.perf_counter(), time.process_time()
    steps = sum(await asyncio.gather(*(play(env, began + seconds) for env in envs)))
    told = {"steps": steps, "seconds": time.perf_counter() - began, "cpu_s": time.process_time() - cpu, "open_s": opened}
    print(json.dumps(told), flush=True)
    sys.stdin.readline()
    for env in envs if not tools else []:  # sessions of its MCP client take seconds each to close: they end with the process
        await env.close()


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what == "serve":
        serve(int(rest[0]), rest[1], *map(int, rest[2:3]), *rest[3:])
    elif what == "drive":
        asyncio.run(drive(rest[0], int(rest[1])))
        drive_sync(rest[0])
    elif what == "call":
        asyncio.run(call(rest[0]))
    elif what == "bench":
        asyncio.run(bench(rest[0], int(rest[1]), float(rest[2]), "tools" in rest))
