"""Serve a customer by policy, in the manner of τ-bench (arXiv:2406.12045): talk, look things up, change records, or refuse.

A message without a tool call is said to the customer, who answers. The conversation ends when the customer says goodbye, or
when the agent transfers them to a human. It is a success if, at its end,

- the records are what they should be: changed by what was asked for and is allowed, and by nothing else;
- the customer was told what they asked to know, and no choice of answers (`telling`); and nothing that is somebody else's;
- what policy forbids was refused, with the reason, and no choice of reasons (`refusing`);
- what was told, and why it was refused, was looked up: a guess that is right is worth nothing.

Promises:
- a wish of one kind about one thing (a refund of the blue jacket) is trained on or held out (`requests`);
- the tools do what they are told, if it can be done at all: to keep to the policy is the agent's part;
- a model that plays the customer and fails breaks the episode, it is never the agent's fault.
"""

from __future__ import annotations

import copy
import inspect
import json
import random
from collections.abc import Awaitable, Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from troupe.envs.base import Task, ToolCall, Turn
from troupe.envs.desk import records as desk
from troupe.envs.desk.customer import Customer, Modelled, Reply, Scripted
from troupe.envs.desk.player import Player
from troupe.envs.desk.refusing import refused
from troupe.envs.desk.requests import POLICY, Request, requests
from troupe.envs.desk.telling import said_in, told
from troupe.envs.endpoint import Endpoint
from troupe.envs.tools import Rewards, ToolWorld, tool, turn_of
from troupe.envs.verifiers.state import StateMatch
from troupe.protocol.errors import InvalidAction

_READ = 4_000  # characters of a message in which the customer looks for what they want to know
_DIFFERENCES = 5  # that are told at the end
_OTHERS = 2  # other customers

Order = Annotated[str, Field(description="an order's number")]
Number = Annotated[str, Field(description="of an order or a reservation")]


