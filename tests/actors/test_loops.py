"""How an agent and a world take turns: text, tools, and anybody's harness; and what happens at each limit."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from troupe.actors import loops
from troupe.actors.loops.base import LimitReached, Loop, Outcome, Stage
from troupe.actors.loops.program import ChatClient, Episode, ProgramFailed, program
from troupe.actors.loops.react import CUT, react
from troupe.actors.loops.text import text
from troupe.actors.recorder import Recorder
from troupe.actors.rendering import Rendering
from troupe.actors.settings import AgentSettings
from troupe.envs.base import Task, TextWorld, Turn
from troupe.envs.drive import Driver
from troupe.envs.tools import Rewards, ToolWorld, tool
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction, TimedOut
from troupe.protocol.messages import Generate, Generated, Limits, RunEpisode, Sampling
from troupe.protocol.trajectory import POLICY, branches_of

TASK = Task("train/7", "desk", "train", 7)


class Desk(ToolWorld):
    """Find out what is in stock and say how many."""

    def reset(self, task: Task) -> str:
        self.log: list[str] = []
        self.hurry = asyncio.Event()
        return "How many?"

    @tool
    async def slow(self, item: str) -> str:
        """Waits for the quick one."""
        await self.hurry.wait()
        self.log.append(f"slow {item}")
        return f"3 {item}"

    @tool
    async def quick(self, item: str) -> str:
        """Answers first."""
        self.log.append(f"quick {item}")
        self.hurry.set()
        return f"4 {item}"

    @tool
    def nothing(self) -> None:
        """Answers nothing."""

    @tool
    def refuse(self) -> str:
        """Refuses."""
        raise InvalidAction("closed on Sundays")

    @tool
    def explode(self) -> str:
        """Breaks the world."""
        raise RuntimeError("boom")

    @tool
    async def submit(self) -> Turn:
        """Ends the episode."""
        return Turn("done", reward=1.0, done=True, success=True)

    @tool
    async def hang(self) -> str:
        """Never returns."""
        await asyncio.Event().wait()
        return ""

    @tool
    def award(self) -> Turn:
        """Pays for the step."""
        return Turn("well done", reward=0.25)

    def verify(self) -> Rewards:
        return Rewards(outcome=float(self.answer == "7"), brief=0.5)


class Counter(TextWorld):
    """Counts. `fail_at`: the step that breaks; `hang_at`: the one that never returns; `win_at`: success, but goes on."""

    def __init__(self, fail_at: int = 0, hang_at: int = 0, win_at: int = 0, turns: int = 9) -> None:
        self.fail_at, self.hang_at, self.win_at, self.turns = fail_at, hang_at, win_at, turns

    def reset(self, task: Task) -> str:
        self.n = 0
        return "go"

    async def step(self, text: str) -> Turn:
        self.n += 1
        if self.n == self.fail_at:
            raise RuntimeError("broken")
        if self.n == self.hang_at:
            await asyncio.Event().wait()
        if text == "nonsense":
            raise InvalidAction("what?")
        won = self.n == self.win_at
        return Turn(f"{self.n}", reward=float(won), done=self.n == self.turns, success=True if won else None)


@dataclass
class Speaker:
    """An engine that says the given texts, one a turn, then ends its turns at once. "…" at the end: cut by the limit."""

    rendering: Rendering
    lines: list[str]
    prompts: list[str] = field(default_factory=list)

    async def generate(self, request: Generate) -> Generated:
        line = self.lines[len(self.prompts)] if len(self.prompts) < len(self.lines) else ""
        self.prompts.append(self.rendering.decode(request.prompt.tolist()))
        ids = self.rendering.encode_marks(line.removesuffix("…"))
        finish: Any = "length" if line.endswith("…") or len(ids) >= request.sampling.max_tokens else "stop"
        ids = ids[: request.sampling.max_tokens] + ([self.rendering.stop_ids[0]] if finish == "stop" else [])
        return Generated(np.asarray(ids, np.int32), np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), finish)


@dataclass
class Played:
    outcome: Outcome
    engine: Speaker
    record: Recorder
    world: Any

    @property
    def told(self) -> str:
        """All that the agent saw."""
        return self.engine.prompts[-1]


async def play(loop: Loop, world: TextWorld, rendering: Rendering, lines: list[str], **limits: Any) -> Played:
    sampling = Sampling(max_tokens=limits.pop("max_tokens", 400))
    outcome = limits.pop("outcome", None) or Outcome()
    allowed = Limits(**{"max_episode_tokens": 20_000, **limits})
    engine = Speaker(rendering, lines)
    message = RunEpisode("e", 0, 0, 0, "train", 1, Task("t", "desk", "train", 7), sampling, allowed, seed=3)
    record = Recorder(message, rendering, engine)
    driver = Driver(world, timeout_s=allowed.env_step_s)
    try:
        await loop(Stage(driver, world.system, TASK, record, allowed, outcome))
    finally:
        await driver.close()
    return Played(outcome, engine, record, world)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# -- react -----------------------------------------------------------------------------------------------------------


async def test_calls_of_one_turn_run_at_once_and_are_answered_in_the_order_of_the_calls(renderings):
    lines = [f"<think>both</think>{call('slow', item='nails')}\n{call('quick', item='nuts')}", "7"]
    played = await play(react, Desk(), renderings["tiny"], lines)
    assert played.world.log == ["quick nuts", "slow nails"]  # the second finished first
    assert played.told.index("3 nails") < played.told.index("4 nuts")
    first, last = played.outcome.steps
    assert [(c.id, c.name, c.status) for c in first.calls] == [("call_0_0", "slow", "ok"), ("call_0_1", "quick", "ok")]
    assert json.loads(first.calls[0].arguments) == {"item": "nails"}
    assert (played.outcome.stop, played.outcome.success, played.outcome.reward) == ("terminated", True, 1.5)
    assert last.parts == {"outcome": 1.0, "brief": 0.5} and last.terminated and not last.truncated


@pytest.mark.parametrize(
    ("said", "status", "told"),
    [
        ('<tool_call>{"name": "quick", "arguments": {"item": </tool_call>', "malformed", "not valid JSON"),
        ('<tool_call>["quick"]</tool_call>', "malformed", "not an object"),
        ('<tool_call>{"name": "quick", "arguments": ["nuts"]}</tool_call>', "malformed", "a list, not an object"),
        ('<tool_call>{"name": "quick", "arguments": "nuts"}</tool_call>', "malformed", "not valid JSON"),
        ('<tool_call>{"arguments": {}}</tool_call>', "malformed", "does not name a tool"),
        ('<tool_call>{"name": "quick", "arguments": {"item": "nuts"}}', "malformed", "has no end"),
        ('<tool_call>{"name": "quick", "argum…', "truncated", CUT),
        (call("quik", item="nuts"), "unknown_tool", "quick"),
        (call("quick"), "bad_arguments", "item"),
        (call("quick", item={"a": 1}), "bad_arguments", "item"),
        (call("refuse"), "failed", "closed on Sundays"),
    ],
)
async def test_a_call_that_cannot_be_answered_is_told_why_and_the_episode_goes_on(renderings, said, status, told):
    played = await play(react, Desk(), renderings["tiny"], [said, "7"])
    (record,) = played.outcome.steps[0].calls
    assert record.status == status
    assert told in played.told.rpartition("<|im_start|>tool")[2]
    assert played.outcome.stop == "terminated" and played.outcome.success


async def test_a_broken_call_beside_a_good_one_does_not_stop_the_good_one(renderings):
    played = await play(react, Desk(), renderings["tiny"], ["<tool_call>{</tool_call>" + call("quick", item="nuts"), "7"])
    assert [c.status for c in played.outcome.steps[0].calls] == ["malformed", "ok"]
    assert played.world.log == ["quick nuts"]


async def test_a_tool_that_says_nothing_is_an_empty_observation(renderings):
    played = await play(react, Desk(), renderings["tiny"], [call("nothing"), "7"])
    assert "<|im_start|>tool\n<|im_end|>" in played.told and played.outcome.success


async def test_a_tool_that_breaks_breaks_the_episode(renderings):
    with pytest.raises(EnvironmentFailed, match="boom"):
        await play(react, Desk(), renderings["tiny"], [call("explode"), "7"])


async def test_a_turn_that_only_ends_itself_is_an_empty_answer_of_one_token(renderings):
    played = await play(react, Desk(), renderings["tiny"], [""])
    assert played.outcome.stop == "terminated" and played.outcome.success is False
    assert (played.record.nodes[-1].provenance == POLICY).sum() == 1


async def test_an_answer_that_was_cut_is_no_answer(renderings):
    played = await play(react, Desk(), renderings["tiny"], ["it is…", "7"])
    assert CUT in played.told and played.outcome.success
    assert [step.finish for step in played.outcome.steps] == ["length", "stop"]


async def test_rewards_of_tools_belong_to_the_step_that_called_them(renderings):
    played = await play(react, Desk(), renderings["tiny"], [call("award") + call("award"), "7"])
    assert [step.reward for step in played.outcome.steps] == [0.5, 1.5]


@pytest.mark.parametrize("other", ["hang", "explode"])
async def test_a_tool_that_ends_the_episode_ends_the_calls_beside_it_too(renderings, other):
    played = await play(react, Desk(), renderings["tiny"], [call("submit") + call(other)], env_step_s=5.0)
    assert (played.outcome.stop, played.outcome.success, played.outcome.reward) == ("terminated", True, 1.0)
    assert [c.status for c in played.outcome.steps[0].calls] == ["ok", "refused"]


async def test_what_a_tool_has_earned_stays_when_the_one_beside_it_hangs(renderings):
    outcome = Outcome()
    with pytest.raises(TimedOut, match=r"Desk.hang"):
        await play(react, Desk(), renderings["tiny"], [call("award") + call("hang")], env_step_s=0.3, outcome=outcome)
    assert outcome.reward == 0.25


@pytest.mark.parametrize("name", ["tiny", "qwen3"])
@pytest.mark.parametrize("inside", ["[" * 1500, "1" * 5000])
async def test_json_that_no_parser_takes_is_a_malformed_call_not_a_broken_episode(renderings, name, inside):
    said = '<tool_call>\n{"name": "quick", "arguments": {"item": ' + inside + "}}\n</tool_call>"
    played = await play(react, Desk(), renderings[name], [said, "7"], max_tokens=9_000, max_episode_tokens=90_000)
    assert [c.status for c in played.outcome.steps[0].calls] == ["malformed"] and played.outcome.success


# -- limits ----------------------------------------------------------------------------------------------------------


async def test_max_turns_ends_the_episode_and_the_world_gives_its_verdict(renderings):
    played = await play(react, Desk(), renderings["tiny"], [call("nothing")] * 9, max_turns=3)
    assert (played.outcome.stop, len(played.outcome.steps), played.outcome.success) == ("max_turns", 3, False)
    last = played.outcome.steps[-1]
    assert last.truncated and not last.terminated and last.parts == {"outcome": 0.0, "brief": 0.5}


async def test_calls_beyond_the_limit_are_refused_one_by_one_and_end_the_episode(renderings):
    lines = [call("nothing"), call("nothing") * 3, "7"]
    played = await play(react, Desk(), renderings["tiny"], lines, max_tool_calls=2)
    assert [c.status for c in played.outcome.steps[1].calls] == ["ok", "refused", "refused"]
    assert played.outcome.stop == "max_tool_calls" and len(played.outcome.steps) == 2


@pytest.mark.parametrize(("limit", "stop"), [("max_episode_tokens", "max_tokens"), ("context_window", "context_window")])
async def test_the_last_turn_is_shortened_to_what_is_left_and_no_further_turn_is_begun(renderings, limit, stop):
    lines = ["some words that are known " * 3] * 50
    played = await play(text, Counter(turns=99), renderings["tiny"], lines, max_turns=99, **{limit: 150})
    assert played.outcome.stop == stop and 1 < len(played.outcome.steps) < 50
    assert sum(len(node.tokens) for node in played.record.nodes) <= 150
    assert len(played.engine.prompts) == len(played.outcome.steps) == len(played.record.nodes) // 2


async def test_an_action_cut_by_the_limit_of_a_turn_goes_to_the_world_and_is_recorded_as_cut(renderings):
    played = await play(text, Counter(turns=2), renderings["tiny"], ["some words that are known", "x"], max_tokens=4)
    assert [step.finish for step in played.outcome.steps] == ["length", "stop"]
    assert played.outcome.steps[0].action == "some words that are" and not played.outcome.steps[0].invalid


async def test_a_success_before_a_limit_is_kept(renderings):
    played = await play(text, Counter(win_at=2), renderings["tiny"], ["x"] * 9, max_turns=4)
    assert (played.outcome.stop, played.outcome.success, played.outcome.reward) == ("max_turns", True, 1.0)


async def test_no_success_before_a_limit_is_no_success(renderings):
    played = await play(text, Counter(), renderings["tiny"], ["x"] * 9, max_turns=4)
    assert (played.outcome.stop, played.outcome.success, played.outcome.reward) == ("max_turns", False, 0.0)


class Hourglass(TextWorld):
    """Ends by a limit of its own."""

    def reset(self, task: Task) -> str:
        return "go"

    def step(self, text: str) -> Turn:
        return Turn("time is up", reward=0.5, done=True, success=text == "7", truncated=True)


@pytest.mark.parametrize("said", ["7", "8"])
async def test_an_episode_that_the_world_truncates_is_truncated_and_keeps_the_worlds_verdict(renderings, said):
    played = await play(text, Hourglass(), renderings["tiny"], [said])
    (step,) = played.outcome.steps
    assert (step.terminated, step.truncated, played.outcome.stop) == (False, True, "max_turns")
    assert (played.outcome.success, played.outcome.reward) == (said == "7", 0.5)


async def test_an_invalid_action_costs_a_turn_and_is_told(renderings):
    played = await play(text, Counter(turns=2), renderings["tiny"], ["nonsense", "x"])
    assert [step.invalid for step in played.outcome.steps] == [True, False]
    assert "Invalid action: what?" in played.told


async def test_a_step_that_never_returns_is_given_up_by_name(renderings):
    with pytest.raises(TimedOut, match=r"Counter.step .*has not returned for 0.2 s"):
        await play(text, Counter(hang_at=2), renderings["tiny"], ["x"] * 9, env_step_s=0.2)


# -- anybody's harness -----------------------------------------------------------------------------------------------


async def langgraph(client: ChatClient, episode: Episode) -> str:
    """A LangGraph agent as its users write it: nothing in it knows of Troupe but the client's address."""

    def bound(name: str) -> Any:
        async def run(**arguments: Any) -> str:
            return await episode.call(name, arguments)

        return run

    tools = [
        StructuredTool(
            name=spec["name"], description=spec["description"], args_schema=spec["parameters"], coroutine=bound(spec["name"])
        )
        for spec in episode.tools
    ]
    model = ChatOpenAI(model=client.model, base_url=client.base_url, api_key=client.api_key, http_async_client=client.http)
    speaks = model.bind_tools(tools)

    async def agent(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await speaks.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("agent", agent)
    graph.add_node("tools", ToolNode(tools))
    graph.add_edge(START, "agent")
    graph.add_conditional_edges("agent", tools_condition)
    graph.add_edge("tools", "agent")
    state = await graph.compile().ainvoke({"messages": [("user", episode.observation)]})
    return str(state["messages"][-1].content)


async def chatting(client: ChatClient, episode: Episode) -> str:
    """OpenAI's client, whole and streamed."""
    messages: list[Any] = [{"role": "user", "content": episode.observation}]
    first = await client.openai.chat.completions.create(model="any", messages=messages)
    messages += [first.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "and?"}]
    said = ""
    async for chunk in await client.openai.chat.completions.create(model="any", messages=messages, stream=True):
        said += chunk.choices[0].delta.content or ""
    return said


