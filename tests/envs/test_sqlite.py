"""A stranger's query reads and nothing else, is bounded in steps, time and size, and what is wrong with it is told."""

import resource
import sqlite3
from time import monotonic

import pytest

from troupe.envs import sqlite
from troupe.envs.sqlite import Reader
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction

ROWS = ", ".join(f"({n}, 'x{n}')" for n in range(100))
SCRIPT = f"CREATE TABLE t (n INTEGER, word TEXT); INSERT INTO t VALUES {ROWS};"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"
COSTLY = "SELECT sum(instr(hex(zeroblob(49900)), substr(hex(zeroblob(24900)), a.n * 0) || b.n || c.n)) FROM t a, t b, t c"
"""Little of SQLite's machine, and a great deal of work: ten million steps of it would take most of an hour."""


def test_a_query_gives_columns_and_at_most_so_many_rows():
    assert Reader(SCRIPT).read("SELECT n AS number, word FROM t ORDER BY n", 2) == (["number", "word"], [(0, "x0"), (1, "x1")])
    assert len(Reader(SCRIPT).read("SELECT n FROM t")[1]) == 100


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("INSERT INTO t VALUES (1, 'y')", "can only be read"),
        ("WITH one AS (SELECT 1) DELETE FROM t", "can only be read"),
        ("UPDATE t SET n = 0 RETURNING n", "can only be read"),
        ("DROP TABLE t", "can only be read"),
        ("CREATE TABLE u (n)", "can only be read"),
        ("CREATE TEMP TABLE u (n)", "can only be read"),
        ("ATTACH 'file.db' AS other", "ATTACH is refused"),
        ("VACUUM INTO 'file.db'", "ATTACH is refused"),
        ("DETACH main", "DETACH is refused"),
        ("PRAGMA user_version = 3", "PRAGMA is refused"),
        ("PRAGMA user_version", "PRAGMA is refused"),
        ("SELECT * FROM pragma_table_info('t')", "can only be read"),
        ("BEGIN", "transactions are refused"),
        ("SAVEPOINT here", "transactions are refused"),
        ("SELECT load_extension('x')", "load_extension"),
        ("SELECT random()", "random"),
        ("SELECT hex(randomblob(4))", "randomblob"),
        ("SELECT other FROM t", "no such column: other"),
        ("SELEC 1", "syntax error"),
        ("SELECT 1; SELECT 2", "one statement"),
        ("SELECT ?", "bindings"),
        ("", "no query"),
        ("-- a comment", "no query"),
        ("SELECT 1\0", "null character"),
        ("SELECT '\ud800'", "surrogates"),
        ("SELECT zeroblob(900000)", "too big"),
        (f"SELECT '{'x' * 200_000}'", "too big|too large"),
        (f"SELECT word LIKE '{'%x' * 600}' FROM t", "pattern too complex"),
    ],
)
def test_whatever_is_not_a_bounded_reading_query_is_told_in_one_line_and_changes_nothing(query, told, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    reader = Reader(SCRIPT)
    with pytest.raises(InvalidAction, match=told) as caught:
        reader.read(query)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 300 and str(caught.value).encode()
    assert reader.read("SELECT count(*), sum(n) FROM t")[1] == [(100, 4950)] and not list(tmp_path.iterdir())


def test_recursion_and_functions_can_be_refused_too():
    reader = Reader(SCRIPT, functions={"count"}, recursive=False)
    assert reader.read("WITH one AS (SELECT count(*) FROM t) SELECT * FROM one")[1] == [(100,)]
    with pytest.raises(InvalidAction, match="recursive queries are refused"):
        reader.read(ENDLESS.replace("max(i)", "i"))
    with pytest.raises(InvalidAction, match="the function max is refused"):
        reader.read("SELECT max(n) FROM t")
    with pytest.raises(InvalidAction, match="the function date is refused"):
        reader.read("SELECT date('now')")


@pytest.mark.parametrize("query", [ENDLESS, "SELECT count(*) FROM t a, t b, t c, t d, t e, t f"])
def test_too_many_steps_are_too_long_and_fewer_are_not(query):
    with pytest.raises(InvalidAction, match="takes too long"):
        Reader(SCRIPT, steps=100_000, seconds=1e9).read(query)
    assert Reader(SCRIPT, steps=100_000).read("SELECT count(*) FROM t a, t b")[1] == [(10_000,)]


def test_a_query_of_few_steps_that_each_take_long_ends_as_well():
    began = monotonic()
    with pytest.raises(InvalidAction, match="takes too long"):
        Reader(SCRIPT, seconds=0.2).read(COSTLY)
    assert monotonic() - began < 60


def test_a_database_that_cannot_be_made_is_a_wrong_setting(tmp_path):
    with pytest.raises(ConfigError, match="the database cannot be made: near"):
        Reader("CREATE TABL t;")
    with pytest.raises(ConfigError, match="the database cannot be made"):
        Reader(tmp_path / "none.db")


def test_a_file_is_read_and_never_written(tmp_path):
    path = tmp_path / "t.db"
    made = sqlite3.connect(path)
    made.executescript(SCRIPT)
    made.close()
    before = path.read_bytes()
    assert Reader(path).read("SELECT max(n) FROM t")[1] == [(99,)]
    with pytest.raises(InvalidAction):
        Reader(path).read("DELETE FROM t")
    assert path.read_bytes() == before


def _ctes(each: str, last: str = "SELECT * FROM c9") -> str:
    return (
        "WITH c0 AS (SELECT 1 AS x), " + ", ".join(f"c{n} AS ({each.replace('B', f'c{n - 1}')})" for n in range(1, 10)) + last
    )


def _nested(text: str, times: int) -> str:
    inner = "SELECT n AS x FROM t"
    for _ in range(times):
        inner = text.format(inner)
    return inner


@pytest.mark.parametrize(
    "query",
    [
        _ctes("SELECT 1 x FROM " + ", ".join(f"B a{n}" for n in range(10))),
        _ctes("SELECT x FROM B " + "UNION ALL SELECT x FROM B " * 9),
        _ctes("SELECT 1 x FROM c0 WHERE 1 IN (" + ", ".join(["(SELECT x FROM B)"] * 10) + ")"),
        _nested("SELECT " + " + ".join(["x"] * 12) + " AS x FROM ({})", 9),
        _nested("SELECT q.*, q.* FROM ({}) q", 40),
    ],
    ids=["joins", "unions", "in", "expressions", "stars"],
)
def test_a_short_text_that_is_long_in_preparing_ends_soon_and_costs_its_reader_nothing(query):
    reader = Reader(SCRIPT)
    before, used = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    with pytest.raises(InvalidAction):
        reader.read(query)
    after, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime < 2 and after.ru_maxrss - before.ru_maxrss < 100_000
    assert ended.ru_utime + ended.ru_stime - used.ru_utime - used.ru_stime < 6
    assert ended.ru_maxrss <= max(used.ru_maxrss + 100_000, 1_000_000)  # a child begins as large as who starts it
    assert reader.read("SELECT count(*) FROM t")[1] == [(100,)]


def test_where_no_query_can_be_run_it_is_not_the_querys_fault(monkeypatch):
    monkeypatch.setattr(sqlite, "_idle", [])
    monkeypatch.setattr(sqlite.inspect, "getsource", lambda module: "raise SystemExit(3)")
    with pytest.raises(EnvironmentFailed, match="exit code 3"):
        Reader(SCRIPT).read("SELECT 1")
