"""The policy as a torch module: where it is loaded from, and its weights as named arrays.

Promises:
- `load` with the same config and seed gives the same weights everywhere, whether drawn or read;
- `tensors_of` is what is published to generators: every parameter once (tied ones under their first name), or only the
  adapters' with LoRA; bfloat16 as an int16 view of the same bits;
- after `load_tensors(model, t)`, `checksum_of(tensors_of(model)) == checksum_of(t)`, or it raised and changed nothing;
- a model that is in use changes between two of its steps by `exchange`, which copies nothing: what `beside` made, in another
  thread, becomes its parameters.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from troupe.learner import ranks
from troupe.learner.config import LoraSettings, ModelConfig
from troupe.protocol.errors import CheckpointError, ConfigError

Tensors = dict[str, np.ndarray[Any, Any]]
Array = np.ndarray[Any, Any] | torch.Tensor

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json")
_UNSUPPORTED = ("attn_logit_softcapping", "final_logit_softcapping", "logit_scale", "logits_scaling")


def load(config: ModelConfig, *, seed: int) -> torch.nn.Module:
    """The policy on the CPU, in evaluation mode (no dropout, ever: gradients may not depend on layout).

    A folder with a config and no weights gives random ones drawn from `seed`, as are fresh adapters; torch's global
    generator is left alone. Raises ConfigError for a folder that is no model or an architecture that cannot be trained.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = _folder(config)
    dtype = getattr(torch, config.dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            hf = AutoConfig.from_pretrained(str(folder), local_files_only=True)
            if has_weights(folder):
                model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
            else:
                fresh: Any = AutoModelForCausalLM.from_config(hf, dtype=torch.float32)  # type: ignore[no-untyped-call]
                model = fresh.to(dtype)
        except (OSError, ValueError) as error:
            raise ConfigError(f"model folder '{folder}' cannot be loaded: {error}") from error
        for name in _UNSUPPORTED:
            if getattr(hf, name, None) not in (None, 1.0):
                raise ConfigError(f"model '{folder}' ({hf.model_type}) has logits scaled by '{name}': not supported")
        if config.lora is not None:
            model = _adapted(model, config.lora)
    model.train(False)
    return model


def outline(config: ModelConfig) -> torch.nn.Module:
    """What `load` gives without memory for its weights, on the meta device: names, shapes and dtypes. Raises as `load` does."""
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = _folder(config)
    try:
        hf = AutoConfig.from_pretrained(str(folder), local_files_only=True)
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(hf, dtype=getattr(torch, config.dtype))  # type: ignore[no-untyped-call]
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder '{folder}' cannot be loaded: {error}") from error
    if config.lora is not None:
        with torch.device("meta"):
            model = _adapted(model, config.lora)
    return model.eval()  # type: ignore[no-any-return]


def _folder(config: ModelConfig) -> Path:
    folder = Path(config.path)
    if not folder.is_dir():
        raise ConfigError(f"model folder '{folder}' does not exist: give a folder in Hugging Face layout")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder '{folder}' has no config.json: it is not a model in Hugging Face layout")
    return folder


def has_weights(folder: str | Path) -> bool:
    """Whether a model folder holds weights, or only what a model with random ones is made from."""
    return any(any(Path(folder).glob(pattern)) for pattern in _WEIGHT_FILES)


def _adapted(model: Any, lora: LoraSettings) -> Any:
    from peft import LoraConfig, get_peft_model

    settings = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=lora.targets,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    try:
        return get_peft_model(model, settings, autocast_adapter_dtype=True)  # adapters in float32 over any base
    except ValueError as error:
        raise ConfigError(f"model.lora.targets = {lora.targets!r}: {error}") from error


def parameters_of(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The published parameters by their public names, which with LoRA are those of peft's adapter files."""
    named = dict(model.named_parameters())  # tied parameters appear once
    if not hasattr(model, "peft_config"):
        return named
    return {name.replace(".default.", "."): p for name, p in named.items() if ".lora_" in name}


def check_sendable(model: Any) -> None:
    """Raises ConfigError if the model computes with numbers of its folder that are not among what is published."""
    for prefix, module in model.named_modules():
        for name in module._buffers.keys() - module._non_persistent_buffers_set:
            raise ConfigError(
                f"'{prefix}.{name}' of a {model.config.model_type} model is no parameter: it is not sent, and a server would "
                "not have it; set generator.engine = 'local'"
            )


def check_mergeable(model: torch.nn.Module) -> None:
    """Raises ConfigError if an adapter of the model is not that of a matrix of its own, to which its product can be added."""
    named = dict(model.named_parameters())
    for name, parameter in parameters_of(model).items():
        stem, _, end = name.rpartition(".lora_")
        base = named.get(f"{stem}.base_layer.weight")  # none if it is tied to another
        side = {"A.weight": 1, "B.weight": 0}.get(end)
        if base is None or side is None or base.ndim != 2 or base.shape[side] != parameter.shape[side]:
            raise ConfigError(
                f"model.lora.targets: the adapter of '{stem.removeprefix('base_model.model.')}' cannot be merged into the "
                "weights of a server; leave that module out, or set generator.engine = 'local'"
            )


def tensors_of(model: torch.nn.Module) -> Tensors:
    """The published weights. On a CPU they are views of the parameters: copy what must outlive the next step.

    Of several ranks that share the model all must ask, and only the first gets them.
    """
    whole = ranks.gathered({name: parameter.detach() for name, parameter in parameters_of(model).items()})
    return arrays_of({name: tensor for name, tensor in whole.items() if tensor is not None})


def base_of(model: torch.nn.Module) -> Tensors:
    """With LoRA the frozen weights, as `tensors_of` tells them of the model without it; views of the parameters on a CPU."""
    named = {name: p.detach() for name, p in model.named_parameters() if ".lora_" not in name}
    return arrays_of({name.removeprefix("base_model.model.").replace(".base_layer.", "."): p for name, p in named.items()})


def check_fits(model: torch.nn.Module, tensors: Mapping[str, Array]) -> None:
    """Raises CheckpointError naming what is missing, unexpected or mis-shaped. The model may be on the meta device."""
    own = parameters_of(model)
    problems = [f"missing '{name}'" for name in own if name not in tensors]
    problems += [f"unexpected '{name}'" for name in tensors if name not in own]
    for name in own.keys() & tensors.keys():
        shape, dtype, given = own[name].shape, _array_dtype(own[name].dtype), tensors[name]
        sent = _array_dtype(given.dtype) if isinstance(given, torch.Tensor) else given.dtype
        if tuple(given.shape) != tuple(shape) or sent != dtype:
            shapes = f"{sent}{list(given.shape)} where the model has {dtype}{list(shape)}"
            problems.append(f"'{name}' is {shapes}")
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise CheckpointError(f"weights are of another model: {'; '.join(sorted(problems)[:5])}{more}")


@torch.no_grad()
def load_tensors(model: torch.nn.Module, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
    """The inverse of `tensors_of`. Raises CheckpointError as `check_fits`, and then changed nothing."""
    check_fits(model, tensors)
    for name, parameter in parameters_of(model).items():
        parameter.copy_(ranks.share(to_torch(tensors[name], parameter.dtype), parameter))


def beside(model: torch.nn.Module, tensors: Mapping[str, Array]) -> dict[str, torch.Tensor]:
    """Copies of `tensors` (see `tensors_of`) that can be the model's parameters, on its device, by public name; of those that
    are torch tensors on that device themselves.

    The model is not changed, and may be in use. Raises CheckpointError as `load_tensors` does.
    """
    check_fits(model, tensors)
    own = parameters_of(model)
    return {name: to_torch(tensors[name], parameter.dtype).to(parameter.device) for name, parameter in own.items()}


def exchange(model: torch.nn.Module, others: dict[str, torch.Tensor]) -> None:
    """Makes `others` (from `beside`) the model's parameters, and its parameters `others`: the same memory, not copies of it."""
    for name, parameter in parameters_of(model).items():
        others[name], parameter.data = parameter.data, others[name]


def arrays_of(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """What `tensors_of` tells of a model that has these parameters."""
    return {name: _to_numpy(tensor) for name, tensor in tensors.items()}


def to_torch(array: Array, dtype: torch.dtype) -> torch.Tensor:
    """One of `tensors_of` as a tensor of its own, of the parameter's dtype. One that is a tensor is taken as it is."""
    if isinstance(array, torch.Tensor):
        return array
    source = torch.from_numpy(np.array(array))  # a copy: shared memory is read-only, which torch warns of
    return source.view(torch.bfloat16) if dtype == torch.bfloat16 else source


def _array_dtype(dtype: torch.dtype) -> np.dtype[Any]:
    dtype_of_array: np.dtype[Any] = _to_numpy(torch.empty(0, dtype=dtype)).dtype
    return dtype_of_array


def _to_numpy(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    plain = tensor.contiguous().cpu()
    array: np.ndarray[Any, Any] = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()
    return array


# -- on disk ---------------------------------------------------------------------------------------------------------

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)


def saved_weights(model: torch.nn.Module) -> dict[str, torch.Tensor] | None:
    """What `save_model` needs of a model that several ranks share: all must ask. None if this process is alone."""
    if ranks.size() == 1:
        return None
    state = model.state_dict(keep_vars=True)
    if hasattr(model, "peft_config"):
        state = {name: tensor for name, tensor in state.items() if ".lora_" in name}
    whole: dict[str, torch.Tensor] = ranks.gathered(state)
    return whole


def save_model(model: torch.nn.Module, folder: Path, source: Path, weights: dict[str, torch.Tensor] | None = None) -> None:
    """Writes a Hugging Face folder, or with LoRA a peft adapter's, and the tokenizer of `source` into it.

    weights: from `saved_weights`.
    """
    saved: Any = model
    saved.save_pretrained(str(folder), state_dict=weights)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            (folder / name).write_bytes((source / name).read_bytes())


def restore_model(model: torch.nn.Module, folder: Path) -> None:
    """Takes over the weights that `save_model` wrote. Raises CheckpointError if they are not there or do not fit."""
    if hasattr(model, "peft_config"):
        from safetensors.torch import load_file

        path = folder / "adapter_model.safetensors"
        if not path.is_file():
            raise CheckpointError(f"'{folder}' holds no adapter_model.safetensors: was it trained without model.lora?")
        load_tensors(model, {name: _to_numpy(tensor) for name, tensor in load_file(str(path)).items()})
        return
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(f"'{folder}' holds a LoRA adapter, but the model is configured without model.lora")
    from transformers import AutoModelForCausalLM

    dtype = next(model.parameters()).dtype
    try:
        other = AutoModelForCausalLM.from_pretrained(str(folder), dtype=dtype, local_files_only=True)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"'{folder}' cannot be loaded: {error}") from error
    load_tensors(model, tensors_of(other))
