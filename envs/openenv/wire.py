"""What OpenEnv 0.10 says on the wire, as far as a served world says it: actions in, observations out, errors by code.

Promises: an action is what its published schema says, and nothing else is one; whatever is refused carries OpenEnv's own code.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from troupe.envs.base import SPLITS

VERSION = "1.0.0"
"""Of the HTTP API, as OpenEnv's own servers name it."""

EXTENSION = "x-troupe"
"""Key of the action schema under which a served world tells what OpenEnv has no place for: its system prompt, its turns, its
tools. JSON schema lets readers skip what they do not know."""

INVALID_JSON = "INVALID_JSON"
UNKNOWN_TYPE = "UNKNOWN_TYPE"
VALIDATION_ERROR = "VALIDATION_ERROR"
EXECUTION_ERROR = "EXECUTION_ERROR"
CAPACITY_REACHED = "CAPACITY_REACHED"
FACTORY_ERROR = "FACTORY_ERROR"
SESSION_ERROR = "SESSION_ERROR"

PARSE_ERROR = -32700
INVALID_REQUEST = -32600
NO_METHOD = -32601
INVALID_PARAMS = -32602
INTERNAL_ERROR = -32603
SERVER_ERROR = -32000
"""Error codes of JSON-RPC 2.0."""

_LONGEST_ID = 255


class _Action(BaseModel):
    model_config = ConfigDict(extra="forbid")

    metadata: dict[str, Any] = Field(default_factory=dict, description="not read")


class TextAction(_Action):
    """The agent's message."""

    message: str = Field(description="what the agent says; a <think> block is left out")


class ToolAction(_Action):
    """A call of a tool, the agent's answer, or the end."""

    type: Literal["call_tool", "list_tools", "message", "end"] = Field(
        default="call_tool",
        description="call_tool: tool_name with arguments. list_tools: which there are now. message: the agent's answer, "
        "without a call. end: nothing more will be done; the world gives its verdict",
    )
    tool_name: str = Field(default="", description="of call_tool")
    arguments: dict[str, Any] = Field(default_factory=dict, description="of call_tool")
    message: str = Field(default="", description="of message")

    @model_validator(mode="before")
    @classmethod
    def _by_what_it_has(cls, data: Any) -> Any:
        if isinstance(data, dict) and "type" not in data and "message" in data and "tool_name" not in data:
            return {**data, "type": "message"}
        return data

    @model_validator(mode="after")
    def _names_a_tool(self) -> ToolAction:
        if self.type == "call_tool" and not self.tool_name:
            raise ValueError("call_tool needs a tool_name")
        return self


class Reset(BaseModel):
    """What a reset may ask for. Whatever else a client sends is not read, as OpenEnv does not read it."""

    model_config = ConfigDict(extra="ignore")

    seed: int | None = Field(default=None, ge=0, description="the chance of the episode; without index also its number")
    index: int | None = Field(default=None, ge=0, description="number of the task in its split")
    split: Literal["train", "heldout"] = Field(default="train", description=f"one of {', '.join(SPLITS)}")
    episode_id: str | None = Field(default=None, max_length=_LONGEST_ID, description="a name of the client's own")
    max_turns: int | None = Field(default=None, ge=1, description="steps of the episode (default: as the world has it)")


class HttpStep(BaseModel):
    """The body of POST /step, which is the first step of an episode that nobody sees again."""

    model_config = ConfigDict(extra="ignore")

    action: dict[str, Any] = Field(description="see the action schema at /schema")


class ActionError(BaseModel):
    """Why the world could not do what the agent wanted. The episode goes on."""

    error_type: Literal["invalid_action", "tool_not_found", "invalid_args", "execution_error"]
    message: str


class Observation(BaseModel):
    """What came back."""

    text: str = Field(description="what the agent is told")
    parts: dict[str, float] = Field(default_factory=dict, description="named parts of the reward")
    success: bool | None = Field(default=None, description="the world's verdict; null while it has none")
    truncated: bool = Field(default=False, description="the episode is over because its turns or its time are used up")
    state_key: str = Field(default="", description="names the state that the next action is taken from, where states recur")
    seed: int = Field(description="of the task: reset with it, and with the split, begins the same episode again")
    split: str = Field(description="of the task")
    error: ActionError | None = Field(default=None, description="why the action could not be done")
    done: bool = Field(default=False, description="the episode is over")
    reward: float | None = Field(default=None, description="of this step")
    metadata: dict[str, Any] = Field(default_factory=dict, description="of a reset: the task, and what the agent is told first")


class ToolObservation(Observation):
    """What came back; the fields below only after call_tool and list_tools."""

    tool_name: str = Field(default="", description="that was called")
    result: Any = Field(default=None, description="what the tool returned, as text")
    tools: list[dict[str, Any]] = Field(default_factory=list, description="name, description and input_schema of each tool")


class State(BaseModel):
    """Where the episode stands."""

    model_config = ConfigDict(extra="allow")

    episode_id: str | None = None
    step_count: int = 0
    task_id: str | None = None
    split: str | None = None
    seed: int | None = None
    reward: float = Field(default=0.0, description="the sum so far")
    done: bool = False
    success: bool | None = None
    state_key: str = ""


class Metadata(BaseModel):
    """What GET /metadata says."""

    name: str
    description: str
    version: str


class Message(BaseModel):
    """A frame of the WebSocket /ws."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["reset", "step", "state", "close", "mcp"]
    data: dict[str, Any] = Field(default_factory=dict)


class Rpc(BaseModel):
    """A JSON-RPC 2.0 request."""

    model_config = ConfigDict(extra="forbid")

    jsonrpc: Literal["2.0"]
    method: str
    params: dict[str, Any] = Field(default_factory=dict)
    id: Annotated[str | int | None, Field(union_mode="left_to_right")] = None


class Refused(Exception):
    """What a client is told with a code instead of an answer. more: further fields of it."""

    def __init__(self, code: str, message: str, **more: Any) -> None:
        super().__init__(message)
        self.code, self.message, self.more = code, message, more

    @property
    def body(self) -> dict[str, Any]:
        """The data of an error frame."""
        return {"message": self.message, "code": self.code, **self.more}


def malformed(error: ValidationError) -> Refused:
    """As OpenEnv tells it, with the first reason in its message."""
    found = error.errors(include_url=False, include_context=False, include_input=False)
    place = ".".join(map(str, found[0]["loc"]))
    reason = f"{place}: {found[0]['msg']}" if place else found[0]["msg"]
    return Refused(VALIDATION_ERROR, f"Invalid message: {reason}", errors=[{**one, "loc": list(one["loc"])} for one in found])
