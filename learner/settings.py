"""What sections of a recipe have in common: unknown keys are refused, and so is a yes or no where a number is meant."""

from __future__ import annotations

from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator


class Settings(BaseModel):
    """A section."""

    model_config = ConfigDict(extra="forbid")

    @field_validator("*", mode="before")
    @classmethod
    def _no_flag(cls, value: Any, info: ValidationInfo) -> Any:
        """Python takes true for 1."""
        kind = cls.model_fields[info.field_name or ""].annotation
        kinds = {kind, *get_args(kind)}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError(f"{str(value).lower()} is no number: write one")
        return value


def _device(name: str) -> str:
    kind, colon, number = name.partition(":")
    if name == "cpu" or (kind == "cuda" and (not colon or (number.isascii() and number.isdecimal()))):
        return name
    raise ValueError(f"'{name}' is no device that is known here: write cpu, cuda, or cuda:N for one of several GPUs")


def _device_or_auto(name: str) -> str:
    return name if name == "auto" else _device(name)


Device = Annotated[str, AfterValidator(_device)]
"""A torch device by its name: cpu, cuda or cuda:N."""

DeviceOrAuto = Annotated[str, AfterValidator(_device_or_auto)]
"""The same, or auto."""


def check_present(device: str, key: str) -> None:
    """Raises ConfigError if torch cannot reach `device`, which the setting `key` names."""
    import torch

    from troupe.protocol.errors import ConfigError

    there = torch.cuda.device_count()
    if device == "cpu" or int(device.partition(":")[2] or 0) < there:
        return
    raise ConfigError(
        f"{key} = '{device}', but torch sees {there} GPUs in this process: set it to 'cpu', or install torch with CUDA"
    )
