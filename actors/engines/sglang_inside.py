"""Starts an SGLang server that tells the truth about tokens and weights. Runs in SGLang's interpreter, without Troupe.

    python sglang_inside.py --model-path FOLDER ...        (the flags of `sglang.launch_server`)

SGLang 0.5 does almost all that an engine must; what it lacks is added here through its own hooks
(`sglang.srt.plugins.hook_registry`), in each of its processes: they are spawned, and run this file again as their main module.

Promises:
- `/weights_checker` with action "held" answers with the checksum (`protocol.checksum`) of the tensors that the model holds,
  under the names by which they were sent (`landing.py`); a LoRA adapter that is sent alone is merged into them;
- each streamed piece names the spans of weight versions of its tokens, not only the last one;
- with a top_k, the logprobs of what it left are told as well, unasked: a router drops the flag that asks for them;
- logprobs of a prompt's ids are at the request's temperature, as those of sampled ones are;
- `sampling_seed` is obeyed without deterministic mode, which exists for some GPU kernels only;
- a turn ends with the stop ids of the request, not with what the model's folder calls its end;
- logits that are no numbers end the server instead of being sampled from.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__mp_main__":  # a child of the server: it goes with it, from now on (SGLang sees to that much later)
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() == 1:  # too late
        os._exit(1)
_HERE = Path(__file__).resolve().parent
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != _HERE]  # our sglang.py is not theirs
os.environ.setdefault("SGLANG_ENABLE_NAN_LOGITS_CHECK", "1")
os.environ.setdefault("SGLANG_HEALTH_CHECK_TIMEOUT", "120")  # seconds; one step of a long prompt on a CPU is no illness
os.environ.setdefault("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "0")  # a server that broke ends at once, not a minute later
os.environ.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH", "0")
os.environ.setdefault("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")  # room for one token more than the last position

import torch  # noqa: E402
from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: E402


def _file(name: str, path: Path) -> Any:
    """A module of Troupe's, from its own file: it needs torch or numpy only."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_checksum = _file("checksum", _HERE.parent.parent / "protocol" / "checksum.py")
_landing = _file("landing", _HERE / "landing.py")


