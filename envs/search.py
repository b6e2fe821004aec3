"""Answer a question with a search engine at hand, in one or two hops (see `fiction`): nothing can be known without it.

Promises:
- one entity in five, by the digest of its kind and name, is held out: no question whose answer leads over it is trained on;
- a search gives the best passages by BM25; equal ones come in a fixed order;
- an answer is what stands between <answer> and </answer>. It is a success only if it matches exactly (`answers`).
"""

from __future__ import annotations

import json
import random
import re
import sqlite3
from collections.abc import Iterator
from functools import lru_cache
from typing import Annotated, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import Field

from troupe.envs import fiction
from troupe.envs.answers import exact_match, token_f1
from troupe.envs.base import InvalidAction, Task, ToolCall, belongs
from troupe.envs.tools import Rewards, ToolWorld, tool
from troupe.protocol.errors import ConfigError

OUTCOMES = ("exact", "f1")
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_WORD = re.compile(r"[^\W_]+")
_READ = 4_000  # characters of an answer that are looked at
_QUERY = 400  # characters of a query that are searched for


class Search(ToolWorld):
    """Options:

    hops: documents that a question needs, 1 or 2; 0: either. passages: that a search gives, 1 to 20.
    outcome: what an answer is worth: "exact" (1 if it matches, else 0) or "f1" (of its words, 0 to 1).
    retrieval: reward for having searched at all. format: reward for a message that ends in one answer between the marks.
    penalty: taken off if it does not. Each of these three is a named part of the reward, and none if it is 0.
    library: seed of the documents.
    """

    name: ClassVar[str] = "search"
    max_turns: ClassVar[int] = 6
    inline: ClassVar[bool] = True
    system: ClassVar[str] = (
        "You answer questions. Look up what you need with the search tool, as often as you need it. "
        "Then reply with the answer and nothing else, in the form <answer>1850</answer>."
    )

    def __init__(
        self,
        hops: int = 0,
        passages: int = 3,
        outcome: str = "exact",
        retrieval: float = 0.0,
        format: float = 0.0,
        penalty: float = 0.0,
        library: int = 0,
    ) -> None:
        if hops not in (0, 1, 2):
            raise ValueError(f"hops is {hops}; it is 1, 2, or 0 for either")
        if not 1 <= passages <= 20:
            raise ValueError(f"passages is {passages}; it is 1 to 20")
        if outcome not in OUTCOMES:
            raise ValueError(f"outcome is '{outcome}'; it is one of {', '.join(OUTCOMES)}")
        for option, value in {"retrieval": retrieval, "format": format, "penalty": penalty}.items():
            if not 0 <= value <= 100:
                raise ValueError(f"{option} is {value}; it is 0 to 100")
        self.hops, self.passages, self.outcome = hops, passages, outcome
        self.retrieval, self.format, self.penalty = retrieval, format, penalty
        self.library = library
        self._index = _index(library)

    def reset(self, task: Task) -> str:
        self.question = self.rng.choice(_questions(self.library, self.hops, task.split))
        self.searches = 0
        self.seen: set[str] = set()  # names of the entities whose documents were found
        return self.question.text

    @tool
    def search(self, query: Annotated[str, Field(description="a few keywords")]) -> str:
        """Search the library. Gives the passages that match the query best."""
        found = self._index.best(query[:_QUERY], self.passages)
        self.searches += 1
        self.seen |= {entity.name for entity in found}
        return "\n".join(f"[{n}] {entity.text}" for n, entity in enumerate(found, 1)) or "Nothing was found."

    def verify(self) -> Rewards:
        text = self.answer[:_READ]
        marked = _ANSWER.findall(text)
        said = marked[-1] if marked else ""
        exact = exact_match(said, [self.question.answer])
        formed = len(marked) == 1 and bool(said.strip()) and text.rstrip().endswith("</answer>")
        parts: dict[str, Any] = {}
        if self.retrieval:
            parts["retrieval"] = self.retrieval if self.searches else 0.0
        if self.format:
            parts["format"] = self.format if formed else 0.0
        if self.penalty:
            parts["penalty"] = 0.0 if formed else -self.penalty
        worth = token_f1(said, [self.question.answer]) if self.outcome == "f1" else float(exact)
        verdict = Rewards(outcome=worth, **parts)
        verdict.success = exact
        return verdict

    def state_key(self) -> str:
        return f"{self.question.text} | {', '.join(sorted(self.seen))}"

    def play(self, rng: random.Random, noise: float) -> str | ToolCall:
        """Searches for one entity after another on the way to the answer. At random: for any, or says any fact."""
        if rng.random() < noise:
            one = rng.choice(self._index.entities)
            guess = f"<answer>{rng.choice(list(one.facts.values()))}</answer>"
            return ToolCall("search", {"query": one.name}) if rng.random() < 0.5 else guess
        unseen = next((entity for entity in self.question.path if entity.name not in self.seen), None)
        return ToolCall("search", {"query": unseen.name}) if unseen else f"<answer>{self.question.answer}</answer>"

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from (json.dumps(found.spec) for found in cls._tools.values())
        yield '<tool_call>\n{"name": "search", "arguments": {"query": ""}}\n</tool_call>'
        yield from (question.text for question in _questions(0, 0, "train"))
        yield from (entity.text for entity in _index(0).entities)


class Document(Protocol):
    """What can be searched for: by its name and its text."""

    @property
    def name(self) -> str: ...
    @property
    def text(self) -> str: ...


D = TypeVar("D", bound=Document)


class Index(Generic[D]):
    """Documents, found by BM25 as SQLite's full-text index computes it (k1 = 1.2, b = 0.75)."""

    def __init__(self, entities: list[D]) -> None:
        """Raises ConfigError if Python's SQLite has no such index."""
        self.entities = entities
        self._base = sqlite3.connect(":memory:", check_same_thread=False)
        try:
            self._base.execute("CREATE VIRTUAL TABLE documents USING fts5(name, text, tokenize = 'porter unicode61')")
        except sqlite3.OperationalError as error:
            raise ConfigError(f"SQLite cannot search texts ({error}): use a Python whose sqlite3 has FTS5") from error
        rows = [(number, entity.name, entity.text) for number, entity in enumerate(entities)]
        self._base.executemany("INSERT INTO documents(rowid, name, text) VALUES (?, ?, ?)", rows)

    def best(self, query: str, count: int) -> list[D]:
        """At most `count`, best first; none that shares no word with the query. Raises InvalidAction: it has no words."""
        words = [f'"{word}"' for word in _WORD.findall(query)]
        if not words:
            raise InvalidAction("the query has no words to search for")
        found = self._base.execute(
            "SELECT rowid FROM documents WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?", (" OR ".join(words), count)
        )
        return [self.entities[number] for (number,) in found]


@lru_cache(maxsize=4)
def _index(library: int) -> Index[fiction.Entity]:
    return Index(fiction.write(library))


@lru_cache(maxsize=24)
def _questions(library: int, hops: int, split: str) -> list[fiction.Question]:
    """Those of a split. Raises TaskFailed for an unknown one."""
    asked = fiction.questions(_index(library).entities)
    return [question for question in asked if hops in (0, question.hops) and _belongs(question, split)]


def _belongs(question: fiction.Question, split: str) -> bool:
    """A question is held out if any of its entities is."""
    among = [belongs(f"{entity.kind} {entity.name}", split) for entity in question.path]
    return all(among) if split == "train" else any(among)
