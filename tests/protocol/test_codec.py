"""The codec: every message survives the wire, and nothing but a message does."""

from __future__ import annotations

import contextlib
import dataclasses
import types
import typing
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.protocol import codec
from troupe.protocol.errors import MalformedMessage, ProtocolError, UnknownMessage, UnknownVersion, pack, unpack
from troupe.protocol.messages import Ack, Batch, Blob, Fence, Generated, GetBatch, Receipt

SCALARS: dict[Any, st.SearchStrategy[Any]] = {
    int: st.integers(-(2**63), 2**63 - 1),
    float: st.floats(),
    bool: st.booleans(),
    str: st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    type(None): st.none(),
    Any: st.none() | st.integers(0, 9) | st.text("ab") | st.lists(st.integers(0, 9), max_size=2),
}


def of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a message field's type."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in SCALARS:
        return SCALARS[hint]
    if origin is Annotated:
        dtype = get_args(get_args(args[0])[1])[0]
        numbers = st.floats(width=32) if dtype is np.float32 else st.integers(0, 255)
        return st.lists(numbers, max_size=4).map(lambda values: np.array(values, np.float64).astype(dtype))
    if origin is Literal:
        return st.sampled_from(args)
    if origin in (Union, types.UnionType):
        return st.one_of(*map(of, args))
    if origin is list:
        return st.lists(of(args[0]), max_size=2)
    if origin is tuple:
        return st.tuples(*map(of, args))
    if origin is dict:
        return st.dictionaries(of(args[0]), of(args[1]), max_size=2)
    assert dataclasses.is_dataclass(hint), hint
    hints = get_type_hints(hint, include_extras=True)
    return st.builds(hint, **{field.name: of(hints[field.name]) for field in dataclasses.fields(hint)})


MESSAGES = st.one_of(*(of(cls) for name, cls in codec.TYPES.items() if cls is not Blob))


@pytest.mark.parametrize("name", sorted(codec.TYPES.keys() - {"Blob"}))  # a blob never travels alone
def test_every_message_survives_the_wire(name: str, same: Any) -> None:
    @settings(max_examples=20, deadline=None)
    @given(message=of(codec.TYPES[name]))
    def survives(message: Any) -> None:
        data, blobs = codec.encode(message)
        assert same(codec.decode(data, blobs), message)

    survives()


def test_arrays_keep_dtype_and_shape_and_blobs_stay_beside_the_bytes() -> None:
    data, blobs = codec.encode(Batch(3, Blob({"bulk": 1}), 2))
    assert blobs == [{"bulk": 1}] and b"bulk" not in data
    assert codec.decode(data, blobs).trajectories.ref == {"bulk": 1}

    said = Generated(np.arange(3, dtype=np.int32), np.zeros(3, np.float32), np.ones(3, np.int32), "stop")
    heard = codec.decode(*codec.encode(said))
    assert heard.tokens.dtype == np.int32 and heard.logprobs.dtype == np.float32 and heard.tokens.tolist() == [0, 1, 2]


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=64))
def test_arbitrary_bytes_are_a_protocol_error(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        codec.decode(data)


@settings(max_examples=400, deadline=None)
@given(message=MESSAGES, data=st.data())
def test_a_damaged_message_is_a_protocol_error_or_another_message(message: Any, data: st.DataObject) -> None:
    encoded, blobs = codec.encode(message)
    damaged = bytearray(encoded)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(damaged)))
    for candidate in (bytes(damaged), encoded[:cut], encoded + b"\xc0"):
        with contextlib.suppress(ProtocolError):
            assert type(codec.decode(candidate, blobs)).__name__ in codec.TYPES


@settings(max_examples=300, deadline=None)
@given(body=st.recursive(SCALARS[Any], lambda inner: st.dictionaries(st.text(max_size=6), inner), max_leaves=6), data=st.data())
def test_a_body_of_the_wrong_shape_is_a_protocol_error(body: Any, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(codec.TYPES)))
    try:
        message = codec.decode(msgpack.packb({"v": codec.VERSION, "t": name, "b": body}))
    except ProtocolError:
        return
    assert type(message).__name__ == name


def test_an_unknown_version_says_which_side_to_upgrade() -> None:
    data = msgpack.packb({"v": codec.VERSION + 1, "t": "Ping", "b": {}})
    with pytest.raises(UnknownVersion, match=f"version {codec.VERSION + 1}.*speaks {codec.VERSION}.*upgrade"):
        codec.decode(data)


def test_an_unknown_type_names_the_nearest() -> None:
    with pytest.raises(UnknownMessage, match="Did you mean 'GetBatch'"):
        codec.decode(msgpack.packb({"v": codec.VERSION, "t": "GetBatsh", "b": {}}))
    with pytest.raises(UnknownMessage, match="'dict' is not a message"):
        codec.encode({"t": "Ping"})


@pytest.mark.parametrize(
    ("body", "culprit"),
    [
        ({"episode": "e"}, "Fence.attempt"),
        ({"episode": "e", "attempt": "soon"}, "Fence.attempt"),
        ({"episode": "e", "attempt": 1, "mood": 1}, "Fence.mood"),
    ],
)
def test_a_wrong_field_is_named(body: dict[str, Any], culprit: str) -> None:
    with pytest.raises(MalformedMessage, match=culprit):
        codec.decode(msgpack.packb({"v": codec.VERSION, "t": "Fence", "b": body}))


@pytest.mark.parametrize("message", [Receipt(True, typing.cast(str, object())), Fence("e", 2**70), GetBatch(1, 1j)])  # type: ignore[arg-type]
def test_what_cannot_travel_is_refused_where_it_is_sent(message: Any) -> None:
    with pytest.raises(MalformedMessage, match=type(message).__name__):
        codec.encode(message)


def test_errors_keep_their_type_across_the_wire() -> None:
    packed = codec.decode(*codec.encode(pack(UnknownVersion("v9"))))
    assert type(unpack(packed)) is UnknownVersion and str(unpack(packed)) == "v9"
    assert codec.decode(*codec.encode(Ack())) == Ack()