async def debating(client: ChatClient, episode: Episode) -> str:
    """Two agents, one of whom compacts its history."""
    critic = client.agent("critic")
    talk: list[Any] = [{"role": "user", "content": episode.observation}]
    draft = await client.complete(talk)
    objection = await critic.complete([{"role": "user", "content": f"criticise: {draft.text}"}])
    talk = [{"role": "user", "content": f"in short: {objection.text}"}]
    return (await client.complete(talk)).text


async def endless(client: ChatClient, episode: Episode) -> str:
    talk: list[Any] = [{"role": "user", "content": "go"}]
    while True:
        answer = await client.openai.chat.completions.create(model="any", messages=talk)
        talk += [answer.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "more"}]


async def stumbling(client: ChatClient, episode: Episode) -> str:
    await client.complete([{"role": "user", "content": "go"}])
    raise KeyError("typo")


async def silent(client: ChatClient, episode: Episode) -> str:
    return "7"


async def swallowing(client: ChatClient, episode: Episode) -> None:
    await client.complete([{"role": "user", "content": "go"}])
    with contextlib.suppress(Exception):
        await episode.call("explode", {})


async def deaf(client: ChatClient, episode: Episode) -> str:
    with contextlib.suppress(Exception):
        await client.openai.chat.completions.create(model="any", messages=[{"role": "user", "content": "go"}])
    return "7"