class Desk(ToolWorld):
    """Options:

    requests: most wishes of a customer, 1 to 3. forbidden: share of the wishes that policy does not allow, 0 to 1.
    user_url, user_model: a language model that plays the customer, behind OpenAI's chat completions; empty: a script does.
    user_timeout_s: for one reply of it. user_temperature: of its sampling; 0: greedy.
    """

    name: ClassVar[str] = "desk"
    max_turns: ClassVar[int] = 24
    inline: ClassVar[bool] = True
    system: ClassVar[str] = POLICY

    def __init__(
        self,
        requests: int = 2,
        forbidden: float = 0.3,
        user_url: str = "",
        user_model: str = "",
        user_timeout_s: float = 20.0,
        user_temperature: float = 0.0,
    ) -> None:
        if not 1 <= requests <= 3:
            raise ValueError(f"requests is {requests}; it is 1 to 3")
        if not 0 <= forbidden <= 1:
            raise ValueError(f"forbidden is {forbidden}; it is 0 to 1")
        if bool(user_url) != bool(user_model):
            raise ValueError("user_url and user_model go together: give both or none")
        if not user_timeout_s > 0:
            raise ValueError(f"user_timeout_s is {user_timeout_s}; it is above 0")
        self.requests, self.forbidden, self.user_timeout_s = requests, forbidden, user_timeout_s
        how: dict[str, Any] = {"timeout_s": user_timeout_s, "temperature": user_temperature}
        self.model = Endpoint(user_model, user_url, who="the customer,", **how) if user_url else None

    def reset(self, task: Task) -> str | Awaitable[str]:
        maker = desk.Maker(self.rng)
        self.customer = maker.customer()
        number = self.rng.randint(1, self.requests)
        self.wishes = requests(maker, self.customer, number, self.forbidden, task.split)
        _furnish(maker, self.customer, [wish.thing for wish in self.wishes])
        self.records = maker.records
        self.expected = _should_be(self.records, self.wishes)
        self.said: list[tuple[int | None, str]] = []  # by the agent: which wish it was about, if a script knows, and what
        self.heard: list[str] = []  # from the customer
        self.known: set[str] = set()  # what was looked up
        self.over = False
        self.user = self._customer(self.records["customers"][self.customer]["email"])
        self.player = Player(self)
        opening = self.user.opening()
        return self._opened(opening) if inspect.isawaitable(opening) else self._hear(Reply(opening))

    def _customer(self, email: str) -> Customer:
        if self.model is None:
            return Scripted(email, self.wishes, random.Random(self.rng.random()))
        return Modelled(email, self.wishes, self.model, self.user_timeout_s)

    async def _opened(self, opening: Awaitable[str]) -> str:
        return self._hear(Reply(await opening))

    def _hear(self, reply: Reply) -> str:
        self.heard.append(reply.text)
        self.over = reply.over
        return reply.text

    # -- talking -----------------------------------------------------------------------------------------------------

    def step(self, text: str) -> Turn | Awaitable[Turn]:
        """Says something to the customer."""
        self.said.append((self.user.current if isinstance(self.user, Scripted) else None, text[:_READ]))
        reply = self.user.answer(text)
        return self._answered(reply) if inspect.isawaitable(reply) else self._turn(reply)

    async def _answered(self, reply: Awaitable[Reply]) -> Turn:
        return self._turn(await reply)

    def _turn(self, reply: Reply) -> Turn:
        text = self._hear(reply)
        return self._end(text) if self.over else Turn(text)

    def _end(self, text: str) -> Turn:
        """The last turn. Nobody acts on it any more, so it may say what was wrong."""
        self.over = True
        verdict = turn_of(self.verify())
        verdict.text = "\n".join((text, *(f"({line})" for line in self.faults()[:_DIFFERENCES])))
        return verdict

    def verify(self) -> Rewards:
        return Rewards(outcome=self.over and not self.faults())

    def faults(self) -> list[str]:
        """What is not as it should be, a line each."""
        said = " ".join(text for _, text in self.said)
        lines = StateMatch(self.expected).differences(self.records)
        scripted = isinstance(self.user, Scripted)
        for number, wish in enumerate(self.wishes):
            here = " ".join(text for about, text in self.said if about in (None, number))
            reasons = [one.why for one in ([wish] if scripted else self.wishes) if one.why]
            if wish.why and not refused(wish.why, here, reasons):
                lines.append(f"the customer was not told no, and why, for {wish.number}: {wish.why}")
            lines += [f"not looked up: {one}" for one in wish.reads if one not in self.known]
            known = " ".join((*self.heard, wish.number, desk.TODAY.isoformat()))
            lines += [f"the customer was not told: {ways[0]}" for ways in wish.tell if not told(ways, here, known)]
            lines += [f"the customer was told what is not theirs: {text}" for text in wish.secret if said_in(text, said)]
        return lines

    def state_key(self) -> str:
        changed = StateMatch(self.expected).differences(self.records)
        return " | ".join((*self.heard, *sorted(self.known), *changed))

    # -- tools -------------------------------------------------------------------------------------------------------

    @tool
    def find_customer(self, email: str) -> dict[str, Any]:
        """Find a customer, with the numbers of their orders and reservations."""
        for key, one in self.records["customers"].items():
            if one["email"] == email.strip().lower():
                self.known.add(key)
                mine = {
                    kind: [n for n, r in self.records[kind].items() if r["customer"] == key]
                    for kind in ("orders", "reservations")
                }
                return {"customer": key, **one, **mine}
        raise InvalidAction("no customer has this e-mail address")

    @tool
    def look_up(self, number: Number) -> dict[str, Any]:
        """Look up an order or a reservation."""
        found = desk.record(self.records, number)
        self.known.add(number)
        return found

    @tool
    def stock(self, item: Annotated[str, Field(description="for example 'red cap'")]) -> dict[str, int]:
        """Count an item by size."""
        found = desk.stock(self.records, item)
        self.known.add(item)
        return found

    @tool
    def cancel(self, number: Number) -> str:
        """Cancel an order or a reservation."""
        return desk.cancel(self.records, number)

    @tool
    def refund(self, order: Order) -> str:
        """Give the money back."""
        return desk.refund(self.records, order)

    @tool
    def exchange(self, order: Order, size: str) -> str:
        """Exchange for another size."""
        if found := self.records["orders"].get(order):
            self.known.add(found["item"])  # it says so if there is none
        return desk.exchange(self.records, order, size)

    @tool
    def change_address(self, order: Order, address: str) -> str:
        """Send to another address."""
        return desk.change_address(self.records, order, address)

    @tool
    def transfer(self, reason: str) -> Turn:
        """Transfer the customer to a human, which ends the conversation."""
        self.records["transferred"] = True
        return self._end("The customer is with a human now.")

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str | ToolCall:
        return self.player.act(rng, noise)

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from (json.dumps(found.spec) for found in cls._tools.values())
        for index in range(160):
            world, task = cls(), cls.task("train", index)
            world._begin(task)
            yield str(world.reset(task))
            yield json.dumps(world.records)
            rng = random.Random(index)
            for _ in range(cls.max_turns):
                action = world.play(rng, noise=0.1)
                if isinstance(action, str):
                    turn = world.step(action)
                    assert isinstance(turn, Turn)
                    yield from (action, turn.text)
                else:
                    yield f'<tool_call>\n{{"name": "{action.name}", "arguments": {json.dumps(action.arguments)}}}\n</tool_call>'
                    turn = _called(world, action)
                    yield turn.text
                if turn.done:
                    break


def _called(world: Desk, action: ToolCall) -> Turn:
    try:
        result = getattr(world, action.name)(**action.arguments)
    except InvalidAction as error:
        return Turn(f"Error: {error}")
    return result if isinstance(result, Turn) else Turn(result if isinstance(result, str) else json.dumps(result))


def _furnish(maker: desk.Maker, customer: str, taken: list[str]) -> None:
    """Other customers, and further orders and reservations: of none of the things that the wishes are about."""
    rng = maker.rng
    free = [f"{colour} {garment}" for colour in desk.COLOURS for garment in desk.GARMENTS]
    items = iter(rng.sample([one for one in free if one not in taken], 8))
    huts = iter(rng.sample([hut for hut in desk.HUTS if hut not in taken], 4))
    for one in (customer, *(maker.customer() for _ in range(_OTHERS))):
        maker.order(one, next(items), rng.choice(("pending", "shipped", "delivered")), rng.randint(1, 90))
        maker.stay(one, next(huts), rng.randint(1, 60))


def _should_be(records: desk.Records, wishes: list[Request]) -> desk.Records:
    """The records after all that is asked for and allowed."""
    after = copy.deepcopy(records)
    for wish in wishes:
        if wish.allowed and wish.change:
            name, arguments = wish.change
            if name == "transfer":
                after["transferred"] = True
            else:
                getattr(desk, name)(after, **arguments)
    return after
