"""Sql: questions have one answer, which a query finds and a written-down result does not; what is held out stays so."""

import random
import re
from functools import cache

import pytest
from tokenizers import Tokenizer

from troupe.envs import sql_questions as questions
from troupe.envs.base import Task, belongs
from troupe.envs.check import player_score
from troupe.envs.drive import Driver
from troupe.envs.sql import Sql
from troupe.envs.sqlite import Reader
from troupe.learner.tiny import make_tiny
from troupe.protocol.errors import InvalidAction, TaskFailed


def opened(split="train", seed=0, **options):
    world, task = Sql(**options), Task("x", "sql", split, seed)
    world._begin(task)
    world.reset(task)
    return world


def answered(world, query):
    return world.step(f"I looked.\n<sql>{query}</sql>")


@cache
def worlds():
    """Some training worlds, by the kind of their question."""
    by_kind = {}
    for seed in range(170):
        world = opened(seed=seed)
        by_kind.setdefault(world.question.shape.partition(" ")[0], []).append(world)
    return by_kind


def test_every_shape_of_question_is_sql_that_works_on_its_schema():
    for schema, kind, second in questions.shapes():
        rng = random.Random(f"{schema.name}{kind}{second}")
        named = questions.labels(schema, rng)
        question = questions.ask(schema, kind, second, named, rng)
        script = questions.database(schema, named, rng)
        assert Reader(script).read(question.query)[0]
        assert question.text.endswith((".", "?")) and ("ORDER BY" in question.query) == (
            "first, equal ones by" in question.text
        )
    assert len(questions.shapes()) == 6 * (2 * 17 + 1)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_reference_is_right_and_its_results_written_down_are_wrong(split):
    for seed in range(40):
        world = opened(split, seed)
        rows = world.matches[0].expected
        assert rows and rows != world.matches[1].expected
        written = ", ".join("(" + ", ".join("NULL" if one is None else repr(one) for one in row) + ")" for row in rows)
        turn = answered(world, f"SELECT * FROM (VALUES {written})")
        assert (turn.done, turn.success, turn.parts) == (True, False, {"outcome": 0.0, "executes": 0.1})
        assert world.matches[0](f"SELECT * FROM (VALUES {written})") == 1.0  # on the database that was seen it is right
        turn = answered(world, world.question.query)
        assert (turn.done, turn.success, turn.reward) == (True, True, pytest.approx(1.1))


MISTAKES = [
    ("links_each", " LEFT JOIN ", " JOIN "),
    ("links_each", r"count\(\w+_id\)", "count(*)"),
    ("either", r" OR \w+ IS NULL", ""),
    ("per_kind", r" WHERE \w+ IS NOT NULL", ""),
    ("mean_per_kind", r" ORDER BY ([^,]*),", r" ORDER BY \1 DESC,"),
    ("top", " DESC", ""),
    ("top", r"LIMIT \d", "LIMIT 1"),
    ("linked", "DISTINCT ", ""),
    ("no_links", "NOT IN", "IN"),
    ("above_mean", "> ", "< "),
    ("common", r"HAVING.*", ""),
    ("many_links", ">", ">="),
    ("greatest_sum", r"sum\(", "max("),
    ("no_extra", "IS NULL", "IS NOT NULL"),
    ("best_of_kind", "max", "min"),
    ("both", " AND .*", ""),
]


@pytest.mark.parametrize(("kind", "right", "wrong"), MISTAKES)
def test_the_mistakes_that_people_make_are_told_from_the_right_query(kind, right, wrong):
    tried = []
    for world in worlds()[kind]:
        query = re.sub(right, wrong, world.question.query)
        if query != world.question.query:
            tried.append(answered(world, query).success)
    assert tried and sum(tried) <= len(tried) / 3  # on some data two queries find the same


def test_another_way_to_write_it_is_as_good():
    world = worlds()["no_links"][0]
    thing = next(t for t in (world.about.first, world.about.second) if f"of {t.table} in" in world.question.shape)
    joined = f"LEFT JOIN {world.about.links} AS l ON l.{thing.key} = t.id WHERE l.{thing.key} IS NULL ORDER BY 1"
    assert answered(world, f"SELECT t.{thing.label} AS who FROM {thing.table} t {joined};").success


