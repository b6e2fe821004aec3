"""A trajectory of `troupe trace` as data: everything of it, as JSON can say it, and what its tokens and rewards come to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from troupe.cluster.spelling import Spell
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Node, Step, Trajectory

PROVENANCE = {TEMPLATE: "template", POLICY: "policy", ENVIRONMENT: "environment"}


def as_data(
    t: Trajectory, trains: bool, spell: Spell | None = None, note: str = "", branch: int | None = None
) -> dict[str, Any]:
    """All of `t` as JSON can say it (NaN and infinities are null), and token by token. `branch`: only that one is listed
    in "branches". A piece that is only part of a character also has its "bytes", in hexadecimal."""
    branches = list(t.branches())
    more = {
        "trains": not why_not_trained(t, trains),
        "parts": summed(t.steps),
        "versions": list(t.versions),
        "tokens": dict(zip(PROVENANCE.values(), counts(t), strict=True)),
        "note": note,
        "branches": [branches[branch - 1]] if branch else branches,
        "nodes": [_node_data(node, spell) for node in t.nodes],
    }
    data: dict[str, Any] = finite(asdict(replace(t, nodes=[])) | more)
    return data


def _node_data(node: Node, spell: Spell | None) -> dict[str, Any]:
    sampled = zip(node.logprobs.tolist(), node.versions.tolist(), strict=True)
    tokens = []
    for id_, kind in zip(node.tokens.tolist(), node.provenance.tolist(), strict=True):
        spelled = spell(id_) if spell else None
        token: dict[str, Any] = {"id": id_, "piece": None, "provenance": PROVENANCE[kind]}
        if spelled is not None:
            token["piece"] = spelled.decode("utf-8", "replace")
            if token["piece"].encode() != spelled:
                token["bytes"] = spelled.hex()
        if kind == POLICY:
            token["logprob"], token["version"] = next(sampled)
        tokens.append(token)
    about = {"parent": node.parent, "role": node.role, "agent": node.agent, "step": node.step, "text": node.text}
    return about | {"tokens": tokens}


def finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list) else value


def why_not_trained(t: Trajectory, trains: bool) -> str:
    if t.kind == "eval":
        return "an evaluation"
    if t.status != "completed":
        return "it failed" if t.status == "failed" else "it was cancelled"
    return "" if trains else "its group was left out"


def counts(t: Trajectory) -> list[int]:
    """Tokens by provenance, in the order of `PROVENANCE`; each node once."""
    return [sum(int((node.provenance == kind).sum()) for node in t.nodes) for kind in PROVENANCE]


def summed(steps: Sequence[Step]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for step in steps:
        for name, value in step.parts.items():
            parts[name] = parts.get(name, 0.0) + value
    return parts
