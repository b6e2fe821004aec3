"""Queries are compared by the rows that they find, in a database that they cannot change and in bounded steps."""

import sqlite3
from contextlib import closing

import pytest

from troupe.envs.verifiers import ExecutionMatch
from troupe.protocol.errors import ConfigError, TaskFailed

DESK = """
CREATE TABLE orders (id INTEGER, item TEXT, price REAL);
INSERT INTO orders VALUES (1, 'lamp', 10), (2, 'vase', 0.3), (3, 'lamp', 10), (4, NULL, 5);
"""
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n"


@pytest.mark.parametrize(
    ("reference", "query", "score"),
    [
        ("SELECT id FROM orders", "SELECT id AS number FROM orders ORDER BY id DESC;", 1),  # neither names nor order
        ("SELECT id FROM orders ORDER BY id", "SELECT id FROM orders ORDER BY id DESC", 0),
        ("SELECT id FROM orders ORDER BY id", "SELECT id FROM orders ORDER BY 1 ASC", 1),
        ("SELECT id FROM (SELECT id FROM orders ORDER BY price LIMIT 9)", "SELECT id FROM orders ORDER BY id DESC", 1),
        ("SELECT id, 'order by' FROM orders", "SELECT id, 'order by' FROM orders ORDER BY id DESC", 1),
        ("SELECT item FROM orders", "SELECT DISTINCT item FROM orders", 0),  # each row as often as it occurs
        ("SELECT id, item FROM orders", "SELECT item, id FROM orders", 0),  # columns are in order
        ("SELECT id FROM orders", "SELECT id FROM orders UNION ALL SELECT 5", 0),
        ("SELECT count(*) FROM orders", "SELECT 4.0", 1),
        ("SELECT price FROM orders WHERE id = 2", "SELECT 0.1 + 0.2", 1),
        ("SELECT item FROM orders WHERE id = 4", "SELECT NULL", 1),
        ("SELECT item FROM orders WHERE id = 4", "SELECT ''", 0),
        ("SELECT id FROM orders WHERE id > 9", "SELECT 1 WHERE 0", 1),
        ("SELECT id FROM orders WHERE id > 9", "", 0),  # no query, though the right rows are none
        ("SELECT id FROM orders WHERE id > 9", "-- nothing", 0),
        ("SELECT 1", "SELEC 1", 0),
        ("SELECT 1", "SELECT 1; SELECT 2", 0),
        ("SELECT 1", "SELECT 1 -- \ud800", 0),
        ("SELECT 1", "SELECT 1\0", 0),
    ],
)
def test_the_rows_decide(reference, query, score):
    assert ExecutionMatch(reference, DESK)(query) == score


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM orders RETURNING 1",
        "PRAGMA user_version",
        "SELECT name FROM pragma_database_list",
        "ATTACH 'file.db' AS other",
        "SELECT zeroblob(900000000)",
        ENDLESS,
    ],
)
def test_a_query_that_writes_reaches_out_or_does_not_end_is_wrong(query):
    match = ExecutionMatch("SELECT count(*) FROM orders", DESK, steps=100_000)
    assert match(query) == 0
    assert match("SELECT 4") == 1  # nothing is left of it


def test_a_reference_that_fails_is_a_broken_task_and_a_database_that_is_none_a_wrong_setting(tmp_path):
    for reference in ("SELECT nothing FROM orders", ENDLESS):
        with pytest.raises(TaskFailed, match="the reference query fails"):
            ExecutionMatch(reference, DESK, steps=100_000)("SELECT 1")
    (tmp_path / "text.db").write_text("no database " * 100)
    for database in (tmp_path / "none.db", tmp_path / "text.db", "CREATE TABL orders;"):
        with pytest.raises(ConfigError, match="the database cannot be made"):
            ExecutionMatch("SELECT 1", database)
    assert not (tmp_path / "none.db").exists()


@pytest.mark.parametrize("mode", ["delete", "wal"])
def test_the_database_may_be_a_file_which_is_read_only(tmp_path, mode):
    path = tmp_path / "desk.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute(f"PRAGMA journal_mode={mode}")
        database.executescript(DESK)
    before = path.read_bytes()
    match = ExecutionMatch("SELECT sum(price) FROM orders", str(path))
    assert match("SELECT 25.3") == 1 and match("DROP TABLE orders") == 0
    assert path.read_bytes() == before
