"""What is added to the worker of a vLLM server. Runs in vLLM's interpreter, without Troupe.

The server imports it by name (`--worker-extension-cls`) from a folder that holds it, `landing.py` and `checksum.py`, under the
names that `vllm_launch.py` gives them; its methods are called over `/collective_rpc`.

Promises:
- `troupe_load` takes over weights from a safetensors file, by the model's own loader; `troupe_held` answers with the checksum
  of the tensors that the model then holds, from the model's memory (`landing.py`). A LoRA adapter that is sent alone is merged
  into them;
- on a CPU weights stay as they were loaded: vLLM would pack them for its kernels, once, and sample from the packed copy ever
  after;
- logprobs of a prompt's ids are at the request's temperature, as those of sampled ones are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from safetensors.torch import load_file
from troupe_checksum import checksum_of
from troupe_landing import Weights
from vllm.model_executor.layers import utils
from vllm.v1.sample.sampler import Sampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


class Inside:
    """Methods that the worker inherits beside its own."""

    model_runner: Any

    @torch.no_grad()
    def troupe_load(self, path: str) -> None:
        """Takes over the weights in the file."""
        if self.model_runner.parallel_config.world_size > 1:
            raise ValueError("the weights are spread over several ranks: run one rank a replica")
        self._troupe().load(load_file(path).items())

    def troupe_held(self) -> str:
        """The checksum of what `troupe_load` loaded, as the model holds it now."""
        text: str = self._troupe().checksum()
        return text

    def _troupe(self) -> Any:
        model = self.model_runner.get_model()
        if not hasattr(model, "_troupe_weights"):
            model._troupe_weights = Weights(model, model.load_weights, checksum_of)
        return model._troupe_weights


def _unpacked(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear  # type: ignore[assignment]


def _tempered(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around the logprobs of prompts: vLLM tells them at temperature 1. One request at a time, each at its own."""

    def prompt_logprobs(self: Any, hidden_states: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        asked, found = self.num_prompt_logprobs, {}
        try:
            for name in [name for name in asked if name in num_scheduled_tokens]:
                self.num_prompt_logprobs = {name: asked[name]}
                temperature = self.requests[name].sampling_params.temperature or 1.0
                self.sampler.compute_logprobs = lambda logits, t=temperature: Sampler.compute_logprobs(logits.float() / t)
                found.update(original(self, hidden_states, num_scheduled_tokens))
                if not self.num_prompt_logprobs:  # it was the last part of that prompt
                    del asked[name]
        finally:
            self.num_prompt_logprobs = asked
            vars(self.sampler).pop("compute_logprobs", None)
        return found

    return prompt_logprobs


utils.dispatch_cpu_unquantized_gemm = _unpacked
GPUModelRunner._get_prompt_logprobs_dict = _tempered(GPUModelRunner._get_prompt_logprobs_dict)
