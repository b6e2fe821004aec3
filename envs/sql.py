"""Answer a question about a database with one SQL query, after looking at the database and trying queries on it.

The agent sees one database. Its answer is judged on that one and on a second one, with the same names and other facts: a
query that has the right rows written into it is wrong there.

Promises:
- one question in five is held out, by what it asks for (schema, kind and table, see `sql_questions`), whatever it compares
  with: no such question is ever trained on;
- the right rows are never none, and never the same in both databases; their order counts only where the question orders;
- queries only read, and are bounded in steps and in rows (see `sqlite`); what is refused, wrong or too long is told;
- the answer is what stands between <sql> and </sql>. It is a success only if it finds the right rows in both databases.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import Field

from troupe.envs.base import Task, ToolCall, belongs, rng_of
from troupe.envs.sql_questions import Question, Schema, ask, database, labels, shape_of, shapes
from troupe.envs.sqlite import Reader
from troupe.envs.tools import Rewards, ToolWorld, tool
from troupe.envs.verifiers.sql import ExecutionMatch
from troupe.envs.verifiers.text import inside
from troupe.protocol.errors import InvalidAction, TaskFailed

_STEPS, _LONGEST, _SECONDS = 1_000_000, 4_000, 10.0
_READ = 8_000  # characters of an answer that are looked at
_CELL = 60  # characters of a value that are shown
_DRAWS = 200
_FUNCTIONS = (  # nothing that tells the time: the same query gives the same rows
    "abs avg coalesce count group_concat iif ifnull instr length like lower max min nullif printf format replace round sign "
    "substr substring sum total trim ltrim rtrim typeof upper dense_rank first_value lag last_value lead nth_value ntile rank "
    "row_number percent_rank cume_dist"
)


class Sql(ToolWorld):
    """Options: rows: of a result that the agent is shown, 1 to 100. executes: reward for an answer that is a query which
    runs, right or wrong, 0 to 1; a named part, none if it is 0.
    """

    name: ClassVar[str] = "sql"
    max_turns: ClassVar[int] = 8
    system: ClassVar[str] = (
        "You answer questions about a SQLite database. Look at its schema and try queries with the tools. "
        "Then reply with one query that finds what is asked for, in the form <sql>SELECT ...</sql>. "
        "It is judged on other data too, so do not write results into it."
    )

    def __init__(self, rows: int = 20, executes: float = 0.1) -> None:
        if not 1 <= rows <= 100:
            raise ValueError(f"rows is {rows}; it is 1 to 100")
        if not 0 <= executes <= 1:
            raise ValueError(f"executes is {executes}; it is 0 to 1")
        self.rows, self.executes = rows, executes

    def reset(self, task: Task) -> str:
        asked = [shape for shape in shapes() if belongs(shape_of(*shape), task.split)]
        for _ in range(_DRAWS):
            self.about, kind, second = self.rng.choice(asked)
            self.named = labels(self.about, self.rng)
            self.question = ask(self.about, kind, second, self.named, self.rng)
            self.seen: set[str] = set()  # what the agent has looked at
            if self._two_databases():
                return self.question.text
        raise TaskFailed(f"no question of split '{task.split}' with two answers in {_DRAWS} draws")

    def _two_databases(self) -> bool:
        """Makes both; whether the question has an answer in each, and not the same."""
        readers = [_reader(database(self.about, self.named, self.rng)) for _ in range(2)]
        self.matches = [ExecutionMatch(self.question.query, reader) for reader in readers]
        one, other = (match.expected for match in self.matches)
        return _some(one) and _some(other) and Counter(one) != Counter(other)

    @tool
    def schema(self) -> str:
        """Show the tables and their columns."""
        self.seen.add("schema")
        return self.about.script

    @tool
    def query(self, sql: Annotated[str, Field(description="one SELECT")]) -> str:
        """Run a query on the database, which can only be read. Shows the first rows."""
        columns, rows = self.matches[0].reader.read(sql, self.rows + 1)
        self.seen.add(sql)
        lines = [" | ".join(map(_cell, row)) for row in (columns, *rows[: self.rows])]
        more = [f"only the first {self.rows} rows are shown"] if len(rows) > self.rows else []
        return "\n".join((*lines, *(more or [] if rows else ["no rows"])))

    def verify(self) -> Rewards:
        said = inside("sql", self.answer[:_READ])
        right = all(match(said) == 1.0 for match in self.matches)
        if not self.executes:
            return Rewards(outcome=right)
        return Rewards(outcome=right, executes=self.executes * (right or self._runs(said)))

    def _runs(self, said: str) -> bool:
        try:
            self.matches[0].reader.read(said, 1)
        except InvalidAction:
            return False
        return True

    def close(self) -> None:
        for match in getattr(self, "matches", ()):
            match.reader.close()

    def state_key(self) -> str:
        return f"{self.question.text} | {' ; '.join(sorted(self.seen))}"

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str | ToolCall:
        """Looks at the schema, tries the reference and answers with it. At random: tries or answers another question's."""
        query = self.question.query
        if rng.random() < noise:
            query = self._another(rng).query
            return f"<sql>{query}</sql>" if rng.random() < 0.3 else ToolCall("query", {"sql": query})
        if "schema" not in self.seen:
            return ToolCall("schema", {})
        return f"<sql>{query}</sql>" if query in self.seen else ToolCall("query", {"sql": query})

    def _another(self, rng: random.Random) -> Question:
        """About the same database, of those that are trained on: no demonstration shows a held-out query."""
        asked = [shape for shape in shapes() if shape[0] is self.about and belongs(shape_of(*shape), "train")]
        return ask(*rng.choice(asked), self.named, rng)

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from (json.dumps(found.spec) for found in cls._tools.values())
        yield '<tool_call>\n{"name": "query", "arguments": {"sql": "SELECT 1"}}\n</tool_call> no rows only the first are shown'
        yield '{"name": "schema", "arguments": {}}'
        for index, (schema, kind, second) in enumerate(shapes()):
            if not belongs(shape_of(schema, kind, second), "train"):
                continue
            rng = rng_of(cls.task("train", index))
            named = labels(schema, rng)
            question = ask(schema, kind, second, named, rng)
            yield from (question.text, f"<sql>{question.query}</sql>", json.dumps({"sql": question.query}))
            yield _shown_as_text(schema, named)


def _shown_as_text(schema: Schema, named: tuple[list[str], list[str]]) -> str:
    """The schema and what can stand in its cells."""
    kinds = " | ".join((*schema.first.kinds, *schema.second.kinds, "NULL"))
    names = " | ".join((*named[0], *named[1]))
    return f"{schema.script}\n{kinds}\n{names}"


def _reader(script: str) -> Reader:
    return Reader(script, steps=_STEPS, longest=_LONGEST, seconds=_SECONDS, functions=_FUNCTIONS.split(), recursive=False)


def _some(rows: list[tuple[object, ...]]) -> bool:
    """Whether there is an answer at all."""
    return any(value not in (None, 0) for row in rows for value in row)


def _cell(value: object) -> str:
    if value is None:
        return "NULL"
    text = f"{value:.6g}" if isinstance(value, float) else " ".join(str(value).split())
    return text if len(text) <= _CELL else text[:_CELL] + "…"