async def compacting(client: ChatClient, episode: Episode) -> str:
    talk: list[Any] = [{"role": "user", "content": "some words " * 30}]
    talk += [(await client.complete(talk)).message, {"role": "user", "content": "more words " * 30}]
    try:
        await client.complete(talk)
    except LimitReached:
        return (await client.complete([{"role": "user", "content": "in short"}])).text
    return ""


async def greedy(client: ChatClient, episode: Episode) -> str:
    await client.complete([{"role": "user", "content": "go"}])
    return "".join([await episode.call("quick", {"item": "nuts"}) for _ in range(9)])


async def immortal(client: ChatClient, episode: Episode) -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(100)


async def exiting(client: ChatClient, episode: Episode) -> None:
    raise SystemExit(3)


async def cancelling(client: ChatClient, episode: Episode) -> None:
    raise asyncio.CancelledError


async def clumsy(client: ChatClient, episode: Episode) -> None:
    await episode.step("nonsense")


def here(function: Any) -> Loop:
    return program(f"{Path(__file__)}:{function.__name__}")


async def test_a_langgraph_agent_is_recorded_token_by_token_as_one_branch(renderings):
    rendering = renderings["tiny"]
    lines = [f"{call('slow', item='nails')}\n{call('quick', item='nuts')}", "7"]
    played = await play(here(langgraph), Desk(), rendering, lines)
    assert (played.outcome.stop, played.outcome.success) == ("terminated", True)
    assert [c.status for step in played.outcome.steps for c in step.calls] == ["ok", "ok"]
    (branch,) = branches_of(played.record.nodes)
    ids = np.concatenate([played.record.nodes[i].tokens for i in branch]).tolist()
    assert rendering.decode(ids).startswith(played.engine.prompts[-1])  # what was fed last, and what it answered
    assert "3 nails" in played.told and "4 nuts" in played.told and '"name": "slow"' in played.told


