"""Typed errors: each names the thing, the reason and the fix, and keeps its type across an actor boundary.

Promises:
- every error that Troupe raises on purpose is a `TroupeError`; the command line prints it as one line, without a traceback;
- `pack` and `unpack` carry an error over a wire: the same class comes out, or `RemoteError` for a class the
  receiver does not know;
- `FailureKind` is decided where the failure happens, because only there is it known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

FailureKind = Literal["infrastructure", "data"]
"""`infrastructure`: the same task may succeed elsewhere, so retry. `data`: this task always fails, so report it."""


class TroupeError(Exception):
    """Base of all deliberate errors. `exit_code` is what the command line exits with."""

    exit_code = 1


class ConfigError(TroupeError):
    """A recipe, flag or run folder that cannot be used as it is."""

    exit_code = 2


class ProtocolError(TroupeError):
    """Bytes that are not a message of this protocol."""


class UnknownVersion(ProtocolError):
    """A message of a protocol version that this side does not speak."""


class UnknownMessage(ProtocolError):
    """A message type that this side does not know."""


class MalformedMessage(ProtocolError):
    """A known message type with missing, extra or wrongly typed fields."""


class InvalidAction(TroupeError):
    """A world could not read the agent's action. The agent is told so and the episode goes on."""


class UnknownTool(TroupeError):
    """The agent called a tool that the world does not have. It is told so and the episode goes on."""


class BadArguments(TroupeError):
    """The agent called a tool with arguments that it does not take. It is told so and the episode goes on."""


class EpisodeError(TroupeError):
    """An episode broke. It is retried or excluded, never rewarded (law 6)."""

    kind: FailureKind = "infrastructure"


class EnvironmentFailed(EpisodeError):
    """A world raised, hung or answered nonsense."""


class TaskFailed(EpisodeError):
    """This task cannot be run anywhere; retrying elsewhere would not help."""

    kind: FailureKind = "data"


class NotReplayed(EpisodeError):
    """A world, or an agent's program, did not do again what it had done before from the same task with the same actions."""


class ActorLost(TroupeError):
    """The actor that was called died or cannot be reached; the call may or may not have been executed."""


class Unhealthy(TroupeError):
    """A run stopped itself, because its recipe says so for what its health shows."""


class TimedOut(TroupeError):
    """Another party did not answer in time; the message names it."""


class NotReady(TroupeError):
    """The actor lives but cannot take this work yet (for example, its weights are not proved)."""


class Overloaded(TroupeError):
    """A bounded queue is full; try again later."""


class StoreError(TroupeError):
    """A trajectory store that cannot be read or written."""


class CheckpointError(TroupeError):
    """A checkpoint that is missing, incomplete or of another model."""


class RemoteError(TroupeError):
    """An unexpected exception inside another actor; the message names the actor and the original type."""


@dataclass(slots=True)
class PackedError:
    """An error as data. `type` is the class's name, `message` its text."""

    type: str
    message: str


def _classes() -> dict[str, type[TroupeError]]:
    found: dict[str, type[TroupeError]] = {}
    pending: list[type[TroupeError]] = [TroupeError]
    while pending:
        cls = pending.pop()
        found[cls.__name__] = cls
        pending.extend(cls.__subclasses__())
    return found


def pack(error: BaseException, *, where: str = "") -> PackedError:
    """Makes data of `error`. An exception that is not a `TroupeError` becomes a `RemoteError` naming `where`."""
    if isinstance(error, TroupeError):
        return PackedError(type(error).__name__, str(error))
    text = f"{where or 'a remote actor'}: {type(error).__name__}: {error}"
    return PackedError(RemoteError.__name__, text)


def unpack(packed: PackedError) -> TroupeError:
    """The inverse of `pack`."""
    return _classes().get(packed.type, RemoteError)(packed.message)


def nearest(word: str, known: Any) -> str:
    """`" Did you mean 'x'?"` for the closest of `known`, or an empty string. For error messages."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" Did you mean '{close[0]}'?" if close else ""
