"""What a sandbox may use, and what a run in it gives back. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Backend = Literal["auto", "docker", "bubblewrap", "subprocess"]
Cause = Literal["", "wall", "cpu", "memory", "output", "disk", "pids"]

SMALL_MB = 16
"""Size of `/tmp` and of `/dev/shm`, beside the `disk_mb` of the folder in which programs run."""


class SandboxSettings(BaseModel):
    """A recipe's table of a sandbox. Limits are of one run and all its processes together, unless they say otherwise."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    backend: Backend = Field("auto", description="docker, bubblewrap or subprocess; auto: docker, else bubblewrap")
    trusted: bool = Field(False, description="the code may do what you may: subprocess is refused without it")
    memory_mb: int = Field(256, ge=16, description="resident memory; one process may not ask for more either")
    pids: int = Field(64, ge=2, le=4096, description="processes and threads")
    cpu_s: float = Field(10.0, gt=0, allow_inf_nan=False, description="seconds of CPU time")
    wall_s: float = Field(30.0, gt=0, allow_inf_nan=False, description="seconds until a run is ended, unless it asks for fewer")
    disk_mb: int = Field(64, ge=1, description="what fits into the folder in which programs run")
    output_bytes: int = Field(
        64 * 1024, ge=1, le=64 * 2**20, description="of stdout, and of stderr; a run that writes more is ended"
    )
    readable: tuple[Path, ...] = Field((), description="bubblewrap: further host paths that programs may read")
    image: str = Field("", description="docker: an image with python3; empty: one that is made of the local Python")
    runtime: str = Field("", description="docker: the daemon's runtime; empty: runsc (gVisor) if it has it, else its default")


@dataclass(frozen=True, slots=True)
class Result:
    """What came of one run.

    stdout, stderr: at most `output_bytes` of each. exit_code: the program's, -N if signal N ended it, 127 if there is no such
    program. killed_for: the limit for which the run was ended; empty if it ended by itself. wall_s: seconds it took.
    """

    stdout: bytes
    stderr: bytes
    exit_code: int
    killed_for: Cause
    wall_s: float

    @property
    def timed_out(self) -> bool:
        """Whether time was what it had too little of, on the clock or of the CPU."""
        return self.killed_for in ("wall", "cpu")

    @property
    def ok(self) -> bool:
        """It ended by itself, and well."""
        return self.exit_code == 0 and not self.killed_for