async def test_openais_client_and_its_streams_are_answered_by_the_policy(renderings):
    played = await play(here(chatting), Desk(), renderings["tiny"], ["some words", "7"])
    assert played.outcome.success and len(played.outcome.steps) == 2
    assert "some words<|im_end|>\n<|im_start|>user\nand?" in played.told


async def test_several_agents_and_compacted_histories_are_branches_of_one_episode(renderings):
    played = await play(here(debating), Desk(), renderings["tiny"], ["some", "words", "7"])
    assert len(list(branches_of(played.record.nodes))) == 3 and played.outcome.success
    assert [node.agent for node in played.record.nodes] == ["main"] * 2 + ["critic"] * 2 + ["main"] * 2


async def test_a_program_that_goes_on_for_ever_is_ended_by_the_limit_of_turns(renderings):
    played = await play(here(endless), Desk(), renderings["tiny"], ["x"] * 99, max_turns=5)
    assert (played.outcome.stop, len(played.outcome.steps)) == ("max_turns", 5)


async def test_a_program_that_raises_breaks_its_episode_by_name(renderings):
    with pytest.raises(ProgramFailed, match=r"test_loops.py:stumbling' raised KeyError: 'typo'"):
        await play(here(stumbling), Desk(), renderings["tiny"], ["x"])


