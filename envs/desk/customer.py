"""Customers who talk: one that follows a script, and one that a language model plays.

The scripted one reads the agent's message sentence by sentence:

    it asks for something (an e-mail address, a number, a size, …)   says what it knows of that
    it refuses                                                       asks for an exception once, if of that kind, then gives up
    it asks for consent                                              says yes
    it asks whether there is anything else, or states something      goes on to its next wish, or says goodbye
    it asks something else                                           says one more thing that it knows, or its wish again
    it asks for patience, or says nothing                            waits

Promises: a customer never says by itself more than one thing; one whose patience is used up by messages that bring nothing
new says goodbye; the same messages get the same replies from the scripted one. A model that cannot be reached, says nothing or
takes too long is EnvironmentFailed: it says nothing about the agent.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Awaitable, Sequence
from typing import NamedTuple, Protocol

from troupe.envs.base import action_of
from troupe.envs.desk.refusing import says_no
from troupe.envs.desk.requests import Request
from troupe.envs.endpoint import Endpoint
from troupe.protocol.errors import EnvironmentFailed

_READ = 4_000  # characters of a message that are looked at
_PATIENCE = 4  # messages that may bring nothing new
_STOP = "###STOP###"

_ASKS = re.compile(
    r"\?|\b(please|could you|can you|may i have|tell me|give me|let me know|i need|provide|what|which|where|who)\b"
)
_ABOUT = {
    "email": re.compile(r"\be-?mail|\bwho are you\b"),
    "number": re.compile(r"\bnumber|\bid\b|\bwhich (order|reservation|stay|one)\b"),
    "size": re.compile(r"\bsize"),
    "address": re.compile(r"\baddress\b|\bwhere (should|shall|to)\b"),
    "reason": re.compile(r"\bwhy\b|\breason|\bwhat (is wrong|happened)\b"),
}
_E_MAIL_ADDRESS = re.compile(r"\be-?mail address\b")
_MORE = re.compile(r"\b(anything|something|what|how) else\b|\belse (can|could|may) i\b|\bother (question|request|wish)")
_CONSENT = re.compile(
    r"\b(shall i|should i|do you want|would you like|is (that|this) (right|correct|ok|okay|fine)|"
    r"confirm|proceed|go ahead|agree)\b"
)
_WAITS = re.compile(
    r"\b(moment|hold on|wait|checking|let me (check|look|see|find)|looking (up|into|for)|i will (check|look))\b"
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+|\n")


class Reply(NamedTuple):
    """What the customer says. over: it was their last word."""

    text: str
    over: bool = False


class Customer(Protocol):
    """Somebody who has come to the desk."""

    def opening(self) -> str | Awaitable[str]: ...
    def answer(self, message: str) -> Reply | Awaitable[Reply]: ...


class Scripted:
    """A customer with an e-mail address and some wishes. What there is of chance comes from `rng`."""

    def __init__(self, email: str, wishes: Sequence[Request], rng: random.Random) -> None:
        self.email, self.wishes, self.rng = email, wishes, rng
        self.insists = [rng.random() < 0.5 for _ in wishes]  # those who do not take a no at once
        self.current = 0
        self.told: set[str] = set()  # names of facts; "email" for the whole conversation, others for the current wish
        self.patience = _PATIENCE

    @property
    def wish(self) -> Request:
        return self.wishes[self.current]

    def opening(self) -> str:
        return f"{self.rng.choice(('Hello.', 'Good morning.', 'Hi.'))} {self.wish.wish}"

    def answer(self, message: str) -> Reply:
        text = message[:_READ].lower().replace("’", "'")
        asking = [sentence for sentence in _SENTENCE.split(text) if _ASKS.search(sentence)]
        if wanted := self._asked_for(asking):
            return self._say(" ".join(self._tell(fact) for fact in wanted), new=not self._known_already)
        if says_no(text):
            return self._refused()
        if any(_MORE.search(sentence) for sentence in asking):
            return self._next("Thank you.")
        if any(_CONSENT.search(sentence) for sentence in asking):
            return self._say("Yes, please.", new=False)
        if asking:
            left = [fact for fact in ("email", *self.wish.facts) if fact not in self.told]
            return self._say(self._tell(left[0]), new=True) if left else self._say(self.wish.wish, new=False)
        if not text.strip() or _WAITS.search(text):
            return self._say("All right, I wait.", new=False)
        return self._next("Thank you.")

    def _asked_for(self, asking: Sequence[str]) -> list[str]:
        """Facts that these sentences ask for."""
        facts = {
            fact: [_E_MAIL_ADDRESS.sub("email", sentence) for sentence in asking if fact in ("email", *self.wish.facts)]
            for fact in _ABOUT
        }
        return [fact for fact, sentences in facts.items() if any(_ABOUT[fact].search(one) for one in sentences)]

    def _tell(self, fact: str) -> str:
        self._known_already = fact in self.told
        self.told.add(fact)
        return f"It is {self.email}." if fact == "email" else self.wish.facts[fact]

    def _refused(self) -> Reply:
        if self.insists[self.current]:
            self.insists[self.current] = False
            return self._say("That is a pity. Can you not make an exception, just this once?", new=True)
        return self._next("Then I leave it as it is.")

    def _next(self, thanks: str) -> Reply:
        self.current += 1
        self.told &= {"email"}
        if self.current == len(self.wishes):
            return Reply(f"{thanks} Goodbye.", over=True)
        return Reply(f"{thanks} One more thing. {self.wish.wish}")

    def _say(self, text: str, *, new: bool) -> Reply:
        self.patience -= not new
        return Reply(text) if self.patience >= 0 else Reply("This leads nowhere. Goodbye.", over=True)


class Modelled:
    """A customer that a language model plays. timeout_s: for one reply, with all retries."""

    def __init__(self, email: str, wishes: Sequence[Request], endpoint: Endpoint, timeout_s: float) -> None:
        self.endpoint, self.timeout_s = endpoint, timeout_s
        self.messages = [{"role": "system", "content": instructions(email, wishes)}]

    async def opening(self) -> str:
        return (await self.answer("Hello. What can I do for you?")).text

    async def answer(self, message: str) -> Reply:
        """What the agent says is the model's user, what the customer says its own."""
        self.messages.append({"role": "user", "content": message[:_READ] or "(says nothing)"})
        try:
            async with asyncio.timeout(self.timeout_s):
                said = action_of(await self.endpoint.reply(self.messages))
        except TimeoutError:
            name = self.endpoint.model
            raise EnvironmentFailed(
                f"the model {name} that plays the customer has not answered for {self.timeout_s:g} s"
            ) from None
        text, over = " ".join(said.replace(_STOP, " ").split())[:_READ], _STOP in said
        if not text and not over:
            raise EnvironmentFailed(f"the model {self.endpoint.model} that plays the customer has said nothing")
        self.messages.append({"role": "assistant", "content": said})
        return Reply(text or "Goodbye.", over)


def instructions(email: str, wishes: Sequence[Request]) -> str:
    """What a model that plays the customer is told."""
    lines = [
        "You play a customer who writes to the desk of a shop for outdoor clothes that also lets huts.",
        f"Your e-mail address is {email}. You have come for this, one after the other:",
    ]
    for number, wish in enumerate(wishes, 1):
        lines.append(f'{number}. "{wish.wish}" What you can say if you are asked: {" ".join(wish.facts.values())}')
    lines += [
        "Write only what the customer says: one short message at a time, about one wish at a time.",
        "Say a fact only when you are asked for it, and make up none. Agree if you are asked whether to go ahead.",
        "If you are refused, ask for an exception once, then leave it as it is; accept nothing else instead.",
        f"When every wish is done or refused, say goodbye and write {_STOP}. Write it also if you are sent to a human.",
    ]
    return "\n".join(lines)
