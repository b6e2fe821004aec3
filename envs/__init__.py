"""Where agents act: the environment interface, the built-in worlds and their scripted players. No Ray, no torch."""

from troupe.envs.base import InvalidAction, Task, TextWorld, Turn

__all__ = ["InvalidAction", "Task", "TextWorld", "Turn"]
