"""A small MCP server for tests: a till that counts, over stdio, or over HTTP on the port that is its argument."""

import asyncio
import os
import sys
from typing import Annotated

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field

server = MCPServer("till")
total = 0


@server.tool()
def add(amount: Annotated[int, Field(ge=1, description="coins")], note: str = "") -> str:
    """Put coins into the till."""
    global total
    total += amount
    return f"{total} coins {note}".strip()


@server.tool(name="count-coins")
def count() -> int:
    """Count the coins."""
    return total


@server.tool()
def refuse() -> str:
    """Always fail."""
    raise ToolError("the till is locked")


@server.tool(description="Tell all. " * 100)
def recite(characters: int, fail: bool = False) -> str:
    if fail:
        raise ToolError("x" * characters)
    return "x" * characters


@server.tool()
async def wait() -> str:
    """Wait for ever."""
    await asyncio.sleep(3_600)
    return ""


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def pid() -> str:
    """The server's process."""
    return str(os.getpid())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run()
