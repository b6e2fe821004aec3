"""Tools of MCP servers, for the agents of a ToolWorld.

    class Desk(ToolWorld):
        def __init__(self):
            self.server = McpTools("python", "orders_server.py")   # or McpTools(url="http://127.0.0.1:8000/mcp")

        async def reset(self, task):
            await self.server.offer(self)
            return "Where is order 4711?"

        async def close(self):
            await self.server.close()

Promises:
- what the agent is told about a tool, and what its arguments are checked against, is the server's own JSON schema;
- what a tool reports as its error, or refuses as its arguments, is told to the agent. A server that cannot be reached, dies or
  breaks the protocol is EnvironmentFailed: it says nothing about the agent (law 6);
- of a text that is longer than `longest` (a result, an error, a description) the agent is told the beginning, and how much was
  left out;
- each episode has a connection of its own, so a stdio server is a new process and remembers nothing of another episode;
- a call has the time that each call of the world has; connecting and closing are bounded; `close` ends what was started.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from troupe.envs import json_schema
from troupe.envs.returned import told
from troupe.envs.tools import Tool, ToolWorld, short
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction, nearest

if TYPE_CHECKING:
    import mcp
    from mcp import types

_CLOSE_S = 10.0  # the client ends a stdio server in three steps of 2 s
_PAGES = 100  # of a list of tools
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9_]")


class McpTools:
    """One MCP server: a command that speaks over its standard input and output, or the URL of one (streamable HTTP).

    env: variables for the command, beside PATH, HOME and the like. headers: of each HTTP request. prefix: put before the name
    of each tool. only: names of the tools that are offered, as the server has them; empty for all. fresh: a new connection
    for each episode; False: one for as long as it lives, for a server that remembers nothing. connect_s: seconds.
    longest: characters of one text of the server that the agent is told. Raises ConfigError, also where the package mcp is not
    installed.
    """

    def __init__(
        self,
        *command: str,
        url: str = "",
        env: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        headers: Mapping[str, str] | None = None,
        prefix: str = "",
        only: Collection[str] = (),
        fresh: bool = True,
        connect_s: float = 30.0,
        longest: int = 20_000,
    ) -> None:
        if find_spec("mcp") is None:
            raise ConfigError("McpTools needs the package mcp: pip install 'troupe-rl[mcp]'")
        if bool(command) == bool(url):
            raise ConfigError("McpTools takes a command, or url=: one of them")
        if longest < 1:
            raise ConfigError(f"McpTools: longest is {longest}; it is at least 1 character")
        self.longest = longest
        self.command, self.url, self.env, self.cwd, self.headers = command, url, env, cwd, headers
        self.prefix, self.only, self.fresh, self.connect_s = prefix, tuple(only), fresh, connect_s
        self.name = url or " ".join(command)
        self._connection: _Connection | None = None

    async def offer(self, world: ToolWorld) -> None:
        """Adds the server's tools to the episode of `world` that begins. Raises EnvironmentFailed."""
        if self.fresh or self._connection is None or not self._connection.usable():
            await self.close()
            self._connection = _Connection(self)
        connection = self._connection
        offered = await connection.tools()
        for name in self.only:
            if name not in (known := [tool.name for tool in offered]):
                raise EnvironmentFailed(f"MCP server {self.name} has no tool '{name}'.{nearest(name, known)}")
        taken = {spec["name"] for spec in world.tools()}
        for tool in offered:
            if self.only and tool.name not in self.only:
                continue
            made = _made(self.prefix, tool, connection)
            if made.name in taken:
                raise EnvironmentFailed(f"MCP server {self.name}: there is a tool '{made.name}' already: give it a prefix=")
            taken.add(made.name)
            world.add_tool(made)

    async def close(self) -> None:
        """Ends the connection, and the server if it is a command. May be called again."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()


class _Connection:
    """A task that holds the client open: it has to be opened and closed by the same one, and a world's calls are many."""

    def __init__(self, server: McpTools) -> None:
        self.server = server
        self._loop = asyncio.get_running_loop()
        self._over = asyncio.Event()
        self._ready: asyncio.Future[tuple[mcp.Client, list[types.Tool]]] = self._loop.create_future()
        self._task = asyncio.create_task(self._hold(), name=f"mcp {server.name}")

    def usable(self) -> bool:
        return self._loop is asyncio.get_running_loop() and not self._task.done()

    async def tools(self) -> list[types.Tool]:
        """Raises EnvironmentFailed."""
        try:
            return (await asyncio.shield(self._ready))[1]
        except asyncio.CancelledError:
            self._task.cancel()
            raise

    async def call(self, name: str, /, **arguments: Any) -> str:
        """What the tool says. Raises InvalidAction for what it refuses, EnvironmentFailed."""
        from mcp import MCPError
        from mcp.types import INVALID_PARAMS

        if not self.usable():
            raise EnvironmentFailed(f"MCP server {self.server.name}: the connection has ended")
        client, _ = await asyncio.shield(self._ready)
        try:
            result = await client.call_tool(name, arguments)
        except MCPError as error:
            if error.code == INVALID_PARAMS:
                raise InvalidAction(short(error.message, 500)) from None
            raise EnvironmentFailed(f"MCP server {self.server.name}, tool {name}: {error.message} ({error.code})") from error
        except Exception as error:  # the transport, or what the client makes of a server that breaks the protocol
            raise EnvironmentFailed(f"MCP server {self.server.name}, tool {name}: {_reason(error)}") from error
        text = cut(_text(result), self.server.longest)
        if result.is_error:
            raise InvalidAction(text or f"{name} failed")
        return text

    async def close(self) -> None:
        if self._loop is not asyncio.get_running_loop():
            with suppress(RuntimeError):  # a loop that is closed has ended its tasks
                self._loop.call_soon_threadsafe(self._over.set)
            return
        self._over.set()
        if not self._ready.done():
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=_CLOSE_S)
        if not self._task.done():
            self._task.cancel()
            raise EnvironmentFailed(f"MCP server {self.server.name} has not ended for {_CLOSE_S:g} s")

    async def _hold(self) -> None:
        from mcp import Client

        with tempfile.TemporaryFile("w+", errors="replace") as log:
            try:
                async with (
                    asyncio.timeout(self.server.connect_s) as limit,
                    _transport(self.server, log) as transport,
                    Client(transport, cache=None) as client,
                ):
                    tools = await _listed(client)
                    limit.reschedule(None)
                    self._ready.set_result((client, tools))
                    await self._over.wait()
            except BaseException as error:
                if not self._ready.done():
                    self._ready.set_exception(EnvironmentFailed(self._unreachable(error, log)))
                    self._ready.exception()  # nobody may be waiting any more
                if isinstance(error, asyncio.CancelledError | KeyboardInterrupt | SystemExit):
                    raise

    def _unreachable(self, error: BaseException, log: IO[str]) -> str:
        log.seek(0)
        said = [line.strip() for line in log.read()[-4_000:].splitlines() if line.strip()]
        why = f"no answer for {self.server.connect_s:g} s" if isinstance(error, TimeoutError) else _reason(error)
        return f"MCP server {self.server.name} cannot be used: {why}" + (f"; it wrote: {short(said[-1], 300)}" if said else "")


