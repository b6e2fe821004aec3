"""What a real run plugs into its learner and generators. Torch is imported only in the actors that need it."""

from __future__ import annotations

from typing import Any

from troupe.actors.engines.base import Engine
from troupe.actors.learner import Trains
from troupe.actors.settings import GeneratorSettings
from troupe.learner.config import LearnerConfig, ModelConfig


def make_trainer(config: LearnerConfig, model: ModelConfig, seed: int) -> Trains:
    """The trainer of a run."""
    if config.ranks > 1:
        from troupe.learner.ranked import RankedTrainer

        return RankedTrainer(config, model, seed=seed)
    from troupe.learner.trainer import Trainer

    return Trainer(config, model, seed=seed)


def make_engine(name: str, settings: GeneratorSettings, model: ModelConfig, seed: int, steady: bool = False) -> Engine:
    """The generation engine of the replica called `name`. steady: what a request draws does not depend on its company;
    an engine that is not repeatable (`Capabilities`) draws by its seed all the same, up to rounding."""
    from functools import partial

    from troupe.actors.rendering.tokenizer import PlainTokenizer

    common: dict[str, Any] = {
        "max_running": settings.max_running,
        "device": settings.device,
        "threads": settings.threads,
        "generator_name": name,
        "decode": PlainTokenizer(model.path).decode,
    }
    if settings.engine == "sglang":
        from troupe.actors.engines.sglang import SGLangEngine

        return SGLangEngine(
            model,
            python=settings.sglang_python,
            url=settings.sglang_url,
            max_cached_tokens=settings.sglang_tokens,
            on_update=settings.sglang_update,
            transport=settings.sglang_weights,
            start_s=settings.sglang_start_s,
            args=settings.sglang_args,
            seed=seed,
            **common,
        )
    if settings.engine == "vllm":
        from troupe.actors.engines.vllm import VLLMEngine

        return VLLMEngine(
            model,
            python=settings.vllm_python,
            max_cached_tokens=settings.vllm_tokens,
            start_s=settings.vllm_start_s,
            args=settings.vllm_args,
            seed=seed,
            **common,
        )
    from troupe.actors.engines.local import LocalEngine
    from troupe.learner.model import load

    return LocalEngine(partial(load, model, seed=seed), steady=steady, **common)
