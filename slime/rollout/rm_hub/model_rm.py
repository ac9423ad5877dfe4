"""Class-style reward models: ``__init__(self, model_path)``, ``compute_reward(self, prompts, responses) -> list``.

``--custom-rm-path`` may name such a class; it gets ``--rm-model-path`` or nothing. The model is made
once per process and called from one thread of its own, a batch at a time.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from slime.data.sample import Sample

_models: dict[tuple[type, str | None], tuple[Any, ThreadPoolExecutor]] = {}


def is_model_class(function: Any) -> bool:
    """Whether what ``--custom-rm-path`` names is a class-style reward model."""
    return inspect.isclass(function)


async def model_rewards(args: Any, model_class: type, samples: Sequence[Sample]) -> list[Any]:
    """One call of ``compute_reward`` for all samples, in their order."""
    path = getattr(args, "rm_model_path", None)
    model, thread = _model(model_class, path)
    prompts, responses = [sample.prompt for sample in samples], [sample.response for sample in samples]
    rewards = await asyncio.get_running_loop().run_in_executor(thread, model.compute_reward, prompts, responses)
    if inspect.isawaitable(rewards):
        rewards = await rewards
    return [float(reward) if not isinstance(reward, dict) else reward for reward in rewards]


def _model(model_class: type, path: str | None) -> tuple[Any, ThreadPoolExecutor]:
    key = (model_class, path)
    if key not in _models:
        if not callable(getattr(model_class, "compute_reward", None)):
            raise TypeError(f"reward model class {model_class.__name__} has no compute_reward(prompts, responses)")
        required = [
            name
            for name, parameter in inspect.signature(model_class).parameters.items()
            if parameter.default is parameter.empty
            and parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        ]
        if path is None and required:
            raise ValueError(
                f"reward model class {model_class.__name__} wants {', '.join(required)}: give --rm-model-path"
            )
        takes_path = bool(inspect.signature(model_class).parameters)
        model = model_class(path) if path is not None and takes_path else model_class()
        _models[key] = (model, ThreadPoolExecutor(1, thread_name_prefix="reward-model"))
    return _models[key]
