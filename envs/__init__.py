"""Where agents act: the environment interface, tools, the built-in worlds and their scripted players. No Ray, no torch."""

from troupe.envs.base import InvalidAction, Task, TextWorld, ToolCall, Turn
from troupe.envs.tools import Rewards, ToolWorld, tool

__all__ = ["InvalidAction", "Rewards", "Task", "TextWorld", "ToolCall", "ToolWorld", "Turn", "tool"]
