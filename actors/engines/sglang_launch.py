"""The command that starts an SGLang server as this engine needs it, and what its flags are for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from troupe.learner.config import ModelConfig

MARGIN = 8
"""SGLang keeps a few positions of its context for itself."""

_INSIDE = Path(__file__).with_name("sglang_inside.py")


def command(
    model: ModelConfig,
    port: int,
    *,
    python: str,
    device: str,
    context: int,
    vocabulary: int,
    max_running: int,
    max_cached_tokens: int,
    more: Sequence[str],
) -> list[str]:
    """Arguments of the process. more: flags of the user's, which come last and so win."""
    flags: dict[str, str | int] = {
        "--model-path": model.path,
        "--dtype": model.dtype,
        "--load-format": "dummy",  # weights come by load_weights before anything is sampled
        "--host": "127.0.0.1",
        "--port": port,
        "--device": device.partition(":")[0],
        "--context-length": context + MARGIN,
        "--max-total-tokens": max_cached_tokens,
        "--max-running-requests": max_running,
        "--sampling-backend": "pytorch",  # the one that takes seeds
        "--sampling-mask-max-tokens": max(4096, vocabulary),
    }
    switches = ["--skip-tokenizer-init", "--skip-server-warmup", "--incremental-streaming-output"]
    switches += ["--sleep-on-idle"]  # else it spins on a core of its own while it waits for the worlds
    switches += ["--disable-overlap-schedule"]  # else a token under way when weights change is told as the new ones'
    if device == "cpu":
        flags["--attention-backend"] = "torch_native"
        switches += ["--disable-cuda-graph"]
    given = [str(part) for pair in flags.items() for part in pair]
    return [python, "-P", str(_INSIDE), *given, *switches, *more]


def environment(device: str, threads: int) -> dict[str, str]:
    """Variables of the process, beside those that are set. threads: of its CPU work."""
    own = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
    own["SGLANG_TIMEOUT_KEEP_ALIVE"] = "3600"  # idle connections are closed by the engine (`wire.py`)
    own["SGLANG_HEALTH_CHECK_TIMEOUT"] = "120"  # a step may take longer than its 20 s, on a busy machine
    return own | ({"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"} if device == "cpu" else {})
