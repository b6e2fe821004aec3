"""The fingerprint of a set of weights: equal exactly when names, dtypes, shapes and every byte are equal (law 4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash


def checksum_of(tensors: Mapping[str, np.ndarray[Any, Any]]) -> str:
    """XXH3 over the tensors in the order of their names, 16 hex digits: it guards against what goes wrong, not against forgery.

    bf16 has no numpy dtype: it travels as int16 of the same bits, so both sides hash the same bytes.
    """
    digest = xxhash.xxh3_64()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name}|{array.dtype.str}|{array.shape}|".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