@pytest.mark.parametrize(
    ("harness", "why"), [(exiting, "SystemExit"), (cancelling, "CancelledError"), (clumsy, "InvalidAction")]
)
async def test_however_a_program_fails_its_episode_breaks_by_name(renderings, harness, why):
    with pytest.raises(ProgramFailed, match=f"{harness.__name__}' raised {why}"):
        await play(here(harness), Counter(), renderings["tiny"], ["x"])


async def test_a_failure_of_the_world_that_a_program_swallows_still_breaks_the_episode(renderings):
    with pytest.raises(EnvironmentFailed, match="boom"):
        await play(here(swallowing), Desk(), renderings["tiny"], ["x"])


async def test_a_policy_that_did_not_answer_breaks_the_episode_even_if_the_program_swallows_it(renderings, monkeypatch):
    async def down(self: Speaker, request: Generate) -> Generated:
        raise TimedOut("generator-0.generate has not answered for 120 s")

    monkeypatch.setattr(Speaker, "generate", down)
    with pytest.raises(TimedOut, match="generator-0"):
        await play(here(deaf), Desk(), renderings["tiny"], [])


async def test_an_answer_of_a_program_is_judged_even_if_its_agent_said_nothing(renderings):
    played = await play(here(silent), Desk(), renderings["tiny"], [])
    assert played.outcome.success and not played.record.nodes  # the pool calls this broken: there is nothing to train


