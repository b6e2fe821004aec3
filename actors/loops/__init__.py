"""Agent loops: how an agent and a world take turns. They see messages; only the recorder sees tokens."""

from __future__ import annotations

from troupe.actors.loops.base import Loop
from troupe.actors.loops.program import program
from troupe.actors.loops.react import react
from troupe.actors.loops.text import text
from troupe.actors.settings import AgentSettings
from troupe.envs.base import TextWorld
from troupe.envs.tools import ToolWorld
from troupe.protocol.errors import ConfigError

__all__ = ["Loop", "choose", "program", "react", "text"]


def choose(settings: AgentSettings, world: type[TextWorld]) -> Loop:
    """The loop that the recipe asks for. Raises ConfigError if it and the world do not fit each other."""
    if settings.program and settings.loop not in ("auto", "program"):
        raise ConfigError(f"agent.program is set, but agent.loop is '{settings.loop}': set it to 'program'")
    if settings.loop == "program" or settings.program:
        if not settings.program:
            raise ConfigError("agent.loop is 'program': say which with agent.program = 'module:function'")
        return program(settings.program)
    has_tools = issubclass(world, ToolWorld)
    if settings.loop == "react" and not has_tools:
        raise ConfigError(f"agent.loop is 'react', but the world '{world.__name__}' has no tools: it is no ToolWorld")
    return react if settings.loop == "react" or (settings.loop == "auto" and has_tools) else text
