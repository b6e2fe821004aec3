"""Troupe: reinforcement learning for LLM agents over whole multi-turn trajectories."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from troupe.cluster.run import Run

__version__ = "0.1.0"
__all__ = ["__version__", "open"]


def open(run: str) -> Run:
    """Opens a run folder for reading: `troupe.open("runs/x").query("SELECT …")` gives a `pyarrow.Table`."""
    from troupe.cluster.run import Run

    return Run(run)


def __getattr__(name: str) -> Any:
    raise AttributeError(f"module 'troupe' has no attribute {name!r}")