def _watched(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Around the ways in which weights are changed: whatever loads into the model is seen doing it."""
    model = self.get_model()
    if "load_weights" not in vars(model):
        model._troupe_weights = _landing.Weights(model, model.load_weights, _checksum.checksum_of)
        model.load_weights = model._troupe_weights.load
    return original(self, *args, **kwargs)


def _held(original: Callable[..., Any], self: Any, action: str, *args: Any, **kwargs: Any) -> Any:
    if action != "held":
        return original(self, action, *args, **kwargs)
    if unknown := [target for target, *_ in _HOOKS if target not in HookRegistry._patched]:
        raise ValueError(f"this version of SGLang has no {unknown[0]}")
    place, model = self._parallelism_info(role=kwargs["role"]).model_dump(), self._get_model()
    if place["size"] > 1:
        raise ValueError("the weights are spread over several ranks: run one rank a replica")
    if not hasattr(model, "_troupe_weights"):
        raise ValueError("no weights were sent yet")
    return {"checksums": {"held": model._troupe_weights.checksum()}, "per_gpu_checksum": "", "parallelism_info": place}


def _spans(result: Any, self: Any, *, req: Any) -> None:
    """After a request was taken into an output: SGLang tells spans in the last one only."""
    if self.rids and self.rids[-1] == req.rid and self.weight_versions[-1] is None:
        from sglang.srt.utils.weight_versions import compute_weight_version_spans

        self.weight_versions[-1] = compute_weight_version_spans(
            req.weight_version_events,
            current_version=self.current_weight_version,
            num_output_tokens=len(req.output_ids_through_stop),
        )


def _tell_what_is_left(result: Any, self: Any) -> None:
    """After a request was read."""
    settings = self.sampling_params
    if self.return_logprob is True and isinstance(settings, dict) and settings.get("top_k", -1) > 0:
        self.return_sampling_mask = True


def _know_temperatures(result: Any, cls: Any, forward_batch: Any) -> None:
    result._troupe_temperatures = getattr(forward_batch.sampling_info, "temperatures", None)


def _tempered(original: Callable[..., Any], self: Any, **kwargs: Any) -> Any:
    """Around the logprobs of prompts. Rows of requests that ask for none are left alone: the sampler tempers them itself."""
    temperatures = getattr(kwargs["logits_metadata"], "_troupe_temperatures", None)
    if temperatures is None:
        return original(self, **kwargs)
    get_logits, done = kwargs["get_logits_fn"], 0
    asked = kwargs["input_logprob_indices"].long()
    sequence = torch.tensor(kwargs["token_to_seq_idx"], device=asked.device)
    divisor = torch.ones(len(sequence), device=asked.device)
    divisor[asked] = temperatures.flatten()[sequence[asked]]

    def tempered(rows: torch.Tensor, *args: Any, **more: Any) -> torch.Tensor:
        nonlocal done
        begin, done = done, done + len(rows)
        logits: torch.Tensor = get_logits(rows, *args, **more)
        return logits / divisor[begin:done, None]

    return original(self, **kwargs | {"get_logits_fn": tempered})


def _seeds(result: Any, cls: Any, batch: Any, vocab_size: int) -> Any:
    """After the settings of a batch were gathered."""
    if result.sampling_seed is None:
        seeds = [r.sampling_params.sampling_seed or 0 for r in batch.reqs]
        result.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)
    return result


def _draw(original: Callable[..., Any], logprobs: torch.Tensor, seed: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Around the seeded draw: SGLang's hash needs a GPU or its CPU kernels. Gumbel-max with a hash of (seed, position, id)."""
    if logprobs.is_cuda:
        return original(logprobs, seed, positions)  # type: ignore[no-any-return]
    column = torch.arange(logprobs.shape[-1])
    row = _mixed(_mixed(seed.to(torch.int64)) + positions.to(torch.int64))
    bits = _mixed(row[:, None] + column[None, :]) >> 11 & (1 << 53) - 1
    uniform = (bits.double() + 0.5) * 2.0**-53
    return (logprobs.double() - (-uniform.log()).log()).argmax(-1, keepdim=True)


def _mixed(x: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64, after a step of it; int64 wraps around."""
    x = x + -7046029254386353131
    x = (x ^ (x >> 30 & (1 << 34) - 1)) * -4658895280553007687
    x = (x ^ (x >> 27 & (1 << 37) - 1)) * -7723592293110705685
    return x ^ (x >> 31 & (1 << 33) - 1)


_SRT = "sglang.srt."
_UPDATER = _SRT + "model_executor.model_runner_components.weight_updater.WeightUpdater."
_HOOKS = [
    (_UPDATER + "update_weights_from_tensor", _watched, HookType.AROUND),
    (_UPDATER + "update_weights_from_disk", _watched, HookType.AROUND),
    (_UPDATER + "load_weights_from_distributed", _watched, HookType.AROUND),
    (_SRT + "utils.weight_checker.WeightChecker.handle", _held, HookType.AROUND),
    (_SRT + "managers.io_struct.GenerateReqInput.normalize_batch_and_arguments", _tell_what_is_left, HookType.AFTER),
    (_SRT + "managers.scheduler_components.output_streamer._GenerationStreamAccumulator.accept", _spans, HookType.AFTER),
    (_SRT + "layers.logits_processor.LogitsMetadata.from_forward_batch", _know_temperatures, HookType.AFTER),
    (_SRT + "layers.logprob_processor.InputLogprobProcessor.forward", _tempered, HookType.AROUND),
    (_SRT + "sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", _seeds, HookType.AFTER),
    (_SRT + "layers.sampler.multinomial_with_seed", _draw, HookType.AROUND),
    (_SRT + "configs.model_config.ModelConfig._get_hf_eos_token_id", lambda *_: set(), HookType.REPLACE),
]
for hook in _HOOKS:
    HookRegistry.register(*hook)


def main() -> None:
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()  # applies the hooks in this process
    try:
        run_server(prepare_server_args(sys.argv[1:]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