@pytest.mark.parametrize(
    ("message", "executes"),
    [
        ("SELECT 1", 0.0),  # not between the marks
        ("<sql>SELECT 1</sql>", 0.1),
        ("<sql>SELECT 1", 0.0),
        ("<sql>SELEC 1</sql>", 0.0),
        ("<sql></sql>", 0.0),
        ("<sql>DROP TABLE students</sql>", 0.0),
        ("<sql>SELECT 1</sql> or <sql>SELEC 2</sql>", 0.0),  # the last one is the answer
        ("", 0.0),
        ("x" * 9_000 + "<sql>SELECT 1</sql>", 0.0),
    ],
)
def test_a_wrong_answer_that_runs_is_worth_a_little(message, executes):
    turn = opened().step(message)
    assert (turn.done, turn.success, turn.parts) == (True, False, {"outcome": 0.0, "executes": executes})
    assert opened(executes=0.0).step(message).parts == {"outcome": 0.0}


async def test_the_tools_show_the_schema_and_rows_and_tell_what_is_refused():
    driver = Driver(Sql(rows=3))
    await driver.reset(Task("x", "sql", "train", 5))
    world = driver.world
    tables = (world.about.first.table, world.about.second.table, world.about.links)
    shown = (await driver.call("schema", {})).text
    assert all(f"CREATE TABLE {table} (" in shown for table in tables)
    text = (await driver.call("query", {"sql": f"SELECT id, NULL AS none, 0.5 FROM {tables[0]}"})).text
    assert text == "id | none | 0.5\n1 | NULL | 0.5\n2 | NULL | 0.5\n3 | NULL | 0.5\nonly the first 3 rows are shown"
    assert (await driver.call("query", {"sql": "SELECT 1 AS x WHERE 0"})).text == "x\nno rows"
    long = (await driver.call("query", {"sql": "SELECT printf('%.90c', 'y') AS x"})).text
    assert long == f"x\n{'y' * 60}…"
    for query, told in {
        f"DELETE FROM {tables[0]}": "can only be read",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n": "recursive",
        f"SELECT count(*) FROM {', '.join(f'{tables[2]} t{i}' for i in range(6))}": "takes too long",
        "SELECT date('now')": "the function date is refused",
        "SELECT x": "no such column: x",
    }.items():
        with pytest.raises(InvalidAction, match=told):
            await driver.call("query", {"sql": query})
    await driver.close()


def test_no_shape_of_question_is_in_both_splits_whatever_it_compares_with():
    shapes = {split: {opened(split, seed).question.shape for seed in range(100)} for split in ("train", "heldout")}
    assert not shapes["train"] & shapes["heldout"] and min(map(len, shapes.values())) > 30
    for split, seen in shapes.items():
        assert all(belongs(shape, split) for shape in seen)
    with pytest.raises(TaskFailed, match="unknown split"):
        opened("test")


def test_an_episode_that_a_limit_ends_has_no_answer():
    assert opened().verify().parts == {"outcome": 0.0, "executes": 0.0}


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_player_is_always_right_and_noise_costs_it(split):
    assert player_score(Sql, {}, n=50, split=split).success == 1.0
    assert player_score(Sql, {}, n=50, noise=0.5, split=split).success < 0.8


def test_random_moves_show_no_query_that_is_held_out():
    world, rng = opened("heldout"), random.Random(0)
    assert all(belongs(world._another(rng).shape, "train") for _ in range(200))


def test_a_tokenizer_made_from_the_corpus_reads_what_the_player_writes_word_by_word(tmp_path):
    tokenizer = Tokenizer.from_file(str(make_tiny(tmp_path, Sql.corpus()) / "tokenizer.json"))
    assert tokenizer.encode("<sql>SELECT count(*) FROM books</sql>").tokens[-5:] == ["ĠFROM", "Ġbooks", "</", "sql", ">"]
    for seed in range(30):
        query = opened("heldout", seed).question.query
        assert len(tokenizer.encode(query).ids) <= len(re.findall(r"\w+?\d*|[^\w\s]", query))


@pytest.mark.parametrize("options", [{"rows": 0}, {"rows": 101}, {"executes": -0.1}, {"executes": 2.0}])
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sql(**options)
