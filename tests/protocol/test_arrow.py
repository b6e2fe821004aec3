"""Trajectories as Arrow: there and back without losing a bit."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.protocol import arrow
from troupe.protocol.errors import StoreError
from troupe.protocol.trajectory import Task, Trajectory


def trajectory(**changes: Any) -> Trajectory:
    fields: dict[str, Any] = dict(
        id="e1", attempt=0, group=0, member=0, kind="train", step=1, task=Task("t", "env", "train", 7), status="completed",
        stop="terminated",
    )  # fmt: skip
    return Trajectory(**fields | changes)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_table_gives_its_trajectories_back_exactly(data: st.DataObject, trajectories: Any, same: Any) -> None:
    drawn = data.draw(st.lists(trajectories, max_size=4))
    table = arrow.to_table(drawn)
    table.validate(full=True)
    assert table.schema.equals(arrow.SCHEMA, check_metadata=True)
    assert same(arrow.from_table(table), drawn)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_slices_chunks_orders_and_files_change_nothing(data: st.DataObject, trajectories: Any, same: Any) -> None:
    drawn = data.draw(st.lists(trajectories, min_size=1, max_size=4))
    order = data.draw(st.permutations(range(len(drawn))))
    cut = data.draw(st.integers(0, len(drawn)))
    table = arrow.to_table(drawn).take(order)
    pieces = pa.concat_tables([table.slice(0, cut), table.slice(cut)])
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pieces.schema) as writer:
        writer.write_table(pieces)
    for variant in (pieces, pa.ipc.open_stream(sink.getvalue()).read_all(), pieces.append_column("more", [[0] * len(drawn)])):
        assert same(arrow.from_table(variant), [drawn[i] for i in order])
    assert same(arrow.from_table(table.slice(cut)), [drawn[i] for i in order[cut:]])


@settings(deadline=None)
@given(data=st.data())
def test_derived_columns_say_what_the_nested_ones_hold(data: st.DataObject, trajectories: Any) -> None:
    drawn = data.draw(trajectories)
    row = arrow.to_table([drawn]).select(["turns", "tokens", "policy_tokens", "version_min", "version_max"]).to_pylist()[0]
    assert row == {
        "turns": len(drawn.steps),
        "tokens": sum(len(node.tokens) for node in drawn.nodes),
        "policy_tokens": drawn.policy_tokens,
        "version_min": drawn.versions[0],
        "version_max": drawn.versions[1],
    }


def test_tokens_are_views_of_the_table() -> None:
    import numpy as np

    from troupe.protocol.trajectory import Node

    empty = (np.empty(0, np.float32), np.empty(0, np.int32))
    node = Node(-1, "user", -1, np.arange(9, dtype=np.int32), np.full(9, 2, np.uint8), *empty)
    table = arrow.to_table([trajectory(nodes=[node])])
    read = arrow.from_table(table)[0].nodes[0].tokens
    buffer = table["nodes"].chunk(0).values.field("tokens").values.buffers()[1]
    assert buffer.address <= read.ctypes.data < buffer.address + buffer.size


def test_a_table_of_another_version_or_shape_is_refused() -> None:
    table = arrow.to_table([trajectory()])
    with pytest.raises(StoreError, match="schema version 99, this side reads 3"):
        arrow.from_table(table.replace_schema_metadata({"troupe.trajectories": "99"}))
    with pytest.raises(StoreError, match="not a table of trajectories"):
        arrow.from_table(table.replace_schema_metadata(None))
    with pytest.raises(StoreError, match="without the column 'nodes"):
        arrow.from_table(table.drop_columns(["nodes"]))


@pytest.mark.parametrize(
    "changes",
    [{"seed": 2**63}, {"sampling": {"stop": object()}}, {"pool": "\ud800"}, {"attempt": 2**31}, {"reward": "high"}],
)
def test_what_does_not_fit_is_refused_and_named(changes: dict[str, Any]) -> None:
    with pytest.raises(StoreError, match="trajectory e1 does not fit"):
        arrow.to_table([trajectory(**changes)])
