"""The command that starts a vLLM server as this engine needs it, and what its flags are for."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from troupe.actors.engines.vllm_wire import MODEL
from troupe.learner.config import ModelConfig

_HERE = Path(__file__).parent
_INSIDE = {
    "sitecustomize.py": _HERE / "vllm_orphans.py",
    "troupe_inside.py": _HERE / "vllm_inside.py",
    "troupe_landing.py": _HERE / "landing.py",
    "troupe_checksum.py": _HERE.parents[1] / "protocol" / "checksum.py",
}
_BLOCK = 32
"""Tokens in a block of keys and values: the least that the attention for CPUs takes."""


def command(
    model: ModelConfig,
    port: int,
    *,
    python: str,
    device: str,
    context: int,
    max_running: int,
    max_cached_tokens: int,
    more: Sequence[str],
) -> list[str]:
    """Arguments of the process. more: flags of the user's, which come last and so win."""
    flags: dict[str, str | int] = {
        "--model": model.path,
        "--served-model-name": MODEL,
        "--dtype": model.dtype,
        "--load-format": "dummy",  # weights come by load_weights before anything is sampled
        "--host": "127.0.0.1",
        "--port": port,
        "--max-model-len": context + 1,  # a prompt of full length is scored: vLLM samples one token after it
        "--max-num-seqs": max_running,
        "--block-size": _BLOCK,
        "--num-gpu-blocks-override": -(-(max_cached_tokens + 1) // _BLOCK) + 1,  # one is vLLM's own
        "--logprobs-mode": "processed_logprobs",  # of the distribution that is drawn from
        "--generation-config": "vllm",  # no settings of the model's folder beside those of the request
        "--worker-extension-cls": "troupe_inside.Inside",
    }
    switches = ["--skip-tokenizer-init", "--disable-uvicorn-access-log"]
    if device == "cpu":
        switches += ["--enforce-eager", "--no-enable-chunked-prefill"]
        # a seeded request whose prompt comes in parts ends the server: torch's CPU generator has no offset to turn back
        flags["--max-num-batched-tokens"] = max(context + 1, 2048)
    given = [str(part) for pair in flags.items() for part in pair]
    return [python, "-m", "vllm.entrypoints.openai.api_server", *given, *switches, *more]


def environment(device: str, threads: int, scratch: Path) -> dict[str, str]:
    """Variables of the process, beside those that are set. Puts into `scratch` what the server imports of ours."""
    site = scratch / "site"
    site.mkdir(exist_ok=True)
    for name, source in _INSIDE.items():
        shutil.copy(source, site / name)
    own = {
        "PYTHONPATH": str(site),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, /abort_requests, /collective_rpc
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",  # room for one token more than the last position
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # `vllm_inside.py` knows the other one
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "3600",  # idle connections are closed by the engine (`wire.py`)
    }
    if device != "cpu":
        return own
    cpu = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    return own | cpu | {"TORCHDYNAMO_DISABLE": "1"}  # else the first request waits for a compiler