@asynccontextmanager
async def _transport(server: McpTools, log: IO[str]) -> AsyncIterator[Any]:
    from mcp import StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import streamable_http_client

    if not server.url:
        command, *args = server.command
        parameters = StdioServerParameters(command=command, args=args, env=dict(server.env or {}), cwd=server.cwd)
        yield stdio_client(parameters, log)  # type: ignore[arg-type]
        return
    import httpx2

    waits = httpx2.Timeout(server.connect_s, read=None)  # a call is bounded by the world's own time
    async with httpx2.AsyncClient(headers=dict(server.headers or {}), timeout=waits) as http:
        yield streamable_http_client(server.url, http_client=http)


async def _listed(client: mcp.Client) -> list[types.Tool]:
    found: list[types.Tool] = []
    cursor = None
    for _ in range(_PAGES):
        page = await client.list_tools(cursor=cursor)
        found += page.tools
        cursor = page.next_cursor
        if cursor is None:
            return found
    raise EnvironmentFailed(f"its list of tools has more than {_PAGES} pages")


def _made(prefix: str, tool: types.Tool, connection: _Connection) -> Tool:
    """The tool as a world has it. Names keep to letters, digits and _, as everywhere in Troupe."""
    name = _NOT_IN_NAMES.sub("_", prefix + tool.name)[:64]
    about = cut(tool.description or tool.title or tool.name, connection.server.longest)
    try:
        return json_schema.tool(name, about, tool.input_schema, partial(connection.call, tool.name))
    except ValueError as error:
        raise EnvironmentFailed(f"MCP server {connection.server.name}: the schema of '{tool.name}' is none: {error}") from None


def cut(text: str, longest: int) -> str:
    """The beginning of a text that is too long, and how much was left out."""
    left = len(text) - longest
    return text if left <= 0 else f"{text[:longest]}\n[{left} more characters, not shown]"


def _text(result: types.CallToolResult) -> str:
    """Text as it is; what is no text is named, not shown."""
    said: list[str] = []
    for block in result.content:
        text = block.text if block.type == "text" else getattr(getattr(block, "resource", None), "text", None)
        said.append(f"[{block.type}, not shown]" if text is None else text)
    if not said and result.structured_content is not None:
        return json.dumps(result.structured_content, ensure_ascii=False)
    return "\n".join(said)


def _reason(error: BaseException) -> str:
    """The first cause in groups of exceptions, which tasks make."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {short(told(error), 300)}"
