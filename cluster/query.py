"""SQL over trajectories: DuckDB reads the Arrow tables where they lie; answers go out as text, JSON, CSV or Arrow.

Promises:
- three tables: `trajectories` (without its nested columns), `steps` and `nodes` (`trajectory` and `index` say of which
  trajectory a row is, and at which place). `group` is a word of SQL: write "group", in quotes;
- a query sees its tables and nothing else: no files, no network, no Python variables, no settings;
- a query that fails is a `QueryError` of one line that says what is wrong with it.
"""

from __future__ import annotations

import csv
import decimal
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import duckdb
import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from troupe.protocol.errors import ConfigError, TroupeError, nearest

Format = Literal["table", "json", "csv", "arrow"]

_ROWS_SHOWN, _ITEMS_SHOWN, _TEXT_SHOWN = 100, 6, 80


class QueryError(TroupeError):
    """SQL that cannot be answered."""

    exit_code = 2


def query(sql: str, trajectories: pa.Table) -> pa.Table:
    """The answer to `sql` over `trajectories`, a table as in `protocol.arrow` (further columns are kept).

    Raises QueryError.
    """
    tables = tables_of(trajectories)
    # Without external access DuckDB looks neither for files nor for Python variables.
    with duckdb.connect(":memory:", config={"enable_external_access": "false"}) as connection:
        for name, table in tables.items():
            connection.register(name, table)
        connection.execute("SET lock_configuration = true")
        try:
            relation = connection.sql(sql)
            answer = relation.to_arrow_table() if relation is not None else None
        except duckdb.Error as error:
            raise QueryError(_one_line(error, tables, sql)) from error
    if answer is None:
        raise QueryError("this SQL has no answer to show: ask with SELECT")
    return answer


def tables_of(trajectories: pa.Table) -> dict[str, pa.Table]:
    """The tables that SQL sees, by name. Nothing is copied but ids and row numbers."""
    return {
        "trajectories": trajectories.drop_columns(["steps", "nodes"]),
        "steps": _unnested(trajectories, "steps"),
        "nodes": _unnested(trajectories, "nodes"),
    }


def render(table: pa.Table, format: str = "table", path: str | None = None) -> None:
    """Writes `table` to the file `path`, or to standard output. Raises ConfigError for what cannot be written."""
    if path is None:
        if format == "arrow" and sys.stdout.isatty():
            raise ConfigError("Arrow is binary and this is a terminal: name a file or pipe it into a program")
        data = rendered(table, format, shutil.get_terminal_size((160, 50)).columns)
        try:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
            sys.stdout.flush()
        except BrokenPipeError:  # `… | head` has seen enough; keep the interpreter from flushing again at its end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    data = rendered(table, format)
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"cannot write '{path}': {error.strerror}") from error


def rendered(table: pa.Table, format: str = "table", width: int = 160) -> bytes:
    """`table` as bytes: for people ("table": what is long is cut, and says so), a JSON array of objects, CSV (nested
    values as JSON), or an Arrow IPC stream."""
    if format == "arrow":
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
        return bytes(sink.getvalue())
    if format == "json":
        lines = (json.dumps(dict(zip(table.column_names, row, strict=True)), ensure_ascii=False) for row in _rows(table))
        return ("[" + ",\n ".join(lines) + "]\n").encode()
    if format == "csv":
        text = io.StringIO()
        out = csv.writer(text, lineterminator="\n")
        out.writerow(table.column_names)
        out.writerows([_csv(value) for value in row] for row in _rows(table))
        return text.getvalue().encode()
    if format == "table":
        return _for_people(table, width).encode()
    raise ConfigError(f"unknown format '{format}', known: {', '.join(get_args(Format))}." + nearest(format, get_args(Format)))


# -- helpers ---------------------------------------------------------------------------------------------------------


def _unnested(trajectories: pa.Table, name: str) -> pa.Table:
    """One row an item of the list column `name`, in order."""
    kind = trajectories.schema.field(name).type.value_type
    schema = pa.schema([("trajectory", pa.string()), ("index", pa.int32()), *kind])
    batches = []
    for batch in trajectories.select(["id", name]).to_batches():
        ids, lists = batch.columns
        offsets = lists.offsets.to_numpy()
        lengths = np.diff(offsets)
        first, total = int(offsets[0]), int(offsets[-1] - offsets[0])
        index = np.arange(total) - np.repeat(offsets[:-1] - first, lengths)
        columns = [
            ids.take(pa.array(np.repeat(np.arange(len(ids)), lengths))),
            pa.array(index, pa.int32()),
            *lists.values.slice(first, total).flatten(),
        ]
        batches.append(pa.record_batch(columns, schema=schema))
    return pa.Table.from_batches(batches, schema)


def _one_line(error: duckdb.Error, tables: Mapping[str, Any], sql: str) -> str:
    """DuckDB's message without its drawing of the query."""
    lines = [line.strip() for line in str(error).split("\n\nLINE ")[0].splitlines() if line.strip()]
    if isinstance(error, duckdb.CatalogException) and lines[0].startswith("Catalog Error: Table with name"):
        lines[1:] = [f"Tables: {', '.join(tables)}."]  # its own suggestions are system tables
    hint = (
        ' ("group" is a word of SQL: write it in double quotes)'
        if re.search(r"(?<!\")\bgroup\b(?!\"|\s+by)", sql, re.I)
        else ""
    )
    return "SQL: " + " ".join(lines) + hint


def _rows(table: pa.Table) -> list[tuple[Any, ...]]:
    """Rows of plain values: what JSON can say, NaN and infinities being null."""
    columns = [[_plain(v) for v in column.to_pylist(maps_as_pydicts="lossy")] for column in table.columns]
    return list(zip(*columns, strict=True))


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, decimal.Decimal):  # DuckDB's sums of integers
        return int(value) if value == value.to_integral_value() else float(value)
    return str(value)


def _csv(value: Any) -> Any:
    if isinstance(value, bool | list | dict):
        return json.dumps(value, ensure_ascii=False)
    return value


def _for_people(table: pa.Table, width: int) -> str:
    shown = Table(box=None, pad_edge=False, header_style="bold")
    for field in table.schema:
        number = pa.types.is_integer(field.type) or pa.types.is_floating(field.type) or pa.types.is_decimal(field.type)
        shown.add_column(field.name, justify="right" if number else "left", overflow="fold")
    for row in _rows(table.slice(0, _ROWS_SHOWN)):
        shown.add_row(*map(_cell, row))
    text = io.StringIO()
    console = Console(file=text, width=width, markup=False, highlight=False, emoji=False)
    console.print(shown)
    if table.num_rows > _ROWS_SHOWN:
        console.print(f"… and {table.num_rows - _ROWS_SHOWN} more rows; json, csv and arrow have all {table.num_rows}")
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list):
        items = ", ".join(map(_cell, value[:_ITEMS_SHOWN]))
        return f"[{items}]" if len(value) <= _ITEMS_SHOWN else f"[{items}, … {len(value)} in all]"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | bool) else str(value).replace("\n", "⏎")
    return text if len(text) <= _TEXT_SHOWN else text[: _TEXT_SHOWN - 1] + "…"