async def test_a_program_that_compacts_its_history_at_the_context_window_goes_on(renderings):
    played = await play(here(compacting), Desk(), renderings["tiny"], ["x", "7"], context_window=130)
    assert (played.outcome.stop, played.outcome.success) == ("terminated", True)


async def test_calls_that_a_program_makes_count_towards_the_limit(renderings):
    played = await play(here(greedy), Desk(), renderings["tiny"], ["x"], max_tool_calls=4)
    assert [c.status for c in played.outcome.steps[0].calls] == ["ok"] * 4 + ["refused"] * 5


async def test_a_program_that_ignores_its_end_is_ended(renderings):
    playing = asyncio.ensure_future(play(here(immortal), Desk(), renderings["tiny"], []))
    await asyncio.sleep(0.1)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


@pytest.mark.parametrize("asked", [{"max_tokens": "7"}, {"messages": 5}, {"messages": [{"role": "king", "content": "x"}]}])
async def test_a_request_that_means_nothing_is_a_400_and_no_turn(renderings, asked):
    statuses: list[int] = []

    async def asking(client: ChatClient, episode: Episode) -> str:
        body = {"messages": [{"role": "user", "content": "x"}], **asked}
        statuses.append((await client.http.post(f"{client.base_url}/chat/completions", json=body)).status_code)
        return (await client.complete([{"role": "user", "content": "go"}])).text

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["troupe.actors.loops.program"], "_load", lambda path: asking)
        played = await play(program("here:asking"), Desk(), renderings["tiny"], ["7"])
    assert statuses == [400] and len(played.outcome.steps) == 1 and played.outcome.success


# -- choosing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "world", "problem"),
    [
        (AgentSettings(loop="react"), Counter, "has no tools"),
        (AgentSettings(loop="program"), Counter, "agent.program = 'module:function'"),
        (AgentSettings(loop="text", program="x:y"), Counter, "set it to 'program'"),
        (AgentSettings(program="nocolon"), Counter, "write module:function"),
        (AgentSettings(program="no/such.py:f"), Counter, "no file no/such.py"),
        (AgentSettings(program="no_such_module:f"), Counter, "cannot be imported"),
        (AgentSettings(program="json:dumps"), Counter, "not an async function"),
        (AgentSettings(program="json:dump_it"), Counter, "there is no 'dump_it' in 'json'. Did you mean"),
    ],
)
def test_a_loop_that_does_not_fit_is_refused_with_what_to_do(settings, world, problem):
    with pytest.raises(ConfigError, match=problem):
        loops.choose(settings, world)


def test_a_world_with_tools_gets_the_tool_loop_and_any_other_the_plain_one():
    assert loops.choose(AgentSettings(), Desk) is react and loops.choose(AgentSettings(), Counter) is text
