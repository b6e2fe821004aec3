"""Messages ↔ bytes: msgpack in an envelope that names the protocol version and the message type.

Promises:
- `decode(encode(m))` equals `m` for every message; arrays keep dtype and shape;
- bytes that are not a message of this protocol raise a typed error (`UnknownVersion`, `UnknownMessage`,
  `MalformedMessage`), whatever they are;
- blobs are not copied into the bytes: they come back as a list beside them, in order.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import msgpack
import numpy as np
import pydantic

from troupe.protocol import errors, messages

VERSION = 1
_ARRAY = 1
_BLOB = 2
_ARRAY_KINDS = frozenset("biuf")


def _known() -> dict[str, type[Any]]:
    known = {
        name: cls
        for name, cls in vars(messages).items()
        if dataclasses.is_dataclass(cls) and isinstance(cls, type) and not name.startswith("_")
    }
    known["PackedError"] = errors.PackedError
    return known


TYPES: dict[str, type[Any]] = _known()
"""Every message type by its name on the wire."""


@functools.cache
def _adapter(name: str) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(TYPES[name])


def _field_names(cls: type[Any]) -> tuple[str, ...]:
    names: tuple[str, ...] = tuple(cls.__dataclass_fields__)
    return names


def encode(message: Any) -> tuple[bytes, list[Any]]:
    """Returns (bytes, blobs). Raises UnknownMessage if `message` is not of a type in `TYPES`."""
    name = type(message).__name__
    if TYPES.get(name) is not type(message):
        raise errors.UnknownMessage(f"'{name}' is not a message of protocol version {VERSION}")
    blobs: list[Any] = []

    def plain(value: Any) -> Any:
        if isinstance(value, messages.Blob):
            blobs.append(value.ref)
            return msgpack.ExtType(_BLOB, msgpack.packb(len(blobs) - 1))
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {f: getattr(value, f) for f in _field_names(type(value))}
        if isinstance(value, np.ndarray) and value.dtype.kind in _ARRAY_KINDS:
            header = msgpack.packb((value.dtype.str, value.shape))
            return msgpack.ExtType(_ARRAY, header + np.ascontiguousarray(value).tobytes())
        if isinstance(value, np.generic):
            return value.item()
        raise TypeError(f"{type(value).__name__} cannot travel in a message")

    body = {f: getattr(message, f) for f in _field_names(type(message))}
    try:
        return msgpack.packb({"v": VERSION, "t": name, "b": body}, default=plain), blobs
    except (TypeError, ValueError, OverflowError) as error:
        raise errors.MalformedMessage(f"{name}: {error}") from error


def decode(data: bytes, blobs: list[Any] | None = None) -> Any:
    """The message in `data`. Raises a ProtocolError for anything that is not one."""
    refs = blobs or []

    def extension(code: int, payload: bytes) -> Any:
        if code == _BLOB:
            return messages.Blob(refs[msgpack.unpackb(payload)])
        if code == _ARRAY:
            unpacker = msgpack.Unpacker()
            unpacker.feed(payload)
            dtype, shape = unpacker.unpack()
            parsed = np.dtype(dtype)
            if parsed.kind not in _ARRAY_KINDS:
                raise ValueError(f"arrays of dtype '{dtype}' do not travel")
            return np.frombuffer(payload, parsed, offset=unpacker.tell()).reshape(shape)
        raise ValueError(f"unknown extension {code}")

    try:
        envelope = msgpack.unpackb(data, ext_hook=extension, strict_map_key=False)
    except Exception as error:  # msgpack raises many types; whatever it is, these bytes are no message
        raise errors.MalformedMessage(f"not a message: {type(error).__name__}: {error}") from error
    if not isinstance(envelope, dict) or "v" not in envelope or "t" not in envelope:
        raise errors.MalformedMessage("not a message: no envelope with 'v' (version) and 't' (type)")
    version, name, body = envelope["v"], envelope["t"], envelope.get("b", {})
    if version != VERSION:
        raise errors.UnknownVersion(
            f"message of protocol version {version!r}; this side speaks {VERSION}: upgrade the older one"
        )
    if not isinstance(name, str) or name not in TYPES:
        raise errors.UnknownMessage(f"unknown message type {name!r}" + errors.nearest(str(name), TYPES))
    try:
        return _adapter(name).validate_python(body)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise errors.MalformedMessage(f"{name}.{where}: {first['msg']}") from error
